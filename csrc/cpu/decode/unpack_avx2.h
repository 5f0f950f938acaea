// Unpacks steps of a row with AVX2 (32 bytes of the widest plane) into codes as bytes, and loads scales and zero points.
#pragma once

#include <immintrin.h>

#include <type_traits>

#include "../kernels/split_int8_gemv.h"
#include "bit_planes.h"

#define LOWBIT_SET avx2
#include "../isa/array_view.h"

namespace lowbit::cpu::avx2 {
namespace {

constexpr int lanes = narrow_lanes;
template <int bits>
using Planes = cpu::Planes<bits, 4 * lanes>;
template <int bits>
using LastStep = cpu::LastStep<bits, 4 * lanes>;

inline __m256i bytes32(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline __m128i bytes16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline __m256i broadcast_u8(int byte) { return _mm256_set1_epi8(static_cast<char>(byte)); }

// Spreads the bytes of a narrower plane: one byte for each of the 2 or 4 bytes of the widest plane that it belongs to.
template <int64_t bytes>
inline __m256i spread(const uint8_t* p) {
  if constexpr (bytes == 16) {
    const __m256i all = _mm256_cvtepu8_epi16(bytes16(p));
    return _mm256_and_si256(_mm256_or_si256(all, _mm256_slli_epi16(all, 4)), broadcast_u8(15));
  } else {
    static_assert(bytes == 8);
    __m256i all = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    all = _mm256_and_si256(_mm256_or_si256(all, _mm256_slli_epi32(all, 12)), _mm256_set1_epi32(0x000f000f));
    return _mm256_and_si256(_mm256_or_si256(all, _mm256_slli_epi32(all, 6)), broadcast_u8(3));
  }
}

// Codes as bytes, directly or through `tables` pshufb tables of 16 entries: all of a table, or half of it where the other half is
// its mirror image.
template <int bits, int tables>
struct CodeUnpacker {
  using P = Planes<bits>;
  static constexpr int F = P::fields;
  static constexpr bool mirrored = tables && bits > 4 && tables < 1 << (bits - 4);
  __m256i flipped;
  __m256i table[tables ? tables : 1];
  __m256i twice;                // twice the offset: byte and mirror image add up to it
  __m256i of_two[2];    // 3 bits: where the high bits go, for even and for odd fields
  __m256i above[F][2];  // contribution of the narrower planes to a code
  explicit CodeUnpacker(const ByteDecoding& decoding) {
    flipped = broadcast_u8(decoding.flipped * (255 / ((1 << P::width(0)) - 1)));
    twice = broadcast_u8(2 * decoding.offset);
    for (int i = 0; i < tables; i++)
      table[i] = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(decoding.table + 16 * i)));
    for (int odd = 0; odd < 2; odd++) {
      alignas(16) uint8_t of[16];
      for (int i = 0; i < 16; i++) {
        const int spread = (i >> odd & 1) << 2 | (i >> odd & 4) << 4;
        of[i] = static_cast<uint8_t>(decoding.flipped ? spread ^ 0x44 : spread);
      }
      of_two[odd] = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(of)));
    }
    for (int p = 1, low = P::width(0); p < P::count; low += P::width(p), p++)
      for (int f = 0; f < F; f++) {
        const int width = P::width(p), sign = p + 1 == P::count ? decoding.flipped : 0;
        alignas(16) uint8_t of[16];
        for (int i = 0; i < 16; i++) of[i] = static_cast<uint8_t>(((i >> f * width & ((1 << width) - 1)) << low) ^ sign);
        above[f][p - 1] = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(of)));
      }
  }

  // Looks up the codes of one field in tables [first, first + count): the low four bits index, and bits of the narrower plane,
  // shifted to the top of their byte, select among tables.
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
  void extract_field(__m256i widest, const __m256i* narrower, __m256i* bytes) const {
    if constexpr (field < F) {
      constexpr int width = P::width(0);
      __m256i code = _mm256_and_si256(field ? _mm256_srli_epi16(widest, field * width) : widest, broadcast_u8((1 << width) - 1));
      if constexpr (tables && bits >= 4) {
        code = found<field, 0, tables>(code, narrower[0]);
        if constexpr (mirrored) code = _mm256_blendv_epi8(code, _mm256_sub_epi8(twice, code), at_top<field, bits - 5>(narrower[0]));
      } else {
        if constexpr (P::count > 1) code = _mm256_or_si256(code, _mm256_shuffle_epi8(above[field][0], narrower[0]));
        if constexpr (P::count > 2) code = _mm256_or_si256(code, _mm256_shuffle_epi8(above[field][1], narrower[1]));
        if constexpr (tables > 0) code = _mm256_shuffle_epi8(table[0], code);
      }
      bytes[field] = code;
      extract_field<field + 1>(widest, narrower, bytes);
    }
  }

  // 3 bits: the high bits of four codes are looked up as a byte that holds two of them in place, so that two fields share one
  // shift.
  void extract_3bit(__m256i lower, __m256i high_bits, __m256i* bytes) const {
    const __m256i nibble = broadcast_u8(15), mask_33 = broadcast_u8(0x33);  // 15: bit 3 is 0 anyway
    const auto merge_planes = [&](__m256i low, __m256i spread) {
      return _mm256_or_si256(_mm256_and_si256(low, mask_33), _mm256_shuffle_epi8(spread, high_bits));
    };
    const __m256i even = merge_planes(lower, of_two[0]), odd = merge_planes(_mm256_srli_epi16(lower, 2), of_two[1]);
    bytes[0] = _mm256_and_si256(even, nibble), bytes[2] = _mm256_and_si256(_mm256_srli_epi16(even, 4), nibble);
    bytes[1] = _mm256_and_si256(odd, nibble), bytes[3] = _mm256_and_si256(_mm256_srli_epi16(odd, 4), nibble);
  }

  // The codes of a step as bytes, field by field; 8 bits: the even and the odd bytes as int16. `at`: the step in each plane of
  // the first row; `row`: offset of this row in bytes. `flips`: codes may be signed.
  template <bool flips = true>
  __attribute__((always_inline)) void unpack(const uint8_t* const* at, int64_t row, __m256i* bytes) const {
    __m256i narrower[2];
    load_narrower_planes(at, row, narrower);
    unpack<flips>(bytes32(at[0] + row), narrower, bytes);
  }

  // The same in two parts, so that the narrower planes of several rows can be loaded first.
  __attribute__((always_inline)) static void load_narrower_planes(const uint8_t* const* at, int64_t row, __m256i* narrower) {
    if constexpr (P::count > 1) narrower[0] = spread<P::bytes(1)>(at[1] + row);
    if constexpr (P::count > 2) narrower[1] = spread<P::bytes(2)>(at[2] + row);
  }
  template <bool flips>
  __attribute__((always_inline)) void unpack(__m256i widest, const __m256i* narrower, __m256i* bytes) const {
    asm("" : "+x"(widest));  // keeps the value in a register: a second load would cost as much as the product
    if constexpr (P::count == 1 && !tables && flips) widest = _mm256_xor_si256(widest, flipped);
    if constexpr (bits == 8) {
      bytes[0] = _mm256_and_si256(widest, _mm256_set1_epi16(255));
      bytes[1] = _mm256_srli_epi16(widest, 8);
    } else if constexpr (bits == 3 && !tables) {
      extract_3bit(widest, narrower[0], bytes);
    } else {
      extract_field<0>(widest, narrower, bytes);
    }
  }
};

