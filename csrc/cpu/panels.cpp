// Rows of a weight as numbers, compiled once for each instruction set (LOWBIT_SET is its namespace): each is computed in fp32,
// (code's number - zero point) * scale, and rounded once.
//
// Codes of up to six bits in large groups go through a table of a group's numbers as they are stored, thirty-two at a time, and
// those with scales that are powers of two through one of all groups' numbers.
#include "panels.h"

#include <cmath>
#include <type_traits>

#include "codes.h"
#include "numbers.h"
#include "shifted.h"
#include "vectors.h"

namespace lowbit::cpu::LOWBIT_SET {
namespace {

template <Stored type>
using Element = std::conditional_t<type == Stored::float32, float, uint16_t>;

template <Stored type>
inline Element<type> rounded(float number) {
  if constexpr (type == Stored::float32) return number;
  else if constexpr (type == Stored::bfloat16) return to_bfloat16(number);
  else return to_half(number);
}

#if defined(__AVX512BW__)
constexpr Words upper_halves = words([](int i) { return 2 * i + 1; });  // of the words of two registers

// Thirty-two numbers as 16-bit ones. A NaN has lower bits of 0: see `rows_with`.
template <Stored type>
inline __m512i halves_of(Floats a, Floats b) {
  if constexpr (type == Stored::float16) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT)),
                              _mm512_cvtps_ph(b.v, _MM_FROUND_TO_NEAREST_INT), 1);
  } else {
#if defined(__AVX512BF16__)
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b.v, a.v));
#else
    const auto up = [](Floats numbers) {
      const __m512i bits = _mm512_castps_si512(numbers.v);
      const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
      return _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    };
    return _mm512_permutex2var_epi16(up(a), load(upper_halves), up(b));
#endif
  }
}
#endif

// Thirty-two numbers, rounded and stored.
template <Stored type>
inline void put(Element<type>* to, Floats a, Floats b) {
  if constexpr (type == Stored::float32) {
    store(to, a);
    store(to + 16, b);
  } else {
#if defined(__AVX512BW__)
    _mm512_storeu_si512(to, halves_of<type>(a, b));
#elif defined(__AVX2__)
    const __m256 numbers[] = {a.a, a.b, b.a, b.b};
    if constexpr (type == Stored::float16) {
      for (int i = 0; i < 4; i++)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 8 * i), _mm256_cvtps_ph(numbers[i], _MM_FROUND_TO_NEAREST_INT));
    } else {  // a NaN has lower bits of 0: see `rows_with`
      const auto up = [](__m256 some) {
        const __m256i bits = _mm256_castps_si256(some), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        return _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
      };
      for (int i = 0; i < 4; i += 2) {
        const __m256i both = _mm256_packus_epi32(up(numbers[i]), up(numbers[i + 1]));  // in either half of a register
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 8 * i), _mm256_permute4x64_epi64(both, 0xd8));
      }
    }
#else
    for (int i = 0; i < 16; i++) to[i] = rounded<type>(a.v[i]), to[i + 16] = rounded<type>(b.v[i]);
#endif
  }
}

inline Floats times(Floats a, Floats b) { return fma(a, b, broadcast(-0.0f)); }

