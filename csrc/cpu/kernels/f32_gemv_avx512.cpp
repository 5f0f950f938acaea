// fp32 GEMV for AVX-512 with VBMI (picture and contract in f32_gemv.h).
//
// e4m3, e5m2 and e3m2 are IEEE half without some bits and are shifted into place; 4-bit formats look up their float among sixteen
// in a register.
#include "f32_gemv.h"

#include <cmath>

#include "../decode/unpack_avx512.h"

namespace lowbit::cpu::avx512vnni {
namespace {

// Decodes the codes of half a field to two registers of floats.
template <int bits>
struct CodeToFloat {
  __m512 table = _mm512_setzero_ps();
  __m512i mask = _mm512_setzero_si512();
  __m128i up = _mm_setzero_si128();
  bool has_nan = false;
  explicit CodeToFloat(const Linear& a) {
    if constexpr (bits == 4) {
      table = _mm512_loadu_ps(a.values);
    } else {
      mask = _mm512_set1_epi16(static_cast<int16_t>(a.truncated_half.mask)), up = _mm_cvtsi32_si128(a.truncated_half.up), has_nan = a.truncated_half.has_nan;
    }
  }
  template <int half>
  void of_half(__m512i codes, __m512* to) const {
    if constexpr (bits == 4) {
      to[0] = _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(codes, 2 * half)), table);
      to[1] = _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(codes, 2 * half + 1)), table);
    } else {
      __m256i bytes = _mm512_extracti64x4_epi64(codes, half);
      if constexpr (bits == 6) bytes = _mm256_sub_epi8(_mm256_xor_si256(bytes, _mm256_set1_epi8(32)), _mm256_set1_epi8(32));
      __m512i numbers = _mm512_and_si512(_mm512_sll_epi16(_mm512_cvtepi8_epi16(bytes), up), mask);
      if (has_nan) {
        const __m256i ones = _mm256_set1_epi8(127);
        const __mmask32 nan = _mm256_cmpeq_epi8_mask(_mm256_and_si256(bytes, ones), ones);
        numbers = _mm512_mask_mov_epi16(numbers, nan, _mm512_set1_epi16(0x7e00));
      }
      to[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(numbers));
      to[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(numbers, 1));
    }
  }
};

template <int bits>
inline void codes_of(const Planes<bits>& planes, int64_t step, __m512i* codes) {
  using P = Planes<bits>;
  __m512i quads[3];
  if constexpr (P::count > 1) quads[1] = quads_of<P::bytes(1)>(planes.at[1] + step * P::bytes(1));
  extract_codes<bits, (P::count > 1)>(_mm512_loadu_si512(planes.at[0] + step * P::bytes(0)), quads, codes);
}

// R rows of the weight times M rows of x from m0 on. Rows from `end` on repeat the last one.
template <int bits, int M, int R>
void tile(const Linear& a, const PackedFloats& x, const ByteScales& byte_scales, int64_t m0, int64_t begin, int64_t end) {
  using P = Planes<bits>;
  constexpr int F = P::fields;
  constexpr int64_t columns = 64 * F, steps_per_chunk = chunk / columns;
  const CodeToFloat<bits> decoder(a);
  const float unit = a.unit * (a.has_outer ? a.outer : 1.0f);
  const int64_t whole = a.k / columns, groups = (a.k + a.group - 1) / a.group;
  int64_t row[R];
  Planes<bits> planes[R];
  LastStep<bits> last[R];
  for (int r = 0; r < R; r++) {
    row[r] = begin + r < end ? begin + r : end - 1;
    planes[r] = Planes<bits>(a.packed + row[r] * a.packed_stride, a.k);
    if (whole < x.steps) last[r].copy(planes[r], whole, a.k);
  }
  const uintptr_t prefetch_stride = static_cast<uintptr_t>(R * a.packed_stride);  // prefetches the same place in the next tile
  alignas(64) float scale[R][chunk / 16 + 48];
  __m512 total[R][M];
  for (auto& of_row : total)
    for (__m512& t : of_row) t = _mm512_setzero_ps();

  for (int64_t from = 0; from < x.steps; from += steps_per_chunk) {
    const int64_t to = from + steps_per_chunk < x.steps ? from + steps_per_chunk : x.steps;
    const int64_t first = x.group_of_quad[from * 4];
    const int64_t stop = to * columns >= a.k ? groups : (to * columns - 1) / a.group + 1;
    for (int r = 0; r < R; r++) load_scales(a, byte_scales, row[r], first, stop - first, unit, scale[r]);
    for (int64_t s = from; s < to; s++) {
      const float* numbers = x.numbers + (s * a.m + m0) * columns;
      const int32_t* group = x.group_of_quad + s * 4;
      const bool one_group = group[0] == group[3];
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        __m512i codes[F];
        if (s < whole) {
          for (int p = 0; p < P::count; p++)
            _mm_prefetch(reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(planes[r].at[p] + s * P::bytes(p)) + prefetch_stride), _MM_HINT_T1);
          codes_of<bits>(planes[r], s, codes);
        } else {
          codes_of<bits>(last[r].planes, 0, codes);
        }
        __m512 sum[M][4];
#pragma GCC unroll 2
        for (int f = 0; f < F; f++) {
          __m512 w[4];
          decoder.template of_half<0>(codes[f], w);
          decoder.template of_half<1>(codes[f], w + 2);
#pragma GCC unroll 4
          for (int m = 0; m < M; m++)
#pragma GCC unroll 4
            for (int q = 0; q < 4; q++) {
              const __m512 of_x = _mm512_loadu_ps(numbers + ((m * F + f) * 4 + q) * 16);
              sum[m][q] = f ? _mm512_fmadd_ps(w[q], of_x, sum[m][q]) : _mm512_mul_ps(w[q], of_x);
            }
        }
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) {
          if (one_group) {
            const __m512 all = _mm512_add_ps(_mm512_add_ps(sum[m][0], sum[m][1]), _mm512_add_ps(sum[m][2], sum[m][3]));
            total[r][m] = _mm512_fmadd_ps(all, _mm512_set1_ps(scale[r][group[0] - first]), total[r][m]);
          } else {
            for (int q = 0; q < 4; q++)
              total[r][m] = _mm512_fmadd_ps(sum[m][q], _mm512_set1_ps(scale[r][group[q] - first]), total[r][m]);
          }
        }
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int m = 0; m < M; m++) a.y[(m0 + m) * a.n + row[r]] = _mm512_reduce_add_ps(total[r][m]);
}

template <int bits>
void rows(const Linear& a, const PackedFloats& x, int64_t begin, int64_t end) {
  const ByteScales byte_scales(a.scale);
  for (int64_t row = begin; row < end; row += 4) {
    int64_t m = 0;
    for (; m + 4 <= a.m; m += 4) tile<bits, 4, 4>(a, x, byte_scales, m, row, end);
    if (m + 2 <= a.m) tile<bits, 2, 4>(a, x, byte_scales, m, row, end), m += 2;
    if (m < a.m) tile<bits, 1, 4>(a, x, byte_scales, m, row, end);
  }
}

}  // namespace

void f32_gemv(const Linear& a, const PackedFloats& x, int64_t begin, int64_t end) {
  if (a.bits == 4) return rows<4>(a, x, begin, end);
  if (a.bits == 6) return rows<6>(a, x, begin, end);
  return rows<8>(a, x, begin, end);
}

}  // namespace lowbit::cpu::avx512vnni
