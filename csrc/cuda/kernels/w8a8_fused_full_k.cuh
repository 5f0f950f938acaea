// Quantizes x and multiplies in one kernel, with whole rows in each block: for short rows and little x.
//
//    W [64 or 128 rows, K] --TMA multicast in the cluster, before x is ready (PDL)--> shared memory ---+
//    x [T rows, K] --registers--> max |x| of a row, codes --swizzled--> shared memory ----------------+--wgmma--> s32 or f32
//             y [T, rows] <--s_x s_w, bias, round-- sums of four warpgroups, in W's place in shared memory <------------+
//
// y = (x W^T) s_x s_w + bias. Each block quantizes all of x that it multiplies and waits for no other block; warpgroups split K.
// Contract: exact: integer sums (e4m3: the tensor cores' fp32 sums), one rounding.
// Limit: latency: one launch, one read of W.
// Reached (evals/results/w8a8_h100.json, 1024 x 1024, int8, one H100): 2.2 us at M = 1 where F.linear takes 4.0.
#pragma once

#include "w8a8_gemm.cuh"
#include "../pipeline/warp_row_quant.cuh"

namespace lowbit::cuda::w8a8 {

struct FusedFullK {
  W8A8Args product;
  const void* x;             // [m, k], rows aligned to 16 bytes, k a multiple of 8
  const float* fixed_scale;  // the scale of all rows, or null: one for each row
  int k;
};

constexpr int full_k_threads = 512;
constexpr int min_full_k_steps = 4;  // fewer would leave warpgroups without a part, and no room for their sums

// What a block with T rows of x has: rows of W, parts of K, most columns (a warp holds whole rows), and offsets in shared memory
// behind W.
template <int T>
struct FullKShape {
  static constexpr int warpgroups_of_w = T == 64 ? 2 : 1, rows = 64 * warpgroups_of_w, parts = 4 / warpgroups_of_w;
  static constexpr int w_stage_bytes = rows * stage_k;  // bytes of a stage
  static constexpr int max_columns = T == 64 ? 1024 : 2048;
  int x, scales, barriers, all;

  __host__ __device__ explicit FullKShape(int steps) {
    x = steps * w_stage_bytes;
    scales = x + steps * T * stage_k;
    barriers = scales + T * 4;
    all = barriers + parts * 8 + 1024;
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Quantizes the block's rows of x.
template <bool is_float, class X, int T, int chunks>
__device__ __forceinline__ void quantize_rows(const FusedFullK& args, int64_t m, int steps, uint32_t to, float* scales) {
  constexpr int warps = full_k_threads / 32, rows = T / warps;
  const int warp = threadIdx.x / 32, there = static_cast<int>(min(args.product.m - m, static_cast<int64_t>(T)));
  const int count = there > warp ? (there - warp + warps - 1) / warps : 0;
  const X* const x = static_cast<const X*>(args.x) + (m + warp) * args.k;
  const WarpRows<X, is_float, rows, chunks> held(x, static_cast<int64_t>(warps) * args.k, args.k, count);
  // A chunk of 256 columns is two stages; each half of the warp writes one.
  const int lane = threadIdx.x % 32;
  const uint32_t at = to + lane / 16 * T * stage_k + lane % 2 * 8;
  held.round(
      args.fixed_scale, steps * stage_k,
      [&](int r, int chunk, uint2 codes) {
        const int row = warp + r * warps, place = lane / 2 % 8 ^ row % 8;
        const uint32_t there = at + row * stage_k + place * 16 + chunk * 2 * T * stage_k;
        asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(there), "r"(codes.x), "r"(codes.y) : "memory");
      },
      [&](int r, float scale) { scales[warp + r * warps] = scale; });
}

// Sums of this warpgroup's part of K.
template <class Number, int T>
__device__ __forceinline__ void multiply_full_k(uint32_t w, uint32_t x, int first, int last, Number (&sums)[T / 2]) {
  constexpr int w_stage_bytes = FullKShape<T>::w_stage_bytes;
  if constexpr (std::is_same_v<Number, float>) {
#pragma unroll
    for (int e = 0; e < T / 2; e++) sums[e] = 0;
#pragma unroll 1
    for (int step = first; step < last; step++) {
      float part[T / 2];
      const uint64_t w_at = smem_descriptor(w + step * w_stage_bytes), x_at = smem_descriptor(x + step * T * stage_k);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < stage_k / 32; k++) add<T>(part, w_at + 2 * k, x_at + 2 * k, k > 0);
      wgmma_commit();
      wgmma_wait<0>();
#pragma unroll
      for (int e = 0; e < T / 2; e++) sums[e] += part[e];
    }
  } else {
#pragma unroll 1
    for (int step = first; step < last; step++) {
      const uint64_t w_at = smem_descriptor(w + step * w_stage_bytes), x_at = smem_descriptor(x + step * T * stage_k);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < stage_k / 32; k++) add<T>(sums, w_at + 2 * k, x_at + 2 * k, step > first || k > 0);
      wgmma_commit();
    }
    wgmma_wait<0>();
  }
}

