// Steps of a weight's rows with AVX2: 32 bytes of the widest plane at a time, as codes, and the scales beside them.
#pragma once

#include <immintrin.h>

#include <type_traits>

#include "digits.h"
#include "planes.h"

#define LOWBIT_SET avx2
#include "numbers.h"

namespace lowbit::cpu::avx2 {
namespace {

constexpr int lanes = narrow_lanes;
template <int bits>
using Planes = cpu::Planes<bits, 4 * lanes>;
template <int bits>
using LastStep = cpu::LastStep<bits, 4 * lanes>;

inline __m256i bytes32(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline __m256i every(int byte) { return _mm256_set1_epi8(static_cast<char>(byte)); }

// The bytes of a narrower plane, of which each belongs to two or four of the widest one's, as one byte for each of those.
template <int64_t bytes>
inline __m256i spread(const uint8_t* p) {
  if constexpr (bytes == 16) {
    const __m256i all = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_and_si256(_mm256_or_si256(all, _mm256_slli_epi16(all, 4)), every(15));
  } else {
    static_assert(bytes == 8);
    __m256i all = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    all = _mm256_and_si256(_mm256_or_si256(all, _mm256_slli_epi32(all, 12)), _mm256_set1_epi32(0x000f000f));
    return _mm256_and_si256(_mm256_or_si256(all, _mm256_slli_epi32(all, 6)), every(3));
  }
}

// Codes of `bits` bits as they are, or through so many tables of sixteen: those of all codes, or of half of them where the other
// half has the same numbers with a minus.
template <int bits, int tables>
struct Codes {
  using P = Planes<bits>;
  static constexpr int F = P::fields;
  static constexpr bool mirrored = tables && bits > 4 && tables < 1 << (bits - 4);
  __m256i flipped;
  __m256i table[tables ? tables : 1];
  __m256i twice;                // twice the offset: a byte and its mirror image
  __m256i of_two[2];    // of three bits: where the upper bits of the even fields go to, and those of the odd ones
  __m256i above[F][2];  // what the bits of the narrower planes add to a code
  explicit Codes(const Bytewise& how) {
    flipped = every(how.flipped * (255 / ((1 << P::width(0)) - 1)));
    twice = every(2 * how.offset);
    for (int i = 0; i < tables; i++)
      table[i] = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(how.table + 16 * i)));
    for (int odd = 0; odd < 2; odd++) {
      alignas(16) uint8_t of[16];
      for (int i = 0; i < 16; i++) {
        const int spread = (i >> odd & 1) << 2 | (i >> odd & 4) << 4;
        of[i] = static_cast<uint8_t>(how.flipped ? spread ^ 0x44 : spread);
      }
      of_two[odd] = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(of)));
    }
    for (int p = 1, low = P::width(0); p < P::count; low += P::width(p), p++)
      for (int f = 0; f < F; f++) {
        const int width = P::width(p), sign = p + 1 == P::count ? how.flipped : 0;
        alignas(16) uint8_t of[16];
        for (int i = 0; i < 16; i++) of[i] = static_cast<uint8_t>(((i >> f * width & ((1 << width) - 1)) << low) ^ sign);
        above[f][p - 1] = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(of)));
      }
  }

  // The number of each code of one field, of `count` tables from `first` on: four bits look up, those of the narrower plane choose,
  // moved to the top of their byte (`at_top`).
  template <int field, int first, int count>
  __m256i found(__m256i nibbles, __m256i narrower) const {
    if constexpr (count == 1) {
      return _mm256_shuffle_epi8(table[first], nibbles);
    } else {
      return _mm256_blendv_epi8(found<field, first, count / 2>(nibbles, narrower),
                                found<field, first + count / 2, count / 2>(nibbles, narrower), at_top<field, count == 2 ? 0 : 1>(narrower));
    }
  }
  template <int field, int bit>
  static __m256i at_top(__m256i narrower) {
    return _mm256_slli_epi16(narrower, 7 - field * P::width(1) - bit);
  }

  template <int field>
  void take_field(__m256i widest, const __m256i* narrower, __m256i* bytes) const {
    if constexpr (field < F) {
      constexpr int width = P::width(0);
      __m256i code = _mm256_and_si256(field ? _mm256_srli_epi16(widest, field * width) : widest, every((1 << width) - 1));
      if constexpr (tables && bits >= 4) {
        code = found<field, 0, tables>(code, narrower[0]);
        if constexpr (mirrored) code = _mm256_blendv_epi8(code, _mm256_sub_epi8(twice, code), at_top<field, bits - 5>(narrower[0]));
      } else {
        if constexpr (P::count > 1) code = _mm256_or_si256(code, _mm256_shuffle_epi8(above[field][0], narrower[0]));
        if constexpr (P::count > 2) code = _mm256_or_si256(code, _mm256_shuffle_epi8(above[field][1], narrower[1]));
        if constexpr (tables > 0) code = _mm256_shuffle_epi8(table[0], code);
      }
      bytes[field] = code;
      take_field<field + 1>(widest, narrower, bytes);
    }
  }

  // The upper bits of four codes, spread to two of them in a byte: one shift for two fields.
  void take_three(__m256i lower, __m256i fours, __m256i* bytes) const {
    const __m256i threes = every(7), twos = every(0x33);
    const auto both = [&](__m256i low, __m256i spread) {
      return _mm256_or_si256(_mm256_and_si256(low, twos), _mm256_shuffle_epi8(spread, fours));
    };
    const __m256i even = both(lower, of_two[0]), odd = both(_mm256_srli_epi16(lower, 2), of_two[1]);
    bytes[0] = _mm256_and_si256(even, threes), bytes[2] = _mm256_and_si256(_mm256_srli_epi16(even, 4), threes);
    bytes[1] = _mm256_and_si256(odd, threes), bytes[3] = _mm256_and_si256(_mm256_srli_epi16(odd, 4), threes);
  }

  // The bytes of a step, field by field; of eight bits the even ones and the odd ones as words. `at`: the step in each plane of a
  // row, from which this one is so many bytes away.
  void take(const uint8_t* const* at, int64_t row, __m256i* bytes) const {
    __m256i widest = bytes32(at[0] + row);
    if constexpr (P::count == 1 && !tables) widest = _mm256_xor_si256(widest, flipped);
    if constexpr (bits == 8) {
      bytes[0] = _mm256_and_si256(widest, _mm256_set1_epi16(255));
      bytes[1] = _mm256_srli_epi16(widest, 8);
      return;
    }
    if constexpr (bits == 3 && !tables) return take_three(widest, spread<16>(at[1] + row), bytes);
    __m256i narrower[2];
    if constexpr (P::count > 1) narrower[0] = spread<P::bytes(1)>(at[1] + row);
    if constexpr (P::count > 2) narrower[1] = spread<P::bytes(2)>(at[2] + row);
    take_field<0>(widest, narrower, bytes);
  }
};

