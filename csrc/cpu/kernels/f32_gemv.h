// fp32 GEMV for formats that are not small integers (fp8, fp6 e3m2, nf4): each code is decoded to a float in registers.
//
//    x [M, K] --pack_floats--> f32 [steps, M, fields, 4 lanes], in the order in which codes are decoded
//    row: planes --unpack--> codes u8 --shift, vcvtph2ps | lookup--> w f32 --fma--> sums [lanes] --* group scale--> total
//                                                                             y [M, R rows] <--sum of lanes--+
//
// Contract: exact: fp32 sums of the exact quantized weights.
// Limit: at M = 1 the bytes of the weight, in practice the conversion of codes.
// Reached (evals/results/gemv_cpu.json, 11008 x 4096, AMD EPYC with AVX-512, 2 threads, M = 1): fp8 2011 us, 0.45 of the time to
// read its bytes and 2.9 times as fast as bfloat16's F.linear; nf4 1564 us, 0.32 and 3.9 times; fp6_e3m2 2181 us, 0.32 and 2.7
// times.
//
// Kernels: f32_gemv_avx512.cpp and f32_gemv_avx2.cpp.
#pragma once

#include "split_int8_gemv.h"

namespace lowbit::cpu {

struct PackedFloats {
  int64_t steps;
  const int32_t* group_of_quad;  // [steps, 4]: group of each quarter of a step's columns
  float* numbers;                   // [steps, M, fields, 4 lanes], in the order in which codes are decoded
};

// Whether the kernel supports this format and group size: no quarter of a step may straddle two groups.
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
