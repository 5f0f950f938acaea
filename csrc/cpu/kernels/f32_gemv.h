// y = x W^T with weights that are no small integers, a step at a time: what the binding hands to the kernels. See f32_gemv_avx512.cpp and
// f32_gemv_avx2.cpp.
#pragma once

#include "split_int8_gemv.h"

namespace lowbit::cpu {

struct PackedFloats {
  int64_t steps;
  const int32_t* group_of_quad;  // [steps, 4]
  float* numbers;                   // [steps, m, fields, 4 lanes]: as the codes of a step come out
};

// Whether the kernel takes such codes: no quarter of a step is of two groups.
static inline bool supports_f32_gemv(const Linear& a) {
  const bool known = (a.bits == 4 && a.codes == Codes::nibbles) || a.codes == Codes::truncated_half;
  return known && !a.zero_point.data && (a.group >= a.k || a.group % (16 * fields_of(a.bits)) == 0);
}

#if defined(__x86_64__)
namespace avx512 {
void pack_floats(const Linear&, const ArrayView& x, const PackedFloats&);
}  // namespace avx512
namespace avx512vnni {
void f32_gemv(const Linear&, const PackedFloats&, int64_t begin, int64_t end);
}  // namespace avx512vnni
namespace avx2 {
void pack_floats(const Linear&, const ArrayView& x, const PackedFloats&);
void f32_gemv(const Linear&, const PackedFloats&, int64_t begin, int64_t end);
}  // namespace avx2
#endif

}  // namespace lowbit::cpu
