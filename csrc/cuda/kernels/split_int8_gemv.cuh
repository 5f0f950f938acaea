// Split-int8 GEMV for one or two rows of x on the integer tensor cores (mma.m16n8k32), from the layout mma_fragment: integers of
// up to eight bits, and e2m1.
//
//    x [M, K] --split_activations.cuh--> three int8 limbs in shared memory ------------> operand B [limbs] -----+
//    units of W (global) --bulk copies, one warp--> ring in shared memory --AND, shift--> operand A [16 rows] --+--mma--> s32
//                                                                                                                         |
//    y [M, N] <--bias, round-- sum of warps, in order <-- f32 <--* scale of the slice of x <--* group scale <-------------+
//
// A block has a run of tiles of 16 rows. Its warps split the columns of W (column_warps) and the tiles (tile_warps); each makes
// the limbs of its own columns of x, so that no warp waits for another. Copies of weights start before the kernel that writes x
// has ended (PDL).
//
// Contract: split-int8 (3 limbs): x to 2^-22 of the largest of each slice of a unit's columns; integer sums of a group exact,
// then fp32. Slices with infinity or NaN are recomputed in fp32.
// Limit: the bytes of W.
// Reached (evals/results/gemv_h100.json, 8192 x 8192, bfloat16, one H100, M = 1): int8 21.5 us, 1.00 of the time to read its
// bytes and 2.2 times as fast as F.linear; int4 11.8 us, 0.95 and 4.0 times; int2 8.2 us, 0.78 and 5.8 times; nvfp4 13.5 us, 0.90
// and 3.5 times.
#pragma once

#include <climits>

#include "../ptx/bulk_copy.cuh"
#include "../mma/split_int8_mma.cuh"
#include "../mma/f16x2_math.cuh"

