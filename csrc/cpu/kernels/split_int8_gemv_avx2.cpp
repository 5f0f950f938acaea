// Split-int8 GEMV for AVX2 (picture and contract in split_int8_gemv.h).
//
// maddubs adds pairs of products of an unsigned code and a signed limb in int16. At most 127 / max(code) such pair sums are added
// before they are widened to int32 (128 * 2 * 127 < 2^15), where a factor of 256 moves the higher limb up. 8-bit codes are
// multiplied as int16 words with two limbs in one. All integer sums are exact: the sum of |code| in a lane is at most 512, times
// 22 bits of x (sums_fit_int32); two steps are summed before scaling only where that holds for both together. With two limbs or
// one, four lanes of four rows are reduced to one register first, so that one multiplication scales all four rows (quad sums).
#include <algorithm>

#include "tile_args.h"
#include "../decode/unpack_avx2.h"

// Widths: 2 3 4 5 6 7 8
namespace lowbit::cpu::avx2 {
namespace {

// How products of codes up to `largest` are accumulated.
template <int bits, int largest>
struct Products {
  static constexpr bool words = bits == 8;
  static constexpr int pairs_per_flush = words ? 1 : 127 / largest;  // int16 pair sums that are added before widening
  // Whether the sum of two steps fits in int32 with 22 bits of x.
  static constexpr bool pairs = 2 * largest * 4 * Planes<bits>::fields <= 512;
};

// int32 sums of the lanes over `steps` steps: bytes [steps * F] times the limbs of one row of x, `stride` bytes apart in steps.
template <int bits, int largest, int D, int steps>
__attribute__((always_inline)) inline __m256i lanes_of(const __m256i* bytes, const int8_t* limbs, int64_t stride) {
  using P = Products<bits, largest>;
  constexpr int F = P::words ? 2 : Planes<bits>::fields, count = P::words ? words_for(D) : D;
  __m256i sum = _mm256_setzero_si256();
#pragma GCC unroll 3
  for (int d = 0; d < count; d++) {
    if (P::words ? d > 0 : d > 1) sum = _mm256_slli_epi32(sum, P::words ? 16 : 8);
    const __m256i factor = _mm256_set1_epi16(!P::words && d == 0 && D > 1 ? 256 : 1);
    __m256i short_sums = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int i = 0; i < steps * F; i++) {
      const __m256i limb = bytes32(limbs + (i / F) * stride + (d * F + i % F) * 32);
      if constexpr (P::words) {
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(bytes[i], limb));
        continue;
      }
      const __m256i pair_sums = _mm256_maddubs_epi16(bytes[i], limb);
      short_sums = i % P::pairs_per_flush ? _mm256_add_epi16(short_sums, pair_sums) : pair_sums;
      if ((i + 1) % P::pairs_per_flush == 0 || i + 1 == steps * F) sum = _mm256_add_epi32(sum, _mm256_madd_epi16(short_sums, factor));
    }
  }
  return sum;
}

constexpr int R = 4;  // rows of the weight in a tile: their sums stay in registers
constexpr int64_t scale_slots = max_groups + 16;  // scales of a row, and 16 that a vector store may write behind them
template <int bits>
using TileArgs = cpu::TileArgs<Planes<bits>>;

// Sums the lanes of four rows by fours: lane 4 i + r of the result belongs to row r.
inline __m256i quad_sums(const __m256i* of_row) {
  const __m256i ab = _mm256_add_epi32(_mm256_unpacklo_epi32(of_row[0], of_row[1]), _mm256_unpackhi_epi32(of_row[0], of_row[1]));
  const __m256i cd = _mm256_add_epi32(_mm256_unpacklo_epi32(of_row[2], of_row[3]), _mm256_unpackhi_epi32(of_row[2], of_row[3]));
  return _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
}

