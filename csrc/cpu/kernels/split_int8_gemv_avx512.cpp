// Split-int8 GEMV for AVX-512 with VBMI and VNNI (picture and contract in split_int8_gemv.h).
//
// Codes are extracted in the order that costs least, one shift and one AND for 64 of them, and pack_activations.cpp stores limbs
// in that order. dpbusd adds four products of a limb to each of sixteen int32 lanes, which are shifted up by 8 bits between
// limbs. The sums less the zero point's share are exact: the sum of |code| in a lane is at most 512, times 22 bits of x. Scaling
// by group and by slice and the sum of the lanes are fp32.
#include "split_int8_gemv.h"

#include <algorithm>
#include <memory>
#include <type_traits>

#include "tile_args.h"
#include "../decode/unpack_avx512.h"

// Widths: 2 3 4 5 6 7 8
namespace lowbit::cpu::avx512vnni {
namespace {

// Unpacks a step of one row of the weight into codes as unsigned bytes.
template <int bits, bool has_table>
struct CodeUnpacker {
  using P = Planes<bits>;
  __m512i flipped, table;
  __m512i above[2];  // 3 bits: where the high bits go, for even and for odd fields
  explicit CodeUnpacker(const ByteDecoding& decoding)
      // the plane with the sign bit
      : flipped(broadcast_u8(P::count == 1 || !decoding.flipped ? decoding.flipped : P::width(P::count - 1) == 1 ? 0xff : 0xaa)),
        table(has_table ? _mm512_loadu_si512(decoding.table) : _mm512_setzero_si512()) {
    alignas(64) uint8_t bytes[64];
    for (int odd = 0; odd < 2; odd++) {
      for (int i = 0; i < 64; i++) {
        const int spread = (i >> odd & 1) << 2 | (i >> odd & 4) << 4;
        bytes[i] = static_cast<uint8_t>(decoding.flipped ? spread ^ 0x44 : spread);
      }
      above[odd] = _mm512_load_si512(bytes);
    }
  }
  inline void unpack(const uint8_t* const* at, int64_t row, __m512i* bytes) const {
    if constexpr (bits == 3 && !has_table) return extract_3bit(at, row, bytes);
    __m512i quads[3];
    if constexpr (P::count > 1) quads[1] = quads_of<P::bytes(1)>(at[1] + row);
    if constexpr (P::count > 2) quads[2] = quads_of<P::bytes(2)>(at[2] + row);
    __m512i widest = _mm512_loadu_si512(at[0] + row);
    asm("" : "+v"(widest));  // keeps the value in a register: a second load would cost as much as the product
    if constexpr (has_table) {
      extract_codes<bits, false>(widest, quads, bytes);
      for (int f = 0; f < P::fields; f++) bytes[f] = _mm512_permutexvar_epi8(bytes[f], table);
    } else if constexpr (P::count == 1) {
      extract_fields(widest, bytes);
    } else {
      quads[P::count - 1] = _mm512_xor_si512(quads[P::count - 1], flipped);
      extract_codes<bits, true>(widest, quads, bytes);
    }
  }

 private:
  // 3 bits: the high bits of four codes are looked up as a byte that holds two of them in place, so that two fields share one
  // shift.
  inline void extract_3bit(const uint8_t* const* at, int64_t row, __m512i* bytes) const {
    const __m512i lower = _mm512_loadu_si512(at[0] + row);
    const __m512i high_bits = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(0x1c1814100c080400), quads_of<32>(at[1] + row));
    const __m512i mask_7 = broadcast_u8(7), mask_33 = broadcast_u8(0x33);
    const auto merge_planes = [&](__m512i low, __m512i spread) {
      return _mm512_ternarylogic_epi64(low, mask_33, _mm512_permutexvar_epi8(high_bits, spread), 0xea);  // (a & b) | c
    };
    const __m512i even = merge_planes(lower, above[0]), odd = merge_planes(_mm512_srli_epi16(lower, 2), above[1]);
    bytes[0] = _mm512_and_si512(even, mask_7), bytes[2] = _mm512_and_si512(_mm512_srli_epi16(even, 4), mask_7);
    bytes[1] = _mm512_and_si512(odd, mask_7), bytes[3] = _mm512_and_si512(_mm512_srli_epi16(odd, 4), mask_7);
  }

