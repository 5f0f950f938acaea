// Linear for few rows of x on integer dot products. Compiled for AVX-512 with VBMI and VNNI.
//
// Codes come out of their planes in the order in which that is cheapest, one AND and one shift for 64 of them, and the digits
// lie in the same order (order_of_x.cpp). A dot product of four bytes adds each digit's products to sixteen integers, which are
// moved up by eight bits from digit to digit. These sums, less the zero point's share, are exact: no lane has more than 512 times
// the 22 bits of x.
// What follows is fp32: the scales of the groups, those of the slices, the sum of the lanes. No sum depends on the threads.
#include "digits.h"

#include <algorithm>
#include <memory>
#include <type_traits>

#include "digits_steps.h"
#include "steps.h"

// Widths: 2 3 4 5 6 7 8
namespace lowbit::cpu::avx512vnni {
namespace {

// Codes of one row as bytes: what the instructions of a step need beside the planes.
template <int bits, bool has_table>
struct Bytes {
  using P = Planes<bits>;
  __m512i flipped, table;
  __m512i above[2];  // of three bits: where the upper bits of the even fields go to, and those of the odd ones
  explicit Bytes(const Bytewise& how)
      : flipped(every(P::count == 1 || !how.flipped ? how.flipped : P::width(P::count - 1) == 1 ? 0xff : 0xaa)),  // last plane
        table(has_table ? _mm512_loadu_si512(how.table) : _mm512_setzero_si512()) {
    alignas(64) uint8_t bytes[64];
    for (int odd = 0; odd < 2; odd++) {
      for (int i = 0; i < 64; i++) {
        const int spread = (i >> odd & 1) << 2 | (i >> odd & 4) << 4;
        bytes[i] = static_cast<uint8_t>(how.flipped ? spread ^ 0x44 : spread);
      }
      above[odd] = _mm512_load_si512(bytes);
    }
  }
  inline void take(const uint8_t* const* at, int64_t row, __m512i* bytes) const {
    if constexpr (bits == 3 && !has_table) return take_three(at, row, bytes);
    __m512i quads[3];
    if constexpr (P::count > 1) quads[1] = quads_of<P::bytes(1)>(at[1] + row);
    if constexpr (P::count > 2) quads[2] = quads_of<P::bytes(2)>(at[2] + row);
    __m512i widest = _mm512_loadu_si512(at[0] + row);
    asm("" : "+v"(widest));  // read once: a load takes as long as a product
    if constexpr (has_table) {
      take_codes<bits, false>(widest, quads, bytes);
      for (int f = 0; f < P::fields; f++) bytes[f] = _mm512_permutexvar_epi8(bytes[f], table);
    } else if constexpr (P::count == 1) {
      take_fields(widest, bytes);
    } else {
      quads[P::count - 1] = _mm512_xor_si512(quads[P::count - 1], flipped);
      take_codes<bits, true>(widest, quads, bytes);
    }
  }

 private:
  // The upper bits of four codes, spread to two of them in a byte: one shift for two fields, and none of a plane for each field.
  inline void take_three(const uint8_t* const* at, int64_t row, __m512i* bytes) const {
    const __m512i lower = _mm512_loadu_si512(at[0] + row);
    const __m512i fours = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(0x1c1814100c080400), quads_of<32>(at[1] + row));
    const __m512i threes = every(7), twos = every(0x33);
    const auto both = [&](__m512i low, __m512i spread) {
      return _mm512_ternarylogic_epi64(low, twos, _mm512_permutexvar_epi8(fours, spread), 0xea);  // (a & b) | c
    };
    const __m512i even = both(lower, above[0]), odd = both(_mm512_srli_epi16(lower, 2), above[1]);
    bytes[0] = _mm512_and_si512(even, threes), bytes[2] = _mm512_and_si512(_mm512_srli_epi16(even, 4), threes);
    bytes[1] = _mm512_and_si512(odd, threes), bytes[3] = _mm512_and_si512(_mm512_srli_epi16(odd, 4), threes);
  }

