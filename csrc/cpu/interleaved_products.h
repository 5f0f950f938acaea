// Blocks of interleaved rows times rows of x in digits, for the instruction set whose registers `Set` tells of:
//   Bytes, Floats                       registers of codes, or of 32-bit integers, and of floats
//   size, lanes                         bytes of a register, and numbers of 32 bits
//   registers(bits, M)                  of rows that are multiplied together
//   streams(bits)                       blocks that one row of x is multiplied with in turns
//   chains(sums)                        sums one behind the other, of each of so many
//   Sum<most>                           products of bytes of no more than `most`, and of words where takes_words(bits)
//   Scales                              scales as floats, a register for each of those of rows
// and the instructions, by names of their own.
#pragma once

#include <utility>

#include "interleaved.h"

namespace lowbit::cpu {
namespace {

template <typename Take, int... i>
inline __attribute__((always_inline)) void each(const Take& take, std::integer_sequence<int, i...>) {
  (take(std::integral_constant<int, i>()), ...);
}
template <int count, typename Take>
inline __attribute__((always_inline)) void each(const Take& take) {
  each(take, std::make_integer_sequence<int, count>());
}

// Codes of one register of rows, field by field, as bytes without a sign.
template <class Set, int bits, bool has_table>
struct CodesOfUnit {
  using U = Unit<bits>;
  using V = typename Set::Bytes;
  V flipped;  // of the plane of the highest bits
  typename Set::Table table;
  explicit CodesOfUnit(const Bytewise& how) : flipped(Set::every(how.flipped ? highest() : 0)), table(how.table) {}