  template <int field = 0>
  inline void extract_fields(__m512i widest, __m512i* bytes) const {
    if constexpr (field < P::fields) {
      const __m512i local = field ? _mm512_srli_epi16(widest, field * bits) : widest;
      bytes[field] = bits == 8 ? _mm512_xor_si512(local, flipped)
                               : _mm512_ternarylogic_epi64(local, broadcast_u8((1 << bits) - 1), flipped, 0x6a);  // (a & b) ^ c
      extract_fields<field + 1>(widest, bytes);
    }
  }
};

constexpr int64_t scale_slots = max_groups + 48;  // scales of a row, and 48 that a vector store may write behind them
template <int bits>
using TileArgs = cpu::TileArgs<Planes<bits>>;

// Sums the lanes of four rows by fours: lane 4 i + r of the result belongs to row r.
inline __m512i quad_sums(const __m512i* of_row) {
  const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(of_row[0], of_row[1]), _mm512_unpackhi_epi32(of_row[0], of_row[1]));
  const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(of_row[2], of_row[3]), _mm512_unpackhi_epi32(of_row[2], of_row[3]));
  return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}

// `count` steps of R = 4 Q rows of the weight times M rows of x in D limbs, added to total [M, R], or to [M, Q] where `use_quads`
// puts four rows in a register. Not inlined and long-running, so that registers hold only what a step needs.
template <int bits, bool has_table, int D, int M, int Q, bool use_quads, bool in_groups, bool has_zeros>
__attribute__((noinline)) void gemv_tile(const CodeUnpacker<bits, has_table>& decoding, const TileArgs<bits>& args, int64_t count,
                                          __m512* total) {
  using P = Planes<bits>;
  constexpr int F = P::fields, R = 4 * Q, S = use_quads ? Q : R;
  constexpr int64_t steps_per_slice = slice / (64 * F);
  const CodeUnpacker<bits, has_table> bytes_of = decoding;
  const uint8_t* at[P::count];
  for (int p = 0; p < P::count; p++) at[p] = args.at[p];
  uintptr_t prefetch_at = args.prefetch_at;
  const int64_t stride = args.stride, m = args.m, slices = args.slices, first = args.first;
  const int32_t *groups = args.group, *lane = args.lane_group, *sums = args.sums;
  const int8_t* limbs = args.limbs;
  const float *slice_scale = args.slice_scale, *const scale = args.scale, *const zero = args.zero;

  __m512 part[S][M];
  const auto step = [&]() __attribute__((always_inline)) {
    __m512i bytes[R][F];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) bytes_of.unpack(at, r * stride, bytes[r]);
#pragma GCC unroll 8
    for (int line = 0; line < R * P::bytes_per_step / 64; line++)
      _mm_prefetch(reinterpret_cast<const char*>(prefetch_at + line * 64), _MM_HINT_T1);
    prefetch_at = opaque_advance(prefetch_at, R * P::bytes_per_step);
    for (int p = 0; p < P::count; p++) at[p] = opaque_advance(at[p], P::bytes(p));
    const int64_t group = *groups++ - first;
    const auto lane_group = [&](const float* all) {
      if constexpr (in_groups && use_quads) return _mm512_broadcast_f32x4(_mm_loadu_ps(all + 4 * group));
      else if constexpr (in_groups) return _mm512_set1_ps(all[group]);
      else if constexpr (use_quads) return _mm512_permutexvar_ps(_mm512_loadu_si512(lane), _mm512_loadu_ps(all + 4 * group));
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
          __m512i limb = _mm512_loadu_si512(limbs + ((i * D + d) * F + f) * 64);
          asm("" : "+v"(limb));  // keeps the value in a register: a second load would cost as much as the product
#pragma GCC unroll 8
          for (int r = 0; r < R; r++)
            sum[r] = _mm512_dpbusd_epi32(d && !f ? _mm512_slli_epi32(sum[r], 8) : sum[r], bytes[r][f], limb);
        }
      }
      const __m512i share = _mm512_loadu_si512(sums + i * lanes);
      if constexpr (use_quads) {
#pragma GCC unroll 2
        for (int q = 0; q < Q; q++) {
          const __m512i local = quad_sums(sum + 4 * q);
          const auto with_zeros = [&] {
            return _mm512_sub_epi32(local, _mm512_mullo_epi32(_mm512_castps_si512(lane_group(zero + q * 4 * scale_slots)), share));
          };
          __m512 all;
          if constexpr (has_zeros) all = _mm512_cvtepi32_ps(with_zeros());
          else all = _mm512_cvtepi32_ps(_mm512_add_epi32(local, share));
          part[q][i] = _mm512_fmadd_ps(all, lane_group(scale + q * 4 * scale_slots), part[q][i]);
        }
        continue;
      }
