// Unpacks 32 codes of a canonical row into bytes, and converts them to two vectors of sixteen floats, for the instruction set
// this file is compiled for.
//
// Fields of a plane are in the order of the codes; a code is the OR of its planes. Integers are converted; other formats look up
// 16-bit floats in registers: two registers for 64 codes with AVX-512; low and high bytes separately, 16 entries at a time, with
// AVX2.
#pragma once

#include <type_traits>

#include "../../decode.h"
#include "../isa/simd.h"

namespace {

constexpr int codes_per_load = 32;

#if defined(__AVX2__)

struct CodeBytes {
  __m256i v;
};

inline __m128i bytes_of(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }

// The 32 fields of `width` bits at p as bytes.
template <int width>
inline __m256i fields(const uint8_t* p) {
  if constexpr (width == 8) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  } else if constexpr (width == 4) {
    const __m128i all = bytes_of(p), mask = _mm_set1_epi8(15);
    const __m128i even = _mm_and_si128(all, mask), odd = _mm_and_si128(_mm_srli_epi16(all, 4), mask);
    return _mm256_set_m128i(_mm_unpackhi_epi8(even, odd), _mm_unpacklo_epi8(even, odd));
  } else if constexpr (width == 2) {  // repeats each byte four times and keeps one field of each
    int64_t eight;
    memcpy(&eight, p, 8);
    const __m256i four_times = _mm256_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6,
                                                6, 7, 7, 7, 7);
    const __m256i all = _mm256_shuffle_epi8(_mm256_set1_epi64x(eight), four_times);
    const auto field = [&](int i) { return _mm256_and_si256(_mm256_srli_epi16(all, 2 * i), _mm256_set1_epi32(3 << 8 * i)); };
    return _mm256_or_si256(_mm256_or_si256(field(0), field(1)), _mm256_or_si256(field(2), field(3)));
  } else {  // repeats each byte eight times and keeps one bit of each
    uint32_t four;
    memcpy(&four, p, 4);
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    return _mm256_maskz_mov_epi8(four, _mm256_set1_epi8(1));
#else
    const __m256i eight_times = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3,
                                                 3, 3, 3, 3, 3);
    const __m256i bits = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201ull));
    const __m256i all = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(four)), eight_times);
    return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(all, bits), bits), _mm256_set1_epi8(1));
#endif
  }
}

template <int by>
inline __m256i shift_fields(__m256i fields) {  // no field crosses a byte
  return by ? _mm256_slli_epi16(fields, by) : fields;
}

inline CodeBytes bit_or(CodeBytes a, CodeBytes b) { return {_mm256_or_si256(a.v, b.v)}; }
template <int width, int low>
inline CodeBytes plane(const uint8_t* p) {
  return {shift_fields<low>(fields<width>(p))};
}

inline void integers(CodeBytes codes, int sign, F32x16& w0, F32x16& w1) {
  const __m256i signs = _mm256_set1_epi8(static_cast<char>(sign));
  const __m256i all = _mm256_sub_epi8(_mm256_xor_si256(codes.v, signs), signs);
  alignas(32) uint8_t bytes[32];
  _mm256_store_si256(reinterpret_cast<__m256i*>(bytes), all);
  w0 = signed_bytes(bytes);
  w1 = signed_bytes(bytes + 16);
}

#else

struct CodeBytes {
  uint8_t v[codes_per_load];
};

inline CodeBytes bit_or(const CodeBytes& a, const CodeBytes& b) {
  CodeBytes r;
  for (int i = 0; i < codes_per_load; i++) r.v[i] = a.v[i] | b.v[i];
  return r;
}
template <int width, int low>
inline CodeBytes plane(const uint8_t* p) {
  CodeBytes r = {};
  lowbit::unpack_plane<width>(p, low, codes_per_load, r.v);
  return r;
}