  template <int field = 0>
  inline void take_fields(__m512i widest, __m512i* bytes) const {
    if constexpr (field < P::fields) {
      const __m512i own = field ? _mm512_srli_epi16(widest, field * bits) : widest;
      bytes[field] = bits == 8 ? _mm512_xor_si512(own, flipped)
                               : _mm512_ternarylogic_epi64(own, every((1 << bits) - 1), flipped, 0x6a);  // (a & b) ^ c
      take_fields<field + 1>(widest, bytes);
    }
  }
};

constexpr int64_t room = most_groups + 48;  // scales of a row, and what may be written behind
template <int bits>
using Steps = cpu::Steps<Planes<bits>>;

// The sums of four lanes of each row, the rows side by side.
inline __m512i in_quarters(const __m512i* of_row) {
  const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(of_row[0], of_row[1]), _mm512_unpackhi_epi32(of_row[0], of_row[1]));
  const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(of_row[2], of_row[3]), _mm512_unpackhi_epi32(of_row[2], of_row[3]));
  return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}

// `count` steps of 4 Q rows of the weight times M rows of x, in D digits, added to total [M, 4 Q], or [M, Q] where lanes come
// together in `quarters`. A call of its own for many slices, so that nothing but what a step needs is in registers.
template <int bits, bool has_table, int D, int M, int Q, bool quarters, bool in_groups, bool has_zeros>
__attribute__((noinline)) void take_steps(const Bytes<bits, has_table>& how, const Steps<bits>& given, int64_t count,
                                          __m512* total) {
  using P = Planes<bits>;
  constexpr int F = P::fields, R = 4 * Q, S = quarters ? Q : R;
  constexpr int64_t steps_of_slice = slice / (64 * F);
  const Bytes<bits, has_table> bytes_of = how;
  const uint8_t* at[P::count];
  for (int p = 0; p < P::count; p++) at[p] = given.at[p];
  uintptr_t ahead = given.ahead;
  const int64_t stride = given.stride, m = given.m, slices = given.slices, first = given.first;
  const int32_t *groups = given.group, *lane = given.of_lane, *sums = given.sums;
  const int8_t* digits = given.digits;
  const float *of_slice = given.of_slice, *const scale = given.scale, *const zero = given.zero;

  __m512 part[S][M];
  const auto step = [&]() __attribute__((always_inline)) {
    __m512i bytes[R][F];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) bytes_of.take(at, r * stride, bytes[r]);
#pragma GCC unroll 8
    for (int line = 0; line < R * P::bytes_of_step / 64; line++)
      _mm_prefetch(reinterpret_cast<const char*>(ahead + line * 64), _MM_HINT_T1);
    ahead = moved(ahead, R * P::bytes_of_step);
    for (int p = 0; p < P::count; p++) at[p] = moved(at[p], P::bytes(p));
    const int64_t group = *groups++ - first;
    const auto of_lane = [&](const float* all) {
      if constexpr (in_groups && quarters) return _mm512_broadcast_f32x4(_mm_loadu_ps(all + 4 * group));
      else if constexpr (in_groups) return _mm512_set1_ps(all[group]);
      else if constexpr (quarters) return _mm512_permutexvar_ps(_mm512_loadu_si512(lane), _mm512_loadu_ps(all + 4 * group));
      else return _mm512_permutexvar_ps(_mm512_loadu_si512(lane), _mm512_loadu_ps(all + group));
    };
#pragma GCC unroll 4
    for (int i = 0; i < M; i++) {
      __m512i sum[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) sum[r] = _mm512_setzero_si512();
#pragma GCC unroll 3
      for (int d = 0; d < D; d++) {
#pragma GCC unroll 8
        for (int f = 0; f < F; f++) {
          __m512i digit = _mm512_loadu_si512(digits + ((i * D + d) * F + f) * 64);
          asm("" : "+v"(digit));  // read once: a load takes as long as a product
#pragma GCC unroll 8
          for (int r = 0; r < R; r++)
            sum[r] = _mm512_dpbusd_epi32(d && !f ? _mm512_slli_epi32(sum[r], 8) : sum[r], bytes[r][f], digit);
        }
      }
      const __m512i share = _mm512_loadu_si512(sums + i * lanes);
      if constexpr (quarters) {
#pragma GCC unroll 2
        for (int q = 0; q < Q; q++) {
          const __m512i own = in_quarters(sum + 4 * q);
          const auto with_zeros = [&] {
            return _mm512_sub_epi32(own, _mm512_mullo_epi32(_mm512_castps_si512(of_lane(zero + q * 4 * room)), share));
          };
          __m512 all;
          if constexpr (has_zeros) all = _mm512_cvtepi32_ps(with_zeros());
          else all = _mm512_cvtepi32_ps(_mm512_add_epi32(own, share));
          part[q][i] = _mm512_fmadd_ps(all, of_lane(scale + q * 4 * room), part[q][i]);
        }
        continue;
      }
#pragma GCC unroll 4
      for (int r = 0; r < S; r++) {
        __m512 all;
        if constexpr (!has_zeros) {
          all = _mm512_cvtepi32_ps(_mm512_add_epi32(sum[r], share));
        } else if constexpr (D < 3) {  // no more than 24 bits: exact in floats
          all = _mm512_fmadd_ps(of_lane(zero + r * room), _mm512_castsi512_ps(share), _mm512_cvtepi32_ps(sum[r]));
        } else {
          const __m512i less = _mm512_mullo_epi32(_mm512_castps_si512(of_lane(zero + r * room)), share);
          all = _mm512_cvtepi32_ps(_mm512_add_epi32(sum[r], less));
        }
        part[r][i] = _mm512_fmadd_ps(all, of_lane(scale + r * room), part[r][i]);
      }
    }
    if constexpr (!in_groups) lane = moved(lane, lanes);
    digits = moved(digits, m * D * F * 64), sums = moved(sums, m * lanes);
  };
  const auto take_slice = [&](int64_t steps, auto is_whole) __attribute__((always_inline)) {
    for (auto& of_row : part)
      for (__m512& p : of_row) p = _mm512_setzero_ps();
    if constexpr (decltype(is_whole)::value) {
#pragma GCC unroll 4
      for (int64_t s = 0; s < steps_of_slice; s++) step();
    } else {
      for (int64_t s = 0; s < steps; s++) step();
    }
    for (int i = 0; i < M; i++) {
      const __m512 times = _mm512_set1_ps(of_slice[i * slices]);
      for (int r = 0; r < S; r++) total[i * S + r] = _mm512_fmadd_ps(part[r][i], times, total[i * S + r]);
    }
    of_slice++;
  };
  for (; count >= steps_of_slice; count -= steps_of_slice) take_slice(steps_of_slice, std::true_type());
  if (count > 0) take_slice(count, std::false_type());
}

