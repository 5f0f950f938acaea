// Producers of mixed_gemm.cuh: two rings in shared memory, for W and for x, each filled by one thread.
#pragma once

#include "../schedule/mixed_gemm_args.cuh"
#include "../schedule/mixed_gemm_shape.cuh"
#include "../ptx/sm90_ptx.cuh"

namespace lowbit::cuda {

constexpr int max_stages = 8;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// A block's part of K, in pieces of W (a unit or half of one), and its first tile of W and of x.
struct BlockShare {
  int first, last;  // pieces of a row
  int64_t first_tile;
  int first_row_of_x;
};

struct Ring {
  uint64_t *full, *free;
  int stages, stage = 0, parity = 0;
  __device__ Ring(uint64_t* barriers, int stages) : full(barriers), free(barriers + max_stages), stages(stages) {}
  // Initializes all barriers, by one thread: how many are used is an argument, which takes long to load. With constant addresses
  // they are issued back to back; in a loop, or by several threads, each would wait for its own fence.
  __device__ __forceinline__ void start() const {
#pragma unroll
    for (int i = 0; i < max_stages; i++) mbarrier_init(full + i, 1), mbarrier_init(free + i, tiles_per_block);
  }
  __device__ void advance(int by = 1) {
    if ((stage += by) == stages) stage = 0, parity ^= 1;
  }
};

// Runs of stages of x by their position in a piece, a compile-time constant.
template <int run, bool is_all>
struct Runs : Ring {
  __device__ explicit Runs(const Ring& ring) : Ring(ring) {}
  __device__ __forceinline__ int at(int i) const { return (is_all ? 0 : stage) + i % run; }
  __device__ __forceinline__ void pass(int i) {
    if ((i + 1) % run) return;
    if constexpr (is_all)
      parity ^= 1;
    else
      advance(run);
  }
};

// The units that a block reads, a column of tiles at a time. Only before_x of them are requested before x begins to arrive: every
// warp waits for x, and x would wait behind them.
template <class S, int unit_columns>
struct Weights {
  const uint8_t* from;  // next unit of the first tile
  int64_t row_bytes;
  int size, pitch, tiles, units;
  __device__ __forceinline__ Weights(const MixedGemm& a, const BlockShare& share) : size(a.unit.size), pitch(a.unit.pitch()) {
    constexpr int pieces = unit_columns / k_per_piece(S::columns, unit_columns);
    const int first = share.first / pieces;
    row_bytes = static_cast<int64_t>(a.units_per_row) * size;
    from = a.units + share.first_tile * row_bytes + first * size;
    tiles = static_cast<int>(min(static_cast<int64_t>(tiles_per_block), a.tiles - share.first_tile));
    units = share.first < share.last ? (share.last + pieces - 1) / pieces - first : 0;
  }
  static __device__ __forceinline__ uint64_t policy_of(const MixedGemm& a) { return a.m <= S::columns ? evict_first_policy() : evict_normal_policy(); }
  // The first unit of each tile: each warp requests its own, sooner than one thread could for all.
  __device__ __forceinline__ void copy_first(const MixedGemm& a, uint8_t* memory, const Ring& ring, int tile) const {
    if (units > 0 && tile < tiles)
      bulk_copy(memory + tile * pitch, from + tile * row_bytes, size, ring.full, policy_of(a));
  }
  // Requests all other units; sets how many bytes the first ones have.
  __device__ __forceinline__ void copy(const MixedGemm& a, uint8_t* memory, Ring ring, uint64_t* x_arrived_bar) {
    const uint64_t policy = policy_of(a);
    if (units > 0) mbarrier_expect_tx(ring.full, tiles * size);
#pragma unroll 1
    for (int u = 1; u < units; u++) {
      ring.advance();
      from += size;
      if (u == a.before_x) mbarrier_wait(x_arrived_bar, 0);
      mbarrier_wait(ring.free + ring.stage, ring.parity ^ 1);
      mbarrier_expect_tx(ring.full + ring.stage, tiles * size);
      const uint8_t* next = from;
      uint8_t* to = memory + ring.stage * tiles_per_block * pitch;
#pragma unroll 1
      for (int t = 0; t < tiles; t++, next += row_bytes, to += pitch) bulk_copy(to, next, size, ring.full + ring.stage, policy);
    }
  }
};

// Prefetches the first units of each share of K for all tiles into L2, by the blocks that start on multiprocessors which the
// kernel ahead has left free.
template <class S, int unit_columns>
__device__ __forceinline__ void prefetch_weights(const MixedGemm& a, int parts, int thread, int threads) {
  constexpr int pieces = unit_columns / k_per_piece(S::columns, unit_columns), max_units = 4;
  for (int i = blockIdx.x * threads + thread; i < a.tiles * parts; i += a.early * threads) {
    const int tile = i / parts, part = i % parts, first = a.pieces_per_row * part / parts / pieces;
    const int last = (a.pieces_per_row * (part + 1) / parts + pieces - 1) / pieces;
    const int64_t at = static_cast<int64_t>(tile) * a.units_per_row + first;
    if (first < last) prefetch(a.units + at * a.unit.size, min(last - first, max_units) * a.unit.size);
  }
}

// Copies x. Zero fill beyond the last row is slow where many blocks request it at once, so boxes of the last tile have only the
// rows that exist; what comes of the others is not written.
template <class S>
__device__ __forceinline__ void copy_x(const MixedGemm& a, const BlockShare& share, uint8_t* memory, Ring ring) {
  const int piece = k_per_piece(S::columns, a.unit.columns), rows = min(a.m - share.first_row_of_x, S::columns);
  const CUtensorMap* const x = rows < S::columns ? &a.last_of_x : &a.x;
  for (int c = share.first * piece; c < share.last * piece; c += S::stage_columns, ring.advance()) {
    mbarrier_wait(ring.free + ring.stage, ring.parity ^ 1);
    mbarrier_expect_tx(ring.full + ring.stage, S::boxes_of_stage * rows * box_k * 2);
#pragma unroll
    for (int b = 0; b < S::boxes_of_stage; b++)
      tma_load(memory + ring.stage * S::stage_bytes + b * S::box_bytes, x, c + b * box_k, share.first_row_of_x,
               ring.full + ring.stage);
  }
}
#endif

}  // namespace lowbit::cuda