namespace lowbit::cuda {

constexpr int max_split_int8_rows = 2;
constexpr int max_split_int8_warps = 16;

// Offsets of the parts of shared memory behind the ring, in this order, each aligned to 16 bytes.
struct SplitInt8Memory {
  int limbs, factors, shares, partial, of_row, barriers, total;  // behind the ring
};

struct SplitInt8Args {
  const uint8_t* units;       // [tiles][units_of_row] of unit_size bytes
  const void* scale;          // [n] where a row is one group, else in the units
  const uint8_t* zero_point;  // [n] where a row is one group with a zero point, else null
  const float* outer;         // the tensor scale, or null
  float factor;               // of the format: value of the integer 1
  const void* x;              // [M, k]
  const void* bias;           // [n] of x's type, or null
  void* y;                    // [M, n]
  int64_t n, tiles;
  int k, unit_size, units_per_row, scale_size;
  int column_warps, tile_warps;
  int units_per_pass;                   // slices of x that a warp holds at a time
  int run_log2;                      // log2 of the units in one copy; a copy stays in one tile where a row takes several passes
  int stages, max_in_flight;          // copies in the ring, and in flight: more in flight would delay the loads of x
  int min_tiles, extra_blocks;  // the first extra_blocks blocks have min_tiles + 1 tiles
  SplitInt8Memory at;
  Dtype scale_dtype;
  bool is_early;  // copies start before x may be read (PDL)
  bool has_zero, row_is_group, x_is_half, x_on_16_bytes;
};

// The bits of a stored value, loaded early and converted late, so that nothing waits for the load.
__device__ __forceinline__ uint32_t bits_at(const void* data, Dtype dtype, int64_t i) {
  return dtype == Dtype::float32 ? static_cast<const uint32_t*>(data)[i] : static_cast<const uint16_t*>(data)[i];
}
__device__ __forceinline__ float number_of(uint32_t bits, Dtype dtype) {
  return dtype == Dtype::float32 ? __uint_as_float(bits) : unpack_f16x2(bits, dtype == Dtype::float16).x;
}

// Contribution to y of a slice of x with infinity or NaN: plain fp32 products.
template <class W>
__device__ __noinline__ float non_finite_products(const SplitInt8Args& a, int64_t tile, int row, int m, int unit) {
  const uint8_t* bytes = a.units + (tile * a.units_per_row + unit) * a.unit_size;
  const int64_t n = tile * tile_rows + row;
  const Groups groups = {a.scale_dtype, a.scale_size, !a.row_is_group, false, {0, 0}};
  const uint32_t zero = W::has_zero && a.row_is_group ? a.zero_point[n] : 0;
  const float factor = W::has_outer && a.outer ? a.factor * *a.outer : a.factor;
  const float scale = a.row_is_group ? factor * load_float(a.scale, a.scale_dtype, n) : factor;
  float sum = 0;
#pragma unroll 1
  for (int k = 0; k < W::columns && unit * W::columns + k < a.k; k++) {
    const float x = load_float(a.x, a.x_is_half ? Dtype::float16 : Dtype::bfloat16, int64_t{m} * a.k + unit * W::columns + k);
    sum = fmaf(W::number(bytes, groups, row, k, zero) * scale, x, sum);
  }
  return sum;
}

// The same for all slices of a row of x that have any.
template <class W>
__device__ __noinline__ float non_finite_products(const SplitInt8Args& a, int64_t tile, int row, int m) {
  float sum = 0;
#pragma unroll 1
  for (int u = 0; u < a.units_per_row; u++) {
    bool has_all = true;
#pragma unroll 1
    for (int k = 0; k < W::columns && u * W::columns + k < a.k; k++) {
      const uint16_t element = static_cast<const uint16_t*>(a.x)[int64_t{m} * a.k + u * W::columns + k];
      has_all &= (element & 0x7fff) < (a.x_is_half ? 0x7c00 : 0x7f80);
    }
    if (!has_all) sum += non_finite_products<W>(a, tile, row, m, u);
  }
  return sum;
}

// Issues a block's copies: pass by pass, tile by tile, the units of the pass, a run of units in each copy. A single thread issues
// all, so this is on the critical path.
struct CopyQueue {
  const SplitInt8Args& a;
  const uint8_t *weights, *from;
  uint32_t ring, full, free;  // addresses in shared memory
  int tiles, tile = 0, first = 0, unit = 0;
  int stage = 0, parity = 1, started = 0, landing = 0, parity_landed = 0, left;
  __device__ CopyQueue(const SplitInt8Args& a, const uint8_t* weights, uint32_t ring, int tiles)
      : a(a), weights(weights), from(weights), ring(ring), full(ring + a.at.barriers), free(full + a.stages * 8), tiles(tiles),
        left(tiles * a.units_per_row) {
    opaque(full), opaque(free);
  }
#if LOWBIT_BULK_COPIES
  __device__ void start(uint64_t policy, int count) {
    const int run_size = a.unit_size << a.run_log2;
    for (; count > 0 && left > 0; count--) {
      if (started >= a.stages) mbarrier_wait(free + stage * 8, parity);
      if (++started > a.max_in_flight) {
        mbarrier_wait(full + landing * 8, parity_landed);
        if (++landing == a.stages) landing = 0, parity_landed ^= 1;
      }
      const int units = min(1 << a.run_log2, left), size = units * a.unit_size;
      copy(ring + stage * run_size, from, size, full + stage * 8, policy);
      if (++stage == a.stages) stage = 0, parity ^= 1;
      left -= units, from += size;
      const int units_per_pass = a.units_per_pass * a.column_warps;
      if (units_per_pass >= a.units_per_row) continue;  // one contiguous stretch
      unit += units;
      const int units_of_tile = min(units_per_pass, a.units_per_row - first);
      if (unit < units_of_tile) continue;
      unit = 0;
      from += int64_t{a.units_per_row - units_of_tile} * a.unit_size;
      if (++tile < tiles) continue;
      tile = 0;
      first += units_per_pass;
      from = weights + int64_t{first} * a.unit_size;
    }
  }
#endif
};

// Recomputed where it is needed instead of kept in registers, which are scarce.
struct BlockTiles {
  int64_t first;
  int count;
  __device__ __forceinline__ explicit BlockTiles(const SplitInt8Args& a) {
    int block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    first = static_cast<int64_t>(block) * a.min_tiles + min(block, a.extra_blocks);
    count = a.min_tiles + (block < a.extra_blocks);
  }
};

// W: storage and products of the weights (such as IntegerWeights).
template <class W, int M>
__global__ void __launch_bounds__((max_split_int8_warps + 1) * 32, 1) split_int8_gemv(const __grid_constant__ SplitInt8Args a) {
  using Order = typename W::template Order<M>;
  constexpr int parts = W::columns / 256, together = parts * M == 1 ? 2 : 1;  // slices of a row loaded at a time
  constexpr int slice_size = W::columns / 64 * Order::size_of_pair;
  extern __shared__ __align__(128) uint8_t memory[];
  uint32_t hidden = threadIdx.x % 32;
  opaque(hidden);  // otherwise the compiler recomputes it at every use
  const int lane = static_cast<int>(hidden), warp = threadIdx.x / 32, warps = a.column_warps * a.tile_warps, threads = warps * 32;
  const BlockTiles of_block(a);
  const int64_t first_tile = of_block.first;
  const int tiles = of_block.count;
  const uint8_t* weights = a.units + first_tile * a.units_per_row * a.unit_size;

  launch_dependents();
#if LOWBIT_BULK_COPIES
  uint64_t *full = reinterpret_cast<uint64_t*>(memory + a.at.barriers), *free = full + a.stages;
  if (warp == warps) {
    CopyQueue copies(a, weights, shared_address(memory), tiles);
    const uint64_t policy = evict_first_policy();
    if (lane == 0) {  // the first copy waits only for the barriers that it needs
      mbarrier_init(full);
      fence_barrier_init();
      if (a.is_early) copies.start(policy, 1);
    }
    __syncwarp();
    named_barrier_sync(2, threads + 32);  // the other warps have initialized the other barriers
    if (lane == 0 && a.is_early) copies.start(policy, a.max_in_flight - 1);
    __syncwarp();
    if (a.is_early) {
      arrive(1, threads + 32);
    } else {
      named_barrier_sync(1, threads + 32);  // the loads of x have been issued; copies issued earlier would delay them
    }
    if (lane == 0) copies.start(policy, INT_MAX);
    return;
  }
  if (lane == 0) {  // initializing a barrier takes about as long as issuing a copy, so warps share it
#pragma unroll 1
    for (int s = warp; s < a.stages; s += warps) {
      if (s > 0) mbarrier_init(full + s);
      mbarrier_init(free + s, 1 << a.run_log2);
    }
    fence_barrier_init();
  }
  __syncwarp();
  arrive(2, threads + 32);
#endif
  const int column = warp % a.column_warps;
  const int local = (a.units_per_row - column + a.column_warps - 1) / a.column_warps;
  uint8_t* limbs = memory + a.at.limbs + warp * a.units_per_pass * slice_size;
  float2* factors = reinterpret_cast<float2*>(memory + a.at.factors) + warp * a.units_per_pass * 8;
  int* shares = reinterpret_cast<int*>(memory + a.at.shares) + warp * a.units_per_pass * W::grains * 8;
  float* partial = reinterpret_cast<float*>(memory + a.at.partial);
  float2* of_row = reinterpret_cast<float2*>(memory + a.at.of_row);
  const Dtype x_dtype = a.x_is_half ? Dtype::float16 : Dtype::bfloat16;
  const float factor = W::has_outer && a.outer ? a.factor * *a.outer : a.factor;

  // Scale and bias of the rows, loaded early so that the last step does not wait for them.
  const bool has_row = static_cast<int>(threadIdx.x) < tiles * tile_rows && first_tile * tile_rows + threadIdx.x < a.n;
  const int64_t row_of_thread = first_tile * tile_rows + threadIdx.x;
  uint32_t row_scale = 0, bias_of_row = 0;
  if (has_row && a.row_is_group) row_scale = bits_at(a.scale, a.scale_dtype, row_of_thread);
  if (has_row && a.bias) bias_of_row = bits_at(a.bias, x_dtype, row_of_thread);
#pragma unroll 1
  for (int i = threadIdx.x + threads; i < tiles * tile_rows && first_tile * tile_rows + i < a.n; i += threads) {
    const int64_t n = first_tile * tile_rows + i;
    of_row[i] = {factor * (a.row_is_group ? load_float(a.scale, a.scale_dtype, n) : 1.0f),
                 a.bias ? load_float(a.bias, x_dtype, n) : 0.0f};
  }

  wait_for_dependencies();
  uint32_t x[together][M][parts][4];
  const auto load_x = [&](int index) {
#pragma unroll
    for (int j = 0; j < together; j++)
      if (index + j < local) {
#pragma unroll
        for (int m = 0; m < M; m++)
          load_slice<parts>(static_cast<const uint16_t*>(a.x) + static_cast<int64_t>(m) * a.k,
                            (column + (index + j) * a.column_warps) * W::columns, a.k, a.x_on_16_bytes, x[j][m]);
      }
  };
  load_x(0);
#if LOWBIT_BULK_COPIES
  named_barrier_sync(1, threads + 32);
#endif
  if (has_row) of_row[threadIdx.x] = {factor * (a.row_is_group ? number_of(row_scale, a.scale_dtype) : 1.0f),
                                      a.bias ? number_of(bias_of_row, x_dtype) : 0.0f};
#if LOWBIT_BULK_COPIES
  const int ring = a.stages << a.run_log2;
  int at = 0, parity = 0, seen = 0;  // at: position in the ring of the unit that was `seen` last, in the order of copies
  uint32_t full_at = shared_address(full), free_at = shared_address(free);
  opaque(full_at), opaque(free_at);
#endif

  uint32_t are_usual = !a.row_is_group && a.scale_dtype == Dtype::bfloat16;
  opaque(are_usual);
  const bool usual = are_usual != 0;
  bool is_finite = true;
#pragma unroll 1
  for (int first = 0; first == 0 || first < local; first += a.units_per_pass) {
    const int units = min(a.units_per_pass, local - first);
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < units; i += together) {
      if (first + i) load_x(first + i);
#pragma unroll
      for (int j = 0; j < together; j++) {
        if (i + j >= units) break;
        uint8_t* slice = limbs + (i + j) * slice_size;
        const int first_column = (column + (first + i + j) * a.column_warps) * W::columns;
        if (is_fully_loaded(first_column, W::columns, a.k, a.x_on_16_bytes)) {
#pragma unroll
          for (int m = 0; m < M; m++) exchange_words(x[j][m], slice + m * parts * 512);
        }
#pragma unroll
        for (int m = 0; m < M; m++)
          is_finite &= a.x_is_half
                           ? split_slice<parts, M, Order, true>(x[j][m], m, W::unit_log2, slice, factors + (i + j) * 8)
                           : split_slice<parts, M, Order, false>(x[j][m], m, W::unit_log2, slice, factors + (i + j) * 8);
      }
    }
    __syncwarp();
    if constexpr (W::has_shares) {
      if (!W::HeldCodes::makes_shares || units > 1) {
#pragma unroll 1
        for (int i = 0; i < units; i++) W::template write_shares<M>(limbs + i * slice_size, shares + i * W::grains * 8);
        __syncwarp();
      }
    }
    const int first_unit = first * a.column_warps;
    const int units_of_tile = min(a.units_per_pass * a.column_warps, a.units_per_row - first_unit);
    const int first_of_warp = a.tile_warps == 1 ? 0 : (warp - column) / a.column_warps;
    const bool holds = units == 1;  // a single unit for each tile: its registers of x serve all tiles
    typename W::HeldCodes held;
    float4 f;
    const auto load_codes = [&](int i) {
      held.load_codes(limbs + i * slice_size, shares + i * W::grains * 8, lane, holds);
      f = *reinterpret_cast<const float4*>(factors + i * 8 + lane % 4 * 2);
    };
    if (holds) load_codes(0);
#if LOWBIT_BULK_COPIES
    // Distance in the order of copies: to the first unit of the pass, and from a tile's last unit to the next tile's first.
    int step = tiles * first_unit + first_of_warp * units_of_tile + column - seen;
    const int step_of_tile = a.tile_warps * units_of_tile - (units - 1) * a.column_warps;
#endif
    Groups groups = {a.scale_dtype, a.scale_size, !a.row_is_group, usual, {0, 0}};
#pragma unroll 1
    for (int tile = first_of_warp; tile < tiles; tile += a.tile_warps) {
      if (W::has_zero && !usual && a.row_is_group) {
        const int64_t n = (BlockTiles(a).first + tile) * tile_rows + lane / 4;
        groups.zero_of_row = {n < a.n ? a.zero_point[n] : 0, n + 8 < a.n ? a.zero_point[n + 8] : 0};
      }
      float total[4] = {};
#pragma unroll 1
      for (int i = 0; i < units; i++) {
        float sum[4] = {};
        if (!holds) load_codes(i);
#if LOWBIT_BULK_COPIES
        at += step;
        if (at >= ring) at -= ring, parity ^= 1;
        step = i + 1 < units ? a.column_warps : step_of_tile;
        const int stage = at >> a.run_log2;
        mbarrier_wait(full_at + stage * 8, parity);
        uint32_t offset = at * a.unit_size;
        opaque(offset);
        const uint8_t* unit = memory + offset;
#else
        const uint8_t* unit =
            weights + (static_cast<int64_t>(tile) * a.units_per_row + column + (first + i) * a.column_warps) * a.unit_size;
#endif
        W::template add_products<M>(unit, held, groups, lane, sum);
#if LOWBIT_BULK_COPIES
        __syncwarp();
        if (lane == 0) arrive(free_at + stage * 8);
#endif
        total[0] = fmaf(sum[0] * f.x, f.y, total[0]);
        total[2] = fmaf(sum[2] * f.x, f.y, total[2]);
        if constexpr (!Order::has_limb_per_lane) {
          total[1] = fmaf(sum[1] * f.z, f.w, total[1]);
          total[3] = fmaf(sum[3] * f.z, f.w, total[3]);
        }
      }
      // Limbs 0 and 1 are in lane 0 of four (lane 2: the other row of x, or other columns of the same), limb 2 in the next lane;
      // or each limb is in a lane of its own.
      float sums[M][2];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float both = total[2 * half] + total[2 * half + 1];
        sums[0][half] = both + __shfl_down_sync(0xffffffffu, total[2 * half], 1);
        if constexpr (Order::has_limb_per_lane) sums[0][half] += __shfl_down_sync(0xffffffffu, total[2 * half], 2);
        if constexpr (Order::splits_columns) sums[0][half] += __shfl_down_sync(0xffffffffu, sums[0][half], 2);
        if constexpr (M > 1) sums[1][half] = both + __shfl_up_sync(0xffffffffu, total[2 * half + 1], 1);
      }
      float* rows = partial + (tile * a.column_warps + column) * (M * tile_rows) + lane / 4;
#pragma unroll
      for (int m = 0; m < M; m++) {
        if (lane % 4 != 2 * m) continue;
#pragma unroll
        for (int half = 0; half < 2; half++) {
          float* to = rows + m * tile_rows + half * 8;
          *to = first ? *to + sums[m][half] : sums[m][half];
        }
      }
    }
#if LOWBIT_BULK_COPIES
    // With several passes there is one warp for all tiles.
    seen = tiles * first_unit + (tiles - 1) * units_of_tile + column + (units - 1) * a.column_warps;
#endif
  }

  is_finite = named_barrier_and(1, threads, is_finite);
  const BlockTiles written(a);
