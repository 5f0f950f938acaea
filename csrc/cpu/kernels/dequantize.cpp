// Dequantizes rows of a weight: (value of code - zero_point) * scale in fp32, rounded once. Compiled once for each instruction
// set (LOWBIT_SET is its namespace).
//
//    packed row --unpack 32 codes--> codes --+-- InOrder: to f32, - zero, * scale, round ---------------+--> out [rows, K]
//                                            +-- ByTable (AVX-512, <= 6 bits, large groups): lookup ---+
//                                            +-- dequantize_e8m0.h (scales are powers of two) ---------+
//
// ByTable dequantizes and rounds the 2^bits values of a group once and looks codes up.
// Contract: exact, rounded once to the output type.
// Limit: the bytes of `out`.
// Figures: as part of bf16_dot_gemm.cpp.
#include "dequantize.h"

#include <cmath>
#include <memory>
#include <type_traits>

#include "../decode/unpack_codes.h"
#include "../isa/array_view.h"
#include "dequantize_e8m0.h"
#include "../decode/truncated_half.h"
#include "../isa/simd.h"

// Instruction sets: portable avx2 avx512 avx512bf16
namespace lowbit::cpu::LOWBIT_SET {
namespace {

template <Dtype type>
using Element = std::conditional_t<type == Dtype::float32, float, uint16_t>;

template <Dtype type>
inline Element<type> rounded(float number) {
  if constexpr (type == Dtype::float32) return number;
  else if constexpr (type == Dtype::bfloat16) return to_bfloat16(number);
  else return to_half(number);
}

#if defined(__AVX512BW__)
// Rounds 32 floats to 16-bit ones. Low bits of a NaN must be 0: see load_scales.
template <Dtype type>
inline __m512i halves_of(F32x16 a, F32x16 b) {
  if constexpr (type == Dtype::float16) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT)),
                              _mm512_cvtps_ph(b.v, _MM_FROUND_TO_NEAREST_INT), 1);
  } else {
#if defined(__AVX512BF16__)
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b.v, a.v));
#else
    const auto up = [](F32x16 numbers) {
      const __m512i bits = _mm512_castps_si512(numbers.v);
      const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
      return _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    };
    return _mm512_permutex2var_epi16(up(a), load(upper_halves), up(b));
#endif
  }
}
#endif

// Rounds and stores 32 floats.
template <Dtype type>
inline void store_rounded(Element<type>* to, F32x16 a, F32x16 b) {
  if constexpr (type == Dtype::float32) {
    store(to, a);
    store(to + 16, b);
  } else {
#if defined(__AVX512BW__)
    _mm512_storeu_si512(to, halves_of<type>(a, b));
#elif defined(__AVX2__)
    const __m256 numbers[] = {a.a, a.b, b.a, b.b};
    if constexpr (type == Dtype::float16) {
      for (int i = 0; i < 4; i++)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 8 * i), _mm256_cvtps_ph(numbers[i], _MM_FROUND_TO_NEAREST_INT));
    } else {  // low bits of a NaN must be 0: see load_scales
      const auto up = [](__m256 temp) {
        const __m256i bits = _mm256_castps_si256(temp), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        return _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
      };
      for (int i = 0; i < 4; i += 2) {
        const __m256i both = _mm256_packus_epi32(up(numbers[i]), up(numbers[i + 1]));  // packs within 128-bit halves
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 8 * i), _mm256_permute4x64_epi64(both, 0xd8));
      }
    }
#else
    for (int i = 0; i < 16; i++) to[i] = rounded<type>(a.v[i]), to[i + 16] = rounded<type>(b.v[i]);
#endif
  }
}

inline F32x16 times(F32x16 a, F32x16 b) { return fma(a, b, broadcast(-0.0f)); }