// Thirty-two codes as numbers, of one group or sixteen of each of two.
template <int bits, Stored type>
struct InOrder {
  const Linear& a;
  Halves<bits> halves;
  int sign;
  Floats zero[2] = {}, scale[2] = {}, unit;
  explicit InOrder(const Linear& a) : a(a), halves(a.halves ? a.halves : nothing()), sign(a.is_signed ? 1 << (bits - 1) : 0), unit(broadcast(a.unit)) {}
  static const uint16_t* nothing() {
    static const uint16_t zeros[256] = {};
    return zeros;
  }
  void half(int i, float z, float s) { zero[i] = broadcast(z), scale[i] = broadcast(s); }
  void group(float z, float s) { half(0, z, s), half(1, z, s); }
  static constexpr bool takes_halves = true;
  void of_halves(const uint8_t* row, int64_t first, Element<type>* to) const { operator()(row, first, to); }
  void operator()(const uint8_t* row, int64_t first, Element<type>* to) const {
    Floats w0, w1;
    if (bits == 8 && a.codes == Codes::signed_bytes) {
      w0 = signed_bytes(row + first), w1 = signed_bytes(row + first + 16);
      if (a.unit != 1) w0 = times(w0, unit), w1 = times(w1, unit);
    } else if (bits == 8 && a.codes == Codes::unsigned_bytes) {
      w0 = unsigned_bytes(row + first), w1 = unsigned_bytes(row + first + 16);
    } else {
      const CodeBytes codes = codes_from<bits>(row, a.k, first);
      if (a.codes == Codes::shifted) {
        shifted_halves<bits>(a.shifted, codes, w0, w1);
        w0 = times(w0, unit), w1 = times(w1, unit);
      } else if (a.codes == Codes::halves) {
        halves(codes, w0, w1);
      } else if (a.codes == Codes::integers) {
        integers(codes, sign, w0, w1);
      } else {
        uint8_t bytes[codes_at_a_time];
        memcpy(bytes, &codes, sizeof bytes);
        w0 = look_up(bytes, a.values), w1 = look_up(bytes + 16, a.values);
      }
    }
    put<type>(to, times(subtract(w0, zero[0]), scale[0]), times(subtract(w1, zero[1]), scale[1]));
  }
};

#if defined(__AVX512BW__)
// The same through a table of the group's numbers, or of sixteen of each of two groups.
template <int bits, Stored type>
struct ByTable {
  static constexpr int vectors = bits <= 4 ? 1 : 1 << (bits - 4);
  static constexpr bool takes_halves = bits <= 4;
  const Linear& a;
  Floats values[vectors], first_half = {};
  __m512i table[(vectors + 1) / 2];
  explicit ByTable(const Linear& a) : a(a) {
    for (int i = 0; i < vectors; i++)
      values[i].v = _mm512_maskz_loadu_ps(static_cast<__mmask16>(bits < 4 ? (1 << (1 << bits)) - 1 : -1), a.values + 16 * i);
  }
  void group(float z, float s) {
    const Floats zero = broadcast(z), scale = broadcast(s);
    const auto at = [&](int i) { return times(subtract(values[i], zero), scale); };
    if constexpr (vectors == 1) {
      table[0] = halves_of<type>(at(0), at(0));
    } else {
      for (int i = 0; i < vectors; i += 2) table[i / 2] = halves_of<type>(at(i), at(i + 1));
    }
  }
  void half(int i, float z, float s) {
    const Floats numbers = times(subtract(values[0], broadcast(z)), broadcast(s));
    if (i == 0) first_half = numbers;
    else table[0] = halves_of<type>(first_half, numbers);
  }
  void of_halves(const uint8_t* row, int64_t first, uint16_t* to) const {
    static constexpr Words upper = words([](int i) { return i & 16; });
    const __m512i index = _mm512_or_si512(code_words<bits>(row, a.k, first), load(upper));
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(index, table[0]));
  }
  void operator()(const uint8_t* row, int64_t first, uint16_t* to) const {
    const __m512i index = code_words<bits>(row, a.k, first);
    if constexpr (bits <= 5) {
      _mm512_storeu_si512(to, _mm512_permutexvar_epi16(index, table[0]));
    } else {
      _mm512_storeu_si512(to, _mm512_permutex2var_epi16(table[0], index, table[1]));
    }
  }
};
#endif

#if defined(__AVX512BW__)
// Whether scales are powers of two, with nothing beside them, of groups that are taken at a time.
inline bool has_powers(const Linear& a) {
  if (a.scale.stored != Stored::bytes || !a.scale.table || a.has_outer || a.zero_point.data || a.group % codes_at_a_time) return false;
  for (int i = 0; i < 255; i++) {  // the last one is NaN
    const uint32_t power = i ? static_cast<uint32_t>(i) << 23 : 1u << 22;
    if (memcmp(a.scale.table + i, &power, 4) != 0) return false;
  }
  return true;
}

