// Scales and zero points of a lane's two rows, group after group along a unit.
#pragma once

#include "../mma/f16x2_math.cuh"
#include "unit_scales.cuh"

namespace lowbit::cuda {

// Types of scales in the units: plain (fp32 or any 16-bit), local (the type of x), the 8-bit ones, or row: none in the units.
enum class Scaling { plain, local, e8m0, e4m3, row };

__device__ __forceinline__ uint32_t dup_bfloat16(float number) {
  uint32_t two;
  asm("cvt.rn.bf16x2.f32 %0, %1, %1;" : "=r"(two) : "f"(number));
  return two;
}

template <Scaling scaling>
struct GroupScales {
  const uint8_t *scales, *zeros;
  ScaleType type;
  int step;  // bytes of a group's scales

  __device__ GroupScales(const uint8_t* unit, const UnitLayout& plan, ScaleType type, int lane) : type(type) {
    const int size = scaling == Scaling::plain ? size_of(type) : scaling == Scaling::local ? 2 : 1;
    scales = unit + plan.scale_at + lane / 4 * 2 * size;
    zeros = unit + plan.zero_at + lane / 4 * 2;
    step = tile_rows * size;
  }

  __device__ __forceinline__ void skip(int groups) {
    scales += groups * step;
    zeros += groups * tile_rows;
  }

  // T: type of x.
  template <class T>
  __device__ __forceinline__ float2 next() {
    const uint8_t* at = scales;
    scales += step;
    if constexpr (scaling == Scaling::local) {
      const uint32_t two = *reinterpret_cast<const uint32_t*>(at);
      if constexpr (std::is_same_v<T, __half>) return __half22float2(reinterpret_cast<const __half2&>(two));
      return {__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u)};
    } else if constexpr (scaling == Scaling::e8m0) {
      const uint32_t two = *reinterpret_cast<const uint16_t*>(at);
      return {e8m0_to_float(two & 0xff), e8m0_to_float(two >> 8)};
    } else {
      if (type == ScaleType::float32) return *reinterpret_cast<const float2*>(at);
      const uint32_t two = *reinterpret_cast<const uint32_t*>(at);
      const float2 halves = __half22float2(reinterpret_cast<const __half2&>(two));
      const bool is_half = type == ScaleType::float16;
      return {is_half ? halves.x : __uint_as_float(two << 16), is_half ? halves.y : __uint_as_float(two & 0xffff0000u)};
    }
  }

  // The same as pairs of equal values of T, where T holds them: its own type, and powers of two in bfloat16.
  template <class T>
  __device__ __forceinline__ uint2 next_exact() {
    const uint8_t* at = scales;
    scales += step;
    if constexpr (scaling == Scaling::local) {
      const uint32_t two = *reinterpret_cast<const uint32_t*>(at);
      return {__byte_perm(two, 0, 0x1010), __byte_perm(two, 0, 0x3232)};
    }
    const uint32_t codes = *reinterpret_cast<const uint16_t*>(at);
    // code 0 is subnormal; 255, infinity here, gives NaN times zero
    const uint32_t two = __vmaxu2(__byte_perm(codes, 0, 0x4140) << 7, 0x00400040u);
    const uint32_t numbers = fma_f16x2<T>(two, 0, two);
    return {__byte_perm(numbers, 0, 0x1010), __byte_perm(numbers, 0, 0x3232)};
  }

  // 8-bit scales times 2^power, as pairs: one multiplication applies the scale and the power of two that values need
  // (FloatDecoder, weight_decoders.cuh). Less than the full power, since some would overflow. e8m0 scales may still be too large:
  // `largest` is the largest code so far.
  template <class T, int power>
  __device__ __forceinline__ uint2 next_with_power(uint32_t& largest) {
    static_assert(scaling == Scaling::e4m3 || scaling == Scaling::e8m0);
    const uint8_t* at = scales;
    scales += step;
    if constexpr (scaling == Scaling::e8m0) {
      static_assert(std::is_same_v<T, __nv_bfloat16>);
      const uint32_t row = at[0], row8 = at[1];
      largest = __vimax3_u32(largest, row, row8);
      return {row * dup_u16(128) + dup_u16(power * 128), row8 * dup_u16(128) + dup_u16(power * 128)};
    }
    const uint32_t codes = *reinterpret_cast<const uint16_t*>(at);
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(codes)));
    if constexpr (std::is_same_v<T, __half>) {
      const uint32_t two = fma_f16x2<T>(halves, dup_power_of_two<T>(power), 0x80008000u);
      return {__byte_perm(two, 0, 0x1010), __byte_perm(two, 0, 0x3232)};
    } else {
      const float2 numbers = __half22float2(reinterpret_cast<const __half2&>(halves));
      const float factor = __uint_as_float((127u + power) << 23);
      return {dup_bfloat16(numbers.x * factor), dup_bfloat16(numbers.y * factor)};
    }
  }

  __device__ __forceinline__ uint2 next_zeros() {
    const uint32_t two = *reinterpret_cast<const uint16_t*>(zeros);
    zeros += tile_rows;
    return {two & 0xff, two >> 8};
  }
};

// A scale as the sum of two values of T, each as a pair; the second is zero where T holds the scale.
struct ScaleParts {
  uint32_t high, low;
};
template <class T>
__device__ __forceinline__ ScaleParts parts_of(float scale) {
  constexpr uint32_t infinity = (1u << 15) - (1u << F16Traits<T>::mantissa);
  const T high = from_float<T>(scale), low = from_float<T>(scale - to_float(high));
  const uint32_t h = reinterpret_cast<const uint16_t&>(high), l = reinterpret_cast<const uint16_t&>(low);
  return {h | h << 16, (h & 0x7fff) < infinity ? l | l << 16 : 0};
}

// Turns operands of values into operands of values times scales. has_rest: scales have a second part.
template <class T, bool has_rest, int parts>
__device__ __forceinline__ void scale_operand(uint32_t (&a)[parts][4], ScaleParts row, ScaleParts row8) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const ScaleParts& s = i % 2 ? row8 : row;
    uint32_t rest = has_rest ? fma_f16x2<T>(a[0][i], s.low, 0x80008000u) : 0x80008000u;
#pragma unroll
    for (int p = parts - 1; p > 0; p--) rest = fma_f16x2<T>(a[p][i], s.high, rest);
    a[0][i] = fma_f16x2<T>(a[0][i], s.high, rest);
  }
}

}  // namespace lowbit::cuda
