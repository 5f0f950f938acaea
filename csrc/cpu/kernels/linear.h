// y = x W^T for few rows of x, from packed codes: what the binding hands to the kernels. See linear.cpp.
#pragma once

#include <cstdint>

#include "../../decode.h"
#include "../sets.h"

namespace lowbit::cpu {

constexpr int block = 32;  // codes taken at a time
constexpr int max_float_rows = 8;                // of x that floats take at a time
constexpr int64_t max_rows = 64;  // that a call takes

// How codes become numbers.
enum class Codes {
  nibbles,         // 4 bits, any format without NaN and infinity: a table in a register
  signed_bytes,    // int8, and mxint8, whose numbers are integers times a power of two
  unsigned_bytes,  // uint8
  integers,        // integers of any other width
  truncated_half,         // 6 or 8 bits: 16-bit floats without some bits, times a power of two
  halves,          // any format whose numbers are 16-bit floats exactly: a table in registers
  table,           // any format of 1 to 8 bits: a table in memory
};

enum class Dtype { float32, bfloat16, float16, bytes };

// A matrix of scales, zero points or x: contiguous along its rows.
struct ArrayView {
  const void* data = nullptr;
  int64_t stride = 0;  // elements from row to row
  Dtype dtype = Dtype::float32;
  const float* table = nullptr;  // what the bytes stand for; none: the bytes are integers
};

// A number is the 16-bit float (code, its sign extended, << up) & mask; or NaN where all bits but the sign are set and has_nan.
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
  bool interleaved = false;  // the rows, in blocks of 32: see interleaved.h
  const float* values;  // [2^bits]
  const uint16_t* halves;  // [256]: the same numbers as 16-bit floats, where they are that
  bool is_signed;          // of integers: two's complement
  TruncatedHalf truncated_half;         // of codes that are 16-bit floats without some bits
  float unit = 1;          // of those and of signed bytes: what one of their numbers counts, a power of two
  ArrayView scale;        // [n, groups]
  ArrayView zero_point;   // [n, groups]; data is null where there is none
  float outer;
  bool has_outer;
  int64_t m, n, k, group;
  const float* arranged;  // x as arrange() leaves it
  float* y;               // [m, n]
};

// Rows of the weight that a thread takes, and the one that it goes on with: what it reads ahead.
struct RowRange {
  int64_t begin, end, next_begin;
};

// Codes before the group's first one that share a byte with it, and blocks that the group takes from that byte on.
struct Span {
  int64_t first, lead, count, blocks;
};

static inline Span span_of(const Linear& linear, int64_t g) {
  const int64_t start = g * linear.group;
  const int64_t count = linear.k - start < linear.group ? linear.k - start : linear.group;
  const int64_t lead = start % byte_aligned_codes(linear.bits);
  return {start - lead, lead, count, (lead + count + block - 1) / block};
}

// x [m, k] as float [group][block of the group][m][32], zeros where the block holds no code of the group; within a
// block of nibbles the 16 even positions come before the 16 odd ones, as a byte's halves come apart.
// Then rows begin .. end - 1 of the weight. One pair for each instruction set, chosen by the processor at run time.
#define LOWBIT_DECLARE(set)                                         \
  namespace set {                                                   \
  void arrange(const Linear&, const ArrayView& x, float* arranged);   \
  void linear(const Linear&, int64_t begin, int64_t end);           \
  }
LOWBIT_FOR_EACH_SET(LOWBIT_DECLARE)
#undef LOWBIT_DECLARE

}  // namespace lowbit::cpu