constexpr int few = 31;  // bytes of a table that come together in 16 bits four at a time

inline float sum_of(__m256 v) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

// Whether bytes are powers of two as e8m0 has them: a float's exponent, the last one NaN.
inline bool are_exponents(const float* table) {
  for (int i = 0; i < 255; i++) {
    const uint32_t expected = i ? static_cast<uint32_t>(i) << 23 : 1u << 22;
    if (memcmp(table + i, &expected, 4) != 0) return false;
  }
  return table[255] != table[255];
}

// Scales of a row times `unit` from group `first` on, and zeros for the lanes behind the end of a row.
inline void take_scales(const Linear& a, bool exponents, int64_t row, int64_t first, int64_t count, float unit, float* to) {
  const int64_t at = row * a.scale.stride + first;
  const auto as_float = [](uint32_t bits) {
    float number;
    memcpy(&number, &bits, 4);
    return number;
  };
  if (a.scale.stored == Stored::float32) {
    const float* scales = static_cast<const float*>(a.scale.data) + at;
    for (int64_t i = 0; i < count; i++) to[i] = scales[i] * unit;
  } else if (a.scale.stored == Stored::bfloat16) {
    const uint16_t* scales = static_cast<const uint16_t*>(a.scale.data) + at;
    for (int64_t i = 0; i < count; i++) to[i] = as_float(static_cast<uint32_t>(scales[i]) << 16) * unit;
  } else if (exponents) {
    const uint8_t* scales = static_cast<const uint8_t*>(a.scale.data) + at;
    for (int64_t i = 0; i < count; i++) {
      const uint32_t byte = scales[i];
      to[i] = as_float(byte << 23 | (byte == 0 || byte == 255 ? 1u << 22 : 0)) * unit;
    }
  } else {
    for (int64_t i = 0; i < count; i++) to[i] = number_at(a.scale, at + i) * unit;
  }
  for (int i = 0; i < lanes; i++) to[count + i] = 0;
}

// Zero points with a minus, as floats or as integers; returns the largest of them.
inline int take_zeros(const Linear& a, int64_t row, int64_t first, int64_t count, bool as_floats, float* to) {
  const uint8_t* zeros = static_cast<const uint8_t*>(a.zero_point.data) + row * a.zero_point.stride + first;
  int most = 0;
  for (int64_t i = 0; i < count; i++) most = zeros[i] > most ? zeros[i] : most;
  if (as_floats) {
    for (int64_t i = 0; i < count; i++) to[i] = -static_cast<float>(zeros[i]);
  } else {
    for (int64_t i = 0; i < count; i++) {
      const int32_t less = -zeros[i];
      memcpy(to + i, &less, 4);
    }
  }
  for (int i = 0; i < lanes; i++) to[count + i] = 0;
  return most;
}

}  // namespace
}  // namespace lowbit::cpu::avx2
