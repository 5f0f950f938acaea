// Unpacks steps of a row with AVX-512 and VBMI (64 bytes of the widest plane) into codes as bytes, and loads scales and zero
// points.
#pragma once

#include <immintrin.h>

#include <type_traits>

#include "../kernels/split_int8_gemv.h"
#include "bit_planes.h"

namespace lowbit::cpu::avx512vnni {
namespace {

constexpr int lanes = wide_lanes;

inline __m128i bytes16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline __m256i bytes32(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline __m512i broadcast_u8(int byte) { return _mm512_set1_epi8(static_cast<char>(byte)); }

// Loads sixteen values from element i on where `mask` is set; 0 elsewhere.
inline __m512 load_floats(const ArrayView& numbers, int64_t i, __mmask16 mask) {
  switch (numbers.dtype) {
    case Dtype::float32: return _mm512_maskz_loadu_ps(mask, static_cast<const float*>(numbers.data) + i);
    case Dtype::float16: return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(numbers.data) + i));
    case Dtype::bfloat16: {
      const __m256i halves = _mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(numbers.data) + i);
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
    }
    case Dtype::bytes: break;
  }
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, static_cast<const uint8_t*>(numbers.data) + i));
  return numbers.table ? _mm512_mask_i32gather_ps(_mm512_setzero_ps(), mask, bytes, numbers.table, 4) : _mm512_cvtepi32_ps(bytes);
}

// Decodes scales stored as bytes (e4m3, e8m0) whose values fit in bfloat16: the upper halves of the table's 256 floats, in eight
// registers.
struct ByteScales {
  bool short_numbers = true, exponents = true;  // short_numbers: values fit in bfloat16; exponents: e8m0
  uint16_t high[256];
  __attribute__((noinline)) explicit ByteScales(const ArrayView& scale) {
    if (scale.dtype != Dtype::bytes || !scale.table) return;
    for (int i = 0; i < 256; i++) {
      uint32_t bits;
      memcpy(&bits, scale.table + i, 4);
      high[i] = static_cast<uint16_t>(bits >> 16);
      short_numbers = short_numbers && !(bits & 0xffff);
      exponents = exponents && (i == 255 ? scale.table[i] != scale.table[i] : bits == (i ? static_cast<uint32_t>(i) << 23 : 1u << 22));
    }
  }
  // Decodes 32 scales.
  void operator()(__m256i bytes, __m512& first, __m512& second) const {
    if (exponents) {
      const auto powers = [](__m128i temp) {
        const __m512i wide = _mm512_cvtepu8_epi32(temp);
        const __mmask16 usual = _mm512_cmple_epu32_mask(_mm512_sub_epi32(wide, _mm512_set1_epi32(1)), _mm512_set1_epi32(253));
        const __m512i lower = _mm512_maskz_set1_epi32(_knot_mask16(usual), 1 << 22);  // 2^-127 is subnormal, 255 is NaN
        return _mm512_castsi512_ps(_mm512_or_si512(_mm512_slli_epi32(wide, 23), lower));
      };
      first = powers(_mm256_castsi256_si128(bytes)), second = powers(_mm256_extracti128_si256(bytes, 1));
      return;
    }
    const __m512i index = _mm512_cvtepu8_epi16(bytes);
    const auto of_two = [&](int i) {
      return _mm512_permutex2var_epi16(_mm512_loadu_si512(high + 32 * i), index, _mm512_loadu_si512(high + 32 * i + 32));
    };
    const auto has = [&](int bit) { return _mm512_test_epi16_mask(index, _mm512_set1_epi16(static_cast<int16_t>(bit))); };
    const __m512i low = _mm512_mask_blend_epi16(has(64), of_two(0), of_two(2));
    const __m512i found = _mm512_mask_blend_epi16(has(128), low, _mm512_mask_blend_epi16(has(64), of_two(4), of_two(6)));
    first = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(found)), 16));
    second = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(found, 1)), 16));
  }
};

