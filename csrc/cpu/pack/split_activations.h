// Numbers of x as limbs, for whichever instruction set this file is compiled for (LOWBIT_SET is its namespace). The loops are
// plain: a compiler turns each into vectors.
//
// In a slice of 512 columns, x = scale * (65536 d0 + 256 d1 + d2) with limbs of -128 to 127, to 2^-22 of the largest; or
// scale * (256 d0 + d1), to 1/65278 of the largest; or one limb, a row's numbers rounded to eight bits. Words hold two limbs.
#pragma once

#include <cmath>

#include "../kernels/split_int8_gemv.h"
#include "../isa/array_view.h"

namespace lowbit::cpu::LOWBIT_SET {
namespace {

#if defined(__AVX512F__)
constexpr int lanes = wide_lanes;
#else
constexpr int lanes = narrow_lanes;
#endif

inline int32_t bits_of(float number) {
  int32_t bits;
  memcpy(&bits, &number, 4);
  return bits;
}
inline float float_of(int32_t bits) {
  float number;
  memcpy(&number, &bits, 4);
  return number;
}

// Columns at .. at + count - 1 of x.
void load_row(const ArrayView& x, int64_t at, int64_t count, float* to) {
  int64_t i = 0;
  if (x.dtype == Dtype::float32) {
    memcpy(to, static_cast<const float*>(x.data) + at, count * sizeof(float));
    return;
  }
  if (x.dtype == Dtype::bfloat16) {
    const uint16_t* from = static_cast<const uint16_t*>(x.data) + at;
    for (; i < count; i++) to[i] = float_of(static_cast<int32_t>(static_cast<uint32_t>(from[i]) << 16));
    return;
  }
#if defined(__F16C__)
  if (x.dtype == Dtype::float16) {
    const uint16_t* from = static_cast<const uint16_t*>(x.data) + at;
    for (; i + 8 <= count; i += 8)
      _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
#endif
  for (; i < count; i++) to[i] = load_float(x, at + i);
}

// The bits of the largest magnitude: as integers, of which those of infinity and NaN are the largest.
int32_t largest_of(const float* numbers, int64_t count) {
  int32_t largest = 0;
  for (int64_t i = 0; i < count; i++) {
    const int32_t bits = bits_of(numbers[i]) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// To the nearest integer, ties to even, of no more than 2^22: the float that is added has a last bit of 1.
inline int32_t nearest(float number) { return bits_of(number + 0x1.8p23f) - 0x4b400000; }

// Numbers over the unit of their slice, which is returned. Three limbs: a power of two, no smaller than a float goes, and
// integers of no more than 2^22 - 1. Two: the largest number / 32639, which is the largest that two limbs hold.
template <int D>
float to_limb_integers(const float* numbers, int64_t count, float largest, int32_t* to) {
  float unit, up, further = 1;
  int32_t maximum;
  if constexpr (D == 2) {
    unit = largest / 32639, up = unit > 0 ? 1 / unit : 0, maximum = 32639;
  } else {  // two factors: one might be no float
    const int e = largest > 0 ? std::ilogb(largest) : 0, low = e - 21 < -149 ? -149 : e - 21;
    unit = std::ldexp(1.0f, low), up = std::ldexp(1.0f, -low / 2), further = std::ldexp(1.0f, -low - -low / 2), maximum = (1 << 22) - 1;
  }
  for (int64_t i = 0; i < count; i++) {
    const int32_t near = nearest(numbers[i] * up * further), below = near < maximum ? near : maximum;
    to[i] = below > -maximum ? below : -maximum;
  }
  return unit;
}

void to_int8(const float* numbers, int64_t count, float scale, int32_t* to) {
  const float over = scale == 0 ? INFINITY : scale;
  for (int64_t i = 0; i < count; i++) {
    const float number = numbers[i] / over, below = number < 127 ? number : 127;
    to[i] = nearest(below > -128 ? below : -128);
  }
}

// What is left over is divided by the base without a rest.
template <typename Limb>
void extract_low_limb(int32_t* left, int64_t count, Limb* to) {
  constexpr int width = 8 * sizeof(Limb);
  for (int64_t i = 0; i < count; i++) {
    to[i] = static_cast<Limb>(left[i]);
    left[i] = (left[i] + (1 << (width - 1))) >> width;
  }
}

// The scale of row m with one limb; NaN where it holds infinity or NaN. `input_scale`: of all rows, or none.
float scale_of_row(const ArrayView& x, int64_t m, int64_t k, const float* input_scale) {
  alignas(64) float numbers[slice];
  int32_t largest = 0;
  for (int64_t first = 0; first < k; first += slice) {
    const int64_t count = k - first < slice ? k - first : slice;
    load_row(x, m * x.stride + first, count, numbers);
    const int32_t temp = largest_of(numbers, count);
    largest = temp > largest ? temp : largest;
  }
  return largest >= 0x7f800000 ? NAN : input_scale ? *input_scale : float_of(largest) / 127;
}

// A slice's numbers over their unit, which goes to `scale`: that of the row with one limb. False, and zeros, where they have no
// limbs.
template <int D>
bool quantize_slice(const float* numbers, int64_t count, float of_row, int32_t* to, float& scale) {
  if constexpr (D == 1) {
    to_int8(numbers, count, of_row, to);
    scale = of_row;
    return true;
  } else {
    const int32_t largest = largest_of(numbers, count);
    const float maximum = float_of(largest);
    const bool is_small = D == 2 && maximum > 0 && maximum < 0x1p-100f;  // its unit might be no normal number
    if (largest < 0x7f800000 && !is_small) {
      scale = to_limb_integers<D>(numbers, count, maximum, to);
      return true;
    }
    for (int64_t i = 0; i < count; i++) to[i] = 0;
    scale = 0;
    return false;
  }
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_SET