constexpr int small_table_max = 31;  // largest table entry for which four pair sums fit in int16

// Sums the two 128-bit halves.
inline __m128 sums_of(__m256 v) { return _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1)); }

// Sums the lanes of four registers.
inline __m128 sums_of(const __m256* of) {
  return sums_of(_mm256_hadd_ps(_mm256_hadd_ps(of[0], of[1]), _mm256_hadd_ps(of[2], of[3])));
}

inline float sum_of(__m256 v) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

// Whether the scale format is e8m0: byte i has the value 2^(i - 127), 255 is NaN.
__attribute__((noinline)) inline bool are_exponents(const float* table) {
  for (int i = 0; i < 255; i++) {
    const uint32_t expected = i ? static_cast<uint32_t>(i) << 23 : 1u << 22;
    if (memcmp(table + i, &expected, 4) != 0) return false;
  }
  return table[255] != table[255];
}

// Loads eight values from element i on. `exponents`: bytes are e8m0.
inline __m256 load_floats(const ArrayView& numbers, bool exponents, int64_t i) {
  const auto halves = [&] { return bytes16(static_cast<const uint16_t*>(numbers.data) + i); };
  switch (numbers.dtype) {
    case Dtype::float32: return _mm256_loadu_ps(static_cast<const float*>(numbers.data) + i);
    case Dtype::bfloat16: return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves()), 16));
    case Dtype::float16: return _mm256_cvtph_ps(halves());
    case Dtype::bytes: break;
  }
  const uint8_t* const p = static_cast<const uint8_t*>(numbers.data) + i;
  const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  if (!numbers.table) return _mm256_cvtepi32_ps(bytes);
  if (!exponents) return _mm256_i32gather_ps(numbers.table, bytes, 4);
  const auto are = [&](int byte) { return _mm256_cmpeq_epi32(bytes, _mm256_set1_epi32(byte)); };
  const __m256i lower = _mm256_and_si256(_mm256_or_si256(are(0), are(255)), _mm256_set1_epi32(1 << 22));
  return _mm256_castsi256_ps(_mm256_or_si256(_mm256_slli_epi32(bytes, 23), lower));
}