// Writes `count` values to `to`, sixteen at a time, as `at(i, mask)` gives them.
template <class At>
inline void fill(int64_t count, float* to, const At& at) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) _mm512_storeu_ps(to + i, at(i, static_cast<__mmask16>(~0u)));
  if (i < count) _mm512_storeu_ps(to + i, at(i, static_cast<__mmask16>((1u << (count - i)) - 1)));
}

// Loads the scales of a row for groups [first, first + count), times `unit`; may write 31 values more.
__attribute__((noinline)) inline void load_scales(const Linear& a, const ByteScales& byte_scales, int64_t row, int64_t first, int64_t count, float unit, float* to) {
  const __m512 times = _mm512_set1_ps(unit);
  const int64_t at = row * a.scale.stride + first;
  if (a.scale.dtype == Dtype::bfloat16)  // most scales are bfloat16: no type test in the loop
    return fill(count, to, [&](int64_t i, __mmask16 mask) {
      const __m256i halves = _mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(a.scale.data) + at + i);
      return _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16)), times);
    });
  if (a.scale.dtype == Dtype::bytes && a.scale.table && byte_scales.short_numbers) {
    for (int64_t i = 0; i < count; i += 32) {
      const __mmask32 mask = count - i < 32 ? (1u << (count - i)) - 1 : ~0u;
      __m512 low, high;
      byte_scales(_mm256_maskz_loadu_epi8(mask, static_cast<const uint8_t*>(a.scale.data) + at + i), low, high);
      _mm512_storeu_ps(to + i, _mm512_mul_ps(low, times));
      _mm512_storeu_ps(to + i + 16, _mm512_mul_ps(high, times));
    }
    return;
  }
  fill(count, to, [&](int64_t i, __mmask16 mask) { return _mm512_mul_ps(load_floats(a.scale, at + i, mask), times); });
}

// Loads minus the zero points of a row, as floats or as int32; returns bytes whose maximum is the largest of them.
__attribute__((noinline)) inline __m512i load_zeros(const Linear& a, int64_t row, int64_t first, int64_t count, bool as_floats, float* to) {
  __m512i maximum = _mm512_setzero_si512();
  const uint8_t* bytes = static_cast<const uint8_t*>(a.zero_point.data) + row * a.zero_point.stride + first;
  fill(count, to, [&](int64_t i, __mmask16 mask) {
    const __m512i zeros = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, bytes + i));
    maximum = _mm512_max_epu8(maximum, zeros);
    const __m512i less = _mm512_sub_epi32(_mm512_setzero_si512(), zeros);
    return as_floats ? _mm512_cvtepi32_ps(less) : _mm512_castsi512_ps(less);
  });
  return maximum;
}

// Permutation from [4 rows, 16 groups] to [16 groups, 4 rows]; `stride_between`: bytes of an element.
template <typename Place, int stride_between>
struct QuadIndex {
  alignas(64) Place of[64 * stride_between];
  constexpr QuadIndex() : of() {
    for (int i = 0; i < 64 * stride_between; i++) of[i] = static_cast<Place>(i / stride_between % 4 * 16 + i / stride_between / 4);
  }
};

// Loads sixteen bytes of each of four rows, `next` bytes apart.
inline __m512i load_4_rows_u8(const uint8_t* p, int64_t next, __mmask16 mask) {
  __m512i rows = _mm512_zextsi128_si512(_mm_maskz_loadu_epi8(mask, p));
  rows = _mm512_inserti64x2(rows, _mm_maskz_loadu_epi8(mask, p + next), 1);
  rows = _mm512_inserti64x2(rows, _mm_maskz_loadu_epi8(mask, p + 2 * next), 2);
  return _mm512_inserti64x2(rows, _mm_maskz_loadu_epi8(mask, p + 3 * next), 3);
}

// Transposes them to [16, 4].
inline __m512i to_quads_u8(__m512i rows) {
  static constexpr QuadIndex<uint8_t, 1> place;
  return _mm512_permutexvar_epi8(_mm512_load_si512(place.of), rows);
}

