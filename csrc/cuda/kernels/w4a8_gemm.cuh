// GEMM of 8-bit x and signed 4-bit weights with group scales, as w8a8_gemm.cuh but with operand A from registers.
//
//    W [N, K / 2] --TMA--> ring in shared memory --8 codes a word--> two registers of operand A, each code * 16 --+
//    x int8 [M, K], even columns first --TMA--> ring in shared memory ------------------------> operand B --------+--wgmma--> s32
//                                                           y [M, N] <--s_x, bias, round-- f32 <--* group scale <----------+
//
// Codes * 16 need one shift or AND for four codes; the unpacking permutes columns, so the codes of x are stored permuted too: of
// 32 columns the even ones first.
// Contract: exact: integer sums of a group, fp32 from there on.
// Limit: the bytes of W for few rows, the unpacking and scaling in registers for many.
#pragma once

#include "w8a8_gemm.cuh"

namespace lowbit::cuda::w8a8 {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// steps_per_group: steps of 32 columns that share a scale; 4 for groups of 128 columns and more.
template <int T, int steps_per_group>
__device__ __forceinline__ void multiply_w4(const W8A8Args& a, Ring<T, 4> ring, int64_t tiles, int groups_n, uint32_t staging,
                                               float* scales) {
  constexpr int steps = stage_k / 32, groups = steps / steps_per_group;
  const int thread = threadIdx.x, lane = thread % 32, block = cluster_rank();
  const int sharing = a.splits_columns ? 1 : a.cluster_size;
  wait_for_dependencies();  // the scales of x are written by the kernel before
  for (int64_t i = blockIdx.x / a.cluster_size; i < tiles; i += gridDim.x / a.cluster_size) {
    const TileIndex place(i, a.tiles_m, groups_n);
    const int row = thread / 32 * 16 + lane / 4;
    const int64_t n = (a.splits_columns ? place.n : static_cast<int64_t>(place.n) * a.cluster_size + block) * block_rows + row;
    const int64_t m = static_cast<int64_t>(place.m) * T + lane % 4 * 2;
    Rows rows(a, n);
    rows.scale[0] = rows.scale[1] = 0.0625f;  // 1 / 16, since operand A is 16 times the code; group scales are in the sums
    float x_scale[T / 128 + 1];
#pragma unroll
    for (int e = 0; e < T / 128; e++) x_scale[e] = a.x_scale[static_cast<int64_t>(place.m) * T + 128 * e + thread % 128];
    const int first = a.splits_columns ? static_cast<int>(static_cast<int64_t>(a.steps) * block / a.cluster_size) : 0;
    const int last = a.splits_columns ? static_cast<int>(static_cast<int64_t>(a.steps) * (block + 1) / a.cluster_size) : a.steps;

    // The four lanes of a row each load the scales of one stage, four stages before they are used. Beyond the edge codes are 0
    // and any scale will do.
    float incoming[groups][2], held[groups][2];
    const auto read_scales = [&](int step) {
#pragma unroll
      for (int g = 0; g < groups; g++) {
        const int column = min(step + lane % 4, last - 1) * stage_k + g * steps_per_group * 32;
        const int group = a.group_k == 0 ? 0 : min(column / a.group_k, a.groups - 1);
#pragma unroll
        for (int h = 0; h < 2; h++)
          incoming[g][h] = load_float(a.w_scale, a.w_scale_dtype, min(n + 8 * h, a.n - 1) * a.w_scale_stride + group);
      }
    };
    float sums[T / 2];
#pragma unroll
    for (int e = 0; e < T / 2; e++) sums[e] = 0;
    read_scales(first);
    for (int step = first; step < last; step++, ring.advance()) {
      const int phase = (step - first) % 4;
      if (phase == 0) {
#pragma unroll
        for (int g = 0; g < groups; g++) held[g][0] = incoming[g][0], held[g][1] = incoming[g][1];
        read_scales(step + 4);
      }
      float scale[groups][2];
#pragma unroll
      for (int g = 0; g < groups; g++)
#pragma unroll
        for (int h = 0; h < 2; h++) scale[g][h] = __shfl_sync(~0u, held[g][h], phase, 4);
      mbarrier_wait(ring.full(), ring.parity);
      uint32_t codes[steps][4];
#pragma unroll
      for (int k = 0; k < steps; k++) {
        // Rows of 64 bytes: TMA's 64-byte swizzle permutes 16-byte parts by pairs of rows.
        const uint32_t at = ring.w() + row * 64 + (k ^ row / 2 % 4) * 16 + lane % 4 * 4;
#pragma unroll
        for (int h = 0; h < 2; h++) {
          uint32_t word;
          asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(at + h * 8 * 64) : "memory");
          codes[k][h] = word << 4 & 0xf0f0f0f0;
          codes[k][2 + h] = word & 0xf0f0f0f0;
        }
      }
      const uint64_t x = smem_descriptor(ring.x());
#pragma unroll
      for (int g = 0; g < groups; g++) {
        int32_t part[T / 2];
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < steps_per_group; k++) add<T>(part, codes[g * steps_per_group + k], x + 2 * (g * steps_per_group + k), k > 0);
        wgmma_commit();
        wgmma_wait<0>();
        if (g == groups - 1 && lane < sharing) arrive_remote(ring.free(), a.splits_columns ? block : lane);
#pragma unroll
        for (int e = 0; e < T / 2; e++) sums[e] = __fmaf_rn(static_cast<float>(part[e]), scale[g][e / 2 % 2], sums[e]);
      }
    }
    write_tile<float, T>(a, rows, sums, x_scale, m, n, ring.memory, staging, scales);
  }
}

#endif

template <int T, int steps_per_group>
__global__ void __launch_bounds__(threads_per_block<T, 4>, blocks_per_sm<T, 4>)
    w4a8_linear(const __grid_constant__ CUtensorMap w, const __grid_constant__ CUtensorMap x, const W8A8Args a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  run_tiles<T, 4>(w, x, a, [&](const Ring<T, 4>& ring, int64_t tiles, int groups_n, uint32_t staging, float* scales) {
    multiply_w4<T, steps_per_group>(a, ring, tiles, groups_n, staging, scales);
  });
#endif
}

}  // namespace lowbit::cuda::w8a8
