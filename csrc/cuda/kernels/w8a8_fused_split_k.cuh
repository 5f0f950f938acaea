// Quantizes x and multiplies in one kernel, with K split over the blocks of a cluster: for little x, where a kernel of its own
// for x would take longer than the product.
//
//    x [T rows, part of K] --registers--> max |x| --cluster--> max of the row --> codes, swizzled --> shared memory --+
//    W [128 rows, part of K] --TMA, before x is ready (PDL)--> ring in shared memory ---------------------------------+--wgmma-->
//    y <--s_x s_w, bias, round-- sums in block order <--remote stores in the cluster-- sums of a tile <--
//
// y = (x W^T) s_x s_w + bias. A block multiplies 128 rows of W by T rows of x and a part of the columns, and goes on to further
// tiles with the same x. Each tile's sums go to the block that writes its rows and are added in a fixed order.
// Contract: exact: integer sums (e4m3: the tensor cores' fp32 sums), one rounding.
// Limit: latency and the bytes of W.
// Figures: evals/results/w8a8_h100.json.
#pragma once

#include "../ptx/cluster.cuh"
#include "../pipeline/fused_activation_quant.cuh"

namespace lowbit::cuda::w8a8 {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A thread's four values in eight rows of x, from complete sums.
template <int T, class Number>
__device__ __forceinline__ void write_of_tile(const W8A8Args& a, const Rows& rows, const Number* sums, const RowScale* scales,
                                              int octet, int64_t m, int64_t n) {
  const int row = octet * 8 + threadIdx.x % 4 * 2;
  write_eight(a, rows, sums, float2{scales[row].scale, scales[row + 1].scale}, m + row, n);
}

template <class Number, int T>
__device__ __forceinline__ void multiply_part(const W8A8Args& a, Ring<T, 8>& ring, uint32_t x, int steps, Number (&sums)[T / 2]) {
  constexpr bool leaves_cores = std::is_same_v<Number, float>;
  const int lane = threadIdx.x % 32;
  uint32_t before = 0;
  if (leaves_cores || steps == 0)
#pragma unroll
    for (int e = 0; e < T / 2; e++) sums[e] = 0;
#pragma unroll 1
  for (int step = 0; step < steps; step++, ring.advance()) {
    mbarrier_wait(ring.full(), ring.parity);
    const uint64_t w_at = smem_descriptor(ring.memory + ring.at * w_stage_bytes<8> + threadIdx.x / 128 * (w_stage_bytes<8> / 2));
    const uint64_t x_at = smem_descriptor(x + step * T * stage_k);
    if constexpr (leaves_cores) {
      float part[T / 2];
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < stage_k / 32; k++) add<T>(part, w_at + 2 * k, x_at + 2 * k, k > 0);
      wgmma_commit();
      wgmma_wait<0>();
      if (lane == 0) arrive_remote(ring.free(), cluster_rank());
#pragma unroll
      for (int e = 0; e < T / 2; e++) sums[e] += part[e];
    } else {
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < stage_k / 32; k++) add<T>(sums, w_at + 2 * k, x_at + 2 * k, step > 0 || k > 0);
      wgmma_commit();
      if (step > 0) {
        wgmma_wait<1>();
        if (lane == 0) arrive_remote(before, cluster_rank());
      }
      before = ring.free();
    }
  }
  if constexpr (!leaves_cores) {
    wgmma_wait<0>();
    if (steps > 0 && lane == 0) arrive_remote(before, cluster_rank());
  }
}

// A block's part of the product: rows of x, columns, and every step_of_tiles-th tile.
struct BlockPart {
  uint32_t tiles_m, tiles, first_tile, step_of_tiles;
  int first, steps, columns, rows_of_x;  // first: first stage of columns; columns: those within K
  int64_t m;