// Transposes them to int32 [16, 4], four groups in a register.
inline void to_quads_i32(__m512i rows, __m512i* to) {
  static constexpr QuadIndex<uint8_t, 4> place;
  constexpr __mmask64 lowest = 0x1111111111111111;
  for (int f = 0; f < 4; f++) to[f] = _mm512_maskz_permutexvar_epi8(lowest, _mm512_load_si512(place.of + 64 * f), rows);
}

// Loads sixteen bfloat16 of each of four rows, `next` apart, as floats [16, 4], four groups in a register.
inline void to_quads_bf16(const uint16_t* p, int64_t next, __mmask16 mask, __m512* to) {
  static constexpr QuadIndex<uint16_t, 2> place;
  constexpr __mmask32 upper = 0xaaaaaaaa;
  const auto rows = [&](int64_t r) {
    const __m512i first = _mm512_zextsi256_si512(_mm256_maskz_loadu_epi16(mask, p + r * next));
    return _mm512_inserti64x4(first, _mm256_maskz_loadu_epi16(mask, p + (r + 1) * next), 1);
  };
  const __m512i first = rows(0), last = rows(2);
  for (int f = 0; f < 4; f++)
    to[f] = _mm512_castsi512_ps(_mm512_maskz_permutex2var_epi16(upper, first, _mm512_load_si512(place.of + 32 * f), last));
}

// Transposes floats, a register for each row.
inline void to_quads_f32(const __m512* row, __m512* to) {
  const auto pairs = [](__m512 a, __m512 b, auto upper) {
    const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
    return _mm512_castpd_ps(decltype(upper)::value ? _mm512_unpackhi_pd(x, y) : _mm512_unpacklo_pd(x, y));
  };
  constexpr std::false_type lower;
  constexpr std::true_type upper;
  const __m512 ab = _mm512_unpacklo_ps(row[0], row[1]), cd = _mm512_unpacklo_ps(row[2], row[3]);
  const __m512 above_ab = _mm512_unpackhi_ps(row[0], row[1]), above_cd = _mm512_unpackhi_ps(row[2], row[3]);
  // each holds every fourth group
  const __m512 a = pairs(ab, cd, lower), b = pairs(ab, cd, upper);
  const __m512 c = pairs(above_ab, above_cd, lower), d = pairs(above_ab, above_cd, upper);
  const __m512 ab0 = _mm512_shuffle_f32x4(a, b, 0x44), ab1 = _mm512_shuffle_f32x4(a, b, 0xee);
  const __m512 cd0 = _mm512_shuffle_f32x4(c, d, 0x44), cd1 = _mm512_shuffle_f32x4(c, d, 0xee);
  to[0] = _mm512_shuffle_f32x4(ab0, cd0, 0x88), to[1] = _mm512_shuffle_f32x4(ab0, cd0, 0xdd);
  to[2] = _mm512_shuffle_f32x4(ab1, cd1, 0x88), to[3] = _mm512_shuffle_f32x4(ab1, cd1, 0xdd);
}

inline __mmask16 first_mask(int64_t count) { return static_cast<__mmask16>(count < 16 ? (1u << count) - 1 : ~0u); }