// `count` units of U steps of a group: R rows of the weight times M rows of x in D limbs, added to total [M, R], or to [M] where
// `use_quads` puts four rows in a register. Not inlined and long-running, so that registers hold only what a step needs.
template <int bits, int tables, int largest, int D, int M, int U, bool use_quads, bool in_groups, bool has_zeros>
__attribute__((noinline)) void gemv_tile(const CodeUnpacker<bits, tables>& codes_of, const TileArgs<bits>& args, int64_t count,
                                          __m256* total) {
  using P = Planes<bits>;
  constexpr int F = P::fields, G = bits == 8 ? 2 : F, S = use_quads ? 1 : R;  // G: registers of a step's codes
  constexpr int64_t units_per_slice = slice / (4 * lanes * F * U);
  constexpr int64_t size = (bits == 8 ? 2 * words_for(D) : D * F) * 32;  // bytes of a step's limbs of one row of x
  const CodeUnpacker<bits, tables> codes = codes_of;
  const uint8_t* at[P::count];
  for (int p = 0; p < P::count; p++) at[p] = args.at[p];
  uintptr_t prefetch_at = args.prefetch_at;
  const int64_t stride = args.stride, m = args.m, slices = args.slices, first = args.first;
  const int32_t *groups = args.group, *lane = args.lane_group, *sums = args.sums;
  const int8_t* limbs = args.limbs;
  const float *slice_scale = args.slice_scale, *const scale = args.scale, *const zero = args.zero;
  const int64_t row_step = M == 1 && m == 1 ? size : m * size;  // bytes between the limbs of two steps

  for (; count > 0; count -= units_per_slice) {
    __m256 part[S][M];
    for (auto& of_row : part)
      for (__m256& p : of_row) p = _mm256_setzero_ps();
    const int64_t units = count < units_per_slice ? count : units_per_slice;
    for (int64_t u = 0; u < units; u++) {
#pragma GCC unroll 8
      for (int64_t byte = 0; byte < R * P::bytes_per_step * U; byte += 64)
        _mm_prefetch(reinterpret_cast<const char*>(prefetch_at + byte), _MM_HINT_T1);
      // The narrower planes of all rows are loaded first: their unpacking is the longest dependency chain, and the out-of-order
      // window is too short to reach loads behind it.
      __m256i narrower[R][U][2];
#pragma GCC unroll 4
      for (int r = 0; P::count > 1 && r < R; r++) {
#pragma GCC unroll 4
        for (int i = 0; i < U; i++) {
          const uint8_t* local[P::count];
          for (int p = 0; p < P::count; p++) local[p] = at[p] + i * P::bytes(p);
          codes.load_narrower_planes(local, r * stride, narrower[r][i]);
          for (int p = 1; p < P::count; p++) asm("" : "+x"(narrower[r][i][p - 1]));
        }
      }
      __m256i sum[M][R];
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        __m256i bytes[U * G];
#pragma GCC unroll 4
        for (int i = 0; i < U; i++)
          codes.template unpack<!has_zeros>(bytes32(at[0] + i * P::bytes(0) + r * stride), narrower[r][i], bytes + i * G);
#pragma GCC unroll 4
        for (int i = 0; i < M; i++) {
          sum[i][r] = lanes_of<bits, largest, D, U>(bytes, limbs + i * size, row_step);
          asm("" : "+x"(sum[i][r]));  // computed now, and limbs reloaded for each row: there are no registers to hold either
        }
        limbs = opaque_advance(limbs, 0);
      }
      const int64_t group = *groups - first;
      const auto lane_group = [&](const float* all) {
        if constexpr (in_groups && use_quads) return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(all + 4 * group));
        else if constexpr (in_groups) return _mm256_broadcast_ss(all + group);
        else return _mm256_permutevar8x32_ps(_mm256_loadu_ps(all + (use_quads ? 4 : 1) * group), bytes32(lane));
      };
#pragma GCC unroll 4
      for (int i = 0; i < M; i++) {
        __m256i share = bytes32(sums + i * lanes);
#pragma GCC unroll 4
        for (int next = 1; next < U; next++) share = _mm256_add_epi32(share, bytes32(sums + (next * m + i) * lanes));
        if constexpr (use_quads) {
          if constexpr (has_zeros) share = _mm256_mullo_epi32(_mm256_castps_si256(lane_group(zero)), share);
          const __m256 all = _mm256_cvtepi32_ps(_mm256_add_epi32(quad_sums(sum[i]), share));
          part[0][i] = _mm256_fmadd_ps(all, lane_group(scale), part[0][i]);
          continue;
        }
#pragma GCC unroll 4
        for (int r = 0; r < S; r++) {
          __m256 all;
          if constexpr (!has_zeros) {
            all = _mm256_cvtepi32_ps(_mm256_add_epi32(sum[i][r], share));
          } else if constexpr (D < 3) {  // at most 24 bits: exact in float
            all = _mm256_fmadd_ps(lane_group(zero + r * scale_slots), _mm256_castsi256_ps(share), _mm256_cvtepi32_ps(sum[i][r]));
          } else {
            const __m256i less = _mm256_mullo_epi32(_mm256_castps_si256(lane_group(zero + r * scale_slots)), share);
            all = _mm256_cvtepi32_ps(_mm256_add_epi32(sum[i][r], less));
          }
          part[r][i] = _mm256_fmadd_ps(all, lane_group(scale + r * scale_slots), part[r][i]);
        }
      }
      for (int p = 0; p < P::count; p++) at[p] = opaque_advance(at[p], U * P::bytes(p));
      prefetch_at = opaque_advance(prefetch_at, R * P::bytes_per_step * U);
      groups += U;
      if constexpr (!in_groups) lane = opaque_advance(lane, lanes);
      limbs = opaque_advance(limbs, U * m * size), sums = opaque_advance(sums, U * m * lanes);
    }
    for (int i = 0; i < M; i++) {
      const __m256 slice_factor = _mm256_set1_ps(slice_scale[i * slices]);
      for (int r = 0; r < S; r++) total[i * S + r] = _mm256_fmadd_ps(part[r][i], slice_factor, total[i * S + r]);
    }
    slice_scale++;
  }
}

