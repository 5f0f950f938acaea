// x as digits in the order in which codes come out of interleaved weights, compiled once for each instruction set that has
// kernels of them (LOWBIT_SET is its namespace).
#include <type_traits>

#include "digits_of_x.h"
#include "interleaved.h"

// Instruction sets: avx2 avx512
namespace lowbit::cpu::LOWBIT_SET {
namespace {

// Digits of columns in order, as the words of each unit's fields: byte or half p of field f's word is of column p F + f. They lie
// `apart` words from one to the next.
template <int F, typename Digit>
inline void put_words(const Digit* own, int64_t columns, int64_t apart, uint32_t* to) {
  constexpr int bits = 8 * sizeof(Digit), of_word = 32 / bits;
  using Plain = std::make_unsigned_t<Digit>;
  const Plain* const plain = reinterpret_cast<const Plain*>(own);
  uint32_t words[slice / of_word];
  if constexpr (F == 1) {
    memcpy(words, own, columns);
  } else if constexpr (F == 2 && of_word == 4) {  // every second byte, eight at a time
    const auto even = [](uint64_t eight) {
      eight &= 0x00ff00ff00ff00ff;
      eight = (eight | eight >> 8) & 0x0000ffff0000ffff;
      return (eight | eight >> 16) & 0xffffffff;
    };
    uint64_t eights[slice / 8];
    memcpy(eights, own, columns);
    for (int64_t u = 0; u < columns / 8; u++) eights[u] = even(eights[u]) | even(eights[u] >> 8) << 32;
    memcpy(words, eights, columns);
  } else {
    for (int64_t u = 0; u < columns / (F * of_word); u++)
      for (int f = 0; f < F; f++) {
        uint32_t word = 0;
        for (int p = 0; p < of_word; p++) word |= static_cast<uint32_t>(plain[(u * of_word + p) * F + f]) << (p * bits);
        words[u * F + f] = word;
      }
  }
  for (int64_t i = 0; i < columns / of_word; i++) to[i * apart] = words[i];
}

// F: fields of a unit.
template <int F, int D, typename Digit>
void take(const Linear& a, const Bytewise& how, const Numbers& x, const DigitsOfUnits& to, int64_t begin, int64_t end) {
  constexpr int64_t of_word = 4 / sizeof(Digit), columns = F * of_word, parts = sizeof(Digit) == 1 ? D : words_of(D);
  const int64_t slices = (a.k + slice - 1) / slice;
  alignas(64) float numbers[slice];
  alignas(64) int32_t integers[slice];
  alignas(64) Digit own[slice];
  for (int64_t m = begin; m < end; m++) {
    const float of_row = D == 1 ? scale_of_row(x, m, a.k, to.given) : 0;
    uint32_t* words = reinterpret_cast<uint32_t*>(to.digits) + m * a.k / of_word * parts;
    int32_t* sums = to.sums + m * to.runs * parts;
    const Run* run = to.run;
    for (int64_t n = 0; n < slices; n++) {
      const int64_t first = n * slice, count = a.k - first < slice ? a.k - first : slice;
      take_numbers(x, m * x.stride + first, count, numbers);
      if (!take_slice<D>(numbers, count, of_row, integers, to.scale[m * slices + n])) to.without[m] = true;
      int64_t runs = 1;
      while (!run[runs - 1].ends_slice) runs++;
      for (int64_t d = parts - 1; d >= 0; d--) {
        take_lowest(integers, count, own);
        const Digit* at = own;
        for (int64_t r = 0; r < runs; r++) {
          int32_t sum = 0;
          for (int64_t i = 0; i < run[r].units * columns; i++) sum += at[i];
          sums[r * parts + d] = a.zero_point.data ? -sum : -how.offset * sum;
          at += run[r].units * columns;
        }
        put_words<F>(own, count, parts, words + d);
      }
      run += runs, sums += runs * parts, words += count / of_word * parts;
    }
  }
}

template <int F, typename Digit>
void take_any(const Linear& a, const Bytewise& how, const Numbers& x, const DigitsOfUnits& to, int64_t begin, int64_t end) {
  if (to.count == 1) return take<F, 1, Digit>(a, how, x, to, begin, end);
  return to.count == 3 ? take<F, 3, Digit>(a, how, x, to, begin, end) : take<F, 2, Digit>(a, how, x, to, begin, end);
}

}  // namespace

void take_units(const Linear& a, const Bytewise& how, const Numbers& x, const DigitsOfUnits& to, int64_t begin, int64_t end) {
  if (takes_words(a.bits, lanes)) return take_any<2, int16_t>(a, how, x, to, begin, end);
  switch (a.bits & -a.bits) {
    case 8: return take_any<1, int8_t>(a, how, x, to, begin, end);
    case 4: return take_any<2, int8_t>(a, how, x, to, begin, end);
    case 2: return take_any<4, int8_t>(a, how, x, to, begin, end);
    default: return take_any<8, int8_t>(a, how, x, to, begin, end);
  }
}

}  // namespace lowbit::cpu::LOWBIT_SET
