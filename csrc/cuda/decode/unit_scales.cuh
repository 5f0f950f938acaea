// Scales and zero points in units and arrays, and the structure of a unit.
#pragma once

#include "scalar_types.cuh"
#include "mma_fragment_layout.cuh"

namespace lowbit::cuda {

enum class ScaleType { float32, bfloat16, float16, e8m0, e4m3 };

__host__ __device__ constexpr int size_of(ScaleType type) {
  return type == ScaleType::float32 ? 4 : type == ScaleType::bfloat16 || type == ScaleType::float16 ? 2 : 1;
}

// e8m0: 2^(code - 127), the least subnormal in fp32; 255 is NaN.
__device__ __forceinline__ float e8m0_to_float(uint32_t code) {
  return __uint_as_float(code - 1 < 254 ? code << 23 : code << 23 | 0x00400000u);
}

__device__ __forceinline__ float e4m3_to_float(uint32_t code) {
  const uint32_t size = code & 0x7f;
  const float number = __uint_as_float(size << 20) * 0x1p120f;
  return __uint_as_float((size == 0x7f ? 0x7fc00000u : __float_as_uint(number)) | (code & 0x80) << 24);
}

// Element i of an array of scales.
__device__ __forceinline__ float scale_at(const void* scales, ScaleType type, int64_t i) {
  switch (type) {
    case ScaleType::float32: return static_cast<const float*>(scales)[i];
    case ScaleType::bfloat16: return to_float(static_cast<const __nv_bfloat16*>(scales)[i]);
    case ScaleType::float16: return to_float(static_cast<const __half*>(scales)[i]);
    case ScaleType::e8m0: return e8m0_to_float(static_cast<const uint8_t*>(scales)[i]);
    default: return e4m3_to_float(static_cast<const uint8_t*>(scales)[i]);
  }
}

// Scales of rows g and g + 8 of a lane in one group of a unit; `scales`: start of the unit's scales.
__device__ __forceinline__ float2 two_scales_of(const uint8_t* scales, ScaleType type, int group, int lane) {
  const int place = group * tile_rows + lane / 4 * 2;
  if (type == ScaleType::bfloat16) {
    const uint32_t two = *reinterpret_cast<const uint32_t*>(scales + place * 2);
    return {__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u)};
  }
  if (type == ScaleType::float32) return *reinterpret_cast<const float2*>(scales + place * 4);
  if (type == ScaleType::float16) return __half22float2(*reinterpret_cast<const __half2*>(scales + place * 2));
  const uint32_t two = *reinterpret_cast<const uint16_t*>(scales + place);
  if (type == ScaleType::e8m0) return {e8m0_to_float(two & 0xff), e8m0_to_float(two >> 8)};
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(two)));
  return __half22float2(reinterpret_cast<const __half2&>(halves));
#else
  return {e4m3_to_float(two & 0xff), e4m3_to_float(two >> 8)};
#endif
}

// Zero points of those rows; `zeros`: start of the unit's zero points.
__device__ __forceinline__ uint2 two_zeros_of(const uint8_t* zeros, int group, int lane) {
  const uint32_t two = *reinterpret_cast<const uint16_t*>(zeros + group * tile_rows + lane / 4 * 2);
  return {two & 0xff, two >> 8};
}

// Offsets in a unit, for a scheme that is known at run time.
struct UnitLayout {
  int columns, group, groups;  // group: columns of a group; groups: in a row of the unit, 0 where scales are outside
  int scale_at, zero_at, size;

  __host__ __device__ static UnitLayout of(int bits, int group_size, int scale_size, bool has_zero) {
    UnitLayout p = {};
    p.columns = bits <= 4 ? 512 : 256;
    const bool is_inside = group_size > 0 && p.columns % group_size == 0;
    p.group = is_inside ? group_size : p.columns;
    p.groups = is_inside ? p.columns / group_size : 0;
    p.scale_at = tile_rows * p.columns * bits / 8;
    p.zero_at = p.scale_at + tile_rows * p.groups * scale_size;
    p.size = (p.zero_at + (has_zero ? tile_rows * p.groups : 0) + 15) / 16 * 16;
    if (!has_zero) p.zero_at = p.scale_at;  // an unused read stays inside the unit
    return p;
  }
  // Bytes between units in shared memory: copies to multiples of 128 bytes are faster.
  __host__ __device__ int pitch() const { return (size + 127) / 128 * 128; }
};

}  // namespace lowbit::cuda