inline void integers(const CodeBytes& codes, int sign, F32x16& w0, F32x16& w1) {
  for (int i = 0; i < 16; i++) {
    w0.v[i] = static_cast<float>((codes.v[i] ^ sign) - sign);
    w1.v[i] = static_cast<float>((codes.v[i + 16] ^ sign) - sign);
  }
}

#endif

// Codes [first, first + 32) of a row of n codes; `first` is a multiple of byte_aligned_codes(bits), and the row is long enough.
template <int bits>
inline CodeBytes codes_from(const uint8_t* row, int64_t n, int64_t first) {
  constexpr int widest = bits & 8 ? 8 : bits & 4 ? 4 : bits & 2 ? 2 : 1, rest = bits - widest;
  const CodeBytes low = plane<widest, 0>(row + first * widest / 8);
  if constexpr (rest == 0) {
    return low;
  } else {
    row += (n * widest + 7) / 8;
    constexpr int wide = rest & 2 ? 2 : 1;
    const CodeBytes both = bit_or(low, plane<wide, widest>(row + first * wide / 8));
    if constexpr (rest == 3) {
      row += (n * 2 + 7) / 8;
      return bit_or(both, plane<1, widest + 2>(row + first / 8));
    } else {
      return both;
    }
  }
}

#if defined(__AVX512BW__)

// A compile-time table of 32 words.
struct alignas(64) Words {
  uint16_t of[codes_per_load];
};
template <class Word>
constexpr Words words(Word word) {
  Words all = {};
  for (int i = 0; i < codes_per_load; i++) all.of[i] = static_cast<uint16_t>(word(i));
  return all;
}
inline __m512i load(const Words& all) { return _mm512_load_si512(all.of); }

// The 32 fields of `width` bits at p as 16-bit words, at bit `low`; other bits are undefined.
template <int width, int low>
inline __m512i word_fields(const uint8_t* p) {
  if constexpr (width == 8) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  } else if constexpr (width == 4) {  // the byte in the low word, its high nibble in the high word
    static_assert(low == 0);
    const __m512i bytes = _mm512_cvtepu8_epi32(bytes_of(p));
    return _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
  } else if constexpr (width == 2) {  // each byte in the upper half of four words
    static constexpr Words byte = words([](int i) { return i / 4 << 8 | 0x80; }), down = words([](int i) { return 8 - low + i % 4 * 2; });
    int64_t eight;
    memcpy(&eight, p, 8);
    return _mm512_srlv_epi16(_mm512_shuffle_epi8(_mm512_set1_epi64(eight), load(byte)), load(down));
  } else {
    uint32_t four;
    memcpy(&four, p, 4);
    return _mm512_maskz_set1_epi16(four, 1 << low);
  }
}

// The codes of codes_from as 16-bit words. `exact`: bits above the code are 0, else undefined.
template <int bits, bool exact = true>
inline __m512i code_words(const uint8_t* row, int64_t n, int64_t first) {
  constexpr int widest = bits & 8 ? 8 : bits & 4 ? 4 : bits & 2 ? 2 : 1;
  __m512i all = word_fields<widest, 0>(row + first * widest / 8);
  const auto add = [&](auto constant, auto below) {
    constexpr int width = decltype(constant)::value, low = decltype(below)::value;
    if constexpr ((bits & width) != 0 && width < widest) {
      const __m512i next = word_fields<width, low>(row + first * width / 8), mask = _mm512_set1_epi16((1 << low) - 1);
      all = _mm512_ternarylogic_epi64(mask, all, next, 0xca);  // a ? b : c
      row += (n * width + 7) / 8;
    }
  };
  row += (n * widest + 7) / 8;
  add(std::integral_constant<int, 2>(), std::integral_constant<int, widest>());
  add(std::integral_constant<int, 1>(), std::integral_constant<int, widest + (bits & 2 && widest > 2 ? 2 : 0)>());
  if constexpr (exact && bits < 8) all = _mm512_and_si512(all, _mm512_set1_epi16((1 << bits) - 1));
  return all;
}

#endif