// Scales and zero points of a tile's rows for the groups of a chunk of columns.
struct ScaleChunk {
  alignas(32) float scale[R * scale_slots];
  alignas(32) float zero[R * scale_slots];  // int32, where there are three limbs or quad sums
};

// Rows of the weight, R at a time, times all rows of x: with quad sums in one limb or two, in groups without them in three. The
// last rows are computed one at a time, as R copies of one row.
template <int bits, int tables, int largest, bool use_quads, bool in_groups>
struct GemvRows {
  using P = Planes<bits>;
  static constexpr int S = use_quads ? 1 : R;  // registers of sums for a row of x
  static constexpr int64_t columns = 4 * lanes * P::fields, steps_per_slice = slice / columns;
  // steps of one group that are summed before scaling
  static constexpr int steps_per_unit = in_groups && (use_quads || Products<bits, largest>::pairs) ? 128 / columns : 1;
  const Linear& a;
  const PackedLimbs& x;
  const RowRange& range;
  const CodeUnpacker<bits, tables> codes;
  const bool exponents, has_zeros, has_whole_units;
  const float unit;
  const int64_t slices, full_steps, groups, steps_per_chunk, size;
  __m128i largest_zero = _mm_setzero_si128();
  GemvRows(const Linear& a, const ByteDecoding& decoding, const PackedLimbs& x, const RowRange& range)
      : a(a), x(x), range(range), codes(decoding), exponents(a.scale.table && are_exponents(a.scale.table)), has_zeros(a.zero_point.data),
        has_whole_units(a.group >= a.k || a.group % (steps_per_unit * columns) == 0), unit(a.has_outer ? decoding.unit * a.outer : decoding.unit),
        slices((a.k + slice - 1) / slice), full_steps(a.k / columns), groups((a.k + a.group - 1) / a.group),
        steps_per_chunk(std::max<int64_t>(max_groups * a.group / slice, 1) * steps_per_slice),
        size((bits == 8 ? 2 * words_for(x.count) : x.count * P::fields) * 32) {}

  bool is_tail(int64_t row) const { return range.end - row < R; }