  // The words of a unit, `apart` bytes from one to the next.
  template <bool may_flip>
  inline void load(const uint8_t* at, V* words) const {
#pragma GCC unroll 8
    for (int w = 0; w < U::words; w++) words[w] = Set::load(at + w * bytes_of_words);
    constexpr int last = U::first_word(U::P::count - 1);
    if constexpr (may_flip && !has_table)
#pragma GCC unroll 8
      for (int w = last; w < U::words; w++) words[w] = Set::exclusive(words[w], flipped);
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
      constexpr int width = U::P::width(plane), of_byte = 8 / width, shift = f % of_byte * width - low;
      const V word = words[U::first_word(plane) + f / of_byte];
      V moved = word;
      if constexpr (shift > 0) moved = Set::template right<shift>(word);
      else if constexpr (shift < 0) moved = Set::template left<-shift>(word);
      constexpr int mask = ((1 << width) - 1) << low;
      if constexpr (plane > 0) moved = Set::put(lower, moved, Set::every(mask));
      else if constexpr (width < 8) moved = Set::both(moved, Set::every(mask));
      return bits_of<f, plane + 1, low + width>(words, moved);
    }
  }
};

// For the second-level cache. A compiler takes a function that does no more than this for one that does nothing.
inline void fetch(const uint8_t* at) { asm volatile("prefetcht1 (%0)" ::"r"(at)); }
// For the first-level cache, so many bytes behind number i.
inline void fetch_number(const Numbers& of, int64_t i, int64_t bytes) {
  const int64_t size = of.stored == Stored::float32 ? 4 : of.stored == Stored::bytes ? 1 : 2;
  asm volatile("prefetcht0 (%0)" ::"r"(reinterpret_cast<uintptr_t>(of.data) + i * size + bytes));
}

// `streams` blocks of rows, `apart` from each other, the first from `row` on, times M rows of x from `m` on, in D digits. They take
// turns, a stretch of each: a processor foresees either, and more than of one.
template <class Set, int bits, bool has_table, int most, int D, int M, int streams, bool has_zeros>
__attribute__((noinline)) void take_blocks(const Linear& a, const CodesOfUnit<Set, bits, has_table>& how, const DigitsOfUnits& x,
                                           const typename Set::Scales& scales, float unit, int64_t row, int64_t apart, int64_t m) {
  using U = Unit<bits>;
  using V = typename Set::Bytes;
  using F = typename Set::Floats;
  constexpr bool words = Set::takes_words(bits);
  constexpr int fields = words ? 2 : U::fields, parts = words ? words_of(D) : D, R = Set::registers(bits, M);
  constexpr int chains = Set::chains(R * M * parts);
  constexpr int lines = bytes_of_words / Set::size / R;  // parts of a word that are multiplied one after the other
  using Sum = typename Set::template Sum<words, most>;
  constexpr int together = words || Sum::adds >= 64 ? 4 : std::max(1, Sum::adds / fields);  // units before sums are moved
  constexpr int64_t bytes_of_unit = U::words * bytes_of_words;
  // Of two blocks every second line is enough for a processor to see where codes come from; with each of them as many would be on
  // their way as it keeps track of, and loads would wait. Three bits take longer to unpack than to read.
  constexpr int64_t bytes_ahead = streams > 1 ? 2048 : bits == 8 ? 3072 : 6144, lines_apart = streams > 1 ? 2 : 1;
  constexpr bool fetches = streams == 1 || bits != 3;
  const CodesOfUnit<Set, bits, has_table> codes = how;
  F part[streams][lines][R][M], total[streams][lines][R][M];
  for (int b = 0; b < streams; b++)
    for (int l = 0; l < lines; l++)
      for (int r = 0; r < R; r++)
        for (int i = 0; i < M; i++) part[b][l][r][i] = total[b][l][r][i] = Set::zero();

  const int64_t slices = (a.k + slice - 1) / slice, digits_of_row = a.k / U::columns * fields * parts;
  const uint8_t* begin = a.packed + row * a.packed_stride;  // of what is left of the first block
  const int32_t* digits = reinterpret_cast<const int32_t*>(x.digits) + m * digits_of_row;
  const int32_t* sums = x.sums + m * x.runs * parts;
  const float* of_slice = x.scale + m * slices;
  for (const Run *stretch = x.run, *past; stretch < x.run + x.runs; stretch = past) {
    for (past = stretch + 1; !past[-1].ends_stretch;) past++;
    const uint8_t* at = begin;
    const int32_t *digits_of_run = digits, *sums_of_run = sums;
    each<streams>([&](auto block) __attribute__((always_inline)) {  // each with loads of its own, by which a processor foresees what comes
      constexpr int b = decltype(block)::value;
      at = begin + b * apart * a.packed_stride, digits_of_run = digits, sums_of_run = sums;
      for (const Run* run = stretch; run < past; run++) {
        const int64_t numbers = (row + b * apart) * a.scale.stride + run->group * rows_together;
        fetch_number(a.scale, numbers, 512);
        if (has_zeros) fetch_number(a.zero_point, numbers, 256);
        for (int l = 0; l < lines; l++) {
          Sum sum[chains][R][M][parts];
          if constexpr (!has_zeros)
            for (int i = 0; i < M; i++)
              for (int p = 0; p < parts; p++) {
                const V share = Set::broadcast(sums_of_run[i * x.runs * parts + p]);
                for (int r = 0; r < R; r++) sum[0][r][i][p].sums = share;
              }
          const uint8_t* w = at + l * R * Set::size;
          const int32_t* digit = digits_of_run;
          const auto move = [&]() __attribute__((always_inline)) {
            for (auto& chain : sum)
              for (auto& of_register : chain)
                for (auto& of_row : of_register)
                  for (Sum& s : of_row) s.move();
          };
          const auto take = [&](auto count) __attribute__((always_inline)) {
            each<decltype(count)::value>([&](auto unit_of) __attribute__((always_inline)) {
              constexpr int u = decltype(unit_of)::value;
              V of[R][U::words];
#pragma GCC unroll 4
              for (int r = 0; r < R; r++) codes.template load<!has_zeros>(w + r * Set::size, of[r]);
              each<fields>([&](auto field) __attribute__((always_inline)) {
                constexpr int f = decltype(field)::value, chain = (u * fields + f) % chains;
                constexpr int64_t all_lines = bytes_of_unit / 64;
                if (l == 0 && fetches)
#pragma GCC unroll 4
                  for (int64_t line = all_lines * f / fields; line < all_lines * (f + 1) / fields; line++)
                    if ((u * all_lines + line) % lines_apart == 0) fetch(w + bytes_ahead + 64 * line);
                V bytes[R];
#pragma GCC unroll 4
                for (int r = 0; r < R; r++)
                  if constexpr (words) bytes[r] = Set::template words_of_field<f>(of[r][0]);
                  else bytes[r] = codes.template field<f>(of[r]);
#pragma GCC unroll 4
                for (int i = 0; i < M; i++)
#pragma GCC unroll 3
                  for (int p = 0; p < parts; p++) {
                    const V some = Set::broadcast(digit[i * digits_of_row + f * parts + p]);
#pragma GCC unroll 4
                    for (int r = 0; r < R; r++) sum[chain][r][i][p].add(bytes[r], some);
                  }
                if constexpr (Sum::adds < fields && (f + 1) % Sum::adds == 0) move();
              });
              w += bytes_of_unit, digit += fields * parts;
            });
            move();
          };
          int64_t left = run->units;
          for (; left >= together; left -= together) take(std::integral_constant<int, together>());
          for (; left > 0; left--) take(std::integral_constant<int, 1>());

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
                  of_part = Set::plus(of_part, Set::times(zero, Set::broadcast(sums_of_run[i * x.runs * parts + p])));
                }
                const F own = Set::floats(of_part);
                all = p ? Set::fma(all, Set::broadcast(words ? 65536.0f : 256.0f), own) : own;
              }
              part[b][l][r][i] = Set::fma(all, scale[r], part[b][l][r][i]);
            }
        }
        at += run->units * bytes_of_unit, digits_of_run += run->units * fields * parts, sums_of_run += parts;
      }
    });
    begin = at - (streams - 1) * apart * a.packed_stride, digits = digits_of_run, sums = sums_of_run;
    if (!past[-1].ends_slice) continue;
    for (int b = 0; b < streams; b++)
      for (int l = 0; l < lines; l++)
        for (int r = 0; r < R; r++)
          for (int i = 0; i < M; i++) {
            total[b][l][r][i] = Set::fma(part[b][l][r][i], Set::broadcast(of_slice[i * slices]), total[b][l][r][i]);
            part[b][l][r][i] = Set::zero();
          }
    of_slice++;
  }
  for (int b = 0; b < streams; b++)
    for (int l = 0; l < lines; l++)
      for (int r = 0; r < R; r++)
        for (int i = 0; i < M; i++)
          Set::store(a.y + (m + i) * a.n + row + b * apart + (l * R + r) * Set::lanes, Set::times(total[b][l][r][i], Set::broadcast(unit)));
}

