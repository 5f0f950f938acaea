// A slice of x as operand B, in a warp's registers.
#pragma once

#include "../ptx/bulk_copy.cuh"
#include "../schedule/skinny_gemm_launch.h"

namespace lowbit::cuda {

// Two registers for each half of a step and each eight rows; zeros beyond the last row and column. All loads are issued at once,
// in memory order; then 64 columns at a time pass through shared memory, where ldmatrix gives each lane its elements.
//
// of_experts: one row, that of y's row blockIdx.y.
template <int octets, bool of_experts>
struct SliceOfX {
  uint32_t x[octets][4 * steps_per_slice];

  // The first row of x.
  __device__ static __forceinline__ const uint16_t* first_row(const SkinnyGemm& a) {
    const uint16_t* x = static_cast<const uint16_t*>(a.x);
    return of_experts ? x + static_cast<int64_t>(static_cast<int>(blockIdx.y) / a.of_experts.share) * a.k : x;
  }

  __device__ __forceinline__ void start_loads(const SkinnyGemm& a, int slice) {
    const int row = threadIdx.x / 8, column = slice * slice_k + threadIdx.x % 8 * 8, rows = of_experts ? 1 : a.m;
    const uint16_t* from = first_row(a) + static_cast<int64_t>(row) * a.k + column;
#pragma unroll
    for (int j = 0; j < steps_per_slice; j++)
#pragma unroll
      for (int e = 0; e < octets; e++) {
        const int further = e * 8 + j % 2 * 4;
        uint4 w = {0, 0, 0, 0};
        if (a.x_on_16_bytes && row + further < rows && column + j / 2 * 64 < a.k)
          w = *reinterpret_cast<const uint4*>(from + static_cast<int64_t>(further) * a.k + j / 2 * 64);
        x[e][4 * j] = w.x;
        x[e][4 * j + 1] = w.y;
        x[e][4 * j + 2] = w.z;
        x[e][4 * j + 3] = w.w;
      }
  }

  // Reorders the 64 columns from `step` on; rows that are not aligned to 16 bytes are loaded here, element by element.
  __device__ __forceinline__ void reorder(const SkinnyGemm& a, int slice, uint8_t* memory, int step) {
    const int lane = threadIdx.x, row = lane / 8, part = lane % 8;
    const uint32_t matrices = shared_address(memory + lane % 8 * x_pitch + lane / 8 * 16);
#pragma unroll
    for (int e = 0; e < octets; e++) {
      __syncwarp();
      if (a.x_on_16_bytes) {
#pragma unroll
        for (int i = 0; i < 2; i++)
          *reinterpret_cast<uint4*>(memory + (row + i * 4) * x_pitch + part * 16) = {
              x[e][4 * (step + i)], x[e][4 * (step + i) + 1], x[e][4 * (step + i) + 2], x[e][4 * (step + i) + 3]};
      } else {
#pragma unroll 1
        for (int i = lane; i < 8 * 64; i += 32) {
          const int m = e * 8 + i / 64, k = slice * slice_k + step * 32 + i % 64;
          const bool is_there = m < (of_experts ? 1 : a.m) && k < a.k;
          *reinterpret_cast<uint16_t*>(memory + i / 64 * x_pitch + i % 64 * 2) =
              is_there ? first_row(a)[static_cast<int64_t>(m) * a.k + k] : 0;
        }
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 2; i++)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(x[e][4 * (step + i)]), "=r"(x[e][4 * (step + i) + 1]), "=r"(x[e][4 * (step + i) + 2]),
                       "=r"(x[e][4 * (step + i) + 3])
                     : "r"(matrices + i * 64)
                     : "memory");
    }
  }
};

}  // namespace lowbit::cuda
