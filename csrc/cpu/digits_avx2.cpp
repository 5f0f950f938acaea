// Linear for few rows of x on integer dot products of AVX2.
//
// A code is a byte without a sign and a digit one with a sign; products of two such pairs are added in 16 bits, which holds as
// long as no more than 127 / (largest byte) such sums come together: 128 * 2 * 127 < 2^15. Then they are widened, times 256 where
// a digit below follows. Bytes of eight bits are multiplied as 16-bit words with two digits in one. Either way the sums are exact:
// no lane has more than 512 times the 22 bits of x, see `fits`; sums of two steps are only taken together where that is so for
// both.
// What follows is fp32, as with AVX-512: the scales of the groups, those of the slices, the sum of the lanes. No sum depends on
// the threads.
#include "steps_avx2.h"

namespace lowbit::cpu::avx2 {
namespace {

// How the products of bytes up to `largest` add up.
template <int bits, int largest>
struct Products {
  static constexpr bool words = bits == 8;
  static constexpr int together = words ? 1 : 127 / largest;  // sums of pairs that come together in 16 bits
  // Whether the sums of two steps hold in 32 bits with the 22 of x, or the 15 of two digits beside words.
  static constexpr bool pairs = words || 2 * largest * 4 * Planes<bits>::fields <= 512;
};

// Sums of the lanes of `steps` steps: codes times the digits of one row of x.
template <int bits, int largest, int D, int steps>
inline __m256i lanes_of(const __m256i* bytes, const int8_t* digits, int64_t stride) {
  using P = Products<bits, largest>;
  constexpr int F = P::words ? 2 : Planes<bits>::fields, count = P::words ? words_of(D) : D;
  __m256i sum = _mm256_setzero_si256();
#pragma GCC unroll 3
  for (int d = 0; d < count; d++) {
    if (P::words ? d > 0 : d > 1) sum = _mm256_slli_epi32(sum, P::words ? 16 : 8);
    const __m256i times = _mm256_set1_epi16(!P::words && d == 0 && D > 1 ? 256 : 1);
    __m256i some = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int i = 0; i < steps * F; i++) {
      const __m256i digit = bytes32(digits + (i / F) * stride + (d * F + i % F) * 32);
      if constexpr (P::words) {
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(bytes[i], digit));
        continue;
      }
      const __m256i own = _mm256_maddubs_epi16(bytes[i], digit);
      some = i % P::together ? _mm256_add_epi16(some, own) : own;
      if ((i + 1) % P::together == 0 || i + 1 == steps * F) sum = _mm256_add_epi32(sum, _mm256_madd_epi16(some, times));
    }
  }
  return sum;
}