#pragma GCC unroll 4
      for (int r = 0; r < S; r++) {
        __m512 all;
        if constexpr (!has_zeros) {
          all = _mm512_cvtepi32_ps(_mm512_add_epi32(sum[r], share));
        } else if constexpr (D < 3) {  // at most 24 bits: exact in float
          all = _mm512_fmadd_ps(lane_group(zero + r * scale_slots), _mm512_castsi512_ps(share), _mm512_cvtepi32_ps(sum[r]));
        } else {
          const __m512i less = _mm512_mullo_epi32(_mm512_castps_si512(lane_group(zero + r * scale_slots)), share);
          all = _mm512_cvtepi32_ps(_mm512_add_epi32(sum[r], less));
        }
        part[r][i] = _mm512_fmadd_ps(all, lane_group(scale + r * scale_slots), part[r][i]);
      }
    }
    if constexpr (!in_groups) lane = opaque_advance(lane, lanes);
    limbs = opaque_advance(limbs, m * D * F * 64), sums = opaque_advance(sums, m * lanes);
  };
  const auto run_slice = [&](int64_t steps, auto is_whole) __attribute__((always_inline)) {
    for (auto& of_row : part)
      for (__m512& p : of_row) p = _mm512_setzero_ps();
    if constexpr (decltype(is_whole)::value) {
#pragma GCC unroll 2
      for (int64_t s = 0; s < steps_per_slice; s++) step();
    } else {
      for (int64_t s = 0; s < steps; s++) step();
    }
    for (int i = 0; i < M; i++) {
      const __m512 slice_factor = _mm512_set1_ps(slice_scale[i * slices]);
      for (int r = 0; r < S; r++) total[i * S + r] = _mm512_fmadd_ps(part[r][i], slice_factor, total[i * S + r]);
    }
    slice_scale++;
  };
  if constexpr (M == 1)
    for (; count >= steps_per_slice; count -= steps_per_slice) run_slice(steps_per_slice, std::true_type());
  for (; count > 0; count -= steps_per_slice) run_slice(std::min(count, steps_per_slice), std::false_type());
}

// The sums of the four 128-bit quarters of a register.
inline __m128 sums_of(__m512 of) {
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(of), _mm512_extractf32x8_ps(of, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// The sums of all lanes, of four registers.
inline __m128 sums_of(const __m512* of) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(of[0], of[1]), _mm512_unpackhi_ps(of[0], of[1]));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(of[2], of[3]), _mm512_unpackhi_ps(of[2], of[3]));
  return sums_of(_mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee)));
}

// Scales and zero points of a tile's rows for the groups of a chunk of columns.
template <int R>
struct ScaleChunk {
  alignas(64) float scale[R * scale_slots];  // quad sums: [Q, scale_slots, 4]; else [R, scale_slots]
  alignas(64) float zero[R * scale_slots];   // int32, where there are three limbs or quad sums
};

// R = 4 Q rows of the weight at a time, times all rows of x: with quad sums in one limb or two, in groups without them in three.
// The last rows are computed one at a time, as R copies of one row. Q > 1 is for M = 1, where it halves the loads of limbs.
template <int bits, bool has_table, int Q, bool use_quads, bool in_groups>
struct GemvRows {
  using P = Planes<bits>;
  static constexpr int R = 4 * Q, S = use_quads ? Q : R;  // S: registers of sums for a row of x
  static constexpr int64_t columns = 64 * P::fields, steps_per_slice = slice / columns;
  const Linear& a;
  const PackedLimbs& x;
  const RowRange& range;
  const ByteScales byte_scales;
  const CodeUnpacker<bits, has_table> bytes_of;
  const bool has_zeros;
  const float unit;
  const int64_t slices, full_steps, groups, steps_per_chunk;
  __m512i largest_zero = _mm512_setzero_si512();
  GemvRows(const Linear& a, const ByteDecoding& decoding, const PackedLimbs& x, const RowRange& range)
      : a(a), x(x), range(range), byte_scales(a.scale), bytes_of(decoding), has_zeros(a.zero_point.data),
        unit(a.has_outer ? decoding.unit * a.outer : decoding.unit), slices((a.k + slice - 1) / slice), full_steps(a.k / columns),
        groups((a.k + a.group - 1) / a.group),
        steps_per_chunk(std::max<int64_t>(max_groups * a.group / slice, 1) * steps_per_slice) {}

