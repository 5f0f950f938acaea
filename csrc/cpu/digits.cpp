// Linear for few rows of x on integer dot products. Compiled for AVX-512 with VBMI and VNNI.
//
// Codes come out of their planes in the order in which that is cheapest, one AND and one shift for 64 of them, and the digits
// lie in the same order (order_of_x.cpp). A dot product of four bytes adds each digit's products to sixteen integers, which are
// moved up by eight bits from digit to digit. These sums, less the zero point's share, are exact: no lane has more than 512 times
// the 22 bits of x.
// What follows is fp32: the scales of the groups, those of the slices, the sum of the lanes. No sum depends on the threads.
#include "digits.h"

#include "steps.h"

namespace lowbit::cpu::avx512vnni {
namespace {

template <int bits, bool has_table>
inline void bytes_of(const Planes<bits>& planes, int64_t step, __m512i flipped, __m512i table, __m512i* bytes) {
  using P = Planes<bits>;
  __m512i quads[3];
  if constexpr (P::count > 1) quads[1] = quads_of<P::bytes(1)>(planes.at[1] + step * P::bytes(1));
  if constexpr (P::count > 2) quads[2] = quads_of<P::bytes(2)>(planes.at[2] + step * P::bytes(2));
  const __m512i widest = _mm512_loadu_si512(planes.at[0] + step * P::bytes(0));
  if constexpr (has_table) {
    take_codes<bits, false>(widest, quads, bytes);
    for (int f = 0; f < P::fields; f++) bytes[f] = _mm512_permutexvar_epi8(bytes[f], table);
  } else if constexpr (P::count == 1) {  // the bits of all fields at once
    take_codes<bits, true>(_mm512_xor_si512(widest, flipped), quads, bytes);
  } else {
    take_codes<bits, true>(widest, quads, bytes);
    for (int f = 0; f < P::fields; f++) bytes[f] = _mm512_xor_si512(bytes[f], flipped);
  }
}

// R rows of the weight times M rows of x from m0 on, in D digits. Rows beyond `end` stand for the last one before it.
template <int bits, bool has_table, int D, int M, int R>
bool tile(const Linear& a, const Bytewise& how, const DigitsOfX& x, const ByteScales& of_byte, int64_t m0, int64_t begin, int64_t end) {
  using P = Planes<bits>;
  constexpr int F = P::fields;
  constexpr int64_t columns = 64 * F, steps_of_slice = slice / columns, steps_of_chunk = chunk / columns;
  const __m512i flipped = every(how.flipped * (P::count == 1 && F > 1 ? 255 / ((1 << bits) - 1) : 1));
  const __m512i table = has_table ? _mm512_loadu_si512(how.table) : _mm512_setzero_si512();
  const float unit = a.has_outer ? how.unit * a.outer : how.unit;
  const int64_t slices = (a.k + slice - 1) / slice, whole = a.k / columns, groups = (a.k + a.group - 1) / a.group;
  const bool has_zeros = a.zero_point.data != nullptr;
  int64_t row[R];
  Planes<bits> planes[R];
  LastStep<bits> last[R];
  for (int r = 0; r < R; r++) {
    row[r] = begin + r < end ? begin + r : end - 1;
    planes[r] = Planes<bits>(a.packed + row[r] * a.packed_stride, a.k);
    if (whole < x.steps) last[r].copy(planes[r], whole, a.k);
  }
  // The same place in the next tile, for the second-level cache: rows are short and several are read at once, which is more than
  // a processor foresees, and the first level is full of digits.
  const uintptr_t ahead = static_cast<uintptr_t>(R * a.packed_stride);
  alignas(64) float scale[R][chunk / 4 + 48];
  alignas(64) float zero[R][chunk / 4 + 48];  // integers, where there are three digits
  __m512i largest_zero = _mm512_setzero_si512();
  __m512 total[R][M];
  for (auto& of_row : total)
    for (__m512& t : of_row) t = _mm512_setzero_ps();

  for (int64_t from = 0; from < x.steps; from += steps_of_chunk) {
    const int64_t to = from + steps_of_chunk < x.steps ? from + steps_of_chunk : x.steps;
    const int64_t first = x.first_group[from];
    const int64_t past = to * columns >= a.k ? groups : (to * columns - 1) / a.group + 1;
    for (int r = 0; r < R; r++) {
      take_scales(a, of_byte, row[r], first, past - first, unit, scale[r]);
      if (has_zeros) largest_zero = _mm512_max_epu32(largest_zero, take_zeros(a, row[r], first, past - first, D < 3, zero[r]));
    }
    for (int64_t s0 = from; s0 < to; s0 += steps_of_slice) {
      __m512 part[R][M];
      for (auto& of_row : part)
        for (__m512& p : of_row) p = _mm512_setzero_ps();
      const int64_t s1 = s0 + steps_of_slice < to ? s0 + steps_of_slice : to;
      for (int64_t s = s0; s < s1; s++) {
        const int64_t group = x.first_group[s] - first;
        const int8_t* digits = x.digits + (s * a.m + m0) * D * F * 64;
        const int32_t* sums = x.sums + (s * a.m + m0) * lanes;
        __m512i bytes[R][F];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
          if (s < whole) {
            for (int p = 0; p < P::count; p++)
              _mm_prefetch(reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(planes[r].at[p] + s * P::bytes(p)) + ahead), _MM_HINT_T1);
            bytes_of<bits, has_table>(planes[r], s, flipped, table, bytes[r]);
          } else {
            bytes_of<bits, has_table>(last[r].planes, 0, flipped, table, bytes[r]);
          }
        }
        const auto of_lane = [&](const float* all) {
          if (!x.group_of_lane) return _mm512_set1_ps(all[group]);
          return _mm512_permutexvar_ps(_mm512_loadu_si512(x.group_of_lane + s * lanes), _mm512_loadu_ps(all + group));
        };
        __m512 scales[R], zeros[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) scales[r] = of_lane(scale[r]), zeros[r] = has_zeros ? of_lane(zero[r]) : scales[r];
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) {
          __m512i sum[R];
#pragma GCC unroll 4
          for (int r = 0; r < R; r++) sum[r] = _mm512_setzero_si512();
#pragma GCC unroll 3
          for (int d = 0; d < D; d++) {
#pragma GCC unroll 8
            for (int f = 0; f < F; f++) {
              const __m512i digit = _mm512_loadu_si512(digits + ((m * D + d) * F + f) * 64);
#pragma GCC unroll 4
              for (int r = 0; r < R; r++)
                sum[r] = _mm512_dpbusd_epi32(d && !f ? _mm512_slli_epi32(sum[r], 8) : sum[r], bytes[r][f], digit);
            }
          }
          const __m512i share = _mm512_loadu_si512(sums + m * lanes);
#pragma GCC unroll 4
          for (int r = 0; r < R; r++) {
            __m512 all;
            if (!has_zeros) {
              all = _mm512_cvtepi32_ps(_mm512_add_epi32(sum[r], share));
            } else if constexpr (D < 3) {  // no more than 24 bits: exact in floats
              all = _mm512_fmadd_ps(zeros[r], _mm512_castsi512_ps(share), _mm512_cvtepi32_ps(sum[r]));
            } else {
              all = _mm512_cvtepi32_ps(_mm512_add_epi32(sum[r], _mm512_mullo_epi32(_mm512_castps_si512(zeros[r]), share)));
            }
            part[r][m] = _mm512_fmadd_ps(all, scales[r], part[r][m]);
          }
        }
      }
      for (int m = 0; m < M; m++) {
        const __m512 of_slice = _mm512_set1_ps(x.scale[(m0 + m) * slices + s0 * columns / slice]);
        for (int r = 0; r < R; r++) total[r][m] = _mm512_fmadd_ps(part[r][m], of_slice, total[r][m]);
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int m = 0; m < M; m++) a.y[(m0 + m) * a.n + row[r]] = _mm512_reduce_add_ps(total[r][m]);
  return _mm512_cmpgt_epu32_mask(largest_zero, _mm512_set1_epi32((1 << bits) - 1)) == 0;
}

template <int bits, bool has_table, int D>
bool rows(const Linear& a, const Bytewise& how, const DigitsOfX& x, int64_t begin, int64_t end) {
  const ByteScales of_byte(a.scale);
  bool good = true;
  for (int64_t row = begin; row < end; row += 4) {
    int64_t m = 0;
    for (; m + 4 <= a.m; m += 4) good = tile<bits, has_table, D, 4, 4>(a, how, x, of_byte, m, row, end) && good;
    if (m + 2 <= a.m) good = tile<bits, has_table, D, 2, 4>(a, how, x, of_byte, m, row, end) && good, m += 2;
    if (m < a.m) good = tile<bits, has_table, D, 1, 4>(a, how, x, of_byte, m, row, end) && good;
  }
  return good;
}

template <int bits, bool has_table>
bool with_digits(const Linear& a, const Bytewise& how, const DigitsOfX& x, int64_t begin, int64_t end) {
  if (x.count == 1) return rows<bits, has_table, 1>(a, how, x, begin, end);
  if (x.count == 3) return rows<bits, has_table, 3>(a, how, x, begin, end);
  return rows<bits, has_table, 2>(a, how, x, begin, end);
}

}  // namespace

bool digits_linear(const Linear& a, const Bytewise& how, const DigitsOfX& x, int64_t begin, int64_t end) {
  const auto with = [&](auto bits) {
    constexpr int b = decltype(bits)::value;
    if constexpr (b <= 6)
      if (how.table) return with_digits<b, true>(a, how, x, begin, end);
    return with_digits<b, false>(a, how, x, begin, end);
  };
  switch (a.bits) {
    case 2: return with(std::integral_constant<int, 2>());
    case 3: return with(std::integral_constant<int, 3>());
    case 4: return with(std::integral_constant<int, 4>());
    case 5: return with(std::integral_constant<int, 5>());
    case 6: return with(std::integral_constant<int, 6>());
    case 7: return with(std::integral_constant<int, 7>());
    default: return with(std::integral_constant<int, 8>());
  }
}

}  // namespace lowbit::cpu::avx512vnni
