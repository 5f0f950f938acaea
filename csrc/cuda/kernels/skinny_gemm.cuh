// GEMM for up to sixteen rows of x on the 16-bit tensor cores (mma.m16n8k16), from the layout mma_fragment, in every format of
// weight_decoders.cuh.
//
//    units of W (global) --bulk copies--> a ring for each warp --decode--> operand A [16 rows of W] ---+
//    x [M, K] --ldmatrix, 512 columns in a warp's registers----------------> operand B [8 rows of x] --+--mma--> f32
//                                                                                                                |
//    y [M, N] <--bias, round-- sums of blocks (cluster) <-- sums of warps (shared memory) <--* group scale <-----+
//
// Weights are operand A and eight rows of x the columns of operand B, so M = 1 costs as much as M = 8, and eight rows more cost
// one mma more for each operand. A warp keeps its slice of 512 columns of x in registers and visits one tile after another, so
// that codes are all it reads. Blocks of a cluster have the same tiles and split the slices, so that each loads only part of x. A
// block with more slices than warps runs in passes. Copies of weights start before the kernel that writes x has ended (PDL).
//
// Products of experts (of_experts, schedule/expert_rows.h): a row of blocks has one row of y, and begins when the choice of experts
// has been written. Rows that chose the same expert read its weight from the L2 cache.
//
// Contract: exact: codes are exact in 16 bits, products of a group are summed in fp32, scales multiply in fp32, one rounding;
// sums are added in a fixed order.
// Limit: the bytes of W.
// Reached (evals/results/gemv_h100.json, 8192 x 8192, bfloat16, one H100, M = 1): fp8 24.2 us, 0.88 of the time to read its bytes
// and 2.0 times as fast as F.linear; fp6 18.6 us, 0.87 and 2.6 times; nf4 19.7 us, 0.58 and 2.4 times.
#pragma once

#include <type_traits>

#include "../ptx/cluster.cuh"
#include "../pipeline/skinny_gemm_activations.cuh"
#include "../mma/skinny_gemm_mma.cuh"

