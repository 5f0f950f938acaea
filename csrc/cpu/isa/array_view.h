// Access to single scales, zero points and elements of x, for the instruction set this file is compiled for.
#pragma once

#include "../kernels/linear.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace lowbit::cpu::LOWBIT_SET {
namespace {

inline float half_to_f32(uint16_t half) {
#if defined(__F16C__)
  return _cvtsh_ss(half);
#else
  return half_to_float(half);
#endif
}

inline float load_float(const ArrayView& numbers, int64_t i) {
  switch (numbers.dtype) {
    case Dtype::float32: return static_cast<const float*>(numbers.data)[i];
    case Dtype::bfloat16: return bfloat16_to_float(static_cast<const uint16_t*>(numbers.data)[i]);
    case Dtype::float16: return half_to_f32(static_cast<const uint16_t*>(numbers.data)[i]);
    case Dtype::bytes: break;
  }
  const uint8_t byte = static_cast<const uint8_t*>(numbers.data)[i];
  return numbers.table ? numbers.table[byte] : static_cast<float>(byte);
}

inline float scale_of(const Linear& a, int64_t row, int64_t g) {
  const float scale = load_float(a.scale, row * a.scale.stride + g);
  return a.has_outer ? scale * a.outer : scale;
}

inline float zero_of(const Linear& a, int64_t row, int64_t g) {
  return a.zero_point.data ? load_float(a.zero_point, row * a.zero_point.stride + g) : 0.0f;
}

// Rounds to nearest even.
inline uint16_t to_bfloat16(float number) {
  uint32_t bits;
  memcpy(&bits, &number, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline uint16_t to_half(float number) {
#if defined(__F16C__)
  return _cvtss_sh(number, _MM_FROUND_TO_NEAREST_INT);
#else
  uint32_t bits;
  memcpy(&bits, &number, 4);
  const uint32_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (bits >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // 65520 and more: infinity
  if (bits < 0x38800000) {  // subnormal half: the addition rounds to a multiple of 2^-24
    float magnitude;
    memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    memcpy(&bits, &magnitude, 4);
    return static_cast<uint16_t>(sign | (bits - 0x3f000000));
  }
  return static_cast<uint16_t>(sign | (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
#endif
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_SET
