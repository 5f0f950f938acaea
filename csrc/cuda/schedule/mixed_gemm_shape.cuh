// Compile-time shape of a block of mixed_gemm.cuh and the layout of its shared memory.
#pragma once

#include <algorithm>

#include "mixed_gemm_args.cuh"
#include "../epilogue/splitk_reduce.cuh"
#include "../decode/group_scales.cuh"
#include "../decode/mma_fragment_layout.cuh"

namespace lowbit::cuda {

constexpr int box_k = 64;

// columns_: rows of x in a block; batch_: columns of W whose products are in flight together; group_: columns of a group (0: the
// row); is_exact_: scales multiply sums, else operands; ahead_: batches decoded before their products begin.
template <int columns_, int batch_, int group_, bool is_exact_, Scaling scaling_, int ahead_ = 1>
struct Shape {
  static constexpr int columns = columns_, batch = batch_, group = group_, lookahead = ahead_;
  static constexpr bool is_exact = is_exact_;
  static constexpr Scaling scaling = scaling_;
  static constexpr int boxes_of_stage = columns == 16 ? 4 : columns <= 64 ? 2 : 1, box_bytes = columns * box_k * 2;
  static constexpr int stage_columns = boxes_of_stage * box_k, stage_bytes = boxes_of_stage * box_bytes;
  static constexpr int threads = mma_threads + 128;
};

constexpr int x_offset = 1024;  // alignment of TMA boxes; barriers come first, at constant addresses
template <class S>
SharedLayout shared_layout(const MixedGemm& a, int table_bytes) {
  SharedLayout at;
  at.weights = x_offset + a.x_stages * S::stage_bytes;
  const int rings = at.weights + a.weight_stages * tiles_per_block * a.unit.pitch();
  at.sums = a.sums_apart ? rings : x_offset;
  at.row_epilogues = std::max(rings, at.sums + reduce_bytes<S::columns>(a.blocks)) + 15 & ~15;
  at.table = at.row_epilogues + block_rows * static_cast<int>(sizeof(float2));
  at.total = at.table + table_bytes;
  return at;
}

template <class Codes, class = void>
constexpr int table_bytes_of = 0;
template <class Codes>
constexpr int table_bytes_of<Codes, std::enable_if_t<(Codes::table_bytes > 0)>> = Codes::table_bytes;

// The decoder for a kernel of so many rows of x: with 64 rows half of a large table's space is better used for reductions, and
// with 256 there is no room for it.
template <class Codes, int columns, class = void>
struct CodesOf {
  using Type = Codes;
};
template <class Codes, int columns>
struct CodesOf<Codes, columns, std::enable_if_t<(Codes::table_bytes > 0 && (columns == 64 || columns == 256))>> {
  using Type = typename Codes::Smaller;
};

// Stages of x in a run: those of a piece. The ring is a multiple of it, so each stage's address follows from that of the run.
// Beside a table there is no room for four large ones.
template <class Codes, class S>
constexpr int stages_per_run = table_bytes_of<Codes> > 0 && S::columns == 256
                                  ? 1
                                  : k_per_piece(S::columns, Unit<Codes::bits, 0, false>::columns) / S::stage_columns;
// Whether a run is the whole ring.
template <class Codes, class S>
constexpr bool is_ring_a_run = S::columns >= 128 && stages_per_run<Codes, S> > 1;

// Whether the format has NaN but no infinity: then one NaN code makes all sums of its row NaN, whatever x is.
template <class Codes, class = void>
constexpr bool has_nan_of = false;
template <class Codes>
constexpr bool has_nan_of<Codes, std::enable_if_t<Codes::has_nan>> = true;

// Whether the group scale is multiplied together with the power of two that values need anyway, of which 2^power_left is left to
// the sums. e8m0 scales too large for that are detected at the end, since testing each would cost more than the multiplication
// saved; the tile is then recomputed (scale_overflow_fallback.cuh).
template <class Codes, class S>
constexpr bool folds_scales = !Codes::supports_zero && !S::is_exact && (S::scaling == Scaling::e4m3 || S::scaling == Scaling::e8m0);
template <class Codes, class S>
__host__ __device__ constexpr int power_left() {
  if constexpr (!folds_scales<Codes, S>)
    return 0;
  else if constexpr (S::scaling == Scaling::e4m3)
    return 8;
  else
    return Codes::left_of_e8m0;
}

}  // namespace lowbit::cuda
