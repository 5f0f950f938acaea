// Splits x into integer limbs, for the instruction set this file is compiled for (LOWBIT_SET is its namespace). Plain loops,
// which compilers vectorize.
//
// In a slice of 512 columns, with limbs d of -128 to 127:
//    3 limbs: x = scale * (65536 d0 + 256 d1 + d2), to 2^-22 of the largest |x|; scale is a power of two
//    2 limbs: x = scale * (256 d0 + d1), to 1/65278 of the largest |x|
//    1 limb:  x = scale * d0, with one scale for the row (8-bit activations)
// int16 limbs hold two of these each.
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

// Loads columns [at, at + count) of x as floats.
void load_row(const ArrayView& x, int64_t column, int64_t count, float* to) {
  int64_t i = 0;
  if (x.dtype == Dtype::float32) {
    memcpy(to, static_cast<const float*>(x.data) + column, count * sizeof(float));
    return;
  }
  if (x.dtype == Dtype::bfloat16) {
    const uint16_t* from = static_cast<const uint16_t*>(x.data) + column;
    for (; i < count; i++) to[i] = float_of(static_cast<int32_t>(static_cast<uint32_t>(from[i]) << 16));
    return;
  }
#if defined(__F16C__)
  if (x.dtype == Dtype::float16) {
    const uint16_t* from = static_cast<const uint16_t*>(x.data) + column;
    for (; i + 8 <= count; i += 8)
      _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
#endif
  for (; i < count; i++) to[i] = load_float(x, column + i);
}

// Bits of the largest magnitude, compared as integers, so that infinity and NaN are the largest.
int32_t largest_of(const float* numbers, int64_t count) {
  int32_t largest = 0;
  for (int64_t i = 0; i < count; i++) {
    const int32_t bits = bits_of(numbers[i]) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// Rounds to the nearest integer, ties to even, for |number| <= 2^22: the sum's last bit has the value 1.
inline int32_t nearest(float number) { return bits_of(number + 0x1.8p23f) - 0x4b400000; }

// Rounds a slice to integers and returns the value of 1. Three limbs: a power of two, at least the smallest float, and integers
// up to 2^22 - 1. Two limbs: largest / 32639, since two limbs hold 127 * 257 = 32639.
template <int D>
float to_limb_integers(const float* numbers, int64_t count, float largest, int32_t* to) {
  float unit, up, up2 = 1;
  int32_t maximum;
  if constexpr (D == 2) {
    unit = largest / 32639, up = unit > 0 ? 1 / unit : 0, maximum = 32639;
  } else {  // in two factors, since a single one might overflow
    const int e = largest > 0 ? std::ilogb(largest) : 0, low = e - 21 < -149 ? -149 : e - 21;
    unit = std::ldexp(1.0f, low), up = std::ldexp(1.0f, -low / 2), up2 = std::ldexp(1.0f, -low - -low / 2), maximum = (1 << 22) - 1;
  }
  for (int64_t i = 0; i < count; i++) {
    const int32_t rounded = nearest(numbers[i] * up * up2), clamped = rounded < maximum ? rounded : maximum;
    to[i] = clamped > -maximum ? clamped : -maximum;
  }
  return unit;
}

void to_int8(const float* numbers, int64_t count, float scale, int32_t* to) {
  const float over = scale == 0 ? INFINITY : scale;
  for (int64_t i = 0; i < count; i++) {
    const float number = numbers[i] / over, clamped = number < 127 ? number : 127;
    to[i] = nearest(clamped > -128 ? clamped : -128);
  }
}

// Moves the lowest limb of each integer to `to` and divides the rest by the base, exactly.
template <typename Limb>
void extract_low_limb(int32_t* integers, int64_t count, Limb* to) {
  constexpr int width = 8 * sizeof(Limb);
  for (int64_t i = 0; i < count; i++) {
    to[i] = static_cast<Limb>(integers[i]);
    integers[i] = (integers[i] + (1 << (width - 1))) >> width;
  }
}

// The scale of row m with one limb, `input_scale` where it is given; NaN where the row holds infinity or NaN.
float scale_of_row(const ArrayView& x, int64_t m, int64_t k, const float* input_scale) {
  alignas(64) float numbers[slice];
  int32_t largest = 0;
  for (int64_t first = 0; first < k; first += slice) {
    const int64_t count = k - first < slice ? k - first : slice;
    load_row(x, m * x.stride + first, count, numbers);
    const int32_t slice_largest = largest_of(numbers, count);
    largest = slice_largest > largest ? slice_largest : largest;
  }
  return largest >= 0x7f800000 ? NAN : input_scale ? *input_scale : float_of(largest) / 127;
}

// Rounds a slice to integers in units of `scale`, which is set (with one limb to `of_row`). False, with zeros, where the slice
// has no limbs: it holds infinity, NaN or, with two limbs, tiny values.
template <int D>
bool quantize_slice(const float* numbers, int64_t count, float of_row, int32_t* to, float& scale) {
  if constexpr (D == 1) {
    to_int8(numbers, count, of_row, to);
    scale = of_row;
    return true;
  } else {
    const int32_t largest = largest_of(numbers, count);
    const float maximum = float_of(largest);
    const bool is_small = D == 2 && maximum > 0 && maximum < 0x1p-100f;  // its unit might be subnormal
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