// Run by one thread: copies W of the block; each block of a cluster copies some stages to all blocks.
template <int T>
__device__ __forceinline__ void load_weights(const CUtensorMap& w, const W8A8Args& a, int tile_n, uint32_t to, uint32_t barriers) {
  using Shape = FullKShape<T>;
  const int blocks = a.cluster_size, block = blocks > 1 ? cluster_rank() : 0;
  const uint64_t policy = a.tiles_m > blocks ? evict_normal_policy() : evict_first_policy();
  const auto to_all = static_cast<uint16_t>((1 << blocks) - 1);
#pragma unroll 1
  for (int part = 0, step = 0; part < Shape::parts; part++) {
    const int last = a.steps * (part + 1) / Shape::parts;
    const uint32_t barrier = barriers + 8 * part;
    mbarrier_expect_tx(barrier, (last - step) * Shape::w_stage_bytes);
#pragma unroll 1
    for (; step < last; step++) {
      const uint32_t place = to + step * Shape::w_stage_bytes;
      if (blocks == 1)
        tma_load(place, w, step * stage_k, tile_n * Shape::rows, barrier, policy);
      else if (step % blocks == block)
        tma_load_multicast(place, w, step * stage_k, tile_n * Shape::rows, barrier, to_all, policy);
    }
  }
}

#endif

template <class Number, class X, int T>
__global__ void __launch_bounds__(full_k_threads, T == 16 ? 2 : 1)
    w8a8_fused_full_k(const __grid_constant__ CUtensorMap w, const __grid_constant__ FusedFullK args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr bool is_float = std::is_same_v<Number, float>;
  using Shape = FullKShape<T>;
  launch_dependents();
  extern __shared__ uint8_t unaligned[];
  const W8A8Args& a = args.product;
  uint8_t* const memory = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  const Shape at(a.steps);
  const uint32_t w_at = shared_address(memory), x_at = w_at + at.x, barriers = w_at + at.barriers;
  float* const scales = reinterpret_cast<float*>(memory + at.scales);
  const int tile_n = blockIdx.x / a.tiles_m;
  const int64_t m = static_cast<int64_t>(blockIdx.x - tile_n * a.tiles_m) * T;
  if (threadIdx.x == 0) {
#pragma unroll
    for (int part = 0; part < Shape::parts; part++) mbarrier_init(barriers + 8 * part, 1);
    fence_barrier_init();
  }
  __syncwarp();
  if (a.cluster_size > 1) cluster_sync();  // all blocks have initialized their barriers
  if (threadIdx.x == 0) load_weights<T>(w, a, tile_n, w_at, barriers);
  __syncwarp();
  const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int part = warpgroup / Shape::warpgroups_of_w, part_of_w = warpgroup % Shape::warpgroups_of_w;
  const int64_t n = static_cast<int64_t>(tile_n) * Shape::rows + part_of_w * 64 + warp * 16 + lane / 4;
  const Rows rows(a, n);
  wait_for_dependencies();
  if (args.k <= 1024) {
    quantize_rows<is_float, X, T, 4>(args, m, a.steps, x_at, scales);
  } else if constexpr (Shape::max_columns > 1024) {
    quantize_rows<is_float, X, T, 8>(args, m, a.steps, x_at, scales);
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // makes the generic stores visible to the tensor cores
  __syncthreads();

  Number sums[T / 2];
  const auto first_of = [&](int part) { return a.steps * part / Shape::parts; };
  const uint32_t own_w = w_at + part_of_w * 64 * stage_k;
  mbarrier_wait(barriers + 8 * part, 0);
  multiply_full_k<Number, T>(own_w, x_at, first_of(part), first_of(part + 1), sums);
  warpgroup_sync();  // all warps have read this part of W, which the sums now overwrite
  const auto place = [&](int from, int octet) {
    return own_w + (first_of(from) + octet / 4) * Shape::w_stage_bytes + (octet % 4 * 128 + threadIdx.x % 128) * 16;
  };
#pragma unroll
  for (int j = 0; j < T / 8; j++) {
    const int4 four = *reinterpret_cast<const int4*>(sums + 4 * j);
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(place(part, j)), "r"(four.x), "r"(four.y), "r"(four.z),
                 "r"(four.w)
                 : "memory");
  }
  __syncthreads();
  for (int j = part; j < T / 8; j += Shape::parts) {
    Number total[4] = {};
#pragma unroll
    for (int from = 0; from < Shape::parts; from++) {
      const uint4 four = load_sixteen_shared(place(from, j));
      const Number* number = reinterpret_cast<const Number*>(&four);
#pragma unroll
      for (int i = 0; i < 4; i++) total[i] += number[i];
    }
    const int row = 8 * j + lane % 4 * 2;
    write_eight(a, rows, total, float2{scales[row], scales[row + 1]}, m + row, n);
  }
#endif
}

}  // namespace lowbit::cuda::w8a8
