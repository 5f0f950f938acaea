// Products by limbs of x with weights in the layout `interleaved` (lowbit_kernels/interleaved.py): 32 rows together, four bytes
// of each in turn. A register has the same columns of all its rows, so that their sums stay apart: neither a row's nor a group's
// sums have to be added up, and scales meet those of sixteen rows at once.
#pragma once

#include "../kernels/split_int8_gemv.h"
#include "bit_planes.h"

namespace lowbit::cpu {

constexpr int64_t rows_per_block = 32;
constexpr int64_t bytes_per_word = 4 * rows_per_block;  // one word of each row
static inline int64_t columns_per_unit(int bits) { return 32 / (bits & -bits); }

// What a row has in a unit: `words` of four bytes, those of each plane behind those of the wider one, and `fields` of each byte.
template <int bits>
struct Unit {
  using P = Planes<bits, 4>;
  static constexpr int narrowest = bits & -bits, fields = 8 / narrowest, words = bits / narrowest;
  static constexpr int64_t columns = 4 * fields;
  static constexpr int words_per_plane(int plane) { return P::width(plane) / narrowest; }
  static constexpr int first_word(int plane) { return plane == 0 ? 0 : first_word(plane - 1) + words_per_plane(plane - 1); }
};

// Units in a row that are of one group and one slice, and few enough for their sums to hold in 32 bits. Some runs, of a slice and of
// two to four kilobytes together, are a stretch: what is read of one block before another takes its turn.
struct Run {
  int32_t units, group;
  bool is_stretch_end, is_slice_end;
};
constexpr int64_t min_stretch_bytes = 2048;  // bytes
static inline int64_t max_run_columns(int bits) { return bits > 4 ? 128 : bits > 2 ? 256 : slice; }

struct InterleavedLimbs {
  int count;           // limbs of a number, as of DigitsOfX
  const float* input_scale;
  int64_t runs;
  const Run* run;      // [runs], all columns
  int8_t* limbs;      // [m, units, fields, count] of four bytes; words: [m, units, 2, words] of two
  int32_t* sums;       // [m, runs, count or words]: of each run's limbs, with a minus; times the offset where there are no zero points
  float* scale;        // [m, slices]: what the lowest limb counts
  bool* no_limbs;       // [m]: whether a row has no limbs, whose products mean nothing
};

constexpr int64_t min_interleaved_group = 16;  // columns: the scales of a slice have a place that holds no more

// Whether weights of such sizes and groups lie interleaved and are taken so.
static inline bool supports_interleaved(int bits, int64_t group, int64_t n, int64_t k) {
  const int64_t columns = columns_per_unit(bits);
  return n % rows_per_block == 0 && k % columns == 0 && (group >= k || (group >= min_interleaved_group && group % columns == 0));
}

#if defined(__x86_64__)
namespace avx512 {
void pack_limbs_interleaved(const Linear&, const ByteDecoding&, const ArrayView& x, const InterleavedLimbs&, int64_t begin, int64_t end);
}  // namespace avx512
namespace avx512vnni {
template <int bits>  // a unit for each
void interleaved_linear(const Linear&, const ByteDecoding&, const InterleavedLimbs&, const RowRange&);
}  // namespace avx512vnni
namespace avx2 {
void pack_limbs_interleaved(const Linear&, const ByteDecoding&, const ArrayView& x, const InterleavedLimbs&, int64_t begin, int64_t end);
template <int bits>  // a unit for each
void interleaved_linear(const Linear&, const ByteDecoding&, const InterleavedLimbs&, const RowRange&);
}  // namespace avx2
#endif

}  // namespace lowbit::cpu