  bool is_tail(int64_t row) const { return range.end - row < R; }

  // Loads the scales and zero points of R rows from `row` on for one chunk of steps from `from` on.
  __attribute__((noinline)) void load_chunk(int64_t row, int64_t from, ScaleChunk<R>& to) {
    if (row >= range.end) return;
    const int64_t stop = from + steps_per_chunk < x.steps ? (((from + steps_per_chunk) * columns) - 1) / a.group + 1 : groups;
    const int64_t first = x.first_group[from], count = stop - first;
    if constexpr (use_quads) {
      const int64_t row_step = is_tail(row) ? 0 : 1;
      for (int q = 0; q < Q; q++) {
        const int64_t local = row + 4 * q * row_step;
        load_scales_quads(a, byte_scales, local, row_step, first, count, unit, to.scale + q * 4 * scale_slots);
        if (!has_zeros) continue;
        largest_zero = _mm512_max_epu8(largest_zero, load_zeros_quads(a, local, row_step, first, count, to.zero + q * 4 * scale_slots));
      }
      return;
    }
    for (int r = 0; r < R; r++) {
      const int64_t local = is_tail(row) ? row : row + r;
      load_scales(a, byte_scales, local, first, count, unit, to.scale + r * scale_slots);
      if (!has_zeros) continue;
      largest_zero = _mm512_max_epu8(largest_zero, load_zeros(a, local, first, count, x.count < 3, to.zero + r * scale_slots));
    }
  }
  // The kernel for M rows of x.
  template <int M>
  auto tile_for() const {
    const auto with = [&](auto limbs) {
      constexpr int D = decltype(limbs)::value;
      auto run_tile = gemv_tile<bits, has_table, D, M, Q, use_quads, in_groups, false>;
      if constexpr (supports_zeros<bits, has_table>)
        if (has_zeros) run_tile = gemv_tile<bits, has_table, D, M, Q, use_quads, in_groups, true>;
      return run_tile;
    };
    if constexpr (in_groups && !use_quads) {
      return with(std::integral_constant<int, 3>());
    } else {
      if constexpr (!use_quads)
        if (x.count == 3) return with(std::integral_constant<int, 3>());
      return x.count == 1 ? with(std::integral_constant<int, 1>()) : with(std::integral_constant<int, 2>());
    }
  }
  // Steps [s, s + count) of a tile, whose codes `steps` points to, times all rows of x.
  __attribute__((noinline)) void run_steps(TileArgs<bits>& steps, int64_t s, int64_t count, const ScaleChunk<R>& of, int64_t first,
                                           __m512* total) const {
    if (count <= 0) return;
    steps.group = x.first_group + s, steps.lane_group = in_groups ? nullptr : x.group_of_lane + s * lanes;
    steps.m = a.m, steps.slices = slices, steps.first = first, steps.scale = of.scale, steps.zero = of.zero;
    const auto run_rows_of_x = [&](int64_t m, auto rows) {
      constexpr int M = decltype(rows)::value;
      steps.limbs = x.limbs + (s * a.m + m) * x.count * columns, steps.sums = x.sums + (s * a.m + m) * lanes;
      steps.slice_scale = x.scale + m * slices + s / steps_per_slice;
      tile_for<M>()(bytes_of, steps, count, total + m * S);
    };
    if constexpr (Q > 1) return run_rows_of_x(0, std::integral_constant<int, 1>());
    int64_t m = 0;
    for (; m + 4 <= a.m; m += 4) run_rows_of_x(m, std::integral_constant<int, 4>());
    if (m + 2 <= a.m) run_rows_of_x(m, std::integral_constant<int, 2>()), m += 2;
    if (m < a.m) run_rows_of_x(m, std::integral_constant<int, 1>());
  }

