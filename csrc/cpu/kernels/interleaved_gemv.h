// Split-int8 GEMV over interleaved weights (32 rows together, four bytes of each in turn: lowbit_kernels/interleaved.py).
//
//    x [M, K] --pack_limbs_interleaved--> limbs int8 [M, units, fields, D], their sums int32, scales f32 [M, K / 512]
//                                            |
//                                            v four bytes of x broadcast to all lanes
//    unit: [words][32 rows][4 bytes] --load, shift, mask--> codes u8 [32 rows][4] --dpbusd / maddubs--> int32 [32 rows], exact
//                                                                                         |
//    zero points u8, group scales [G][32] ----- - zero * sum of limbs, * group scale ---->+--> f32 part [32 rows]
//                                                                                         |
//    scale of a slice of 512 columns of x ------------------------------------- * ------->+--> f32 total --> y [M, 32 rows]
//
// A register holds the same columns of 8 or 16 rows, so neither a row's nor a group's lanes are ever added to each other.
//
// Contract: split-int8 (2 or 3 limbs): x to 1/65278 or 2^-22 of the largest of its 512 columns, then exact integers and fp32 sums
// of groups; with 8-bit activations (1 limb) exact. Results do not depend on the number of threads.
// Limit: at M = 1 the bytes of the weight; from M = 4 on the int8 multiply-adds, M N K D of them.
// Reached (evals/results/gemv_cpu.json, 11008 x 4096, AMD EPYC with AVX-512, 2 threads, cold weights, 2 limbs): int4 476 us at M
// = 1, 0.98 of the time to read its bytes and 12.2 times as fast as bfloat16's F.linear; int8 1251 us, 1.07 and 3.6 times; int2
// 388 us, 0.68 and 15.0 times; int4 at M = 16 2.0 times. With AVX2 alone (gemv_cpu_avx2.json) int4 734 us, 1.02 and 6.4 times.
//
// `Set` describes the registers of an instruction set:
//    ByteReg, FloatReg     registers of codes or int32, and of floats
//    size, lanes           bytes of a register, and 32-bit values in it
//    registers(bits, M)    registers of rows that are multiplied together
//    streams(bits)         blocks that are read alternately at M = 1
//    chains(sums)          independent accumulators for each of `sums` sums, which hide the latency of the dot product
//    Sum<words, max_byte>  accumulator of products with codes of at most max_byte; words: of 16-bit codes
//    Scales                group scales as floats, a register for each register of rows
// and wraps the instructions themselves.
#pragma once

#include <utility>

#include "../decode/interleaved.h"

namespace lowbit::cpu {
namespace {

template <typename Body, int... i>
inline __attribute__((always_inline)) void unroll(const Body& multiply_units, std::integer_sequence<int, i...>) {
  (multiply_units(std::integral_constant<int, i>()), ...);
}
template <int count, typename Body>
inline __attribute__((always_inline)) void unroll(const Body& body) {
  unroll(body, std::make_integer_sequence<int, count>());
}

// Unpacks one register of a unit's words into codes, field by field, as unsigned bytes.
template <class Set, int bits, bool has_table>
struct UnitUnpacker {
  using U = Unit<bits>;
  using V = typename Set::ByteReg;
  V flipped;  // xor for the plane with the highest bit: signed codes become unsigned
  typename Set::Table table;
  explicit UnitUnpacker(const ByteDecoding& decoding) : flipped(Set::broadcast_u8(decoding.flipped ? highest() : 0)), table(decoding.table) {}

  // Loads the U::words registers of a unit; a word of all 32 rows is bytes_per_word long.
  template <bool may_flip>
  inline void load(const uint8_t* at, V* words) const {
#pragma GCC unroll 8
    for (int w = 0; w < U::words; w++) words[w] = Set::load(at + w * bytes_per_word);
    constexpr int last = U::first_word(U::P::count - 1);
    if constexpr (may_flip && !has_table)
#pragma GCC unroll 8
      for (int w = last; w < U::words; w++) words[w] = Set::bit_xor(words[w], flipped);
  }
  template <int f>
  inline V field(const V* words) const {
    const V code = bits_of<f, 0, 0>(words, words[0]);
    if constexpr (has_table) return Set::look_up(table, code);
    else return code;
  }