// Decodes 32 codes of one group, or sixteen of each of two.
template <int bits, Dtype type>
struct InOrder {
  const Linear& a;
  HalfTable<bits> halves;
  int sign;
  const bool has_zeros;
  F32x16 zero[2] = {}, scale[2] = {}, unit;
  explicit InOrder(const Linear& a)
      : a(a), halves(a.halves ? a.halves : nothing()), sign(a.is_signed ? 1 << (bits - 1) : 0), has_zeros(a.zero_point.data),
        unit(broadcast(a.unit)) {}
  static const uint16_t* nothing() {
    static const uint16_t zeros[256] = {};
    return zeros;
  }
  void half(int i, float z, float s) { zero[i] = broadcast(z), scale[i] = broadcast(s); }
  void group(float z, float s) { half(0, z, s), half(1, z, s); }
  static constexpr bool supports_pairs = true;
  void decode_pair(const uint8_t* row, int64_t first, Element<type>* to) const { operator()(row, first, to); }
  void operator()(const uint8_t* row, int64_t first, Element<type>* to) const {
    F32x16 w0, w1;
    if (bits == 8 && a.codes == Codes::signed_bytes) {
      w0 = signed_bytes(row + first), w1 = signed_bytes(row + first + 16);
      if (a.unit != 1) w0 = times(w0, unit), w1 = times(w1, unit);
    } else if (bits == 8 && a.codes == Codes::unsigned_bytes) {
      w0 = unsigned_bytes(row + first), w1 = unsigned_bytes(row + first + 16);
    } else {
      const CodeBytes codes = codes_from<bits>(row, a.k, first);
      if (a.codes == Codes::truncated_half) {
        truncated_to_float<bits>(a.truncated_half, codes, w0, w1);
        w0 = times(w0, unit), w1 = times(w1, unit);
      } else if (a.codes == Codes::halves) {
        halves(codes, w0, w1);
      } else if (a.codes == Codes::integers) {
        integers(codes, sign, w0, w1);
      } else {
        uint8_t bytes[codes_per_load];
        memcpy(bytes, &codes, sizeof bytes);
        w0 = look_up(bytes, a.values), w1 = look_up(bytes + 16, a.values);
      }
    }
    if (has_zeros) w0 = subtract(w0, zero[0]), w1 = subtract(w1, zero[1]);
    store_rounded<type>(to, times(w0, scale[0]), times(w1, scale[1]));
  }
};

#if defined(__AVX512BW__)
// The same by a table of the group's rounded values, or of two groups' sixteen each.
template <int bits, Dtype type>
struct ByTable {
  static constexpr int vectors = bits <= 4 ? 1 : 1 << (bits - 4);
  static constexpr bool supports_pairs = bits <= 4;
  const Linear& a;
  const bool has_zeros;
  F32x16 values[vectors], first_half = {};
  __m512i table[(vectors + 1) / 2];
  explicit ByTable(const Linear& a) : a(a), has_zeros(a.zero_point.data) {
    for (int i = 0; i < vectors; i++)
      values[i].v = _mm512_maskz_loadu_ps(static_cast<__mmask16>(bits < 4 ? (1 << (1 << bits)) - 1 : -1), a.values + 16 * i);
  }
  void group(float z, float s) {
    const F32x16 zero = broadcast(z), scale = broadcast(s);
    const auto at = [&](int i) { return times(has_zeros ? subtract(values[i], zero) : values[i], scale); };
    if constexpr (vectors == 1) {
      table[0] = halves_of<type>(at(0), at(0));
    } else {
      for (int i = 0; i < vectors; i += 2) table[i / 2] = halves_of<type>(at(i), at(i + 1));
    }
  }
  void half(int i, float z, float s) {
    const F32x16 numbers = times(has_zeros ? subtract(values[0], broadcast(z)) : values[0], broadcast(s));
    if (i == 0) first_half = numbers;
    else table[0] = halves_of<type>(first_half, numbers);
  }
  void decode_pair(const uint8_t* row, int64_t first, uint16_t* to) const {
    static constexpr Words upper = words([](int i) { return i & 16; });
    const __m512i index = _mm512_or_si512(code_words<bits>(row, a.k, first), load(upper));
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(index, table[0]));
  }
  void operator()(const uint8_t* row, int64_t first, uint16_t* to) const {
    const __m512i index = code_words<bits, bits < 4>(row, a.k, first);  // the table of sixteen is there twice
    if constexpr (bits <= 5) {
      _mm512_storeu_si512(to, _mm512_permutexvar_epi16(index, table[0]));
    } else {
      _mm512_storeu_si512(to, _mm512_permutex2var_epi16(table[0], index, table[1]));
    }
  }
};
#endif