  bool run() {
    const std::unique_ptr<ScaleChunk<R>[]> chunks(new ScaleChunk<R>[2]);
    __m512 total[Q > 1 ? S : max_rows * S];
    int64_t row = range.begin;
    // Scales are loaded one chunk ahead: a load that spans several recent stores cannot be forwarded and stalls.
    load_chunk(row, 0, chunks[0]);
    for (int64_t at = 0; row < range.end;) {
      const bool is_single = is_tail(row);
      const int64_t next = row + (is_single ? 1 : R), stride = is_single ? 0 : a.packed_stride;
      const uint8_t* const packed = a.packed + row * a.packed_stride;
      const P planes(packed, a.k);
      for (int64_t i = 0; i < a.m * S; i++) total[i] = _mm512_setzero_ps();
      for (int64_t from = 0; from < x.steps; from += steps_per_chunk, at ^= 1) {
        const int64_t to = std::min(from + steps_per_chunk, x.steps), stop = std::min(to, full_steps), first = x.first_group[from];
        load_chunk(to < x.steps ? row : next, to < x.steps ? to : 0, chunks[at ^ 1]);
        TileArgs<bits> steps;
        for (int p = 0; p < P::count; p++) steps.at[p] = planes.at[p] + from * P::bytes(p);
        steps.stride = stride;
        // Prefetches the codes two tiles ahead for the L2 cache, in memory order: R short rows are read at once, more streams
        // than the hardware prefetcher tracks, and limbs fill the L1 cache.
        const auto prefetch_at = [&](int64_t rows) {
          return reinterpret_cast<uintptr_t>(a.packed) + row_to_prefetch(range, row, rows) * a.packed_stride + from * R * P::bytes_per_step;
        };
        steps.prefetch_at = prefetch_at(2 * R);
        // One byte of each page four tiles ahead hides the TLB miss.
        const uintptr_t page_prefetch_at = prefetch_at(4 * R);
        for (int64_t byte = 0; byte < (to - from) * R * P::bytes_per_step; byte += 4096)
          _mm_prefetch(reinterpret_cast<const char*>(page_prefetch_at + byte), _MM_HINT_T1);
        const int64_t prefetch_row = row_to_prefetch(range, row, 2 * R);
        prefetch_l2(a.scale, prefetch_row, R, from, to, x.steps);
        if (has_zeros) prefetch_l2(a.zero_point, prefetch_row, R, from, to, x.steps);
        run_steps(steps, from, stop - from, chunks[at], first, total);
        if (stop == to) continue;
        LastStep<bits> last[R];
        for (int r = 0; r < R; r++) last[r].copy(P(packed + r * stride, a.k), full_steps, a.k);
        for (int p = 0; p < P::count; p++) steps.at[p] = last[0].bytes[p];
        steps.stride = sizeof last[0];
        run_steps(steps, full_steps, 1, chunks[at], first, total);
      }
      for (int64_t m = 0; m < a.m; m++) {
        for (int q = 0; q < (is_single ? 1 : Q); q++) {
          const __m128 sums = use_quads ? sums_of(total[m * S + q]) : sums_of(total + m * S + 4 * q);
          if (is_single) _mm_store_ss(a.y + m * a.n + row, sums);
          else _mm_storeu_ps(a.y + m * a.n + row + 4 * q, sums);
        }
      }
      row = next;
    }
    return _mm512_cmpgt_epu8_mask(largest_zero, broadcast_u8((1 << bits) - 1)) == 0;
  }
};

template <int bits, bool has_table>
bool gemv_for_limbs(const Linear& a, const ByteDecoding& decoding, const PackedLimbs& x, const RowRange& range) {
  if constexpr (bits == 4)
    if (x.quad_sums && a.m == 1) {
      if (x.group_of_lane) return GemvRows<bits, has_table, 2, true, false>(a, decoding, x, range).run();
      return GemvRows<bits, has_table, 2, true, true>(a, decoding, x, range).run();
    }
  if (x.quad_sums && x.group_of_lane) return GemvRows<bits, has_table, 1, true, false>(a, decoding, x, range).run();
  if (x.quad_sums) return GemvRows<bits, has_table, 1, true, true>(a, decoding, x, range).run();
  if (x.count == 3 && !x.group_of_lane) return GemvRows<bits, has_table, 1, false, true>(a, decoding, x, range).run();
  return GemvRows<bits, has_table, 1, false, false>(a, decoding, x, range).run();
}

}  // namespace

template <int bits>
bool split_int8_gemv(const Linear& a, const ByteDecoding& decoding, const PackedLimbs& x, const RowRange& range) {
  if constexpr (bits <= 6)
    if (decoding.table) return gemv_for_limbs<bits, true>(a, decoding, x, range);
  return gemv_for_limbs<bits, false>(a, decoding, x, range);
}
template bool split_int8_gemv<LOWBIT_BITS>(const Linear&, const ByteDecoding&, const PackedLimbs&, const RowRange&);

}  // namespace lowbit::cpu::avx512vnni
