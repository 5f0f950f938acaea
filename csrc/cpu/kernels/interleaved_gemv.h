// Blocks of interleaved rows times rows of x in limbs, for the instruction set whose registers `Set` tells of:
//   Bytes, Floats                       registers of codes, or of 32-bit integers, and of floats
//   size, lanes                         bytes of a register, and numbers of 32 bits
//   registers(bits, M)                  of rows that are multiplied together
//   streams(bits)                       blocks that one row of x is multiplied with in turns
//   chains(sums)                        sums one behind the other, of each of so many
//   Sum<most>                           products of bytes of no more than `max_byte`, and of words where takes_words(bits)
//   Scales                              scales as floats, a register for each of those of rows
// and the instructions, by names of their own.
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
inline __attribute__((always_inline)) void unroll(const Body& multiply_units) {
  unroll(multiply_units, std::make_integer_sequence<int, count>());
}

// Codes of one register of rows, field by field, as bytes without a sign.
template <class Set, int bits, bool has_table>
struct UnitUnpacker {
  using U = Unit<bits>;
  using V = typename Set::ByteReg;
  V flipped;  // of the plane of the highest bits
  typename Set::Table table;
  explicit UnitUnpacker(const ByteDecoding& unpacker) : flipped(Set::broadcast_u8(unpacker.flipped ? highest() : 0)), table(unpacker.table) {}

  // The words of a unit, `block_stride` bytes from one to the next.
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
      constexpr int width = U::P::width(plane), byte_scales = 8 / width, shift = f % byte_scales * width - low;
      const V word = words[U::first_word(plane) + f / byte_scales];
      V shifted_word = word;
      if constexpr (shift > 0) shifted_word = Set::template shift_right<shift>(word);
      else if constexpr (shift < 0) shifted_word = Set::template shift_left<-shift>(word);
      constexpr int mask = ((1 << width) - 1) << low;
      if constexpr (plane > 0) shifted_word = Set::or_masked(lower, shifted_word, Set::broadcast_u8(mask));
      else if constexpr (width < 8) shifted_word = Set::bit_and(shifted_word, Set::broadcast_u8(mask));
      return bits_of<f, plane + 1, low + width>(words, shifted_word);
    }
  }
};

// For the second-level cache. A compiler takes a function that does no more than this for one that does nothing.
inline void prefetch_l2(const uint8_t* at) { asm volatile("prefetcht1 (%0)" ::"r"(at)); }
// For the first-level cache, so many bytes behind number i.
inline void prefetch_l1(const ArrayView& of, int64_t i, int64_t bytes) {
  const int64_t size = of.dtype == Dtype::float32 ? 4 : of.dtype == Dtype::bytes ? 1 : 2;
  asm volatile("prefetcht0 (%0)" ::"r"(reinterpret_cast<uintptr_t>(of.data) + i * size + bytes));
}