#pragma unroll 1
  for (int i = threadIdx.x; i < written.count * tile_rows; i += threads) {
    const int tile = i / tile_rows, row = i % tile_rows;
    const int64_t n = written.first * tile_rows + i;
    if (n >= a.n) continue;
    const float2 constants = of_row[i];
#pragma unroll
    for (int m = 0; m < M; m++) {
      const float* sums = partial + tile * a.column_warps * (M * tile_rows) + m * tile_rows + row;
      float sum = 0;
#pragma unroll 1
      for (int w = 0; w < a.column_warps; w += 8) {
        float eight[8];
#pragma unroll
        for (int j = 0; j < 8; j++) eight[j] = w + j < a.column_warps ? sums[(w + j) * (M * tile_rows)] : 0.0f;
#pragma unroll
        for (int j = 0; j < 8; j++) sum += eight[j];
      }
      sum *= constants.x;
      if (!is_finite) sum += non_finite_products<W>(a, written.first + tile, row, m);
      if (a.bias) sum += constants.y;
      const __half half = from_float<__half>(sum);
      const __nv_bfloat16 bf16 = from_float<__nv_bfloat16>(sum);
      static_cast<uint16_t*>(a.y)[m * a.n + n] =
          a.x_is_half ? reinterpret_cast<const uint16_t&>(half) : reinterpret_cast<const uint16_t&>(bf16);
    }
  }
}

}  // namespace lowbit::cuda