// The sums of the quarters of a register.
inline __m128 sums_of(__m512 of) {
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(of), _mm512_extractf32x8_ps(of, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// The sums of the lanes of four registers.
inline __m128 sums_of(const __m512* of) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(of[0], of[1]), _mm512_unpackhi_ps(of[0], of[1]));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(of[2], of[3]), _mm512_unpackhi_ps(of[2], of[3]));
  return sums_of(_mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee)));
}

// Scales and zero points of the rows of a tile, for the groups of a chunk of columns.
template <int R>
struct Chunk {
  alignas(64) float scale[R * room];  // in quarters: of four rows, then of the next four
  alignas(64) float zero[R * room];   // integers, where there are three digits or quarters
};

// Rows of the weight, R = 4 Q at a time, times all rows of x in D digits; what is left over is taken a row at a time, R times
// over. More than four rows at a time are for one row of x, whose digits are read less often then.
template <int bits, bool has_table, int D, int Q, bool quarters, bool in_groups>
struct Rows {
  using P = Planes<bits>;
  static constexpr int R = 4 * Q, S = quarters ? Q : R;  // S: registers of sums of a row of x
  static constexpr int64_t columns = 64 * P::fields, steps_of_slice = slice / columns;
  const Linear& a;
  const DigitsOfX& x;
  const Turn& turn;
  const ByteScales of_byte;
  const Bytes<bits, has_table> bytes_of;
  const bool has_zeros;
  const float unit;
  const int64_t slices, whole, groups, steps_of_chunk;
  __m512i largest_zero = _mm512_setzero_si512();
  Rows(const Linear& a, const Bytewise& how, const DigitsOfX& x, const Turn& turn)
      : a(a), x(x), turn(turn), of_byte(a.scale), bytes_of(how), has_zeros(a.zero_point.data),
        unit(a.has_outer ? how.unit * a.outer : how.unit), slices((a.k + slice - 1) / slice), whole(a.k / columns),
        groups((a.k + a.group - 1) / a.group),
        steps_of_chunk(std::max<int64_t>(most_groups * a.group / slice, 1) * steps_of_slice) {}

