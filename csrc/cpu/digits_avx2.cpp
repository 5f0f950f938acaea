// Linear for few rows of x on integer dot products of AVX2.
//
// A code is a byte without a sign and a digit one with a sign; products of two such pairs are added in 16 bits, which holds as
// long as no more than 127 / (largest byte) such sums come together: 128 * 2 * 127 < 2^15. Then they are widened, times 256 where
// a digit below follows. Bytes of eight bits are multiplied as 16-bit words with two digits in one. Either way the sums are exact:
// no lane has more than 512 times the 22 bits of x, see `fits`; sums of two steps are only taken together where that is so for
// both. With two digits at most, four lanes of four rows come together before a scale, and zero point, of each is taken at once.
// What follows is fp32, as with AVX-512: the scales of the groups, those of the slices, the sum of the lanes. No sum depends on
// the threads.
#include <algorithm>

#include "digits_steps.h"
#include "steps_avx2.h"

// Widths: 2 3 4 5 6 7 8
namespace lowbit::cpu::avx2 {
namespace {

// How the products of bytes up to `largest` add up.
template <int bits, int largest>
struct Products {
  static constexpr bool words = bits == 8;
  static constexpr int together = words ? 1 : 127 / largest;  // sums of pairs that come together in 16 bits
  // Whether the sums of two steps hold in 32 bits with the 22 of x.
  static constexpr bool pairs = 2 * largest * 4 * Planes<bits>::fields <= 512;
};

// Sums of the lanes of `steps` steps: codes times the digits of one row of x.
template <int bits, int largest, int D, int steps>
__attribute__((always_inline)) inline __m256i lanes_of(const __m256i* bytes, const int8_t* digits, int64_t stride) {
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

constexpr int R = 4;  // rows of the weight in a tile: as many as leave the sums in registers
constexpr int64_t room = most_groups + 16;  // scales of a row, and what may be written behind
template <int bits>
using Steps = cpu::Steps<Planes<bits>>;

// The sums of four lanes of each row, the rows side by side.
inline __m256i in_quarters(const __m256i* of_row) {
  const __m256i ab = _mm256_add_epi32(_mm256_unpacklo_epi32(of_row[0], of_row[1]), _mm256_unpackhi_epi32(of_row[0], of_row[1]));
  const __m256i cd = _mm256_add_epi32(_mm256_unpacklo_epi32(of_row[2], of_row[3]), _mm256_unpackhi_epi32(of_row[2], of_row[3]));
  return _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
}

// `count` times U steps of a group of R rows of the weight times M rows of x, in D digits, added to total [M, R], or [M] where
// lanes come together in `quarters`. A call of its own for many slices, so that nothing but what a step needs is in registers.
template <int bits, int tables, int largest, int D, int M, int U, bool quarters, bool in_groups, bool has_zeros>
__attribute__((noinline)) void take_steps(const Codes<bits, tables>& codes_of, const Steps<bits>& given, int64_t count,
                                          __m256* total) {
  using P = Planes<bits>;
  constexpr int F = P::fields, G = bits == 8 ? 2 : F, S = quarters ? 1 : R;  // G: registers of a step's codes
  constexpr int64_t units_of_slice = slice / (4 * lanes * F * U);
  constexpr int64_t size = (bits == 8 ? 2 * words_of(D) : D * F) * 32;  // of a step's digits of one row of x
  const Codes<bits, tables> codes = codes_of;
  const uint8_t* at[P::count];
  for (int p = 0; p < P::count; p++) at[p] = given.at[p];
  uintptr_t ahead = given.ahead;
  const int64_t stride = given.stride, m = given.m, slices = given.slices, first = given.first;
  const int32_t *groups = given.group, *lane = given.of_lane, *sums = given.sums;
  const int8_t* digits = given.digits;
  const float *of_slice = given.of_slice, *const scale = given.scale, *const zero = given.zero;
  const int64_t apart = M == 1 && m == 1 ? size : m * size;  // bytes from a step's digits to the next one's

  for (; count > 0; count -= units_of_slice) {
    __m256 part[S][M];
    for (auto& of_row : part)
      for (__m256& p : of_row) p = _mm256_setzero_ps();
    const int64_t units = count < units_of_slice ? count : units_of_slice;
    for (int64_t u = 0; u < units; u++) {
#pragma GCC unroll 8
      for (int64_t byte = 0; byte < R * P::bytes_of_step * U; byte += 64)
        _mm_prefetch(reinterpret_cast<const char*>(ahead + byte), _MM_HINT_T1);
      // The narrower planes of all rows come first: what they give waits longest, and a processor looks only so far ahead.
      __m256i narrower[R][U][2];
#pragma GCC unroll 4
      for (int r = 0; P::count > 1 && r < R; r++) {
#pragma GCC unroll 4
        for (int i = 0; i < U; i++) {
          const uint8_t* own[P::count];
          for (int p = 0; p < P::count; p++) own[p] = at[p] + i * P::bytes(p);
          codes.take_narrower(own, r * stride, narrower[r][i]);
          for (int p = 1; p < P::count; p++) asm("" : "+x"(narrower[r][i][p - 1]));
        }
      }
      __m256i sum[M][R];
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        __m256i bytes[U * G];
#pragma GCC unroll 4
        for (int i = 0; i < U; i++)
          codes.template take<!has_zeros>(bytes32(at[0] + i * P::bytes(0) + r * stride), narrower[r][i], bytes + i * G);
#pragma GCC unroll 4
        for (int i = 0; i < M; i++) {
          sum[i][r] = lanes_of<bits, largest, D, U>(bytes, digits + i * size, apart);
          asm("" : "+x"(sum[i][r]));  // now, and the digits from memory for each row: there are no registers to hold either
        }
        digits = moved(digits, 0);
      }
      const int64_t group = *groups - first;
      const auto of_lane = [&](const float* all) {
        if constexpr (in_groups && quarters) return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(all + 4 * group));
        else if constexpr (in_groups) return _mm256_broadcast_ss(all + group);
        else return _mm256_permutevar8x32_ps(_mm256_loadu_ps(all + (quarters ? 4 : 1) * group), bytes32(lane));
      };
#pragma GCC unroll 4
      for (int i = 0; i < M; i++) {
        __m256i share = bytes32(sums + i * lanes);
#pragma GCC unroll 4
        for (int next = 1; next < U; next++) share = _mm256_add_epi32(share, bytes32(sums + (next * m + i) * lanes));
        if constexpr (quarters) {
          if constexpr (has_zeros) share = _mm256_mullo_epi32(_mm256_castps_si256(of_lane(zero)), share);
          const __m256 all = _mm256_cvtepi32_ps(_mm256_add_epi32(in_quarters(sum[i]), share));
          part[0][i] = _mm256_fmadd_ps(all, of_lane(scale), part[0][i]);
          continue;
        }
#pragma GCC unroll 4
        for (int r = 0; r < S; r++) {
          __m256 all;
          if constexpr (!has_zeros) {
            all = _mm256_cvtepi32_ps(_mm256_add_epi32(sum[i][r], share));
          } else if constexpr (D < 3) {  // no more than 24 bits: exact in floats
            all = _mm256_fmadd_ps(of_lane(zero + r * room), _mm256_castsi256_ps(share), _mm256_cvtepi32_ps(sum[i][r]));
          } else {
            const __m256i less = _mm256_mullo_epi32(_mm256_castps_si256(of_lane(zero + r * room)), share);
            all = _mm256_cvtepi32_ps(_mm256_add_epi32(sum[i][r], less));
          }
          part[r][i] = _mm256_fmadd_ps(all, of_lane(scale + r * room), part[r][i]);
        }
      }
      for (int p = 0; p < P::count; p++) at[p] = moved(at[p], U * P::bytes(p));
      ahead = moved(ahead, R * P::bytes_of_step * U);
      groups += U;
      if constexpr (!in_groups) lane = moved(lane, lanes);
      digits = moved(digits, U * m * size), sums = moved(sums, U * m * lanes);
    }
    for (int i = 0; i < M; i++) {
      const __m256 times = _mm256_set1_ps(of_slice[i * slices]);
      for (int r = 0; r < S; r++) total[i * S + r] = _mm256_fmadd_ps(part[r][i], times, total[i * S + r]);
    }
    of_slice++;
  }
}

// Scales and zero points of the rows of a tile, for the groups of a chunk of columns.
struct Chunk {
  alignas(32) float scale[R * room];
  alignas(32) float zero[R * room];  // integers, where there are three digits or quarters
};

// Rows of the weight, R at a time, times all rows of x in D digits; what is left over is taken a row at a time, R times over.
template <int bits, int tables, int largest, int D, bool quarters, bool in_groups>
struct Rows {
  using P = Planes<bits>;
  static constexpr int S = quarters ? 1 : R;  // registers of sums of a row of x
  static constexpr int64_t columns = 4 * lanes * P::fields, steps_of_slice = slice / columns;
  static constexpr int64_t size = (bits == 8 ? 2 * words_of(D) : D * P::fields) * 32;
  static constexpr int together = in_groups && (D < 3 || Products<bits, largest>::pairs) ? 128 / columns : 1;  // of one group
  const Linear& a;
  const DigitsOfX& x;
  const Turn& turn;
  const Codes<bits, tables> codes;
  const bool exponents, has_zeros, in_units;
  const float unit;
  const int64_t slices, whole, groups, steps_of_chunk;
  __m128i largest_zero = _mm_setzero_si128();
  Rows(const Linear& a, const Bytewise& how, const DigitsOfX& x, const Turn& turn)
      : a(a), x(x), turn(turn), codes(how), exponents(a.scale.table && are_exponents(a.scale.table)), has_zeros(a.zero_point.data),
        in_units(a.group >= a.k || a.group % (together * columns) == 0), unit(a.has_outer ? how.unit * a.outer : how.unit),
        slices((a.k + slice - 1) / slice), whole(a.k / columns), groups((a.k + a.group - 1) / a.group),
        steps_of_chunk(std::max<int64_t>(most_groups * a.group / slice, 1) * steps_of_slice) {}

