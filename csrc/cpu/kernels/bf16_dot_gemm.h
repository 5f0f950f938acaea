// GEMM for many rows of x in bfloat16: what the binding hands to bf16_dot_gemm.cpp.
#pragma once

#include "linear.h"

namespace lowbit::cpu {

constexpr int64_t dot_columns = 32;  // bfloat16 values in a register
constexpr int64_t page = 2048;

// Columns from row to row, padded. Long rows start half a page and a line apart modulo whole pages, so that blocks of several
// rows spread over all sets of the L1 cache.
static inline int64_t padded_stride(int64_t k) {
  const int64_t whole = (k + dot_columns - 1) / dot_columns * dot_columns;
  if (whole < page / 2) return whole;
  const int64_t beyond = page / 2 + dot_columns;
  return whole + (beyond - whole % page + page) % page;
}

struct Bf16DotArgs {
  const uint16_t* x;      // [m, x_stride]: the k columns, then zeros up to whole registers
  int64_t x_stride;
  const ArrayView* bias;  // [n], or none
  uint16_t* y;            // [m, n]
  int64_t panel_n;        // rows of the weight at a time, a multiple of 32
};

#if defined(__x86_64__)
namespace avx512bf16 {
void bf16_dot_gemm(const Linear&, const Bf16DotArgs&, int64_t begin, int64_t end);
}  // namespace avx512bf16
#endif

}  // namespace lowbit::cpu
