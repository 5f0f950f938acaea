// Dequantizes to bfloat16 where scales are powers of two (e8m0): adds the scale to the exponent, or multiplies integers, both
// exact. For AVX-512, compiled once for each instruction set that has it (LOWBIT_SET is its namespace).
#pragma once

#include <algorithm>
#include <cstring>

#include "../decode/unpack_codes.h"
#include "../isa/array_view.h"
#include "../isa/simd.h"

#if defined(__AVX512BW__)
namespace lowbit::cpu::LOWBIT_SET {
namespace {

constexpr Words upper_halves = words([](int i) { return 2 * i + 1; });  // selects the upper halves of the words of two registers

// Whether scales are e8m0, without tensor scale and zero points, and groups are multiples of 32.
inline bool has_powers(const Linear& a) {
  if (a.scale.dtype != Dtype::bytes || !a.scale.table || a.has_outer || a.zero_point.data || a.group % codes_per_load) return false;
  for (int i = 0; i < 255; i++) {  // 255 is NaN
    const uint32_t power = i ? static_cast<uint32_t>(i) << 23 : 1u << 22;
    if (memcmp(a.scale.table + i, &power, 4) != 0) return false;
  }
  return true;
}

// Range of the exponents of a format's values.
struct Exponents {
  int minimum = 255, maximum = 0;
  // Whether every value times this scale is a normal number.
  bool takes(uint8_t scale) const { return scale != 255 && minimum + scale > 127 && maximum + scale < 127 + 255; }
};

// 8-bit integers, which have no more bits than bfloat16's mantissa: exact.
struct IntegersByExponent : Exponents {
  const Linear& a;
  explicit IntegersByExponent(const Linear& a) : a(a) {
    uint32_t unit;
    memcpy(&unit, &a.unit, 4);
    minimum = static_cast<int>(unit >> 23), maximum = minimum + 7;
  }
  void group(const uint8_t* packed, int64_t, uint8_t scale, int64_t first, int64_t stop, uint16_t* to) const {
    const F32x16 by = broadcast(a.scale.table[scale] * a.unit);
    const __m512i upper = load(upper_halves);
    for (; first < stop; first += codes_per_load) {
      const __m512 w0 = _mm512_mul_ps(signed_bytes(packed + first).v, by.v), w1 = _mm512_mul_ps(signed_bytes(packed + first + 16).v, by.v);
      _mm512_storeu_si512(to + first, _mm512_permutex2var_epi16(_mm512_castps_si512(w0), upper, _mm512_castps_si512(w1)));
    }
  }
};

// Formats whose values are bfloat16: looks the value up and adds the scale to its exponent, which is exact. 8 bits look up the
// magnitude and take the sign from the code.
template <int bits>
struct ByExponent : Exponents {
  static constexpr int numbers = bits == 8 ? 128 : 1 << bits, vectors = numbers <= 32 ? 1 : numbers / 32;
  __m512i table[vectors];
  bool ok = false, has_nan = false;
  explicit ByExponent(const Linear& a) {
    alignas(64) uint16_t halves[vectors * 32] = {};
    for (int code = 0; code < 1 << bits; code++) {
      uint32_t number;
      memcpy(&number, a.values + code, 4);
      if (code >= numbers) {
        if (number != (static_cast<uint32_t>(halves[code - numbers]) << 16 | 0x80000000u) && a.values[code] == a.values[code]) return;
        continue;
      }
      const int exponent = static_cast<int>(number >> 23 & 255);
      if (a.values[code] != a.values[code]) number = 0x7fc00000, has_nan = true;
      else if ((number & 0xffff) || exponent == 255 || (exponent == 0 && number << 1)) return;
      else if (exponent) minimum = exponent < minimum ? exponent : minimum, maximum = exponent > maximum ? exponent : maximum;
      halves[code] = static_cast<uint16_t>(number >> 16);
    }
    for (int i = 0; i < vectors; i++) table[i] = _mm512_load_si512(halves + 32 * i);
    ok = true;
  }
  __m512i found(__m512i index) const {
    if constexpr (vectors == 1) {
      return _mm512_permutexvar_epi16(index, table[0]);
    } else if constexpr (vectors == 2) {
      return _mm512_permutex2var_epi16(table[0], index, table[1]);
    } else {
      const __mmask32 high = _mm512_test_epi16_mask(index, _mm512_set1_epi16(64));
      return _mm512_mask_mov_epi16(_mm512_permutex2var_epi16(table[0], index, table[1]), high,
                                   _mm512_permutex2var_epi16(table[2], index, table[3]));
    }
  }
  void group(const uint8_t* packed, int64_t k, uint8_t scale, int64_t first, int64_t stop, uint16_t* to) const {
    const __m512i up = _mm512_set1_epi16(static_cast<int16_t>((scale - 127) * 128)), magnitude = _mm512_set1_epi16(0x7fff);
    for (; first < stop; first += codes_per_load) {
      const __m512i codes = code_words<bits, bits != 6>(packed, k, first);
      __m512i half = found(codes);
      __mmask32 finite = _mm512_test_epi16_mask(half, magnitude);  // 0 and NaN keep their exponent
      if (has_nan) finite = _mm512_mask_cmplt_epu16_mask(finite, _mm512_and_si512(half, magnitude), _mm512_set1_epi16(0x7f80));
      half = _mm512_mask_add_epi16(half, finite, half, up);
      if constexpr (bits == 8) half = _mm512_or_si512(half, _mm512_slli_epi16(_mm512_and_si512(codes, _mm512_set1_epi16(128)), 8));
      _mm512_storeu_si512(to + first, half);
    }
  }
};

template <int bits, class Decoder>
void dequantize_rows_e8m0(const Linear& a, const Decoder& powers, uint16_t* out, int64_t stride, int64_t begin, int64_t end) {
  const int64_t groups = (a.k + a.group - 1) / a.group;
  for (int64_t row = begin; row < end; row++, out += stride) {
    const uint8_t* packed = a.packed + row * a.packed_stride;
    const uint8_t* scales = static_cast<const uint8_t*>(a.scale.data) + row * a.scale.stride;
    uint8_t minimum = 255, maximum = 0;
    for (int64_t g = 0; g < groups; g++) minimum = std::min(minimum, scales[g]), maximum = std::max(maximum, scales[g]);
    int64_t first = 0;
    if (powers.takes(minimum) && powers.takes(maximum))  // and so do all scales between them
      for (; first + a.group <= a.k; first += a.group) powers.group(packed, a.k, *scales++, first, first + a.group, out);
    for (; first < a.k; first += a.group, scales++) {
      const int64_t stop = std::min(first + a.group, a.k);
      int64_t at = first;
      if (powers.takes(*scales)) {
        at = first + (stop - first) / codes_per_load * codes_per_load;
        powers.group(packed, a.k, *scales, first, at, out);
      }
      for (; at < stop; at++) out[at] = to_bfloat16(a.values[code_at<bits>(packed, a.k, at)] * a.scale.table[*scales]);
    }
  }
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_SET
#endif
