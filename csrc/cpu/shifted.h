// Codes that are 16-bit floats without some bits (eight of e4m3 and e5m2, six of e3m2) as floats, for whichever instruction set
// this file is compiled for.
#pragma once

#include "codes.h"
#include "linear.h"

namespace {

// Thirty-two of them, without the power of two that they count.
template <int bits>
inline void shifted_halves(const lowbit::cpu::Shifted& how, CodeBytes codes, Floats& w0, Floats& w1) {
#if defined(__AVX512BW__)
  if constexpr (bits < 8) codes = {_mm256_sub_epi8(_mm256_xor_si256(codes.v, _mm256_set1_epi8(1 << (bits - 1))), _mm256_set1_epi8(1 << (bits - 1)))};
  __m512i half = _mm512_sll_epi16(_mm512_cvtepi8_epi16(codes.v), _mm_cvtsi32_si128(how.up));
  half = _mm512_and_si512(half, _mm512_set1_epi16(static_cast<int16_t>(how.mask)));
  if (how.has_nan) {
    const __m256i ones = _mm256_set1_epi8(127);
    const __mmask32 nan = _mm256_cmpeq_epi8_mask(_mm256_and_si256(codes.v, ones), ones);
    half = _mm512_mask_mov_epi16(half, nan, _mm512_set1_epi16(0x7e00));
  }
  w0.v = _mm512_cvtph_ps(_mm512_castsi512_si256(half));
  w1.v = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
#else
  uint8_t bytes[codes_at_a_time];
  uint16_t halves[codes_at_a_time];
  memcpy(bytes, &codes, codes_at_a_time);
  constexpr int sign = 1 << (bits - 1);
  for (int i = 0; i < codes_at_a_time; i++) {
    const int code = (bytes[i] ^ sign) - sign;
    const bool nan = how.has_nan && (bytes[i] & 127) == 127;
    halves[i] = nan ? 0x7e00 : static_cast<uint16_t>(static_cast<uint32_t>(code) << how.up) & how.mask;
  }
#if defined(__AVX2__)
  const auto at = [&](int i) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves + i))); };
  w0 = {at(0), at(8)}, w1 = {at(16), at(24)};
#else
  for (int i = 0; i < 16; i++) w0.v[i] = lowbit::half_to_float(halves[i]), w1.v[i] = lowbit::half_to_float(halves[i + 16]);
#endif
#endif
}

}  // namespace