  bool alone(int64_t row) const { return turn.end - row < R; }

  // The scales of the rows from `row` on for the steps from `from` on.
  void take_chunk(int64_t row, int64_t from, Chunk<R>& to) {
    if (row >= turn.end) return;
    const int64_t past = from + steps_of_chunk < x.steps ? (((from + steps_of_chunk) * columns) - 1) / a.group + 1 : groups;
    const int64_t first = x.first_group[from], count = past - first;
    if constexpr (quarters) {
      const int64_t apart = alone(row) ? 0 : 1;
      for (int q = 0; q < Q; q++) {
        const int64_t own = row + 4 * q * apart;
        take_scales_in_fours(a, of_byte, own, apart, first, count, unit, to.scale + q * 4 * room);
        if (!has_zeros) continue;
        largest_zero = _mm512_max_epu8(largest_zero, take_zeros_in_fours(a, own, apart, first, count, to.zero + q * 4 * room));
      }
      return;
    }
    for (int r = 0; r < R; r++) {
      const int64_t own = alone(row) ? row : row + r;
      take_scales(a, of_byte, own, first, count, unit, to.scale + r * room);
      if (!has_zeros) continue;
      largest_zero = _mm512_max_epu8(largest_zero, take_zeros(a, own, first, count, D < 3, to.zero + r * room));
    }
  }
  // Steps s .. s + count - 1 of a tile, of which `steps` says where the weight is, times all rows of x.
  void take(Steps<bits>& steps, int64_t s, int64_t count, const Chunk<R>& of, int64_t first, __m512* total) const {
    if (count <= 0) return;
    steps.group = x.first_group + s, steps.of_lane = in_groups ? nullptr : x.group_of_lane + s * lanes;
    steps.m = a.m, steps.slices = slices, steps.first = first, steps.scale = of.scale, steps.zero = of.zero;
    const auto some = [&](int64_t m, auto rows) {
      constexpr int M = decltype(rows)::value;
      steps.digits = x.digits + (s * a.m + m) * D * columns, steps.sums = x.sums + (s * a.m + m) * lanes;
      steps.of_slice = x.scale + m * slices + s / steps_of_slice;
      auto take_some = take_steps<bits, has_table, D, M, Q, quarters, in_groups, false>;
      if constexpr (takes_zeros<bits, has_table>)
        if (has_zeros) take_some = take_steps<bits, has_table, D, M, Q, quarters, in_groups, true>;
      take_some(bytes_of, steps, count, total + m * S);
    };
    if constexpr (Q > 1) return some(0, std::integral_constant<int, 1>());
    int64_t m = 0;
    for (; m + 4 <= a.m; m += 4) some(m, std::integral_constant<int, 4>());
    if (m + 2 <= a.m) some(m, std::integral_constant<int, 2>()), m += 2;
    if (m < a.m) some(m, std::integral_constant<int, 1>());
  }