  __device__ BlockPart(const FusedSplitK& args, int T, int blocks, int block) {
    const W8A8Args& a = args.product;
    tiles_m = a.tiles_m, tiles = tiles_m * a.tiles_n, step_of_tiles = gridDim.x / blocks, first_tile = blockIdx.x / blocks;
    first = a.steps * block / blocks, steps = a.steps * (block + 1) / blocks - first;
    columns = min(steps * stage_k, args.k - first * stage_k);
    m = static_cast<int64_t>(first_tile % tiles_m) * T;  // a block keeps its rows of x
    rows_of_x = static_cast<int>(min(a.m - m, static_cast<int64_t>(T)));
  }
};

// Run by the copying warp: some of W, then x, then the rest of W.
template <class X, int T>
__device__ __forceinline__ void copy_part(const CUtensorMap& w, const FusedSplitK& args, Ring<T, 8> ring, const BlockPart& part,
                                          const FusedSplitKMemory<T>& at, uint32_t x_arrived) {
  const int lane = threadIdx.x % 32;
  const bool is_cluster = args.product.cluster_size > 1;
  if (is_cluster) cluster_arrive();
  const uint64_t policy = part.tiles_m > 1 ? evict_normal_policy() : evict_first_policy(), x_policy = evict_normal_policy();
  const auto copy_w = [&](uint32_t tile, int step) {
    mbarrier_wait(ring.free(), ring.parity ^ 1);
    mbarrier_expect_tx(ring.full(), w_stage_bytes<8>);
    tma_load(ring.memory + ring.at * w_stage_bytes<8>, w, (part.first + step) * stage_k, tile / part.tiles_m * block_rows,
             ring.full(), policy);
    ring.advance();
  };
  const int early = min(min(early_stages, ring.stages), part.steps);
  if (lane == 0)
#pragma unroll 1
    for (int step = 0; step < early; step++) copy_w(part.first_tile, step);
  __syncwarp();
  wait_for_dependencies();
  const X* const x = static_cast<const X*>(args.x) + part.m * args.k + part.first * stage_k;
#pragma unroll 1
  for (int row = lane; row < part.rows_of_x; row += 32)
    copy_row(ring.memory + at.floats + row * part.steps * stage_k * 2, x + static_cast<int64_t>(row) * args.k,
             part.columns * 2, x_arrived, x_policy);
  __syncwarp();
  if (lane == 0)
    for (uint32_t tile = part.first_tile; tile < part.tiles; tile += part.step_of_tiles)
#pragma unroll 1
      for (int step = tile == part.first_tile ? early : 0; step < part.steps; step++) copy_w(tile, step);
  __syncwarp();
  if (is_cluster) cluster_wait();
}

// Sends each warp's sums to the block that writes its rows of W; then adds this block's, block 0's first, and writes them.
template <class Number, int T>
__device__ __forceinline__ void add_parts(const W8A8Args& a, uint32_t memory, const Number (&sums)[T / 2], const Rows& rows,
                                          const RowScale* scales, int octets, int64_t m, int64_t n, uint32_t arrived) {
  const int blocks = a.cluster_size, block = cluster_rank(), share = consumer_warps / blocks;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, owner = warp / share;
  const auto place = [&](int from, int j) {
    return memory + (((from * octets + j) * share + warp % share) * 32 + lane) * 16;
  };
#pragma unroll
  for (int j = 0; j < T / 8; j++)
    if (j < octets)
      store_remote(remote_address(place(block, j), owner), *reinterpret_cast<const int4*>(sums + 4 * j), remote_address(arrived, owner));
  wait_for_remote_stores(arrived);
#pragma unroll 1
  for (int j = warp / share; j < octets; j += blocks) {
    Number total[4] = {};
#pragma unroll 2
    for (int from = 0; from < blocks; from++) {
      const uint4 four = load_sixteen_shared(place(from, j));
      const Number* number = reinterpret_cast<const Number*>(&four);
#pragma unroll
      for (int i = 0; i < 4; i++) total[i] += number[i];
    }
    write_of_tile<T>(a, rows, total, scales, j, m, n);
  }
}

#endif

