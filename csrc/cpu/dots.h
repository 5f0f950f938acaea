// y = x W^T for many rows of x in bfloat16, on the processor's own dot products of it: what the binding hands to the kernel. See
// dots.cpp.
#pragma once

#include "linear.h"

namespace lowbit::cpu {

constexpr int64_t columns_of_dots = 32;  // that a register holds
constexpr int64_t columns_at_a_time = 4096, page = 2048;

// Columns from row to row. Long rows lie half a page and a line beyond whole pages from each other, so that blocks of several
// rows fill all sets of the first-level cache evenly.
static inline int64_t stride_of_dots(int64_t k) {
  const int64_t whole = (k + columns_of_dots - 1) / columns_of_dots * columns_of_dots;
  if (whole < page / 2) return whole;
  const int64_t beyond = page / 2 + columns_of_dots;
  return whole + (beyond - whole % page + page) % page;
}

struct Dots {
  const uint16_t* x;    // [m, stride_of_dots(k)], zeros behind the k columns
  const Numbers* bias;  // [n], or none
  uint16_t* y;          // [m, n]
};

#if defined(__x86_64__)
namespace avx512bf16 {
void dots_linear(const Linear&, const Dots&, int64_t begin, int64_t end);
}  // namespace avx512bf16
#endif

}  // namespace lowbit::cpu