  bool alone(int64_t row) const { return turn.end - row < R; }

  // The scales of the rows from `row` on for the steps from .. to - 1.
  void take_chunk(int64_t row, int64_t from, int64_t to, Chunk& of) {
    const int64_t first = x.first_group[from], past = to < x.steps ? (to * columns - 1) / a.group + 1 : groups;
    if constexpr (quarters) {
      const int64_t apart = alone(row) ? 0 : 1;
      take_scales_in_fours(a, exponents, row, apart, first, past - first, unit, of.scale);
      if (has_zeros) largest_zero = _mm_max_epu8(largest_zero, take_zeros_in_fours(a, row, apart, first, past - first, of.zero));
      return;
    }
    for (int r = 0; r < R; r++) {
      const int64_t own = alone(row) ? row : row + r;
      take_scales(a, exponents, own, first, past - first, unit, of.scale + r * room);
      if (!has_zeros) continue;
      largest_zero = _mm_max_epu8(largest_zero, take_zeros(a, own, first, past - first, D < 3, of.zero + r * room));
    }
  }

  // Steps s .. s + count - 1 of a tile, of which `steps` says where the weight is, times all rows of x, U at a time.
  template <int U>
  void take(Steps<bits>& steps, int64_t s, int64_t count, __m256* total) const {
    if (count < U) return;
    steps.group = x.first_group + s, steps.of_lane = in_groups ? nullptr : x.group_of_lane + s * lanes;
    const auto some = [&](int64_t m, auto rows) {
      constexpr int M = decltype(rows)::value;
      steps.digits = x.digits + (s * a.m + m) * size, steps.sums = x.sums + (s * a.m + m) * lanes;
      steps.of_slice = x.scale + m * slices + s / steps_of_slice;
      auto take_some = take_steps<bits, tables, largest, D, M, U, quarters, in_groups, false>;
      if constexpr (takes_zeros<bits, tables != 0>)
        if (has_zeros) take_some = take_steps<bits, tables, largest, D, M, U, quarters, in_groups, true>;
      take_some(codes, steps, count / U, total + m * S);
    };
    int64_t m = 0;
    for (; m + 4 <= a.m; m += 4) some(m, std::integral_constant<int, 4>());
    if (m + 2 <= a.m) some(m, std::integral_constant<int, 2>()), m += 2;
    if (m < a.m) some(m, std::integral_constant<int, 1>());
    for (int p = 0; p < P::count; p++) steps.at[p] += count / U * U * P::bytes(p);
    steps.ahead += count / U * U * R * P::bytes_of_step;
  }

