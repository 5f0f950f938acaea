// A weight and a product as kernels see them, and the generic GEMV of linear.cpp.
#pragma once

#include <cstdint>

#include "../../decode.h"
#include "../sets.h"

namespace lowbit::cpu {

constexpr int block = 32;  // codes decoded at a time
constexpr int max_float_rows = 8;                // rows of x in a call of an fp32 kernel
// Rows of x as arrange() lays them out for linear(), the last ones zeros: 1, 2, 4 or 8, so that there are few kernels.
constexpr int64_t arranged_rows(int64_t m) { return m <= 2 ? m : m <= 4 ? 4 : 8; }
constexpr int64_t max_rows = 64;  // rows of x in a call of a split-int8 kernel

// How codes become values.
enum class Codes {
  nibbles,         // 4 bits, formats without NaN and infinity: a table in a register
  signed_bytes,    // int8 and mxint8: integers times a power of two
  unsigned_bytes,  // uint8
  integers,        // integers of any other width
  truncated_half,         // 6 or 8 bits: IEEE half without some bits, times a power of two
  halves,          // formats whose values are all 16-bit floats: a table in registers
  table,           // any format: a table in memory
};

enum class Dtype { float32, bfloat16, float16, bytes };

// A matrix of scales, zero points or x; the elements of a row are contiguous.
struct ArrayView {
  const void* data = nullptr;
  int64_t stride = 0;  // elements from row to row
  Dtype dtype = Dtype::float32;
  const float* table = nullptr;  // [256]: values of bytes; null: the bytes are integers
};

// value = half((sign-extended code << up) & mask); NaN where has_nan and all bits but the sign are set
struct TruncatedHalf {
  int up;
  uint16_t mask;
  bool has_nan;
};

struct Linear {
  Codes codes;
  int bits;
  const uint8_t* packed;
  int64_t packed_stride;
  bool interleaved = false;  // the layout of packed, scale and zero_point: see decode/interleaved.h
  const float* values;  // [2^bits]
  const uint16_t* halves;  // [256]: the same values as 16-bit floats, or null where they are not
  bool is_signed;          // integers: two's complement
  TruncatedHalf truncated_half;         // for Codes::truncated_half
  float unit = 1;          // for those and signed_bytes: value of 1, a power of two
  ArrayView scale;        // [n, groups]
  ArrayView zero_point;   // [n, groups]; data is null where there is none
  float outer;
  bool has_outer;
  int64_t m, n, k, group;
  const float* arranged;  // x in the order of arrange()
  float* y;               // [m, n]
};

// A thread's current range of rows, and where its next one begins, for prefetching.
struct RowRange {
  int64_t begin, end, next_begin;
};

// Codes before the group's first one in the same byte, and blocks that cover the group from that byte on.
struct Span {
  int64_t first, lead, count, blocks;
};

static inline Span span_of(const Linear& linear, int64_t g) {
  const int64_t start = g * linear.group;
  const int64_t count = linear.k - start < linear.group ? linear.k - start : linear.group;
  const int64_t lead = start % byte_aligned_codes(linear.bits);
  return {start - lead, lead, count, (lead + count + block - 1) / block};
}

// arrange: x [m, k] as float [group][block of the group][m][32], zeros where a block reaches beyond its group; for 4 bits the 16
// even positions of a block come before the 16 odd ones, in the order of the low and high nibbles. linear: rows [begin, end) of
// the weight. One pair for each instruction set, chosen at run time.
#define LOWBIT_DECLARE(set)                                         \
  namespace set {                                                   \
  void arrange(const Linear&, const ArrayView& x, float* arranged);   \
  void linear(const Linear&, int64_t begin, int64_t end);           \
  }
LOWBIT_FOR_EACH_SET(LOWBIT_DECLARE)
#undef LOWBIT_DECLARE

}  // namespace lowbit::cpu