  bool run() {
    const std::unique_ptr<Chunk<R>[]> chunks(new Chunk<R>[2]);
    __m512 total[Q > 1 ? S : most_rows_at_once * S];
    int64_t row = turn.begin;
    // Scales are taken one chunk ahead: what was only just stored is slow to read in other sizes.
    take_chunk(row, 0, chunks[0]);
    for (int64_t at = 0; row < turn.end;) {
      const bool one = alone(row);
      const int64_t next = row + (one ? 1 : R), stride = one ? 0 : a.packed_stride;
      const uint8_t* const packed = a.packed + row * a.packed_stride;
      const P planes(packed, a.k);
      for (int64_t i = 0; i < a.m * S; i++) total[i] = _mm512_setzero_ps();
      for (int64_t from = 0; from < x.steps; from += steps_of_chunk, at ^= 1) {
        const int64_t to = std::min(from + steps_of_chunk, x.steps), past = std::min(to, whole), first = x.first_group[from];
        take_chunk(to < x.steps ? row : next, to < x.steps ? to : 0, chunks[at ^ 1]);
        Steps<bits> steps;
        for (int p = 0; p < P::count; p++) steps.at[p] = planes.at[p] + from * P::bytes(p);
        steps.stride = stride;
        // Rows are short and several are read at once, which is more than a processor foresees: what lies two tiles further on,
        // in the order in which it lies, and for the second-level cache, since the first level is full of digits.
        const auto ahead = [&](int64_t rows) {
          return reinterpret_cast<uintptr_t>(a.packed) + row_ahead(turn, row, rows) * a.packed_stride + from * R * P::bytes_of_step;
        };
        steps.ahead = ahead(2 * R);
        // A page that was not touched for long takes longer still: one byte of it, further ahead.
        const uintptr_t further = ahead(4 * R);
        for (int64_t byte = 0; byte < (to - from) * R * P::bytes_of_step; byte += 4096)
          _mm_prefetch(reinterpret_cast<const char*>(further + byte), _MM_HINT_T1);
        const int64_t there = row_ahead(turn, row, 2 * R);
        fetch(a.scale, there, R, from, to, x.steps);
        if (has_zeros) fetch(a.zero_point, there, R, from, to, x.steps);
        take(steps, from, past - from, chunks[at], first, total);
        if (past == to) continue;
        LastStep<bits> last[R];
        for (int r = 0; r < R; r++) last[r].copy(P(packed + r * stride, a.k), whole, a.k);
        for (int p = 0; p < P::count; p++) steps.at[p] = last[0].bytes[p];
        steps.stride = sizeof last[0];
        take(steps, whole, 1, chunks[at], first, total);
      }
      for (int64_t m = 0; m < a.m; m++) {
        for (int q = 0; q < (one ? 1 : Q); q++) {
          const __m128 sums = quarters ? sums_of(total[m * S + q]) : sums_of(total + m * S + 4 * q);
          if (one) _mm_store_ss(a.y + m * a.n + row, sums);
          else _mm_storeu_ps(a.y + m * a.n + row + 4 * q, sums);
        }
      }
      row = next;
    }
    return _mm512_cmpgt_epu8_mask(largest_zero, every((1 << bits) - 1)) == 0;
  }
};

template <int bits, bool has_table>
bool with_digits(const Linear& a, const Bytewise& how, const DigitsOfX& x, const Turn& turn) {
  const auto with = [&](auto digits) {
    constexpr int D = decltype(digits)::value;
    if constexpr (D < 3) {
      if constexpr (bits == 4)
        if (x.in_quarters && a.m == 1) {
          if (x.group_of_lane) return Rows<bits, has_table, D, 2, true, false>(a, how, x, turn).run();
          return Rows<bits, has_table, D, 2, true, true>(a, how, x, turn).run();
        }
      if (x.in_quarters && x.group_of_lane) return Rows<bits, has_table, D, 1, true, false>(a, how, x, turn).run();
      if (x.in_quarters) return Rows<bits, has_table, D, 1, true, true>(a, how, x, turn).run();
    } else {
      if (!x.group_of_lane) return Rows<bits, has_table, D, 1, false, true>(a, how, x, turn).run();
    }
    return Rows<bits, has_table, D, 1, false, false>(a, how, x, turn).run();
  };
  if (x.count == 1) return with(std::integral_constant<int, 1>());
  if (x.count == 3) return with(std::integral_constant<int, 3>());
  return with(std::integral_constant<int, 2>());
}

}  // namespace

template <int bits>
bool digits_linear(const Linear& a, const Bytewise& how, const DigitsOfX& x, const Turn& turn) {
  if constexpr (bits <= 6)
    if (how.table) return with_digits<bits, true>(a, how, x, turn);
  return with_digits<bits, false>(a, how, x, turn);
}
template bool digits_linear<LOWBIT_BITS>(const Linear&, const Bytewise&, const DigitsOfX&, const Turn&);

}  // namespace lowbit::cpu::avx512vnni