  bool run() {
    Chunk of;
    __m256 total[most_rows_at_once * S];
    for (int64_t row = turn.begin; row < turn.end;) {
      const bool one = alone(row);
      const int64_t next = row + (one ? 1 : R), stride = one ? 0 : a.packed_stride;
      const uint8_t* const packed = a.packed + row * a.packed_stride;
      const P planes(packed, a.k);
      for (int64_t i = 0; i < a.m * S; i++) total[i] = _mm256_setzero_ps();
      // What lies two tiles further on, in the order in which it lies, for the second-level cache: rows are short and several are
      // read at once, which is more than a processor foresees, and the first level is full of digits. A page that was not touched
      // for long takes longer still: one byte of it, further ahead.
      Steps<bits> steps;
      const auto ahead = [&](int64_t rows) {
        return reinterpret_cast<uintptr_t>(a.packed) + row_ahead(turn, row, rows) * a.packed_stride;
      };
      steps.ahead = ahead(2 * R);
      for (int64_t byte = 0; byte < R * whole * P::bytes_of_step; byte += 4096)
        _mm_prefetch(reinterpret_cast<const char*>(ahead(4 * R) + byte), _MM_HINT_T1);
      const int64_t there = row_ahead(turn, row, 2 * R);
      fetch(a.scale, there, R, 0, 1, 1);
      if (has_zeros) fetch(a.zero_point, there, R, 0, 1, 1);
      for (int p = 0; p < P::count; p++) steps.at[p] = planes.at[p];
      steps.stride = stride, steps.m = a.m, steps.slices = slices, steps.scale = of.scale, steps.zero = of.zero;
      for (int64_t from = 0; from < x.steps; from += steps_of_chunk) {
        const int64_t to = std::min(from + steps_of_chunk, x.steps), past = std::min(to, whole);
        const int64_t in_ones = in_units ? past - (past - from) % together : from;  // from where on steps are taken one by one
        take_chunk(row, from, to, of);
        steps.first = x.first_group[from];
        take<together>(steps, from, in_ones - from, total);
        take<1>(steps, in_ones, past - in_ones, total);
        if (past == to) continue;
        LastStep<bits> last[R];
        for (int r = 0; r < R; r++) last[r].copy(P(packed + r * stride, a.k), whole, a.k);
        for (int p = 0; p < P::count; p++) steps.at[p] = last[0].bytes[p];
        steps.stride = sizeof last[0];
        take<1>(steps, whole, 1, total);
      }
      for (int64_t m = 0; m < a.m; m++) {
        float* const y = a.y + m * a.n + row;
        const __m128 sums = quarters ? sums_of(total[m]) : sums_of(total + m * S);
        if (one) _mm_store_ss(y, sums);
        else _mm_storeu_ps(y, sums);
      }
      row = next;
    }
    const __m128i most = _mm_set1_epi8(static_cast<char>((1 << bits) - 1));
    return _mm_movemask_epi8(_mm_cmpeq_epi8(_mm_max_epu8(largest_zero, most), most)) == 0xffff;
  }
};

template <int bits, int tables, int largest>
bool with_digits(const Linear& a, const Bytewise& how, const DigitsOfX& x, const Turn& turn) {
  const auto with = [&](auto digits) {
    constexpr int D = decltype(digits)::value;
    if constexpr (D < 3) {
      if (x.in_quarters && x.group_of_lane) return Rows<bits, tables, largest, D, true, false>(a, how, x, turn).run();
      if (x.in_quarters) return Rows<bits, tables, largest, D, true, true>(a, how, x, turn).run();
    } else {
      if (!x.group_of_lane) return Rows<bits, tables, largest, D, false, true>(a, how, x, turn).run();
    }
    return Rows<bits, tables, largest, D, false, false>(a, how, x, turn).run();
  };
  if (x.count == 1) return with(std::integral_constant<int, 1>());
  if (x.count == 3) return with(std::integral_constant<int, 3>());
  return with(std::integral_constant<int, 2>());
}

}  // namespace

template <int bits>
bool digits_linear(const Linear& a, const Bytewise& how, const DigitsOfX& x, const Turn& turn) {
  if constexpr (bits <= 6)
    if (how.table) {
      bool small = bits == 4;  // of fp4
      for (int code = 0; code < 16; code++) small = small && how.table[code] <= few;
      if constexpr (bits == 4)
        if (small) return with_digits<bits, 1, few>(a, how, x, turn);
      bool mirrored = bits == 6;  // of fp6
      for (int code = 0; code < 32; code++) mirrored = mirrored && how.table[code] + how.table[code + 32] == 2 * how.offset;
      if constexpr (bits == 6)
        if (mirrored) return with_digits<bits, 2, 127>(a, how, x, turn);
      return with_digits<bits, bits <= 4 ? 1 : 1 << (bits - 4), 127>(a, how, x, turn);
    }
  return with_digits<bits, 0, (1 << bits) - 1>(a, how, x, turn);
}
template bool digits_linear<LOWBIT_BITS>(const Linear&, const Bytewise&, const DigitsOfX&, const Turn&);

}  // namespace lowbit::cpu::avx2