// Loads the scales of four rows, `next` rows apart, times `unit`, as [groups, 4]; may write fifteen groups more.
__attribute__((noinline)) inline void load_scales_quads(const Linear& a, const ByteScales& byte_scales, int64_t row, int64_t next, int64_t first,
                                 int64_t count, float unit, float* to) {
  const __m512 times = _mm512_set1_ps(unit);
  const int64_t stride = next * a.scale.stride;
  for (int64_t i = 0; i < count; i += 16, to += 64) {
    const int64_t at = row * a.scale.stride + first + i;
    const __mmask16 mask = first_mask(count - i);
    __m512 found[4];
    if (a.scale.dtype == Dtype::bfloat16) {
      to_quads_bf16(static_cast<const uint16_t*>(a.scale.data) + at, stride, mask, found);
    } else if (a.scale.dtype == Dtype::bytes && a.scale.table && byte_scales.short_numbers) {
      const __m512i bytes = to_quads_u8(load_4_rows_u8(static_cast<const uint8_t*>(a.scale.data) + at, stride, mask));
      byte_scales(_mm512_castsi512_si256(bytes), found[0], found[1]);
      byte_scales(_mm512_extracti64x4_epi64(bytes, 1), found[2], found[3]);
    } else {
      __m512 rows[4];
      for (int r = 0; r < 4; r++) rows[r] = load_floats(a.scale, at + r * stride, mask);
      to_quads_f32(rows, found);
    }
    for (int f = 0; f < 4; f++) _mm512_storeu_ps(to + 16 * f, _mm512_mul_ps(found[f], times));
  }
}

// Loads the zero points of four rows as int32 [groups, 4]; returns bytes whose maximum is the largest of them.
__attribute__((noinline)) inline __m512i load_zeros_quads(const Linear& a, int64_t row, int64_t next, int64_t first, int64_t count, float* to) {
  __m512i maximum = _mm512_setzero_si512();
  const int64_t stride = a.zero_point.stride;
  const uint8_t* bytes = static_cast<const uint8_t*>(a.zero_point.data) + row * stride + first;
  for (int64_t i = 0; i < count; i += 16, to += 64) {
    const __m512i rows = load_4_rows_u8(bytes + i, next * stride, first_mask(count - i));
    maximum = _mm512_max_epu8(maximum, rows);
    __m512i zeros[4];
    to_quads_i32(rows, zeros);
    for (int f = 0; f < 4; f++) _mm512_storeu_si512(to + 16 * f, zeros[f]);
  }
  return maximum;
}

template <int bits>
using Planes = cpu::Planes<bits, 64>;
template <int bits>
using LastStep = cpu::LastStep<bits, 64>;

// ORs the bits of a narrower plane into the codes of a field, at bit `low`: multishift takes the eight bits from any place of a
// quadword.
template <int width, int low, int fields, int field>
inline __m512i of_plane(__m512i codes, __m512i quads) {
  uint64_t from = 0;
  for (int i = 0; i < 8; i++) from |= static_cast<uint64_t>(((i * fields + field) * width - low) & 63) << 8 * i;
  const __m512i found = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(static_cast<int64_t>(from)), quads);
  return _mm512_ternarylogic_epi64(found, broadcast_u8(((1 << width) - 1) << low), codes, 0xea);  // (a & b) | c
}

template <int64_t bytes>
inline __m512i quads_of(const uint8_t* p) {  // eight quadwords, each with an eighth of the plane's bytes
  if constexpr (bytes == 64) return _mm512_loadu_si512(p);
  else if constexpr (bytes == 32) return _mm512_cvtepu32_epi64(bytes32(p));
  else return _mm512_cvtepu16_epi64(bytes16(p));
}

// The codes of a step, field by field. `masked`: bits above the code are cleared.
template <int bits, bool masked, int field = 0>
inline void extract_codes(__m512i widest, const __m512i* quads, __m512i* codes) {
  using P = Planes<bits>;
  if constexpr (field < P::fields) {
    constexpr int width = P::width(0);
    __m512i code = field ? _mm512_srli_epi16(widest, field * width) : widest;
    if constexpr (width < 8 && (masked || P::count > 1)) code = _mm512_and_si512(code, broadcast_u8((1 << width) - 1));
    if constexpr (P::count > 1) code = of_plane<P::width(1), width, P::fields, field>(code, quads[1]);
    if constexpr (P::count > 2) code = of_plane<1, width + 2, P::fields, field>(code, quads[2]);
    codes[field] = code;
    extract_codes<bits, masked, field + 1>(widest, quads, codes);
  }
}

}  // namespace
}  // namespace lowbit::cpu::avx512vnni
