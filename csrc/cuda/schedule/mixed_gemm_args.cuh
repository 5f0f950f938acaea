// What mixed_gemm.cuh is launched with.
#pragma once

#include <cuda.h>

#include "../decode/weight_decoders.cuh"
#include "../decode/unit_scales.cuh"

namespace lowbit::cuda {

// Integers as the operands have them: in float16 weights divided by the factor of the scaled ones would be too small.
template <class T, int bits>
using MixedIntegerDecoder = std::conditional_t<std::is_same_v<T, __half>, ExactIntegerDecoder<T, bits>, ScaledIntegerDecoder<T, bits>>;

// Divides by a number that the host knows, whose division takes a block long. Their sum has to be less than 2^32.
struct FastDivide {
  uint32_t by, magic;
  FastDivide() = default;
  explicit FastDivide(uint32_t by) : by(by), magic(by == 1 ? 0 : static_cast<uint32_t>(((uint64_t{1} << 32) + by - 1) / by)) {}
  // Of one factor rounded up: the quotient, or one more.
  __device__ __forceinline__ uint32_t divide(uint32_t x) const {
    const uint32_t q = by == 1 ? x : __umulhi(x, magic);
    return q - (q * by > x);
  }
};

// Where in a block's shared memory what lies, and its end. Sums, and y, may at the end take the place of the rings.
struct SharedLayout {
  int weights, sums, row_epilogues, table, total;
};

struct MixedGemm {
  CUtensorMap x;          // [m, k] in boxes of 64 columns and the rows of a tile of y
  CUtensorMap last_of_x;  // the same in boxes of the last tile's rows, where those are fewer
  const void* plain_x;    // [m, k] without boxes
  const uint8_t* units;   // [tiles][units_of_row]
  UnitLayout unit;
  ScaleType scale_type;
  const void* scale;          // [n] where a row is one group, else in the units
  const uint8_t* zero_point;  // [n] where a row is one group and has one, else null
  const float* outer;         // one number, or null
  float factor;               // of the format: what a code of one step stands for
  const void* bias;           // [n] of x's type, or null
  void* y;                    // [m, n]
  int64_t n, tiles;
  int m, k, units_per_row, pieces_per_row, group_shift, weight_stages, x_stages;
  SharedLayout at;
  int before_x;                // units of W that are asked for before x has come
  int early;                   // blocks that begin long before the others
  int blocks;                  // of a cluster, which share out the columns of W
  FastDivide by_blocks, by_rows;  // those; and the blocks that have all rows of W
  uint32_t unpaired_tiles;           // tiles of y that one cluster makes; two share out the columns for each of the others
  uint8_t* pairs;           // what the two leave for each other, behind a word of each block that tells whether it is there
  unsigned long long launch_tag;  // that word, then
  bool has_zero, is_signed, sums_apart;
};

}  // namespace lowbit::cuda