// Lookup of 2^bits 16-bit floats in registers.
template <int bits>
struct HalfTable {
#if defined(__AVX512BW__)
  static constexpr int registers = bits <= 5 ? 1 : 1 << (bits - 5);
  __m512i table[registers];
  explicit HalfTable(const uint16_t* halves) {  // [256]
    for (int i = 0; i < registers; i++) table[i] = _mm512_loadu_si512(halves + 32 * i);
  }
  void operator()(CodeBytes codes, F32x16& w0, F32x16& w1) const {
    const __m512i index = _mm512_cvtepu8_epi16(codes.v);
    __m512i found;
    if constexpr (registers == 1) {
      found = _mm512_permutexvar_epi16(index, table[0]);
    } else {
      const auto of_two = [&](int i) { return _mm512_permutex2var_epi16(table[i], index, table[i + 1]); };
      const auto has = [&](int bit) { return _mm512_test_epi16_mask(index, _mm512_set1_epi16(static_cast<int16_t>(bit))); };
      found = of_two(0);
      if constexpr (registers >= 4) found = _mm512_mask_blend_epi16(has(64), found, of_two(2));
      if constexpr (registers == 8)
        found = _mm512_mask_blend_epi16(has(128), found, _mm512_mask_blend_epi16(has(64), of_two(4), of_two(6)));
    }
    w0.v = _mm512_cvtph_ps(_mm512_castsi512_si256(found));
    w1.v = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(found, 1));
  }
#elif defined(__AVX2__)
  static constexpr int registers = bits <= 4 ? 1 : 1 << (bits - 4);
  __m256i low[registers], high[registers];  // low and high bytes of 16 entries, in each 128-bit half
  explicit HalfTable(const uint16_t* halves) {
    alignas(16) uint8_t bytes[2][16];
    for (int i = 0; i < registers; i++) {
      for (int j = 0; j < 16; j++) bytes[0][j] = halves[16 * i + j] & 255, bytes[1][j] = halves[16 * i + j] >> 8;
      low[i] = _mm256_broadcastsi128_si256(bytes_of(bytes[0]));
      high[i] = _mm256_broadcastsi128_si256(bytes_of(bytes[1]));
    }
  }
  // Looks codes up in registers [first, first + count): bits above the fourth select the register.
  template <int first, int count>
  static __m256i found(const __m256i* table, __m256i index, __m256i codes) {
    if constexpr (count == 1) {
      return _mm256_shuffle_epi8(table[first], index);
    } else {  // shift that moves the selecting bit to the top of its byte
      constexpr int up = count == 2 ? 3 : count == 4 ? 2 : count == 8 ? 1 : 0;
      return _mm256_blendv_epi8(found<first, count / 2>(table, index, codes), found<first + count / 2, count / 2>(table, index, codes),
                                shift_fields<up>(codes));
    }
  }
  void operator()(CodeBytes codes, F32x16& w0, F32x16& w1) const {
    const __m256i index = _mm256_and_si256(codes.v, _mm256_set1_epi8(15));
    const __m256i l = found<0, registers>(low, index, codes.v), h = found<0, registers>(high, index, codes.v);
    const __m256i first = _mm256_unpacklo_epi8(l, h), second = _mm256_unpackhi_epi8(l, h);
    w0 = {_mm256_cvtph_ps(_mm256_castsi256_si128(first)), _mm256_cvtph_ps(_mm256_castsi256_si128(second))};
    w1 = {_mm256_cvtph_ps(_mm256_extracti128_si256(first, 1)), _mm256_cvtph_ps(_mm256_extracti128_si256(second, 1))};
  }
#else
  const uint16_t* halves;
  explicit HalfTable(const uint16_t* halves) : halves(halves) {}
  void operator()(const CodeBytes& codes, F32x16& w0, F32x16& w1) const {
    for (int i = 0; i < 16; i++) {
      w0.v[i] = lowbit::half_to_float(halves[codes.v[i]]);
      w1.v[i] = lowbit::half_to_float(halves[codes.v[i + 16]]);
    }
  }
#endif
};

}  // namespace