// Exponents of the numbers of a format, as fp32 has them.
struct Exponents {
  int least = 255, most = 0;
  // Whether a scale leaves every number a normal one.
  bool takes(uint8_t scale) const { return scale != 255 && least + scale > 127 && most + scale < 127 + 255; }
};

// Such scales and integers of eight bits, as bfloat16, which has as many: nothing is rounded.
struct IntegersByExponent : Exponents {
  const Linear& a;
  explicit IntegersByExponent(const Linear& a) : a(a) {
    uint32_t unit;
    memcpy(&unit, &a.unit, 4);
    least = static_cast<int>(unit >> 23), most = least + 7;
  }
  void group(const uint8_t* packed, int64_t, uint8_t scale, int64_t first, int64_t past, uint16_t* to) const {
    const Floats by = broadcast(a.scale.table[scale] * a.unit);
    const __m512i upper = load(upper_halves);
    for (; first < past; first += codes_at_a_time) {
      const Floats w0 = times(signed_bytes(packed + first), by), w1 = times(signed_bytes(packed + first + 16), by);
      _mm512_storeu_si512(to + first, _mm512_permutex2var_epi16(_mm512_castps_si512(w0.v), upper, _mm512_castps_si512(w1.v)));
    }
  }
};

// Such scales and numbers of bfloat16: the number of each code comes out of a table, and the scale is added to its exponent, which
// rounds nothing. Eight bits look up a magnitude and take their sign from the code.
template <int bits>
struct ByExponent : Exponents {
  static constexpr int numbers = bits == 8 ? 128 : 1 << bits, vectors = numbers <= 32 ? 1 : numbers / 32;
  __m512i table[vectors];
  bool good = false;
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
      if (a.values[code] != a.values[code]) number = 0x7fc00000;
      else if ((number & 0xffff) || exponent == 255 || (exponent == 0 && number << 1)) return;
      else if (exponent) least = exponent < least ? exponent : least, most = exponent > most ? exponent : most;
      halves[code] = static_cast<uint16_t>(number >> 16);
    }
    for (int i = 0; i < vectors; i++) table[i] = _mm512_load_si512(halves + 32 * i);
    good = true;
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
  void group(const uint8_t* packed, int64_t k, uint8_t scale, int64_t first, int64_t past, uint16_t* to) const {
    const __m512i up = _mm512_set1_epi16(static_cast<int16_t>((scale - 127) * 128)), one = _mm512_set1_epi16(1);
    for (; first < past; first += codes_at_a_time) {
      const __m512i codes = code_words<bits>(packed, k, first);
      __m512i half = found(codes);
      const __m512i magnitude = _mm512_and_si512(half, _mm512_set1_epi16(0x7fff));  // neither 0 nor NaN has an exponent
      const __mmask32 finite = _mm512_cmplt_epu16_mask(_mm512_sub_epi16(magnitude, one), _mm512_set1_epi16(0x7f7f));
      half = _mm512_mask_add_epi16(half, finite, half, up);
      if constexpr (bits == 8) half = _mm512_or_si512(half, _mm512_slli_epi16(_mm512_and_si512(codes, _mm512_set1_epi16(128)), 8));
      _mm512_storeu_si512(to + first, half);
    }
  }
};

template <int bits, class Powers>
void rows_of_powers(const Linear& a, const Powers& powers, uint16_t* out, int64_t stride, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row++, out += stride) {
    const uint8_t* packed = a.packed + row * a.packed_stride;
    const uint8_t* scales = static_cast<const uint8_t*>(a.scale.data) + row * a.scale.stride;
    for (int64_t first = 0; first < a.k; first += a.group, scales++) {
      const int64_t past = first + a.group < a.k ? first + a.group : a.k;
      int64_t at = first;
      if (powers.takes(*scales)) {
        at = first + (past - first) / codes_at_a_time * codes_at_a_time;
        powers.group(packed, a.k, *scales, first, at, out);
      }
      for (; at < past; at++) out[at] = rounded<Stored::bfloat16>(a.values[code_at<bits>(packed, a.k, at)] * a.scale.table[*scales]);
    }
  }
}
#endif