// Loads `count` values, padded with zeros.
inline __m256 load_floats(const ArrayView& numbers, bool exponents, int64_t i, int64_t count) {
  if (count >= 8) return load_floats(numbers, exponents, i);
  alignas(32) float temp[8] = {};
  for (int64_t j = 0; j < count; j++) temp[j] = load_float(numbers, i + j);
  return _mm256_load_ps(temp);
}

// Loads the scales of a row for groups [first, first + count), times `unit`; zeros up to a full register behind them.
__attribute__((noinline)) inline void load_scales(const Linear& a, bool exponents, int64_t row, int64_t first, int64_t count, float unit, float* to) {
  const int64_t at = row * a.scale.stride + first;
  for (int64_t i = 0; i < count; i += 8)
    _mm256_storeu_ps(to + i, _mm256_mul_ps(load_floats(a.scale, exponents, at + i, count - i), _mm256_set1_ps(unit)));
  _mm256_storeu_ps(to + count, _mm256_setzero_ps());
}

// Transposes four rows of eight values to [8, 4]: the four values of a group side by side.
inline void store_quads(const __m256* row, float* to) {
  const __m256 ab = _mm256_unpacklo_ps(row[0], row[1]), cd = _mm256_unpacklo_ps(row[2], row[3]);
  const __m256 above_ab = _mm256_unpackhi_ps(row[0], row[1]), above_cd = _mm256_unpackhi_ps(row[2], row[3]);
  // a: groups 0 and 4, b: groups 1 and 5
  const __m256 a = _mm256_shuffle_ps(ab, cd, 0x44), b = _mm256_shuffle_ps(ab, cd, 0xee);
  const __m256 c = _mm256_shuffle_ps(above_ab, above_cd, 0x44), d = _mm256_shuffle_ps(above_ab, above_cd, 0xee);
  _mm256_storeu_ps(to, _mm256_permute2f128_ps(a, b, 0x20)), _mm256_storeu_ps(to + 8, _mm256_permute2f128_ps(c, d, 0x20));
  _mm256_storeu_ps(to + 16, _mm256_permute2f128_ps(a, b, 0x31)), _mm256_storeu_ps(to + 24, _mm256_permute2f128_ps(c, d, 0x31));
}