// R rows of the weight times M rows of x from m0 on, in D digits; where fewer are left before `end`, the first one R times.
template <int bits, int tables, int largest, int D, int M, int R, bool in_groups, bool has_zeros>
bool tile(const Linear& a, const Bytewise& how, const Codes<bits, tables>& of, const DigitsOfX& x, bool exponents, int64_t m0,
          int64_t begin, int64_t end) {
  using P = Planes<bits>;
  constexpr int F = P::fields, G = bits == 8 ? 2 : F;  // G: registers of a step's codes
  constexpr bool in_pairs = in_groups && Products<bits, largest>::pairs && !(bits == 8 && D == 3);
  constexpr int64_t columns = 4 * lanes * F, steps_of_slice = slice / columns, steps_of_chunk = chunk / columns;
  constexpr int64_t size = (bits == 8 ? 2 * words_of(D) : D * F) * 32;  // of a step's digits of one row of x
  const Codes<bits, tables> codes = of;
  const float unit = a.has_outer ? how.unit * a.outer : how.unit;
  const int64_t slices = (a.k + slice - 1) / slice, whole = a.k / columns, groups = (a.k + a.group - 1) / a.group;
  const int64_t m = a.m, stride = m * size;
  const bool one = end - begin < R, pairs = a.group >= a.k || a.group % (2 * columns) == 0;
  LastStep<bits> last[R];
  const P planes(a.packed + begin * a.packed_stride, a.k);
  const uint8_t* at[P::count];
  for (int p = 0; p < P::count; p++) at[p] = planes.at[p];
  int64_t apart = one ? 0 : a.packed_stride;  // bytes from row to row
  if (whole < x.steps)
    for (int r = 0; r < R; r++) last[r].copy(P(a.packed + begin * a.packed_stride + r * apart, a.k), whole, a.k);
  // What lies two tiles further on, in the order in which it lies, for the second-level cache: rows are short and several are read
  // at once, which is more than a processor foresees, and the first level is full of digits. A page that was not touched for long
  // takes longer still: one byte of it, further ahead.
  uintptr_t ahead = reinterpret_cast<uintptr_t>(a.packed) + (begin + 2 * R) * a.packed_stride;
  for (int64_t byte = 0; byte < R * whole * P::bytes_of_step; byte += 4096)
    _mm_prefetch(reinterpret_cast<const char*>(ahead + 2 * R * a.packed_stride + byte), _MM_HINT_T1);
  const auto fetch = [&](const Numbers& numbers) {
    const int64_t width = numbers.stored == Stored::float32 ? 4 : numbers.stored == Stored::bytes ? 1 : 2;
    const int64_t bytes = R * numbers.stride * width;
    const uintptr_t first = reinterpret_cast<uintptr_t>(numbers.data) + begin * numbers.stride * width + 2 * bytes;
    for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(reinterpret_cast<const char*>(first + i), _MM_HINT_T1);
  };
  if (m0 == 0) fetch(a.scale);
  if (m0 == 0 && has_zeros) fetch(a.zero_point);
  alignas(32) float scale[R][chunk / 4 + 16];
  alignas(32) float zero[R][chunk / 4 + 16];  // integers, where there are three digits
  int largest_zero = 0;
  const int8_t* digits = x.digits + m0 * size;
  const int32_t *sums = x.sums + m0 * lanes, *group_of_step = x.first_group, *group_of_lane = x.group_of_lane;
  __m256 total[R][M];
  for (auto& of_row : total)
    for (__m256& t : of_row) t = _mm256_setzero_ps();

  for (int64_t from = 0; from < x.steps; from += steps_of_chunk) {
    const int64_t to = from + steps_of_chunk < x.steps ? from + steps_of_chunk : x.steps;
    const int64_t first = x.first_group[from];
    const int64_t past = to * columns >= a.k ? groups : (to * columns - 1) / a.group + 1;
    for (int r = 0; r < R; r++) {
      const int64_t row = one ? begin : begin + r;
      take_scales(a, exponents, row, first, past - first, unit, scale[r]);
      if (!has_zeros) continue;
      const int most = take_zeros(a, row, first, past - first, D < 3, zero[r]);
      largest_zero = most > largest_zero ? most : largest_zero;
    }
    for (int64_t s0 = from; s0 < to; s0 += steps_of_slice) {
      __m256 part[R][M];
      for (auto& of_row : part)
        for (__m256& p : of_row) p = _mm256_setzero_ps();
      const int64_t s1 = s0 + steps_of_slice < to ? s0 + steps_of_slice : to;

      const auto take_steps = [&](auto count) __attribute__((always_inline)) {
        constexpr int steps = decltype(count)::value;
        const int64_t group = *group_of_step - first;
        const __m256i of_lane = in_groups ? _mm256_setzero_si256() : bytes32(group_of_lane);
        const auto of_group = [&](const float* all) {
          return in_groups ? _mm256_broadcast_ss(all + group) : _mm256_permutevar8x32_ps(_mm256_loadu_ps(all + group), of_lane);
        };
#pragma GCC unroll 8
        for (int64_t byte = 0; byte < R * P::bytes_of_step * steps; byte += 64)
          _mm_prefetch(reinterpret_cast<const char*>(ahead + byte), _MM_HINT_T1);
        __m256i share[M];
#pragma GCC unroll 4
        for (int i = 0; i < M; i++) {
          share[i] = bytes32(sums + i * lanes);
          if (steps < 2) continue;
          const __m256i next = bytes32(sums + (m + i) * lanes);
          if (!has_zeros || D == 3) share[i] = _mm256_add_epi32(share[i], next);
          else share[i] = _mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(share[i]), _mm256_castsi256_ps(next)));
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
          __m256i bytes[steps * G];
#pragma GCC unroll 2
          for (int i = 0; i < steps; i++) {
            const uint8_t* own[P::count];
            for (int p = 0; p < P::count; p++) own[p] = at[p] + i * P::bytes(p);
            codes.take(own, r * apart, bytes + i * G);
          }
          const __m256 scales = of_group(scale[r]);
#pragma GCC unroll 4
          for (int i = 0; i < M; i++) {
            const __m256i sum = lanes_of<bits, largest, D, steps>(bytes, digits + i * size, stride);
            __m256 all;
            if constexpr (!has_zeros) {
              all = _mm256_cvtepi32_ps(_mm256_add_epi32(sum, share[i]));
            } else if constexpr (D == 3) {
              const __m256i less = _mm256_mullo_epi32(_mm256_castps_si256(of_group(zero[r])), share[i]);
              all = _mm256_cvtepi32_ps(_mm256_add_epi32(sum, less));
            } else {  // no more than 24 bits: exact in floats
              all = _mm256_fmadd_ps(of_group(zero[r]), _mm256_castsi256_ps(share[i]), _mm256_cvtepi32_ps(sum));
            }
            part[r][i] = _mm256_fmadd_ps(all, scales, part[r][i]);
          }
        }
        for (int p = 0; p < P::count; p++) at[p] += steps * P::bytes(p);
        ahead += R * P::bytes_of_step * steps;
        digits += steps * stride, sums += steps * m * lanes, group_of_step += steps;
        if (!in_groups) group_of_lane += steps * lanes;
      };
      int64_t s = s0;
      if constexpr (in_pairs)
        for (; pairs && s + 2 <= s1 && s + 2 <= whole; s += 2) take_steps(std::integral_constant<int, 2>());
      for (; s < s1; s++) {
        if (s == whole) {
          for (int p = 0; p < P::count; p++) at[p] = last[0].bytes[p];
          apart = sizeof last[0];
        }
        take_steps(std::integral_constant<int, 1>());
      }

      for (int i = 0; i < M; i++) {
        const __m256 of_slice = _mm256_set1_ps(x.scale[(m0 + i) * slices + s0 * columns / slice]);
        for (int r = 0; r < R; r++) total[r][i] = _mm256_fmadd_ps(part[r][i], of_slice, total[r][i]);
      }
    }
  }
  for (int r = 0; r < (one ? 1 : R); r++)
    for (int i = 0; i < M; i++) a.y[(m0 + i) * a.n + begin + r] = sum_of(total[r][i]);
  return largest_zero < 1 << bits;
}

