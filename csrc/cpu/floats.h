// y = x W^T with weights that are no small integers, a step at a time: what the binding hands to the kernels. See floats.cpp and
// floats_avx2.cpp.
#pragma once

#include "digits.h"

namespace lowbit::cpu {

struct FloatsOfX {
  int64_t steps;
  const int32_t* group_of_quarter;  // [steps, 4]
  float* numbers;                   // [steps, m, fields, 4 lanes]: as the codes of a step come out
};

// Whether the kernel takes such codes: no quarter of a step is of two groups.
static inline bool takes_floats(const Linear& a) {
  const bool known = (a.bits == 4 && a.codes == Codes::nibbles) || a.codes == Codes::shifted;
  return known && !a.zero_point.data && (a.group >= a.k || a.group % (16 * fields_of(a.bits)) == 0);
}

#if defined(__x86_64__)
namespace avx512 {
void take_floats(const Linear&, const Numbers& x, const FloatsOfX&);
}  // namespace avx512
namespace avx512vnni {
void floats_linear(const Linear&, const FloatsOfX&, int64_t begin, int64_t end);
}  // namespace avx512vnni
namespace avx2 {
void take_floats(const Linear&, const Numbers& x, const FloatsOfX&);
void floats_linear(const Linear&, const FloatsOfX&, int64_t begin, int64_t end);
}  // namespace avx2
#endif

}  // namespace lowbit::cpu
