// fp32 GEMV for AVX2 (picture and contract in f32_gemv.h).
//
// e4m3, e5m2 and e3m2 are IEEE half without some bits and are shifted into place; 4-bit formats look up each of the four bytes of
// their float among sixteen.
#include "f32_gemv.h"

#include <cmath>

#include "../decode/unpack_avx2.h"

namespace lowbit::cpu::avx2 {
namespace {

template <int bits>
struct Fields : CodeUnpacker<bits, 0> {
  __m256i table[4], mask;
  bool is_e4m3;
  explicit Fields(const Linear& a) : CodeUnpacker<bits, 0>(ByteDecoding{0, 0, nullptr, 1}), is_e4m3(bits == 8 && a.truncated_half.has_nan) {
    mask = _mm256_set1_epi16(static_cast<int16_t>(a.truncated_half.mask));
    alignas(16) uint8_t temp[16];
    const auto broadcast16 = [&] { return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(temp))); };
    for (int byte = 0; bits == 4 && byte < 4; byte++) {
      for (int code = 0; code < 16; code++) memcpy(temp + code, reinterpret_cast<const uint8_t*>(a.values + code) + byte, 1);
      table[byte] = broadcast16();
    }
    for (int f = 0; bits == 6 && f < 2; f++) {  // moves the sign to the top of the byte, the upper one of a half
      for (int i = 0; i < 16; i++) temp[i] = static_cast<uint8_t>((i >> 2 * f & 1) << 4 | (i >> (2 * f + 1) & 1) << 7);
      this->above[f][0] = broadcast16();
    }
  }

  // Decodes the bytes of a field to 32 floats: 8 and 6 bits in order, 4 bits within the 128-bit halves. `largest`: running
  // maximum of e4m3's magnitudes, to find NaN (127).
  void floats_of(__m256i bytes, __m256i& largest, __m256* to) const {
    if constexpr (bits == 4) {
      __m256i of[4];
      for (int i = 0; i < 4; i++) of[i] = _mm256_shuffle_epi8(table[i], bytes);
      const __m256i low[] = {_mm256_unpacklo_epi8(of[0], of[1]), _mm256_unpackhi_epi8(of[0], of[1])};
      const __m256i high[] = {_mm256_unpacklo_epi8(of[2], of[3]), _mm256_unpackhi_epi8(of[2], of[3])};
      for (int i = 0; i < 2; i++) {
        to[2 * i] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(low[i], high[i]));
        to[2 * i + 1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(low[i], high[i]));
      }
    } else {
      __m256i first = _mm256_unpacklo_epi8(_mm256_setzero_si256(), bytes), second = _mm256_unpackhi_epi8(_mm256_setzero_si256(), bytes);
      if (is_e4m3) {
        largest = _mm256_max_epu8(largest, _mm256_and_si256(bytes, broadcast_u8(127)));
        first = _mm256_and_si256(_mm256_srai_epi16(first, 1), mask), second = _mm256_and_si256(_mm256_srai_epi16(second, 1), mask);
      }
      to[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(first)), to[1] = _mm256_cvtph_ps(_mm256_castsi256_si128(second));
      to[2] = _mm256_cvtph_ps(_mm256_extracti128_si256(first, 1)), to[3] = _mm256_cvtph_ps(_mm256_extracti128_si256(second, 1));
    }
  }
};

