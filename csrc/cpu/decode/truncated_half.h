// Decodes formats that are IEEE half without some bits (e4m3, e5m2, e3m2): shift the code into place and convert with F16C or
// AVX-512.
#pragma once

#include "unpack_codes.h"
#include "../kernels/linear.h"

namespace {

// Decodes 32 codes, without the power of two that the format's exponent bias differs by.
template <int bits>
inline void truncated_to_float(const lowbit::cpu::TruncatedHalf& truncated, CodeBytes codes, F32x16& w0, F32x16& w1) {
#if defined(__AVX512BW__)
  if constexpr (bits < 8) codes = {_mm256_sub_epi8(_mm256_xor_si256(codes.v, _mm256_set1_epi8(1 << (bits - 1))), _mm256_set1_epi8(1 << (bits - 1)))};
  __m512i half = _mm512_sll_epi16(_mm512_cvtepi8_epi16(codes.v), _mm_cvtsi32_si128(truncated.up));
  half = _mm512_and_si512(half, _mm512_set1_epi16(static_cast<int16_t>(truncated.mask)));
  if (truncated.has_nan) {
    const __m256i ones = _mm256_set1_epi8(127);
    const __mmask32 nan = _mm256_cmpeq_epi8_mask(_mm256_and_si256(codes.v, ones), ones);
    half = _mm512_mask_mov_epi16(half, nan, _mm512_set1_epi16(0x7e00));
  }
  w0.v = _mm512_cvtph_ps(_mm512_castsi512_si256(half));
  w1.v = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
#elif defined(__AVX2__)
  if constexpr (bits < 8) codes = {_mm256_sub_epi8(_mm256_xor_si256(codes.v, _mm256_set1_epi8(1 << (bits - 1))), _mm256_set1_epi8(1 << (bits - 1)))};
  const __m128i up = _mm_cvtsi32_si128(truncated.up);
  const __m256i mask = _mm256_set1_epi16(static_cast<int16_t>(truncated.mask)), ones = _mm256_set1_epi16(127);
  const auto floats_of = [&](__m128i bytes) {
    const __m256i wide = _mm256_cvtepi8_epi16(bytes);
    __m256i half = _mm256_and_si256(_mm256_sll_epi16(wide, up), mask);
    if (truncated.has_nan) half = _mm256_blendv_epi8(half, _mm256_set1_epi16(0x7e00), _mm256_cmpeq_epi16(_mm256_and_si256(wide, ones), ones));
    return F32x16{_mm256_cvtph_ps(_mm256_castsi256_si128(half)), _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))};
  };
  w0 = floats_of(_mm256_castsi256_si128(codes.v)), w1 = floats_of(_mm256_extracti128_si256(codes.v, 1));
#else
  uint8_t bytes[codes_per_load];
  uint16_t halves[codes_per_load];
  memcpy(bytes, &codes, codes_per_load);
  constexpr int sign = 1 << (bits - 1);
  for (int i = 0; i < codes_per_load; i++) {
    const int code = (bytes[i] ^ sign) - sign;
    const bool nan = truncated.has_nan && (bytes[i] & 127) == 127;
    halves[i] = nan ? 0x7e00 : static_cast<uint16_t>(static_cast<uint32_t>(code) << truncated.up) & truncated.mask;
  }
  for (int i = 0; i < 16; i++) w0.v[i] = lowbit::half_to_float(halves[i]), w1.v[i] = lowbit::half_to_float(halves[i + 16]);
#endif
}

}  // namespace
