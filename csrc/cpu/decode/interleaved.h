// The layout `interleaved` (lowbit_kernels/interleaved.py) as kernels see it: blocks of 32 rows, four bytes of each row in turn.
// A register holds the same columns of 8 or 16 rows, so that each lane accumulates one row: lanes are never summed, and one load
// gives the scales of sixteen rows.
#pragma once

#include "../kernels/split_int8_gemv.h"
#include "bit_planes.h"

namespace lowbit::cpu {

constexpr int64_t rows_per_block = 32;
constexpr int64_t bytes_per_word = 4 * rows_per_block;  // one word of each row
static inline int64_t columns_per_unit(int bits) { return 32 / (bits & -bits); }

// Structure of a unit, the smallest number of columns whose planes fill whole words: `words` of four bytes in a row, planes one
// after the other, widest first, and `fields` codes in a byte.
template <int bits>
struct Unit {
  using P = Planes<bits, 4>;
  static constexpr int narrowest = bits & -bits, fields = 8 / narrowest, words = bits / narrowest;
  static constexpr int64_t columns = 4 * fields;
  static constexpr int words_per_plane(int plane) { return P::width(plane) / narrowest; }
  static constexpr int first_word(int plane) { return plane == 0 ? 0 : first_word(plane - 1) + words_per_plane(plane - 1); }
};

// Consecutive units of one group and one slice, few enough for int32 sums. Runs form stretches of 2 to 4 KB within a slice: the
// amount read of one stream before the kernel switches to the other.
struct Run {
  int32_t units, group;
  bool is_stretch_end, is_slice_end;
};
constexpr int64_t min_stretch_bytes = 2048;  // (of a block)
static inline int64_t max_run_columns(int bits) { return bits > 4 ? 128 : bits > 2 ? 256 : slice; }

struct InterleavedLimbs {
  int count;           // limbs of a value of x, as in PackedLimbs
  const float* input_scale;
  int64_t runs;
  const Run* run;      // [runs]: cover all columns
  int8_t* limbs;      // int8: [M, units, fields, count, 4]; int16: [M, units, 2, words_for(count), 2]
  int32_t* sums;       // [M, runs, parts]: minus the sum of the run's limbs; times the offset where there are no zero points
  float* scale;        // [M, slices]: value of 1 in the lowest limb
  bool* no_limbs;       // [M]: rows of x without limbs, whose results are undefined
};

constexpr int64_t min_interleaved_group = 16;  // columns; each group has its own run and its own scaling, which smaller groups
                                               // would not amortize

// Whether weights of this shape and group size are stored interleaved.
static inline bool supports_interleaved(int bits, int64_t group, int64_t n, int64_t k) {
  const int64_t columns = columns_per_unit(bits);
  return n % rows_per_block == 0 && k % columns == 0 && (group >= k || (group >= min_interleaved_group && group % columns == 0));
}

#if defined(__x86_64__)
namespace avx512 {
void pack_limbs_interleaved(const Linear&, const ByteDecoding&, const ArrayView& x, const InterleavedLimbs&, int64_t begin, int64_t end);
}  // namespace avx512
namespace avx512vnni {
template <int bits>  // a translation unit for each
void interleaved_linear(const Linear&, const ByteDecoding&, const InterleavedLimbs&, const RowRange&);
}  // namespace avx512vnni
namespace avx2 {
void pack_limbs_interleaved(const Linear&, const ByteDecoding&, const ArrayView& x, const InterleavedLimbs&, int64_t begin, int64_t end);
template <int bits>  // a translation unit for each
void interleaved_linear(const Linear&, const ByteDecoding&, const InterleavedLimbs&, const RowRange&);
}  // namespace avx2
#endif

}  // namespace lowbit::cpu
