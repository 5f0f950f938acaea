// Interface of skinny_gemm.cuh to its binding: arguments, and a launcher for each family of formats.
#pragma once

#include <cuda_runtime_api.h>

#include "../decode/unit_scales.cuh"
#include "expert_rows.h"

namespace lowbit::cuda {

// Rows of x are padded to one or two octets; the first m exist.
constexpr int max_skinny_rows = 16, max_cluster_size = 4;
__host__ __device__ constexpr int max_skinny_warps(int octets) { return 16 / octets; }  // bounded by the registers that hold x

constexpr int slice_k = 512, steps_per_slice = slice_k / 32;
__host__ __device__ constexpr int outputs_per_tile(int octets) { return octets * 8 * tile_rows; }
constexpr int x_pitch = 144, x_buffer_bytes = 8 * x_pitch;  // 64 columns of a row of x, without bank conflicts

// Offsets in a block's shared memory, each aligned to 16 bytes.
struct SkinnyGemmMemory {
  int ring, x, partial, total, shares, table, barriers, all;
};

struct SkinnyGemm {
  const uint8_t* units;  // [tiles][units_of_row] of unit.size bytes
  UnitLayout unit;
  const void* scale;  // [n] where a row is one group, else in the units
  ScaleType scale_type;
  const uint8_t* zero_point;  // [n] where a row is one group with a zero point, else null
  const float* outer;         // the tensor scale (of each expert), or null
  float factor;               // of the format: factor of the values of weight_decoders.cuh
  const void* x;              // [m, k]
  const void* bias;           // [n] (of each expert) of x's type, or null
  void* y;                    // [m, n]
  int64_t n, tiles, clusters;
  int m, k, units_per_row;
  int cluster_size;               // blocks of a cluster, which split the slices of x
  int passes, slices_per_pass, tile_groups;   // warps of a block: slices_per_pass * tile_groups
  int tiles_per_batch;                  // tiles whose slices are added at a time
  int stages, early_stages;            // stages of each warp's ring, one of them in use; copies issued before waiting for x
  int min_tiles, extra_clusters;  // the first extra_clusters clusters have min_tiles + 1 tiles
  int group_shift;                     // log2 of the columns of a group
  SkinnyGemmMemory at;
  ExpertRows of_experts;  // products of experts, with `n` and `tiles` of one
  bool is_signed, has_zero, x_on_16_bytes;
};

// 0: chosen by the launcher. early_stages -1: no copies before the predecessor has ended.
struct SkinnyGemmPlan {
  int warps, stages, early_stages, cluster_size;
};

// Each width is compiled in a file of its own.
template <int bits>
cudaError_t launch_skinny_width(const SkinnyGemm& a, bool x_is_half, SkinnyGemmPlan plan, cudaStream_t stream);
cudaError_t launch_skinny_fp4(const SkinnyGemm& a, bool x_is_half, SkinnyGemmPlan plan, cudaStream_t stream);
cudaError_t launch_skinny_fp6(const SkinnyGemm& a, int exponent, bool x_is_half, SkinnyGemmPlan plan, cudaStream_t stream);
cudaError_t launch_skinny_fp8(const SkinnyGemm& a, int exponent, bool x_is_half, SkinnyGemmPlan plan, cudaStream_t stream);

// Groups of 32, 64, 128 columns or the row with plain scales; 8-bit integers and floats also groups of 32 with e8m0, and e2m1
// groups of 16 with e4m3.
cudaError_t launch_skinny_integers(const SkinnyGemm& a, int bits, bool x_is_half, SkinnyGemmPlan plan, cudaStream_t stream);
cudaError_t launch_skinny_floats(const SkinnyGemm& a, int bits, int exponent, bool x_is_half, SkinnyGemmPlan plan,
                                    cudaStream_t stream);
cudaError_t launch_skinny_nf4(const SkinnyGemm& a, bool x_is_half, SkinnyGemmPlan plan, cudaStream_t stream);

}  // namespace lowbit::cuda
