// y = x W^T with weights that are no small integers, a step at a time: what the binding hands to the kernel. See floats.cpp.
#pragma once

#include "digits.h"

namespace lowbit::cpu {

struct FloatsOfX {
  int64_t steps;
  const int32_t* group_of_quarter;  // [steps, 4]
  float* numbers;                   // [steps, m, fields, 64]: as the codes of a step come out
};

// Whether the kernel takes such codes: no quarter of a step is of two groups.
static inline bool takes_floats(const Linear& a) {
  const bool known = (a.bits == 4 && a.codes == Codes::nibbles) || a.codes == Codes::shifted;
  return known && !a.zero_point.data && (a.group >= a.k || a.group % (16 * fields_of(a.bits)) == 0);
}

#if defined(__x86_64__)
namespace avx512vnni {
void take_floats(const Linear&, const Numbers& x, const FloatsOfX&);
void floats_linear(const Linear&, const FloatsOfX&, int64_t begin, int64_t end);
}  // namespace avx512vnni
#endif

}  // namespace lowbit::cpu