// R rows of the weight times M rows of x from m0 on. Rows from `end` on repeat the last one.
template <int bits, int M, int R>
void tile(const Linear& a, const PackedFloats& x, bool exponents, int64_t m0, int64_t begin, int64_t end) {
  using P = Planes<bits>;
  constexpr int F = P::fields;
  constexpr int64_t columns = 4 * lanes * F, steps_per_chunk = chunk / columns;
  const Fields<bits> fields(a);
  const float unit = a.unit * (a.has_outer ? a.outer : 1.0f);
  const int64_t whole = a.k / columns, groups = (a.k + a.group - 1) / a.group;
  int64_t row[R], steps_before = 0;  // steps_before: steps before what `planes` point to
  P planes[R];
  LastStep<bits> last[R];
  for (int r = 0; r < R; r++) {
    row[r] = begin + r < end ? begin + r : end - 1;
    planes[r] = P(a.packed + row[r] * a.packed_stride, a.k);
    if (whole < x.steps) last[r].copy(planes[r], whole, a.k);
  }
  const uintptr_t prefetch_stride = static_cast<uintptr_t>(R * a.packed_stride);  // prefetches the same place in the next tile
  alignas(32) float scale[R][chunk / 16 + 16];
  __m256 total[R][M];
  __m256i largest[R];
  for (int r = 0; r < R; r++) {
    largest[r] = _mm256_setzero_si256();
    for (__m256& t : total[r]) t = _mm256_setzero_ps();
  }

  for (int64_t from = 0; from < x.steps; from += steps_per_chunk) {
    const int64_t to = from + steps_per_chunk < x.steps ? from + steps_per_chunk : x.steps;
    const int64_t first = x.group_of_quad[from * 4];
    const int64_t stop = to * columns >= a.k ? groups : (to * columns - 1) / a.group + 1;
    for (int r = 0; r < R; r++) load_scales(a, exponents, row[r], first, stop - first, unit, scale[r]);
    for (int64_t s = from; s < to; s++) {
      if (s == whole) {
        steps_before = whole;
        for (int r = 0; r < R; r++) planes[r] = last[r].planes;
      }
      const float* numbers = x.numbers + (s * a.m + m0) * columns;
      const int64_t lower = x.group_of_quad[s * 4] - first, upper = x.group_of_quad[s * 4 + 2] - first;
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const uint8_t* at[P::count];
        for (int p = 0; p < P::count; p++) {
          at[p] = planes[r].at[p] + (s - steps_before) * P::bytes(p);
          // A cache line holds two steps.
          if (s % 2 == 0) _mm_prefetch(reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(at[p]) + prefetch_stride), _MM_HINT_T1);
        }
        __m256i bytes[F];
        if constexpr (bits == 8) bytes[0] = bytes32(at[0]);
        else fields.unpack(at, 0, bytes);
        __m256 low[M], high[M];
#pragma GCC unroll 2
        for (int f = 0; f < F; f++) {
          __m256 w[4];
          fields.floats_of(bytes[f], largest[r], w);
#pragma GCC unroll 4
          for (int m = 0; m < M; m++) {
            const float* of_x = numbers + m * columns + f * 4 * lanes;
            low[m] = f ? _mm256_fmadd_ps(w[0], _mm256_loadu_ps(of_x), low[m]) : _mm256_mul_ps(w[0], _mm256_loadu_ps(of_x));
            high[m] = f ? _mm256_fmadd_ps(w[2], _mm256_loadu_ps(of_x + 16), high[m]) : _mm256_mul_ps(w[2], _mm256_loadu_ps(of_x + 16));
            low[m] = _mm256_fmadd_ps(w[1], _mm256_loadu_ps(of_x + 8), low[m]);
            high[m] = _mm256_fmadd_ps(w[3], _mm256_loadu_ps(of_x + 24), high[m]);
          }
        }
        const __m256 of_lower = _mm256_broadcast_ss(scale[r] + lower), of_upper = _mm256_broadcast_ss(scale[r] + upper);
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) {
          if constexpr (bits == 4) {
            total[r][m] = _mm256_fmadd_ps(_mm256_add_ps(low[m], high[m]), _mm256_blend_ps(of_lower, of_upper, 0xf0), total[r][m]);
          } else {
            total[r][m] = _mm256_fmadd_ps(low[m], of_lower, total[r][m]);
            total[r][m] = _mm256_fmadd_ps(high[m], of_upper, total[r][m]);
          }
        }
      }
    }
  }
  for (int r = 0; r < R; r++) {
    const bool nan = _mm256_movemask_epi8(_mm256_cmpeq_epi8(largest[r], broadcast_u8(127))) != 0;
    for (int m = 0; m < M; m++) a.y[(m0 + m) * a.n + row[r]] = nan ? NAN : sum_of(total[r][m]);
  }
}

template <int bits>
void rows(const Linear& a, const PackedFloats& x, int64_t begin, int64_t end) {
  const bool exponents = a.scale.table && are_exponents(a.scale.table);
  for (int64_t row = begin; row < end; row += 4) {
    int64_t m = 0;
    const auto of = [&](auto rows_of_x, auto rows_at_a_time) {
      constexpr int M = decltype(rows_of_x)::value, R = decltype(rows_at_a_time)::value;
      for (int64_t r = row; r < row + 4 && r < end; r += R) tile<bits, M, R>(a, x, exponents, m, r, end);
      m += M;
    };
    while (m + 4 <= a.m) of(std::integral_constant<int, 4>(), std::integral_constant<int, 1>());
    if (m + 2 <= a.m) of(std::integral_constant<int, 2>(), std::integral_constant<int, 2>());
    if (m < a.m) of(std::integral_constant<int, 1>(), std::integral_constant<int, 4>());
  }
}

}  // namespace

void f32_gemv(const Linear& a, const PackedFloats& x, int64_t begin, int64_t end) {
  if (a.bits == 4) return rows<4>(a, x, begin, end);
  if (a.bits == 6) return rows<6>(a, x, begin, end);
  return rows<8>(a, x, begin, end);
}

}  // namespace lowbit::cpu::avx2