  // Loads the scales and zero points of R rows from `row` on for steps [from, to).
  __attribute__((noinline)) void load_chunk(int64_t row, int64_t from, int64_t to, ScaleChunk& of) {
    const int64_t first = x.first_group[from], stop = to < x.steps ? (to * columns - 1) / a.group + 1 : groups;
    if constexpr (use_quads) {
      const int64_t row_step = is_tail(row) ? 0 : 1;
      load_scales_quads(a, exponents, row, row_step, first, stop - first, unit, of.scale);
      if (has_zeros) largest_zero = _mm_max_epu8(largest_zero, load_zeros_quads(a, row, row_step, first, stop - first, of.zero));
      return;
    }
    for (int r = 0; r < R; r++) {
      const int64_t local = is_tail(row) ? row : row + r;
      load_scales(a, exponents, local, first, stop - first, unit, of.scale + r * scale_slots);
      if (!has_zeros) continue;
      largest_zero = _mm_max_epu8(largest_zero, load_zeros(a, local, first, stop - first, x.count < 3, of.zero + r * scale_slots));
    }
  }

  // The kernel for M rows of x. Four with three limbs are an eighth of all kernels, and faster than two and two where a code takes
  // several lookups.
  static constexpr bool fours_of_three = tables > 1;
  template <int M, int U>
  auto tile_for() const {
    const auto with = [&](auto limbs) {
      constexpr int D = decltype(limbs)::value;
      auto run_tile = gemv_tile<bits, tables, largest, D, M, U, use_quads, in_groups, false>;
      if constexpr (supports_zeros<bits, tables != 0>)
        if (has_zeros) run_tile = gemv_tile<bits, tables, largest, D, M, U, use_quads, in_groups, true>;
      return run_tile;
    };
    if constexpr (in_groups && !use_quads) {
      return with(std::integral_constant<int, 3>());
    } else {
      if constexpr (!use_quads && (M < 4 || fours_of_three))
        if (x.count == 3) return with(std::integral_constant<int, 3>());
      return x.count == 1 ? with(std::integral_constant<int, 1>()) : with(std::integral_constant<int, 2>());
    }
  }

  // Steps [s, s + count) of a tile, whose codes `steps` points to, times all rows of x, U steps at a time.
  template <int U>
  __attribute__((noinline)) void run_steps(TileArgs<bits>& steps, int64_t s, int64_t count, __m256* total) const {
    if (count < U) return;
    steps.group = x.first_group + s, steps.lane_group = in_groups ? nullptr : x.group_of_lane + s * lanes;
    const auto run_rows_of_x = [&](int64_t m, auto rows) {
      constexpr int M = decltype(rows)::value;
      steps.limbs = x.limbs + (s * a.m + m) * size, steps.sums = x.sums + (s * a.m + m) * lanes;
      steps.slice_scale = x.scale + m * slices + s / steps_per_slice;
      tile_for<M, U>()(codes, steps, count / U, total + m * S);
    };
    int64_t m = 0;
    if constexpr (use_quads || !in_groups || fours_of_three)
      for (; (x.count < 3 || fours_of_three) && m + 4 <= a.m; m += 4) run_rows_of_x(m, std::integral_constant<int, 4>());
    for (; m + 2 <= a.m; m += 2) run_rows_of_x(m, std::integral_constant<int, 2>());
    if (m < a.m) run_rows_of_x(m, std::integral_constant<int, 1>());
    for (int p = 0; p < P::count; p++) steps.at[p] += count / U * U * P::bytes(p);
    steps.prefetch_at += count / U * U * R * P::bytes_per_step;
  }