// All rows of x, as many at a time as registers hold the sums of; one row by two blocks that are half of the turn apart.
template <class Set, int bits, bool has_table, int most, int D, bool has_zeros>
void take_rows(const Linear& a, const Bytewise& bytewise, const DigitsOfUnits& x, const Turn& turn) {
  const CodesOfUnit<Set, bits, has_table> how(bytewise);
  const typename Set::Scales scales(a.scale);
  const float unit = a.has_outer ? bytewise.unit * a.outer : bytewise.unit;
  int64_t row = turn.begin;
  const auto take = [&](auto rows, auto streams, int64_t apart, int64_t m) {
    constexpr int M = decltype(rows)::value, S = decltype(streams)::value;
    take_blocks<Set, bits, has_table, most, D, M, S, has_zeros>(a, how, x, scales, unit, row, apart, m);
  };
  constexpr std::integral_constant<int, 1> one;
  constexpr std::integral_constant<int, 2> two;
  constexpr std::integral_constant<int, 4> four;
  if constexpr (Set::streams(bits) == 2) {
    if (a.m == 1) {
      const int64_t half = (turn.end - turn.begin) / rows_together / 2 * rows_together;
      for (; row < turn.begin + half; row += rows_together) take(one, two, half, 0);
      row += half;
    }
  }
  for (; row < turn.end; row += rows_together) {
    int64_t m = 0;
    if constexpr (Set::most_rows >= 4)
      for (; m + 4 <= a.m; m += 4) take(four, one, 0, m);
    for (; m + 2 <= a.m; m += 2) take(two, one, 0, m);
    if (m < a.m) take(one, one, 0, m);
  }
}

template <class Set, int bits>
void take_digits_of(const Linear& a, const Bytewise& how, const DigitsOfUnits& x, const Turn& turn) {
  const auto with = [&](auto digits) {
    constexpr int D = decltype(digits)::value, most = (1 << bits) - 1;
    if constexpr (bits == 4)
      if (how.table) {
        int largest = 0;
        for (int code = 0; code < 16; code++) largest = std::max<int>(largest, how.table[code]);
        if (largest <= Set::few_of_table) return take_rows<Set, 4, true, Set::few_of_table, D, false>(a, how, x, turn);
        return take_rows<Set, 4, true, 127, D, false>(a, how, x, turn);
      }
    if constexpr (takes_zeros<bits, false>)
      if (a.zero_point.data) return take_rows<Set, bits, false, most, D, true>(a, how, x, turn);
    return take_rows<Set, bits, false, most, D, false>(a, how, x, turn);
  };
  if (x.count == 1) return with(std::integral_constant<int, 1>());
  if (x.count == 3) return with(std::integral_constant<int, 3>());
  return with(std::integral_constant<int, 2>());
}

}  // namespace
}  // namespace lowbit::cpu