// Loads the scales of a row; a NaN gets low bits of 0, so that rounding it to 16 bits cannot carry into the exponent.
inline void load_scales(const Linear& a, int64_t row, int64_t groups, float* to) {
  const int64_t first = row * a.scale.stride;
  const auto fill_scales = [&](const auto& number) {
    for (int64_t g = 0; g < groups; g++) to[g] = number(first + g);
  };
  if (a.scale.dtype == Dtype::bfloat16) {
    fill_scales([of = static_cast<const uint16_t*>(a.scale.data)](int64_t i) { return bfloat16_to_float(of[i]); });
  } else if (a.scale.dtype == Dtype::bytes && a.scale.table) {
    fill_scales([of = static_cast<const uint8_t*>(a.scale.data), table = a.scale.table](int64_t i) { return table[of[i]]; });
  } else {
    fill_scales([&](int64_t i) { return load_float(a.scale, i); });
  }
  if (a.has_outer)
    for (int64_t g = 0; g < groups; g++) to[g] *= a.outer;
  for (int64_t g = 0; g < groups; g++) to[g] = to[g] == to[g] ? to[g] : NAN;
}

template <int bits, Dtype type, class Decode>
void dequantize_with(const Linear& a, Element<type>* out, int64_t stride, int64_t begin, int64_t end) {
  Decode decode(a);
  const int64_t groups = (a.k + a.group - 1) / a.group;
  const std::unique_ptr<float[]> scales(new float[groups]);
  for (int64_t row = begin; row < end; row++) {
    const uint8_t* packed = a.packed + row * a.packed_stride;
    Element<type>* to = out + (row - begin) * stride;
    load_scales(a, row, groups, scales.get());
    int64_t g = 0, first = 0;
    if constexpr (Decode::supports_pairs)
      if (2 * a.group == codes_per_load)
        for (; first + codes_per_load <= a.k; first += codes_per_load, g += 2) {
          for (int i = 0; i < 2; i++) decode.half(i, zero_of(a, row, g + i), scales[g + i]);
          decode.decode_pair(packed, first, to + first);
        }
    for (; first < a.k; g++) {
      const int64_t stop = first + a.group < a.k ? first + a.group : a.k;
      const float zero = zero_of(a, row, g), scale = scales[g];
      if (first % byte_aligned_codes(bits) == 0) {
        decode.group(zero, scale);
        for (; first + codes_per_load <= stop; first += codes_per_load) decode(packed, first, to + first);
      }
      for (; first < stop; first++) to[first] = rounded<type>((a.values[code_at<bits>(packed, a.k, first)] - zero) * scale);
    }
  }
}

template <int bits, Dtype type>
void dequantize_rows_as(const Linear& a, void* out, int64_t stride, int64_t begin, int64_t end) {
  Element<type>* to = static_cast<Element<type>*>(out);
#if defined(__AVX512BW__)
  if constexpr (type == Dtype::bfloat16 && (bits == 4 || bits == 6 || bits == 8))
    if (has_powers(a)) {
      if (bits == 8 && a.codes == Codes::signed_bytes) return dequantize_rows_e8m0<bits>(a, IntegersByExponent(a), to, stride, begin, end);
      if (const ByExponent<bits> powers(a); powers.ok) return dequantize_rows_e8m0<bits>(a, powers, to, stride, begin, end);
    }
  if constexpr (bits <= 6 && type != Dtype::float32)
    if (a.group >= 2 << bits || (bits <= 4 && 2 * a.group == codes_per_load))
      return dequantize_with<bits, type, ByTable<bits, type>>(a, to, stride, begin, end);
#endif
  return dequantize_with<bits, type, InOrder<bits, type>>(a, to, stride, begin, end);
}

template <int bits>
void for_type(const Linear& a, Dtype type, void* out, int64_t stride, int64_t begin, int64_t end) {
  if (type == Dtype::bfloat16) return dequantize_rows_as<bits, Dtype::bfloat16>(a, out, stride, begin, end);
  if (type == Dtype::float16) return dequantize_rows_as<bits, Dtype::float16>(a, out, stride, begin, end);
  return dequantize_rows_as<bits, Dtype::float32>(a, out, stride, begin, end);
}

}  // namespace

void dequantize_rows(const Linear& a, Dtype type, void* out, int64_t stride, int64_t begin, int64_t end) {
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
