// Packs x for the interleaved kernels, as int8 or int16 limbs in the order in which codes leave a unit. Compiled once for each
// instruction set with such kernels (LOWBIT_SET is its namespace).
#include <type_traits>

#include "split_activations.h"
#include "../decode/interleaved.h"

// Instruction sets: avx2 avx512
namespace lowbit::cpu::LOWBIT_SET {
namespace {

// Writes the limbs of `columns` columns as 32-bit words, `word_stride` apart: part p of field f's word in a unit is the limb of
// column p F + f, so that one broadcast word meets the same columns of the codes.
template <int F, typename Limb>
inline void store_words(const Limb* limb_buffer, int64_t columns, int64_t word_stride, uint32_t* to) {
  constexpr int bits = 8 * sizeof(Limb), of_word = 32 / bits;
  using Plain = std::make_unsigned_t<Limb>;
  const Plain* const plain = reinterpret_cast<const Plain*>(limb_buffer);
  uint32_t words[slice / of_word];
  if constexpr (F == 1) {
    memcpy(words, limb_buffer, columns);
  } else if constexpr (F == 2 && of_word == 4) {  // keeps the even and the odd bytes of eight, in two words
    const auto even = [](uint64_t eight) {
      eight &= 0x00ff00ff00ff00ff;
      eight = (eight | eight >> 8) & 0x0000ffff0000ffff;
      return (eight | eight >> 16) & 0xffffffff;
    };
    uint64_t octets[slice / 8];
    memcpy(octets, limb_buffer, columns);
    for (int64_t u = 0; u < columns / 8; u++) octets[u] = even(octets[u]) | even(octets[u] >> 8) << 32;
    memcpy(words, octets, columns);
  } else {
    for (int64_t u = 0; u < columns / (F * of_word); u++)
      for (int f = 0; f < F; f++) {
        uint32_t word = 0;
        for (int p = 0; p < of_word; p++) word |= static_cast<uint32_t>(plain[(u * of_word + p) * F + f]) << (p * bits);
        words[u * F + f] = word;
      }
  }
  for (int64_t i = 0; i < columns / of_word; i++) to[i * word_stride] = words[i];
}

// F: fields of a unit; D: limbs.
template <int F, int D, typename Limb>
void pack(const Linear& a, const ByteDecoding& decoding, const ArrayView& x, const InterleavedLimbs& to, int64_t begin, int64_t end) {
  constexpr int64_t of_word = 4 / sizeof(Limb), columns = F * of_word, parts = sizeof(Limb) == 1 ? D : words_for(D);
  const int64_t slices = (a.k + slice - 1) / slice;
  alignas(64) float numbers[slice];
  alignas(64) int32_t integers[slice];
  alignas(64) Limb limb_buffer[slice];
  for (int64_t m = begin; m < end; m++) {
    const float of_row = D == 1 ? scale_of_row(x, m, a.k, to.input_scale) : 0;
    uint32_t* words = reinterpret_cast<uint32_t*>(to.limbs) + m * a.k / of_word * parts;
    int32_t* sums = to.sums + m * to.runs * parts;
    const Run* run = to.run;
    for (int64_t n = 0; n < slices; n++) {
      const int64_t first = n * slice, count = a.k - first < slice ? a.k - first : slice;
      load_row(x, m * x.stride + first, count, numbers);
      if (!quantize_slice<D>(numbers, count, of_row, integers, to.scale[m * slices + n])) to.no_limbs[m] = true;
      int64_t runs = 1;
      while (!run[runs - 1].is_slice_end) runs++;
      for (int64_t d = parts - 1; d >= 0; d--) {
        extract_low_limb(integers, count, limb_buffer);
        const Limb* at = limb_buffer;
        for (int64_t r = 0; r < runs; r++) {
          int32_t sum = 0;
          for (int64_t i = 0; i < run[r].units * columns; i++) sum += at[i];
          sums[r * parts + d] = a.zero_point.data ? -sum : -decoding.offset * sum;
          at += run[r].units * columns;
        }
        store_words<F>(limb_buffer, count, parts, words + d);
      }
      run += runs, sums += runs * parts, words += count / of_word * parts;
    }
  }
}

template <int F, typename Limb>
void pack_any(const Linear& a, const ByteDecoding& decoding, const ArrayView& x, const InterleavedLimbs& to, int64_t begin, int64_t end) {
  if (to.count == 1) return pack<F, 1, Limb>(a, decoding, x, to, begin, end);
  return to.count == 3 ? pack<F, 3, Limb>(a, decoding, x, to, begin, end) : pack<F, 2, Limb>(a, decoding, x, to, begin, end);
}

}  // namespace

void pack_limbs_interleaved(const Linear& a, const ByteDecoding& decoding, const ArrayView& x, const InterleavedLimbs& to, int64_t begin, int64_t end) {
  if (uses_words(a.bits, lanes)) return pack_any<2, int16_t>(a, decoding, x, to, begin, end);
  switch (a.bits & -a.bits) {
    case 8: return pack_any<1, int8_t>(a, decoding, x, to, begin, end);
    case 4: return pack_any<2, int8_t>(a, decoding, x, to, begin, end);
    case 2: return pack_any<4, int8_t>(a, decoding, x, to, begin, end);
    default: return pack_any<8, int8_t>(a, decoding, x, to, begin, end);
  }
}

}  // namespace lowbit::cpu::LOWBIT_SET
