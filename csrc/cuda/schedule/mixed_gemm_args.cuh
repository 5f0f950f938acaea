// Arguments of mixed_gemm.cuh.
#pragma once

#include <cuda.h>

#include "../decode/weight_decoders.cuh"
#include "../decode/unit_scales.cuh"

namespace lowbit::cuda {

// Decoder for integers; not the scaled one with float16, whose values divided by its factor would be subnormal.
template <class T, int bits>
using MixedIntegerDecoder = std::conditional_t<std::is_same_v<T, __half>, ExactIntegerDecoder<T, bits>, ScaledIntegerDecoder<T, bits>>;

// Division by a host-known divisor as multiply and shift: an integer division would delay the start of a block. The sum of
// dividend and divisor must be less than 2^32.
struct FastDivide {
  uint32_t by, magic;
  FastDivide() = default;
  explicit FastDivide(uint32_t by) : by(by), magic(by == 1 ? 0 : static_cast<uint32_t>(((uint64_t{1} << 32) + by - 1) / by)) {}
  // By one rounded-up factor: the quotient, or one more.
  __device__ __forceinline__ uint32_t divide(uint32_t x) const {
    const uint32_t q = by == 1 ? x : __umulhi(x, magic);
    return q - (q * by > x);
  }
};

// Offsets in a block's shared memory and its size. At the end the sums and y may reuse the rings.
struct SharedLayout {
  int weights, sums, row_epilogues, table, total;
};

struct MixedGemm {
  CUtensorMap x;          // [m, k] in boxes of 64 columns and a tile's rows of y
  CUtensorMap last_of_x;  // the same in boxes of the last tile's rows, where those are fewer
  const void* plain_x;    // [m, k]
  const uint8_t* units;   // [tiles][units_of_row]
  UnitLayout unit;
  ScaleType scale_type;
  const void* scale;          // [n] where a row is one group, else in the units
  const uint8_t* zero_point;  // [n] where a row is one group with a zero point, else null
  const float* outer;         // the tensor scale, or null
  float factor;               // of the format: value of an integer step
  const void* bias;           // [n] of x's type, or null
  void* y;                    // [m, n]
  int64_t n, tiles;
  int m, k, units_per_row, pieces_per_row, group_shift, weight_stages, x_stages;
  SharedLayout at;
  int before_x;                // units of W requested before x has arrived
  int early;                   // blocks that start long before the others
  int blocks;                  // blocks of a cluster, which split K
  FastDivide by_blocks, by_rows;  // by blocks, and by the number of blocks along N
  uint32_t unpaired_tiles;           // tiles of y made by one cluster; each of the others is shared by two clusters that split K
  uint8_t* pairs;           // buffer for the sums of pairs of clusters, behind a word of each block that tells whether they are
                            // there
  unsigned long long launch_tag;  // that word, different in each launch
  bool has_zero, is_signed, sums_apart;
};

}  // namespace lowbit::cuda