template <class Number, class X, int T>
__global__ void __launch_bounds__(threads_per_block<T, 8>, 2)
    w8a8_fused_split_k(const __grid_constant__ CUtensorMap w, const __grid_constant__ FusedSplitK args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  launch_dependents();
  extern __shared__ uint8_t unaligned[];
  const W8A8Args& a = args.product;
  uint8_t* const memory = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  const int blocks = a.cluster_size, block = blocks > 1 ? cluster_rank() : 0;
  const auto at = FusedSplitKMemory<T>::of(a.stages, args.max_steps, args.max_rows, blocks);
  const BlockPart part(args, T, blocks, block);
  const int octets = (part.rows_of_x + 7) / 8;
  Ring<T, 8> ring;
  ring.memory = shared_address(memory);
  ring.stages = a.stages;
  ring.barriers = ring.memory + at.barriers;
  const uint32_t maxima_arrived = ring.barriers + 16 * a.stages, sums_arrived = maxima_arrived + 8, x_arrived = sums_arrived + 8;
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int i = 0; i < a.stages; i++) {
      mbarrier_init(ring.barriers + 16 * i, 1);
      mbarrier_init(ring.barriers + 16 * i + 8, consumer_warps);
    }
    mbarrier_init(maxima_arrived, 1);
    mbarrier_init(sums_arrived, 1);
    mbarrier_init(x_arrived, 1);
    fence_barrier_init();
    mbarrier_expect_tx(maxima_arrived, blocks * part.rows_of_x * 4);
    mbarrier_expect_tx(x_arrived, part.rows_of_x * part.columns * 2);
    mbarrier_expect_tx(sums_arrived, octets * 8 * block_rows * 4);
  }
  uint32_t* const gathered = reinterpret_cast<uint32_t*>(memory + (blocks > 1 ? at.scales : at.maximum));
#pragma unroll 1
  for (int i = threadIdx.x; i < T; i += blockDim.x) gathered[i] = 0;
  __syncthreads();

  if (threadIdx.x >= consumer_threads) {
    copy_part<X, T>(w, args, ring, part, at, x_arrived);
    return;
  }

  // share: warps whose rows a block writes
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, share = consumer_warps / blocks;
  const int row_in_tile = (blocks > 1 ? block * share + warp % share : warp) * 16 + lane / 4;
  const auto n_of = [&](uint32_t tile) { return static_cast<int64_t>(tile / part.tiles_m) * block_rows + row_in_tile; };
  Rows rows(a, n_of(part.first_tile));
  if (blocks > 1) cluster_sync();  // all blocks of the cluster have started, so their shared memory may be written
  ActivationPart<Number, X, T> x;
  x.floats = reinterpret_cast<const X*>(memory + at.floats);
  x.rows = part.rows_of_x;
  x.columns = part.columns;
  x.filled = part.steps * stage_k;
  x.segments = (x.filled + segment_k - 1) / segment_k;
  x.inverse = ~0u / x.segments + 1;
  x.to = ring.memory + at.x;
  mbarrier_wait(x_arrived, 0);  // kernels before this one have also ended
  quantize_part<Number, X, T>(args, x, memory, at, maxima_arrived);

  const RowScale* const scales = reinterpret_cast<const RowScale*>(memory + at.scales);
  for (uint32_t tile = part.first_tile; tile < part.tiles; tile += part.step_of_tiles) {
    Number sums[T / 2];
    multiply_part<Number, T>(a, ring, x.to, part.steps, sums);
    const int64_t n = n_of(tile);
    if (blocks == 1) {
      if (tile != part.first_tile) rows = Rows(a, n);
#pragma unroll
      for (int j = 0; j < T / 8; j++)
        if (j < octets) write_of_tile<T>(a, rows, sums + 4 * j, scales, j, part.m, n);
      continue;
    }
    add_parts<Number, T>(a, ring.memory + at.sums, sums, rows, scales, octets, part.m, n, sums_arrived);
  }
#endif
}

}  // namespace lowbit::cuda::w8a8
