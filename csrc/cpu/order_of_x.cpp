// x in the order in which a kernel's codes come out of their planes, as digits or as floats, compiled once for each instruction
// set that has such kernels (LOWBIT_SET is its namespace), whose registers they fill. The loops are plain: a compiler turns each
// into vectors.
//
// In a slice of 512 columns, x = scale * (65536 d0 + 256 d1 + d2) with digits of -128 to 127, to 2^-22 of the largest; or
// scale * (256 d0 + d1), to 1/65278 of the largest; or one digit, a row's numbers rounded to eight bits. Words hold two digits.
#include "floats.h"

#include <cmath>

#include "numbers.h"

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
void take_numbers(const Numbers& x, int64_t at, int64_t count, float* to) {
  int64_t i = 0;
  if (x.stored == Stored::float32) {
    memcpy(to, static_cast<const float*>(x.data) + at, count * sizeof(float));
    return;
  }
  if (x.stored == Stored::bfloat16) {
    const uint16_t* from = static_cast<const uint16_t*>(x.data) + at;
    for (; i < count; i++) to[i] = float_of(static_cast<int32_t>(static_cast<uint32_t>(from[i]) << 16));
    return;
  }
#if defined(__F16C__)
  if (x.stored == Stored::float16) {
    const uint16_t* from = static_cast<const uint16_t*>(x.data) + at;
    for (; i + 8 <= count; i += 8)
      _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
#endif
  for (; i < count; i++) to[i] = number_at(x, at + i);
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

// Numbers over the unit of their slice, which is returned. Three digits: a power of two, no smaller than a float goes, and
// integers of no more than 2^22 - 1. Two: the largest number / 32639, which is the largest that two digits hold.
template <int D>
float take_integers(const float* numbers, int64_t count, float largest, int32_t* to) {
  float unit, up, further = 1;
  int32_t most;
  if constexpr (D == 2) {
    unit = largest / 32639, up = unit > 0 ? 1 / unit : 0, most = 32639;
  } else {  // two factors: one might be no float
    const int e = largest > 0 ? std::ilogb(largest) : 0, low = e - 21 < -149 ? -149 : e - 21;
    unit = std::ldexp(1.0f, low), up = std::ldexp(1.0f, -low / 2), further = std::ldexp(1.0f, -low - -low / 2), most = (1 << 22) - 1;
  }
  for (int64_t i = 0; i < count; i++) {
    const int32_t near = nearest(numbers[i] * up * further), below = near < most ? near : most;
    to[i] = below > -most ? below : -most;
  }
  return unit;
}

void take_bytes(const float* numbers, int64_t count, float scale, int32_t* to) {
  const float over = scale == 0 ? INFINITY : scale;
  for (int64_t i = 0; i < count; i++) {
    const float number = numbers[i] / over, below = number < 127 ? number : 127;
    to[i] = nearest(below > -128 ? below : -128);
  }
}

// What is left over is divided by the base without a rest.
template <typename Digit>
void take_lowest(int32_t* left, int64_t count, Digit* to) {
  constexpr int width = 8 * sizeof(Digit);
  for (int64_t i = 0; i < count; i++) {
    to[i] = static_cast<Digit>(left[i]);
    left[i] = (left[i] + (1 << (width - 1))) >> width;
  }
}

// F: fields of a step's digits; C: columns of a lane.
template <int F, int C, int D, typename Digit>
bool take(const Linear& a, const Bytewise& how, const Numbers& x, const DigitsOfX& to, int64_t begin, int64_t end) {
  constexpr int64_t columns = C * lanes, count_of_digits = sizeof(Digit) == 1 ? D : words_of(D);
  const int64_t slices = (a.k + slice - 1) / slice;
  Digit* const digits = reinterpret_cast<Digit*>(to.digits);
  alignas(64) float numbers[slice];
  alignas(64) int32_t integers[slice];
  alignas(64) Digit own[slice];
  for (int64_t m = begin; m < end; m++) {
    float of_row = 0;  // with one digit
    if (D == 1) {
      int32_t largest = 0;
      for (int64_t first = 0; first < a.k; first += slice) {
        const int64_t count = a.k - first < slice ? a.k - first : slice;
        take_numbers(x, m * x.stride + first, count, numbers);
        const int32_t some = largest_of(numbers, count);
        largest = some > largest ? some : largest;
      }
      of_row = largest >= 0x7f800000 ? NAN : to.given ? *to.given : float_of(largest) / 127;
    }
    for (int64_t n = 0; n < slices; n++) {
      const int64_t first = n * slice, count = a.k - first < slice ? a.k - first : slice;
      const int64_t steps = (count + columns - 1) / columns;
      take_numbers(x, m * x.stride + first, count, numbers);
      for (int64_t i = count; i < steps * columns; i++) numbers[i] = 0;
      if constexpr (D == 1) {
        take_bytes(numbers, steps * columns, of_row, integers);
        to.scale[m * slices + n] = of_row;
      } else {
        const int32_t largest = largest_of(numbers, count);
        if (largest >= 0x7f800000) return false;
        const float most = float_of(largest);
        if (D == 2 && most > 0 && most < 0x1p-100f) return false;  // its unit might be no normal number
        to.scale[m * slices + n] = take_integers<D>(numbers, steps * columns, most, integers);
      }
      for (int64_t s = 0; s < steps; s++) {
        int32_t* sums = to.sums + ((first / columns + s) * a.m + m) * lanes;
        for (int lane = 0; lane < lanes; lane++) {
          int32_t sum = 0;
          for (int c = 0; c < C; c++) sum += integers[s * columns + lane * C + c];
          sums[lane] = sum;
        }
        if (to.in_quarters)
          for (int lane = 0; lane < lanes; lane += 4) {
            const int32_t sum = sums[lane] + sums[lane + 1] + sums[lane + 2] + sums[lane + 3];
            for (int i = 0; i < 4; i++) sums[lane + i] = sum;
          }
        for (int lane = 0; lane < lanes; lane++) {
          // Without zero points the share is that of the offset, whatever the row.
          if (!a.zero_point.data) sums[lane] *= -how.offset;
          else if (D < 3 && !to.in_quarters) sums[lane] = bits_of(static_cast<float>(sums[lane]));
        }
      }
      for (int64_t d = count_of_digits - 1; d >= 0; d--) {
        take_lowest(integers, steps * columns, own);
        for (int64_t s = 0; s < steps; s++) {
          Digit* all = digits + (((first / columns + s) * a.m + m) * count_of_digits + d) * columns;
          for (int f = 0; f < F; f++)
            for (int64_t i = 0; i < columns / F; i++) all[f * (columns / F) + i] = own[s * columns + i * F + f];
        }
      }
    }
  }
  return true;
}

template <int F, int C, typename Digit>
bool take_any(const Linear& a, const Bytewise& how, const Numbers& x, const DigitsOfX& to, int64_t begin, int64_t end) {
  if (to.count == 1) return take<F, C, 1, Digit>(a, how, x, to, begin, end);
  return to.count == 3 ? take<F, C, 3, Digit>(a, how, x, to, begin, end) : take<F, C, 2, Digit>(a, how, x, to, begin, end);
}

}  // namespace

bool take_digits(const Linear& a, const Bytewise& how, const Numbers& x, const DigitsOfX& to, int64_t begin, int64_t end) {
  if (takes_words(a.bits, lanes)) return take_any<2, 4, int16_t>(a, how, x, to, begin, end);
  switch (fields_of(a.bits)) {
    case 1: return take_any<1, 4, int8_t>(a, how, x, to, begin, end);
    case 2: return take_any<2, 8, int8_t>(a, how, x, to, begin, end);
    default: return take_any<4, 16, int8_t>(a, how, x, to, begin, end);
  }
}

void take_floats(const Linear& a, const Numbers& x, const FloatsOfX& to) {
  const int64_t fields = fields_of(a.bits), columns = columns_of(a.bits, lanes), in_field = 4 * lanes;
  // AVX2 puts together the four bytes of a number of four bits in either half of a register.
  const bool in_fours = a.bits == 4 && lanes == narrow_lanes;
  float some[8 * wide_lanes];
  for (int64_t s = 0; s < to.steps; s++)
    for (int64_t m = 0; m < a.m; m++) {
      float* numbers = to.numbers + (s * a.m + m) * columns;
      const int64_t left = a.k - s * columns, count = left < columns ? left : columns;
      take_numbers(x, m * x.stride + s * columns, count, some);
      for (int64_t i = count; i < columns; i++) some[i] = 0;
      for (int64_t f = 0; f < fields; f++)
        for (int64_t i = 0; i < in_field; i++) {
          const int64_t at = in_fours ? i % 16 / 4 * 8 + i / 16 * 4 + i % 4 : i;
          numbers[f * in_field + at] = some[i * fields + f];
        }
    }
}

}  // namespace lowbit::cpu::LOWBIT_SET