namespace lowbit::cuda {

template <class F>
constexpr int units_per_slice = slice_k / Unit<F::bits, 0, false>::columns;
// Whether scales may be multiplied into the weights before the mma.
template <class F, Scales scales>
constexpr bool folds_into_weights = (scales == Scales::e8m0 || scales == Scales::e4m3) && !F::supports_zero;
// Whether the first tile is multiplied while x is still being reordered; for other formats the unrolled code would grow too
// large.
template <class F, Scales scales>
constexpr bool overlaps_x_load = !folds_into_weights<F, scales> || units_per_slice<F> == 1;

template <class F, class T, Scales scales, int run, int octets, bool of_experts>
__global__ void __launch_bounds__(max_skinny_warps(octets) * 32, 1) skinny_gemm(const __grid_constant__ SkinnyGemm a) {
  constexpr int units_per_slice = cuda::units_per_slice<F>, outputs = outputs_per_tile(octets);
  constexpr bool overlaps_x_load = cuda::overlaps_x_load<F, scales>;
  extern __shared__ __align__(128) uint8_t memory[];
  const int lane = threadIdx.x, place = threadIdx.y, tile_group = threadIdx.z, warp = tile_group * a.slices_per_pass + place;
  const int thread = warp * 32 + lane, threads = a.slices_per_pass * a.tile_groups * 32;
  float *partial = reinterpret_cast<float*>(memory + a.at.partial), *total = reinterpret_cast<float*>(memory + a.at.total);
  float* shares = reinterpret_cast<float*>(memory + a.at.shares);  // [block of the cluster][tile of this block][outputs]
  const int cluster = blockIdx.x / a.cluster_size, block = blockIdx.x % a.cluster_size;
  const int tiles = a.min_tiles + (cluster < a.extra_clusters);
  const int64_t first_tile = static_cast<int64_t>(cluster) * a.min_tiles + min(cluster, a.extra_clusters);
  const int tiles_per_share = (a.min_tiles + a.cluster_size) / a.cluster_size;
  launch_dependents();
  int expert = 0;
  if constexpr (of_experts) {
    wait_for_dependencies();
    expert = a.of_experts.expert_of(blockIdx.y);
    if (expert < 0) {
      for (int64_t n = first_tile * tile_rows + thread; n < min((first_tile + tiles) * tile_rows, a.n); n += threads)
        static_cast<T*>(a.y)[blockIdx.y * a.n + n] = from_float<T>(0.0f);
      return;
    }
  }
  const int rows = of_experts ? 1 : a.m;
  const int64_t first_of_expert = of_experts ? expert * a.n : 0;  // row of W
  const uint8_t* weights = a.units + (first_tile + (of_experts ? expert * a.tiles : 0)) * a.units_per_row * a.unit.size;
  const auto slice_in = [&](int pass) { return (block * a.passes + pass) * a.slices_per_pass + place; };
  const auto units_in = [&](int pass) { return min(units_per_slice, a.units_per_row - slice_in(pass) * units_per_slice); };
  const auto bytes_of = [&](int pass, int tile) {  // the first unit of the slice
    return weights + (static_cast<int64_t>(tile) * a.units_per_row + slice_in(pass) * units_per_slice) * a.unit.size;
  };

  if (a.cluster_size > 1) cluster_arrive();
#if LOWBIT_BULK_COPIES
  const int pitch = a.unit.pitch();
  const uint32_t ring = shared_address(memory) + a.at.ring, barriers = shared_address(memory) + a.at.barriers;
  const int first_slot = warp * a.stages;  // first slot of this warp
  const uint64_t policy = evict_first_policy();
  if (lane == 0) {
#pragma unroll 1
    for (int s = 0; s < a.stages; s++) mbarrier_init(barriers + (first_slot + s) * 8);
    fence_barrier_init();
  }
  __syncwarp();
  int stage = 0, parity = 0;                                             // position of the next unit in the ring
  const int64_t step = int64_t{a.tile_groups} * a.units_per_row * a.unit.size;  // bytes between two tiles of this warp
  int next_pass = 0, next_tile = tile_group, units_copied = 0;                 // next unit to copy
  int units_of_next = units_in(0);
  const uint8_t* from = bytes_of(0, tile_group);
  if (units_of_next <= 0) next_tile = tiles;
  const auto start_copy = [&](int slot) {
    if (next_tile >= tiles) return;
    if (lane == 0) copy(ring + (first_slot + slot) * pitch, from, a.unit.size, barriers + (first_slot + slot) * 8, policy);
    if (units_per_slice > 1) {
      from += a.unit.size;
      if (++units_copied < units_of_next) return;
      from -= units_copied * a.unit.size;
      units_copied = 0;
    }
    from += step;
    next_tile += a.tile_groups;
    if (next_tile < tiles || ++next_pass == a.passes) return;
    units_of_next = units_in(next_pass);
    if (units_of_next <= 0) return;
    next_tile = tile_group, from = bytes_of(next_pass, tile_group);
  };
  const auto start_copies = [&](int first, int last) {
#pragma unroll 1
    for (int slot = first; slot < last; slot++) start_copy(slot);
  };
  start_copies(0, a.early_stages);
#endif
  const uint2* table = reinterpret_cast<const uint2*>(memory + a.at.table);
  if constexpr (F::parts > 1) {
    F::fill(reinterpret_cast<uint2*>(memory + a.at.table), thread, threads);
    __syncthreads();
  }
  const typename F::Constants constants = F::constants(a.is_signed, table);
  const int batches = (tiles + a.tiles_per_batch - 1) / a.tiles_per_batch;
  float factor = a.outer ? a.factor * a.outer[expert] : a.factor;
  if constexpr (F::factor != 1) factor *= F::factor;
  const auto write = [&](int tile, int output, float sum) {
    const int64_t n = (first_tile + tile) * tile_rows + output % tile_rows;
    if (n >= a.n) return;
    if (a.unit.groups == 0) sum *= scale_at(a.scale, a.scale_type, first_of_expert + n);
    sum *= factor;
    if (a.bias) sum += to_float(static_cast<const T*>(a.bias)[first_of_expert + n]);
    const int64_t row = of_experts ? blockIdx.y : output / tile_rows;
    static_cast<T*>(a.y)[row * a.n + n] = from_float<T>(sum);
  };
  wait_for_dependencies();

  int buffer_index = 0;  // buffer of `partial` to write next
  for (int pass = 0; pass < a.passes; pass++) {
    const int units = units_in(pass);
    const bool is_last = pass + 1 == a.passes;
    SliceOfX<octets, of_experts> slice;
    slice.start_loads(a, slice_in(pass));
#if LOWBIT_BULK_COPIES
    if (pass == 0) {  // copies issued earlier would delay the loads of x; by now those have been issued
      int first = a.early_stages;
      if (first == 0) __syncthreads();
      // adds 0, which the compiler cannot know: a dependency on the first load of x
      else if (first < a.stages - 1) first += slice.x[0][0] & a.k >> 31;
      start_copies(first, a.stages - 1);
    }
#endif
    const auto reorder = [&](int step) {
      if (step % 2 == 0) slice.reorder(a, slice_in(pass), memory + a.at.x + warp * x_buffer_bytes, step);
    };
    // is_first: the first tile of a pass, which is multiplied while x is being reordered
    const auto products_of_tile = [&](auto is_first, int tile, float (&sum)[octets][4]) {
      uint32_t zeros = 0x0101u << (F::bits - 1);
      if (F::supports_zero && a.has_zero && a.zero_point) {
        const int64_t n = (first_tile + tile) * tile_rows + lane / 4;
        const uint8_t* of_row = a.zero_point + first_of_expert + n;
        zeros = (n < a.n ? of_row[0] : 0) | (n + 8 < a.n ? of_row[8] : 0) << 8;
      }
#pragma unroll
      for (int u = 0; u < units_per_slice; u++) {
        if (u >= units) break;
#if LOWBIT_BULK_COPIES
        mbarrier_wait(barriers + (first_slot + stage) * 8, parity);
        start_copy((stage ? stage : a.stages) - 1);  // into the slot of the unit before this one
        const uint8_t* unit = memory + a.at.ring + (first_slot + stage) * pitch;
#else
        const uint8_t* unit = bytes_of(pass, tile) + u * a.unit.size;
#endif
        constexpr int steps = steps_per_slice / units_per_slice;
        const auto as_it_is = [](int) {};
        const auto products = [&](auto is_folded, auto prepare) {
          products_of_unit<F, T, scales, run, decltype(is_folded)::value, octets>(unit, a, constants, zeros, slice.x, u * steps,
                                                                                  sum, prepare);
        };
        const auto prepare = [&](int step) {
          if constexpr (decltype(is_first)::value) reorder(step);
        };
        if constexpr (folds_into_weights<F, scales>) {
          if (may_fold<F, scales, run>(unit + a.unit.scale_at, lane)) {
            products(std::true_type(), prepare);
          } else {
#pragma unroll
            for (int step = u * steps; step < (u + 1) * steps; step++) prepare(step);
            products(std::false_type(), as_it_is);
          }
        } else {
          products(std::false_type(), prepare);
        }
#if LOWBIT_BULK_COPIES
        __syncwarp();
        if (++stage == a.stages) stage = 0, parity ^= 1;
#endif
      }
    };
    if constexpr (!overlaps_x_load) {
#pragma unroll
      for (int step = 0; step < steps_per_slice; step++) reorder(step);
    }
    if (pass == 0 && a.cluster_size > 1) cluster_wait();  // all blocks of the cluster have started, so their shared memory may be
                                                          // written
#pragma unroll 1
    for (int batch = 0; batch < batches; batch++, buffer_index ^= 1) {
      const int first = batch * a.tiles_per_batch, count = min(a.tiles_per_batch, tiles - first);
      float* sums = partial + buffer_index * a.tiles_per_batch * a.slices_per_pass * outputs;
#pragma unroll 1
      for (int tile = first + tile_group; tile < first + count; tile += a.tile_groups) {
        float sum[octets][4] = {};
        if (overlaps_x_load && batch == 0 && tile == tile_group) {
          products_of_tile(std::bool_constant<overlaps_x_load>(), tile, sum);
        } else {
          products_of_tile(std::false_type(), tile, sum);
        }
        float* to = sums + ((tile - first) * a.slices_per_pass + place) * outputs + lane % 4 * 2 * tile_rows + lane / 4;
#pragma unroll
        for (int e = 0; e < octets; e++)
#pragma unroll
          for (int i = 0; i < 4; i++) to[(e * 8 + i % 2) * tile_rows + i / 2 * 8] = sum[e][i];
      }
      __syncthreads();
      for (int i = thread; i < count * outputs; i += threads) {
        const int tile = i / outputs, output = i % outputs, m = output / tile_rows;
        if (m >= rows) continue;
        float sum = pass ? total[first * outputs + i] : 0;
        const float* slices = sums + tile * a.slices_per_pass * outputs + output;
#pragma unroll 4
        for (int s = 0; s < a.slices_per_pass; s++) sum += slices[s * outputs];
        if (!is_last) {
          total[first * outputs + i] = sum;
        } else if (a.cluster_size == 1) {
          write(first + tile, output, sum);
        } else {
          const int owner = (first + tile) % a.cluster_size, place_there = (first + tile) / a.cluster_size;
          store_remote(shares + (block * tiles_per_share + place_there) * outputs + output, owner, sum);
        }
      }
    }
  }
  if (a.cluster_size == 1) return;
  cluster_arrive();
  cluster_wait();
  for (int i = thread; i < tiles_per_share * outputs; i += threads) {
    const int tile = i / outputs * a.cluster_size + block, output = i % outputs;
    if (tile >= tiles || output / tile_rows >= rows) continue;
    float sum = shares[i];
    for (int b = 1; b < a.cluster_size; b++) sum += shares[b * tiles_per_share * outputs + i];
    write(tile, output, sum);
  }
}

}  // namespace lowbit::cuda