// Loads the scales of four rows, `next` rows apart, times `unit`, as [groups, 4]; zeros up to a multiple of eight groups, plus
// one group.
__attribute__((noinline)) inline void load_scales_quads(const Linear& a, bool exponents, int64_t row, int64_t next, int64_t first, int64_t count,
                                 float unit, float* to) {
  const int64_t at = row * a.scale.stride + first, stride = next * a.scale.stride;
  const __m256 times = _mm256_set1_ps(unit);
  int64_t i = 0;
  if (a.scale.dtype == Dtype::bfloat16)  // most scales are bfloat16: fewer instructions
    for (; i + 8 <= count; i += 8, to += 32) {
      const uint16_t* const p = static_cast<const uint16_t*>(a.scale.data) + at + i;
      const auto halves = [&](int64_t r) { return bytes16(p + r * stride); };
      const __m128i ab = _mm_unpacklo_epi16(halves(0), halves(1)), cd = _mm_unpacklo_epi16(halves(2), halves(3));
      const __m128i above_ab = _mm_unpackhi_epi16(halves(0), halves(1)), above_cd = _mm_unpackhi_epi16(halves(2), halves(3));
      const auto store_pair = [&](int g, __m128i two) {
        const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(two), 16);
        _mm256_storeu_ps(to + 4 * g, _mm256_mul_ps(_mm256_castsi256_ps(bits), times));
      };
      store_pair(0, _mm_unpacklo_epi32(ab, cd)), store_pair(2, _mm_unpackhi_epi32(ab, cd));
      store_pair(4, _mm_unpacklo_epi32(above_ab, above_cd)), store_pair(6, _mm_unpackhi_epi32(above_ab, above_cd));
    }
  for (; i < count; i += 8, to += 32) {
    __m256 rows[4];
    for (int r = 0; r < 4; r++) rows[r] = _mm256_mul_ps(load_floats(a.scale, exponents, at + r * stride + i, count - i), times);
    store_quads(rows, to);
  }
  _mm_storeu_ps(to, _mm_setzero_ps());
}

// Loads eight bytes, or `count` of them padded with zeros.
inline __m128i eight_bytes(const uint8_t* p, int64_t count) {
  if (count >= 8) return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  uint64_t temp = 0;
  for (int64_t i = 0; i < count; i++) temp |= static_cast<uint64_t>(p[i]) << 8 * i;
  return _mm_cvtsi64_si128(static_cast<int64_t>(temp));
}

// Loads minus the zero points of four rows as int32 [groups, 4]; returns the largest.
__attribute__((noinline)) inline __m128i load_zeros_quads(const Linear& a, int64_t row, int64_t next, int64_t first, int64_t count, float* to) {
  const int64_t stride = next * a.zero_point.stride;
  const uint8_t* const zeros = static_cast<const uint8_t*>(a.zero_point.data) + row * a.zero_point.stride + first;
  __m128i maximum = _mm_setzero_si128();
  for (int64_t i = 0; i < count; i += 8, to += 32) {
    const auto bytes = [&](int64_t r) { return eight_bytes(zeros + r * stride + i, count - i); };
    const __m128i ab = _mm_unpacklo_epi8(bytes(0), bytes(1)), cd = _mm_unpacklo_epi8(bytes(2), bytes(3));
    maximum = _mm_max_epu8(maximum, _mm_max_epu8(ab, cd));
    const auto store_pair = [&](int g, __m128i two) {
      const __m256i less = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_cvtepu8_epi32(two));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 4 * g), less);
    };
    const __m128i low = _mm_unpacklo_epi16(ab, cd), high = _mm_unpackhi_epi16(ab, cd);
    store_pair(0, low), store_pair(2, _mm_unpackhi_epi64(low, low)), store_pair(4, high), store_pair(6, _mm_unpackhi_epi64(high, high));
  }
  _mm_storeu_ps(to, _mm_setzero_ps());
  return maximum;
}

// Loads minus the zero points of a row, as floats or as int32; returns the largest.
__attribute__((noinline)) inline __m128i load_zeros(const Linear& a, int64_t row, int64_t first, int64_t count, bool as_floats, float* to) {
  const uint8_t* const zeros = static_cast<const uint8_t*>(a.zero_point.data) + row * a.zero_point.stride + first;
  __m128i maximum = _mm_setzero_si128();
  for (int64_t i = 0; i < count; i += 8) {
    const __m128i bytes = eight_bytes(zeros + i, count - i);
    maximum = _mm_max_epu8(maximum, bytes);
    const __m256i less = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_cvtepu8_epi32(bytes));
    _mm256_storeu_ps(to + i, as_floats ? _mm256_cvtepi32_ps(less) : _mm256_castsi256_ps(less));
  }
  _mm256_storeu_ps(to + count, _mm256_setzero_ps());
  return maximum;
}

}  // namespace
}  // namespace lowbit::cpu::avx2