template <int bits, Stored type, class Decode>
void rows_with(const Linear& a, Element<type>* out, int64_t stride, int64_t begin, int64_t end) {
  Decode decode(a);
  for (int64_t row = begin; row < end; row++) {
    const uint8_t* packed = a.packed + row * a.packed_stride;
    Element<type>* to = out + (row - begin) * stride;
    const auto scale_at = [&](int64_t g) {
      const float found = scale_of(a, row, g);
      return found == found ? found : NAN;  // whose lower bits are 0
    };
    int64_t g = 0, first = 0;
    if constexpr (Decode::takes_halves)
      if (2 * a.group == codes_at_a_time)
        for (; first + codes_at_a_time <= a.k; first += codes_at_a_time, g += 2) {
          for (int i = 0; i < 2; i++) decode.half(i, zero_of(a, row, g + i), scale_at(g + i));
          decode.of_halves(packed, first, to + first);
        }
    for (; first < a.k; g++) {
      const int64_t past = first + a.group < a.k ? first + a.group : a.k;
      const float zero = zero_of(a, row, g), scale = scale_at(g);
      if (first % byte_aligned_codes(bits) == 0) {
        decode.group(zero, scale);
        for (; first + codes_at_a_time <= past; first += codes_at_a_time) decode(packed, first, to + first);
      }
      for (; first < past; first++) to[first] = rounded<type>((a.values[code_at<bits>(packed, a.k, first)] - zero) * scale);
    }
  }
}

template <int bits, Stored type>
void rows_of(const Linear& a, void* out, int64_t stride, int64_t begin, int64_t end) {
  Element<type>* to = static_cast<Element<type>*>(out);
#if defined(__AVX512BW__)
  if constexpr (type == Stored::bfloat16 && (bits == 4 || bits == 6 || bits == 8))
    if (has_powers(a)) {
      if (bits == 8 && a.codes == Codes::signed_bytes) return rows_of_powers<bits>(a, IntegersByExponent(a), to, stride, begin, end);
      if (const ByExponent<bits> powers(a); powers.good) return rows_of_powers<bits>(a, powers, to, stride, begin, end);
    }
  if constexpr (bits <= 6 && type != Stored::float32)
    if (a.group >= 2 << bits || (bits <= 4 && 2 * a.group == codes_at_a_time))
      return rows_with<bits, type, ByTable<bits, type>>(a, to, stride, begin, end);
#endif
  return rows_with<bits, type, InOrder<bits, type>>(a, to, stride, begin, end);
}

template <int bits>
void for_type(const Linear& a, Stored type, void* out, int64_t stride, int64_t begin, int64_t end) {
  if (type == Stored::bfloat16) return rows_of<bits, Stored::bfloat16>(a, out, stride, begin, end);
  if (type == Stored::float16) return rows_of<bits, Stored::float16>(a, out, stride, begin, end);
  return rows_of<bits, Stored::float32>(a, out, stride, begin, end);
}

}  // namespace

void panel(const Linear& a, Stored type, void* out, int64_t stride, int64_t begin, int64_t end) {
  switch (a.bits) {
    case 1: return for_type<1>(a, type, out, stride, begin, end);
    case 2: return for_type<2>(a, type, out, stride, begin, end);
    case 3: return for_type<3>(a, type, out, stride, begin, end);
    case 4: return for_type<4>(a, type, out, stride, begin, end);
    case 5: return for_type<5>(a, type, out, stride, begin, end);
    case 6: return for_type<6>(a, type, out, stride, begin, end);
    case 7: return for_type<7>(a, type, out, stride, begin, end);
    default: return for_type<8>(a, type, out, stride, begin, end);
  }
}

}  // namespace lowbit::cpu::LOWBIT_SET