 private:
  static constexpr int highest() { return U::narrowest == 8 ? 0x80 : U::narrowest == 4 ? 0x88 : U::narrowest == 2 ? 0xaa : 0xff; }
  template <int f, int plane, int low>
  static inline V bits_of(const V* words, V lower) {
    if constexpr (plane == U::P::count) {
      return lower;
    } else {
      constexpr int width = U::P::width(plane), fields_per_byte = 8 / width, shift = f % fields_per_byte * width - low;
      const V word = words[U::first_word(plane) + f / fields_per_byte];
      V shifted = word;
      if constexpr (shift > 0) shifted = Set::template shift_right<shift>(word);
      else if constexpr (shift < 0) shifted = Set::template shift_left<-shift>(word);
      constexpr int mask = ((1 << width) - 1) << low;
      if constexpr (plane > 0) shifted = Set::or_masked(lower, shifted, Set::broadcast_u8(mask));
      else if constexpr (width < 8) shifted = Set::bit_and(shifted, Set::broadcast_u8(mask));
      return bits_of<f, plane + 1, low + width>(words, shifted);
    }
  }
};

// Prefetches for the L2 cache. asm, because a compiler drops calls of a function that only prefetches.
inline void prefetch_l2(const uint8_t* at) { asm volatile("prefetcht1 (%0)" ::"r"(at)); }
// Prefetches for the L1 cache, `bytes` bytes behind element i.
inline void prefetch_l1(const ArrayView& of, int64_t i, int64_t bytes) {
  const int64_t size = of.dtype == Dtype::float32 ? 4 : of.dtype == Dtype::bytes ? 1 : 2;
  asm volatile("prefetcht0 (%0)" ::"r"(reinterpret_cast<uintptr_t>(of.data) + i * size + bytes));
}

// y for M rows of x from `m` on and `streams` blocks of 32 rows, the first at `row`, `block_stride` rows apart. Two streams are
// read alternately, a stretch of 2 to 4 KB of each: the hardware prefetcher follows both, which keeps more lines in flight than
// one.
template <class Set, int bits, bool has_table, int max_byte, int D, int M, int streams, bool has_zeros>
__attribute__((noinline)) void gemv_panel(const Linear& a, const UnitUnpacker<Set, bits, has_table>& codes_of, const InterleavedLimbs& x,
                                           const typename Set::Scales& scales, float unit, int64_t row, int64_t block_stride, int64_t m) {
  using U = Unit<bits>;
  using V = typename Set::ByteReg;
  using F = typename Set::FloatReg;
  constexpr bool words = Set::uses_words(bits);
  constexpr int fields = words ? 2 : U::fields, parts = words ? words_for(D) : D, R = Set::registers(bits, M);
  constexpr int chains = Set::chains(R * M * parts);
  constexpr int lines = bytes_per_word / Set::size / R;  // register groups of a word, multiplied one after the other
  using Sum = typename Set::template Sum<words, max_byte>;
  // units between two calls of flush
  // Long units are repeated less often: that would be more code and no more speed.
  constexpr int units_at_once = R * M * parts < 8 && parts < 3 ? 4 : std::max(parts < 3 ? 1 : 2, 4 / fields);
  constexpr int units_per_flush = words || Sum::adds_per_flush >= 64 ? units_at_once : std::max(1, Sum::adds_per_flush / fields);
  constexpr int64_t bytes_per_unit = U::words * bytes_per_word;
  // With two streams, prefetching every second line is enough to start the hardware prefetcher; prefetching every line would fill
  // the line fill buffers and stall loads. Three bits are limited by unpacking, not by reading.
  constexpr int64_t bytes_ahead = streams > 1 ? 2048 : bits == 8 ? 3072 : 6144, lines_apart = streams > 1 ? 2 : 1;
  constexpr bool has_prefetch = streams == 1 || bits != 3;
  const UnitUnpacker<Set, bits, has_table> codes = codes_of;
  F part[streams][lines][R][M], total[streams][lines][R][M];
  for (int b = 0; b < streams; b++)
    for (int l = 0; l < lines; l++)
      for (int r = 0; r < R; r++)
        for (int i = 0; i < M; i++) part[b][l][r][i] = total[b][l][r][i] = Set::zero();

  const int64_t slices = (a.k + slice - 1) / slice, limbs_per_row = a.k / U::columns * fields * parts;
  const uint8_t* begin = a.packed + row * a.packed_stride;  // what is left of the first block
  const int32_t* limbs = reinterpret_cast<const int32_t*>(x.limbs) + m * limbs_per_row;
  const int32_t* sums = x.sums + m * x.runs * parts;
  const float* slice_scale = x.scale + m * slices;
  for (const Run *stretch = x.run, *stop; stretch < x.run + x.runs; stretch = stop) {
    for (stop = stretch + 1; !stop[-1].is_stretch_end;) stop++;
    const uint8_t* at = begin;
    const int32_t *limbs_of_run = limbs, *run_sums = sums;
    unroll<streams>([&](auto block) __attribute__((always_inline)) {  // unrolled: separate load PCs, so that the hardware
                                                                      // prefetcher tracks two streams
      constexpr int b = decltype(block)::value;
      at = begin + b * block_stride * a.packed_stride, limbs_of_run = limbs, run_sums = sums;
      for (const Run* run = stretch; run < stop; run++) {
        const int64_t numbers = (row + b * block_stride) * a.scale.stride + run->group * rows_per_block;
        prefetch_l1(a.scale, numbers, 512);
        if (has_zeros) prefetch_l1(a.zero_point, numbers, 256);
        for (int l = 0; l < lines; l++) {
          Sum sum[chains][R][M][parts];
          if constexpr (!has_zeros)
            for (int i = 0; i < M; i++)
              for (int p = 0; p < parts; p++) {
                const V share = Set::broadcast(run_sums[i * x.runs * parts + p]);
                for (int r = 0; r < R; r++) sum[0][r][i][p].sums = share;
              }
          const uint8_t* w = at + l * R * Set::size;
          const int32_t* limb = limbs_of_run;
          const auto flush = [&]() __attribute__((always_inline)) {
            for (auto& chain : sum)
              for (auto& of_register : chain)
                for (auto& of_row : of_register)
                  for (Sum& s : of_row) s.flush();
          };
          const auto multiply_units = [&](auto count) __attribute__((always_inline)) {
            unroll<decltype(count)::value>([&](auto unit_of) __attribute__((always_inline)) {
              constexpr int u = decltype(unit_of)::value;
              V unit_words[R][U::words];
#pragma GCC unroll 4
              for (int r = 0; r < R; r++) codes.template load<!has_zeros>(w + r * Set::size, unit_words[r]);
              unroll<fields>([&](auto field) __attribute__((always_inline)) {
                constexpr int f = decltype(field)::value, chain = (u * fields + f) % chains;
                constexpr int64_t all_lines = bytes_per_unit / 64;
                if (l == 0 && has_prefetch)
#pragma GCC unroll 4
                  for (int64_t line = all_lines * f / fields; line < all_lines * (f + 1) / fields; line++)
                    if ((u * all_lines + line) % lines_apart == 0) prefetch_l2(w + bytes_ahead + 64 * line);
                V bytes[R];
#pragma GCC unroll 4
                for (int r = 0; r < R; r++)
                  if constexpr (words) bytes[r] = Set::template words_of_field<f>(unit_words[r][0]);
                  else bytes[r] = codes.template field<f>(unit_words[r]);
#pragma GCC unroll 4
                for (int i = 0; i < M; i++)
#pragma GCC unroll 3
                  for (int p = 0; p < parts; p++) {
                    const V limb_bytes = Set::broadcast(limb[i * limbs_per_row + f * parts + p]);
#pragma GCC unroll 4
                    for (int r = 0; r < R; r++) sum[chain][r][i][p].add(bytes[r], limb_bytes);
                  }
                if constexpr (Sum::adds_per_flush < fields && (f + 1) % Sum::adds_per_flush == 0) flush();
              });
              w += bytes_per_unit, limb += fields * parts;
            });
            flush();
          };
          int64_t units_left = run->units;
          for (; units_left >= units_per_flush; units_left -= units_per_flush) multiply_units(std::integral_constant<int, units_per_flush>());
          for (; units_left > 0; units_left--) multiply_units(std::integral_constant<int, 1>());

          F scale[R];
          scales(numbers + l * R * Set::lanes, scale);
          for (int r = 0; r < R; r++)
            for (int i = 0; i < M; i++) {
              F all = Set::zero();
              for (int p = 0; p < parts; p++) {
                V limb_sum = sum[0][r][i][p].sums;
                for (int c = 1; c < chains; c++) limb_sum = Set::plus(limb_sum, sum[c][r][i][p].sums);
                if constexpr (has_zeros) {
                  const V zero = Set::integers(static_cast<const uint8_t*>(a.zero_point.data) + numbers + (l * R + r) * Set::lanes);
                  limb_sum = Set::plus(limb_sum, Set::times(zero, Set::broadcast(run_sums[i * x.runs * parts + p])));
                }
                const F limb_value = Set::floats(limb_sum);
                all = p ? Set::fma(all, Set::broadcast(words ? 65536.0f : 256.0f), limb_value) : limb_value;
              }
              part[b][l][r][i] = Set::fma(all, scale[r], part[b][l][r][i]);
            }
        }
        at += run->units * bytes_per_unit, limbs_of_run += run->units * fields * parts, run_sums += parts;
      }
    });
    begin = at - (streams - 1) * block_stride * a.packed_stride, limbs = limbs_of_run, sums = run_sums;
    if (!stop[-1].is_slice_end) continue;
    for (int b = 0; b < streams; b++)
      for (int l = 0; l < lines; l++)
        for (int r = 0; r < R; r++)
          for (int i = 0; i < M; i++) {
            total[b][l][r][i] = Set::fma(part[b][l][r][i], Set::broadcast(slice_scale[i * slices]), total[b][l][r][i]);
            part[b][l][r][i] = Set::zero();
          }
    slice_scale++;
  }
  for (int b = 0; b < streams; b++)
    for (int l = 0; l < lines; l++)
      for (int r = 0; r < R; r++)
        for (int i = 0; i < M; i++)
          Set::store(a.y + (m + i) * a.n + row + b * block_stride + (l * R + r) * Set::lanes, Set::times(total[b][l][r][i], Set::broadcast(unit)));
}

// All rows of x, as many at a time as have their sums in registers. At M = 1 the range is read as two streams, half of it apart.
template <class Set, int bits, bool has_table, int max_byte, int D, bool has_zeros>
void gemv_rows(const Linear& a, const ByteDecoding& decoding, const InterleavedLimbs& x, const RowRange& range) {
  const UnitUnpacker<Set, bits, has_table> codes_of(decoding);
  const typename Set::Scales scales(a.scale);
  const float unit = a.has_outer ? decoding.unit * a.outer : decoding.unit;
  int64_t row = range.begin;
  const auto multiply_panel = [&](auto rows, auto streams, int64_t block_stride, int64_t m) {
    constexpr int M = decltype(rows)::value, S = decltype(streams)::value;
    gemv_panel<Set, bits, has_table, max_byte, D, M, S, has_zeros>(a, codes_of, x, scales, unit, row, block_stride, m);
  };
  constexpr std::integral_constant<int, 1> one;
  constexpr std::integral_constant<int, 2> two;
  constexpr std::integral_constant<int, 4> four;
  if constexpr (Set::streams(bits) == 2) {
    if (a.m == 1) {
      const int64_t half = (range.end - range.begin) / rows_per_block / 2 * rows_per_block;
      for (; row < range.begin + half; row += rows_per_block) multiply_panel(one, two, half, 0);
      row += half;
    }
  }
  for (; row < range.end; row += rows_per_block) {
    int64_t m = 0;
    if constexpr (Set::max_tile_m >= 4 && D < 3)  // with three limbs two and two are nearly as fast, and less code
      for (; m + 4 <= a.m; m += 4) multiply_panel(four, one, 0, m);
    for (; m + 2 <= a.m; m += 2) multiply_panel(two, one, 0, m);
    if (m < a.m) multiply_panel(one, one, 0, m);
  }
}

template <class Set, int bits>
void gemv_for_bits(const Linear& a, const ByteDecoding& decoding, const InterleavedLimbs& x, const RowRange& range) {
  const auto with = [&](auto limbs) {
    constexpr int D = decltype(limbs)::value, max_byte = (1 << bits) - 1;
    if constexpr (bits == 4)
      if (decoding.table) {
        int largest = 0;
        for (int code = 0; code < 16; code++) largest = std::max<int>(largest, decoding.table[code]);
        if (largest <= Set::narrow_table_max) return gemv_rows<Set, 4, true, Set::narrow_table_max, D, false>(a, decoding, x, range);
        return gemv_rows<Set, 4, true, 127, D, false>(a, decoding, x, range);
      }
    if constexpr (supports_zeros<bits, false>)
      if (a.zero_point.data) return gemv_rows<Set, bits, false, max_byte, D, true>(a, decoding, x, range);
    return gemv_rows<Set, bits, false, max_byte, D, false>(a, decoding, x, range);
  };
  if (x.count == 1) return with(std::integral_constant<int, 1>());
  if (x.count == 3) return with(std::integral_constant<int, 3>());
  return with(std::integral_constant<int, 2>());
}

}  // namespace
}  // namespace lowbit::cpu