template <int bits, int tables, int largest, int D, bool in_groups>
bool rows(const Linear& a, const Bytewise& how, const DigitsOfX& x, int64_t begin, int64_t end) {
  const bool exponents = a.scale.table && are_exponents(a.scale.table);
  const Codes<bits, tables> codes(how);
  bool good = true;
  // Fewer rows of the weight beside more of x, so that the sums stay in registers.
  for (int64_t row = begin; row < end; row += 4) {
    int64_t m = 0;
    const auto of = [&](auto rows_of_x, auto rows_at_a_time) {
      constexpr int M = decltype(rows_of_x)::value, R = decltype(rows_at_a_time)::value;
      for (int64_t r = row; r < row + 4 && r < end; r += end - r < R ? 1 : R) {
        const auto take = a.zero_point.data ? tile<bits, tables, largest, D, M, R, in_groups, true>
                                            : tile<bits, tables, largest, D, M, R, in_groups, false>;
        good = take(a, how, codes, x, exponents, m, r, end) && good;
      }
      m += M;
    };
    while (m + 4 <= a.m) of(std::integral_constant<int, 4>(), std::integral_constant<int, 1>());
    if (m + 2 <= a.m) of(std::integral_constant<int, 2>(), std::integral_constant<int, 2>());
    if (m < a.m) of(std::integral_constant<int, 1>(), std::integral_constant<int, 4>());
  }
  return good;
}

template <int bits, int tables, int largest>
bool with_digits(const Linear& a, const Bytewise& how, const DigitsOfX& x, int64_t begin, int64_t end) {
  const auto with = [&](auto digits) {
    constexpr int D = decltype(digits)::value;
    return x.group_of_lane ? rows<bits, tables, largest, D, false>(a, how, x, begin, end)
                           : rows<bits, tables, largest, D, true>(a, how, x, begin, end);
  };
  if (x.count == 1) return with(std::integral_constant<int, 1>());
  if (x.count == 3) return with(std::integral_constant<int, 3>());
  return with(std::integral_constant<int, 2>());
}

}  // namespace

bool digits_linear(const Linear& a, const Bytewise& how, const DigitsOfX& x, int64_t begin, int64_t end) {
  const auto with = [&](auto bits) {
    constexpr int b = decltype(bits)::value;
    if constexpr (b <= 6)
      if (how.table) {
        bool small = b == 4;  // of fp4
        for (int code = 0; code < 16; code++) small = small && how.table[code] <= few;
        if constexpr (b == 4)
          if (small) return with_digits<b, 1, few>(a, how, x, begin, end);
        bool mirrored = b == 6;  // of fp6
        for (int code = 0; code < 32; code++) mirrored = mirrored && how.table[code] + how.table[code + 32] == 2 * how.offset;
        if constexpr (b == 6)
          if (mirrored) return with_digits<b, 2, 127>(a, how, x, begin, end);
        return with_digits<b, b <= 4 ? 1 : 1 << (b - 4), 127>(a, how, x, begin, end);
      }
    return with_digits<b, 0, (1 << b) - 1>(a, how, x, begin, end);
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

}  // namespace lowbit::cpu::avx2