  bool run() {
    ScaleChunk of;
    __m256 total[max_rows * S];
    for (int64_t row = range.begin; row < range.end;) {
      const bool is_single = is_tail(row);
      const int64_t next = row + (is_single ? 1 : R), stride = is_single ? 0 : a.packed_stride;
      const uint8_t* const packed = a.packed + row * a.packed_stride;
      const P planes(packed, a.k);
      for (int64_t i = 0; i < a.m * S; i++) total[i] = _mm256_setzero_ps();
      // Prefetches the codes two tiles ahead for the L2 cache, in memory order. R short rows are read at once, more streams than
      // the hardware prefetcher tracks, and limbs fill the L1 cache. One byte of each page four tiles ahead hides the TLB miss.
      TileArgs<bits> steps;
      const auto prefetch_at = [&](int64_t rows) {
        return reinterpret_cast<uintptr_t>(a.packed) + row_to_prefetch(range, row, rows) * a.packed_stride;
      };
      steps.prefetch_at = prefetch_at(2 * R);
      for (int64_t byte = 0; byte < R * full_steps * P::bytes_per_step; byte += 4096)
        _mm_prefetch(reinterpret_cast<const char*>(prefetch_at(4 * R) + byte), _MM_HINT_T1);
      const int64_t prefetch_row = row_to_prefetch(range, row, 2 * R);
      prefetch_l2(a.scale, prefetch_row, R, 0, 1, 1);
      if (has_zeros) prefetch_l2(a.zero_point, prefetch_row, R, 0, 1, 1);
      for (int p = 0; p < P::count; p++) steps.at[p] = planes.at[p];
      steps.stride = stride, steps.m = a.m, steps.slices = slices, steps.scale = of.scale, steps.zero = of.zero;
      for (int64_t from = 0; from < x.steps; from += steps_per_chunk) {
        const int64_t to = std::min(from + steps_per_chunk, x.steps), stop = std::min(to, full_steps);
        const int64_t single_from = has_whole_units ? stop - (stop - from) % steps_per_unit : from;  // from here on one step at a time
        load_chunk(row, from, to, of);
        steps.first = x.first_group[from];
        run_steps<steps_per_unit>(steps, from, single_from - from, total);
        run_steps<1>(steps, single_from, stop - single_from, total);
        if (stop == to) continue;
        LastStep<bits> last[R];
        for (int r = 0; r < R; r++) last[r].copy(P(packed + r * stride, a.k), full_steps, a.k);
        for (int p = 0; p < P::count; p++) steps.at[p] = last[0].bytes[p];
        steps.stride = sizeof last[0];
        run_steps<1>(steps, full_steps, 1, total);
      }
      for (int64_t m = 0; m < a.m; m++) {
        float* const y = a.y + m * a.n + row;
        const __m128 sums = use_quads ? sums_of(total[m]) : sums_of(total + m * S);
        if (is_single) _mm_store_ss(y, sums);
        else _mm_storeu_ps(y, sums);
      }
      row = next;
    }
    const __m128i maximum = _mm_set1_epi8(static_cast<char>((1 << bits) - 1));
    return _mm_movemask_epi8(_mm_cmpeq_epi8(_mm_max_epu8(largest_zero, maximum), maximum)) == 0xffff;
  }
};

template <int bits, int tables, int largest>
bool gemv_for_limbs(const Linear& a, const ByteDecoding& decoding, const PackedLimbs& x, const RowRange& range) {
  if (x.quad_sums && x.group_of_lane) return GemvRows<bits, tables, largest, true, false>(a, decoding, x, range).run();
  if (x.quad_sums) return GemvRows<bits, tables, largest, true, true>(a, decoding, x, range).run();
  if (x.count == 3 && !x.group_of_lane) return GemvRows<bits, tables, largest, false, true>(a, decoding, x, range).run();
  return GemvRows<bits, tables, largest, false, false>(a, decoding, x, range).run();
}

}  // namespace

template <int bits>
bool split_int8_gemv(const Linear& a, const ByteDecoding& decoding, const PackedLimbs& x, const RowRange& range) {
  if constexpr (bits <= 6)
    if (decoding.table) {
      bool small = bits == 4;  // fp4
      for (int code = 0; code < 16; code++) small = small && decoding.table[code] <= small_table_max;
      if constexpr (bits == 4)
        if (small) return gemv_for_limbs<bits, 1, small_table_max>(a, decoding, x, range);
      bool mirrored = bits == 6;  // fp6: the upper half of the table mirrors the lower
      for (int code = 0; code < 32; code++) mirrored = mirrored && decoding.table[code] + decoding.table[code + 32] == 2 * decoding.offset;
      if constexpr (bits == 6)
        if (mirrored) return gemv_for_limbs<bits, 2, 127>(a, decoding, x, range);
      return gemv_for_limbs<bits, bits <= 4 ? 1 : 1 << (bits - 4), 127>(a, decoding, x, range);
    }
  return gemv_for_limbs<bits, 0, (1 << bits) - 1>(a, decoding, x, range);
}
template bool split_int8_gemv<LOWBIT_BITS>(const Linear&, const ByteDecoding&, const PackedLimbs&, const RowRange&);

}  // namespace lowbit::cpu::avx2