// `streams` blocks of rows, `block_stride` from each other, the first from `row` on, times M rows of x from `m` on, in D limbs. They take
// turns, a stretch of each: a processor foresees either, and more than of one.
template <class Set, int bits, bool has_table, int max_byte, int D, int M, int streams, bool has_zeros>
__attribute__((noinline)) void gemv_panel(const Linear& a, const UnitUnpacker<Set, bits, has_table>& unpacker, const InterleavedLimbs& x,
                                           const typename Set::Scales& scales, float unit, int64_t row, int64_t block_stride, int64_t m) {
  using U = Unit<bits>;
  using V = typename Set::ByteReg;
  using F = typename Set::FloatReg;
  constexpr bool words = Set::uses_words(bits);
  constexpr int fields = words ? 2 : U::fields, parts = words ? words_for(D) : D, R = Set::registers(bits, M);
  constexpr int chains = Set::chains(R * M * parts);
  constexpr int lines = bytes_per_word / Set::size / R;  // parts of a word that are multiplied one after the other
  using Sum = typename Set::template Sum<words, max_byte>;
  constexpr int together = words || Sum::adds >= 64 ? 4 : std::max(1, Sum::adds / fields);  // units before sums are moved
  constexpr int64_t bytes_per_unit = U::words * bytes_per_word;
  // Of two blocks every second line is enough for a processor to see where codes come from; with each of them as many would be on
  // their way as it keeps track of, and loads would wait. Three bits take longer to unpack than to read.
  constexpr int64_t bytes_ahead = streams > 1 ? 2048 : bits == 8 ? 3072 : 6144, lines_apart = streams > 1 ? 2 : 1;
  constexpr bool fetches = streams == 1 || bits != 3;
  const UnitUnpacker<Set, bits, has_table> codes = unpacker;
  F part[streams][lines][R][M], total[streams][lines][R][M];
  for (int b = 0; b < streams; b++)
    for (int l = 0; l < lines; l++)
      for (int r = 0; r < R; r++)
        for (int i = 0; i < M; i++) part[b][l][r][i] = total[b][l][r][i] = Set::zero();

  const int64_t slices = (a.k + slice - 1) / slice, limbs_per_row = a.k / U::columns * fields * parts;
  const uint8_t* begin = a.packed + row * a.packed_stride;  // of what is left of the first block
  const int32_t* limbs = reinterpret_cast<const int32_t*>(x.limbs) + m * limbs_per_row;
  const int32_t* sums = x.sums + m * x.runs * parts;
  const float* slice_scale = x.scale + m * slices;
  for (const Run *stretch = x.run, *stop; stretch < x.run + x.runs; stretch = stop) {
    for (stop = stretch + 1; !stop[-1].is_stretch_end;) stop++;
    const uint8_t* at = begin;
    const int32_t *limbs_of_run = limbs, *run_sums = sums;
    unroll<streams>([&](auto block) __attribute__((always_inline)) {  // each with loads of its own, by which a processor foresees what comes
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
              V of[R][U::words];
#pragma GCC unroll 4
              for (int r = 0; r < R; r++) codes.template load<!has_zeros>(w + r * Set::size, of[r]);
              unroll<fields>([&](auto field) __attribute__((always_inline)) {
                constexpr int f = decltype(field)::value, chain = (u * fields + f) % chains;
                constexpr int64_t all_lines = bytes_per_unit / 64;
                if (l == 0 && fetches)
#pragma GCC unroll 4
                  for (int64_t line = all_lines * f / fields; line < all_lines * (f + 1) / fields; line++)
                    if ((u * all_lines + line) % lines_apart == 0) prefetch_l2(w + bytes_ahead + 64 * line);
                V bytes[R];
#pragma GCC unroll 4
                for (int r = 0; r < R; r++)
                  if constexpr (words) bytes[r] = Set::template words_of_field<f>(of[r][0]);
                  else bytes[r] = codes.template field<f>(of[r]);
#pragma GCC unroll 4
                for (int i = 0; i < M; i++)
#pragma GCC unroll 3
                  for (int p = 0; p < parts; p++) {
                    const V temp = Set::broadcast(limb[i * limbs_per_row + f * parts + p]);
#pragma GCC unroll 4
                    for (int r = 0; r < R; r++) sum[chain][r][i][p].add(bytes[r], temp);
                  }
                if constexpr (Sum::adds < fields && (f + 1) % Sum::adds == 0) flush();
              });
              w += bytes_per_unit, limb += fields * parts;
            });
            flush();
          };
          int64_t shift_left = run->units;
          for (; shift_left >= together; shift_left -= together) multiply_units(std::integral_constant<int, together>());
          for (; shift_left > 0; shift_left--) multiply_units(std::integral_constant<int, 1>());

          F scale[R];
          scales(numbers + l * R * Set::lanes, scale);
          for (int r = 0; r < R; r++)
            for (int i = 0; i < M; i++) {
              F all = Set::zero();
              for (int p = 0; p < parts; p++) {
                V of_part = sum[0][r][i][p].sums;
                for (int c = 1; c < chains; c++) of_part = Set::plus(of_part, sum[c][r][i][p].sums);
                if constexpr (has_zeros) {
                  const V zero = Set::integers(static_cast<const uint8_t*>(a.zero_point.data) + numbers + (l * R + r) * Set::lanes);
                  of_part = Set::plus(of_part, Set::times(zero, Set::broadcast(run_sums[i * x.runs * parts + p])));
                }
                const F local = Set::floats(of_part);
                all = p ? Set::fma(all, Set::broadcast(words ? 65536.0f : 256.0f), local) : local;
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

// All rows of x, as many at a time as registers hold the sums of; one row by two blocks that are half of the turn apart.
template <class Set, int bits, bool has_table, int max_byte, int D, bool has_zeros>
void gemv_rows(const Linear& a, const ByteDecoding& byte_decoding, const InterleavedLimbs& x, const RowRange& range) {
  const UnitUnpacker<Set, bits, has_table> unpacker(byte_decoding);
  const typename Set::Scales scales(a.scale);
  const float unit = a.has_outer ? byte_decoding.unit * a.outer : byte_decoding.unit;
  int64_t row = range.begin;
  const auto multiply_units = [&](auto rows, auto streams, int64_t block_stride, int64_t m) {
    constexpr int M = decltype(rows)::value, S = decltype(streams)::value;
    gemv_panel<Set, bits, has_table, max_byte, D, M, S, has_zeros>(a, unpacker, x, scales, unit, row, block_stride, m);
  };
  constexpr std::integral_constant<int, 1> one;
  constexpr std::integral_constant<int, 2> two;
  constexpr std::integral_constant<int, 4> four;
  if constexpr (Set::streams(bits) == 2) {
    if (a.m == 1) {
      const int64_t half = (range.end - range.begin) / rows_per_block / 2 * rows_per_block;
      for (; row < range.begin + half; row += rows_per_block) multiply_units(one, two, half, 0);
      row += half;
    }
  }
  for (; row < range.end; row += rows_per_block) {
    int64_t m = 0;
    if constexpr (Set::max_tile_m >= 4)
      for (; m + 4 <= a.m; m += 4) multiply_units(four, one, 0, m);
    for (; m + 2 <= a.m; m += 2) multiply_units(two, one, 0, m);
    if (m < a.m) multiply_units(one, one, 0, m);
  }
}

template <class Set, int bits>
void gemv_for_bits(const Linear& a, const ByteDecoding& unpacker, const InterleavedLimbs& x, const RowRange& range) {
  const auto with = [&](auto limbs) {
    constexpr int D = decltype(limbs)::value, max_byte = (1 << bits) - 1;
    if constexpr (bits == 4)
      if (unpacker.table) {
        int largest = 0;
        for (int code = 0; code < 16; code++) largest = std::max<int>(largest, unpacker.table[code]);
        if (largest <= Set::narrow_table_max) return gemv_rows<Set, 4, true, Set::narrow_table_max, D, false>(a, unpacker, x, range);
        return gemv_rows<Set, 4, true, 127, D, false>(a, unpacker, x, range);
      }
    if constexpr (takes_zeros<bits, false>)
      if (a.zero_point.data) return gemv_rows<Set, bits, false, max_byte, D, true>(a, unpacker, x, range);
    return gemv_rows<Set, bits, false, max_byte, D, false>(a, unpacker, x, range);
  };
  if (x.count == 1) return with(std::integral_constant<int, 1>());
  if (x.count == 3) return with(std::integral_constant<int, 3>());
  return with(std::integral_constant<int, 2>());
}

}  // namespace
}  // namespace lowbit::cpu
