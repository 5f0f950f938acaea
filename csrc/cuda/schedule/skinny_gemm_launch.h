// What the bindings know of skinny_gemm.cuh: its arguments, and a function for each family of formats.
#pragma once

#include <cuda_runtime_api.h>

#include "../decode/unit_scales.cuh"

namespace lowbit::cuda {

// Rows of x count in octets here: one or two of them, of which the first m rows are there.
constexpr int max_skinny_rows = 16, max_cluster_size = 4;
__host__ __device__ constexpr int max_skinny_warps(int octets) { return 16 / octets; }  // whose registers hold x

constexpr int slice_k = 512, steps_per_slice = slice_k / 32;
__host__ __device__ constexpr int outputs_per_tile(int octets) { return octets * 8 * tile_rows; }
constexpr int x_pitch = 144, x_buffer_bytes = 8 * x_pitch;  // 64 columns of each row of x, spread over all banks

// Where things are in a block's shared memory, each on 16 bytes.
struct SkinnyGemmMemory {
  int ring, x, partial, total, shares, table, barriers, all;
};

struct SkinnyGemm {
  const uint8_t* units;  // [tiles][units_of_row] of unit.size bytes
  UnitLayout unit;
  const void* scale;  // [n] where a row is one group, else in the units
  ScaleType scale_type;
  const uint8_t* zero_point;  // [n] where a row is one group and has one, else null
  const float* outer;         // one number, or null
  float factor;               // of the format: its numbers are those of weight_decoders.cuh times this
  const void* x;              // [m, k]
  const void* bias;           // [n] of x's type, or null
  void* y;                    // [m, n]
  int64_t n, tiles, clusters;
  int m, k, units_per_row;
  int cluster_size;               // they share out the slices of x and add their sums
  int passes, slices_per_pass, tile_groups;   // a block's warps: one for each slice of a pass and each of so many tiles
  int tiles_per_batch;                  // whose slices are added at a time
  int stages, early_stages;            // of each warp's ring, one of them in use; copies that start before x is waited for
  int min_tiles, extra_clusters;  // the first clusters have a tile more than the others
  int group_shift;                     // a group has 2^that columns
  SkinnyGemmMemory at;
  bool is_signed, has_zero, x_on_16_bytes;
};

// 0: the launcher chooses. `early_stages` -1: no copy before the predecessor has ended.
struct SkinnyGemmPlan {
  int warps, stages, early_stages, cluster_size;
};

// Those of one width are compiled in a file of their own.
template <int bits>
cudaError_t launch_skinny_width(const SkinnyGemm& a, bool x_is_half, SkinnyGemmPlan plan, cudaStream_t stream);
cudaError_t launch_skinny_fp4(const SkinnyGemm& a, bool x_is_half, SkinnyGemmPlan plan, cudaStream_t stream);
cudaError_t launch_skinny_fp6(const SkinnyGemm& a, int exponent, bool x_is_half, SkinnyGemmPlan plan, cudaStream_t stream);
cudaError_t launch_skinny_fp8(const SkinnyGemm& a, int exponent, bool x_is_half, SkinnyGemmPlan plan, cudaStream_t stream);

// Each takes a group of 32, 64, 128 columns or the row under plain scales; integers of 8 bits and floats a group of 32 under
// e8m0 as well, and e2m1 one of 16 under e4m3.
cudaError_t launch_skinny_integers(const SkinnyGemm& a, int bits, bool x_is_half, SkinnyGemmPlan plan, cudaStream_t stream);
cudaError_t launch_skinny_floats(const SkinnyGemm& a, int bits, int exponent, bool x_is_half, SkinnyGemmPlan plan,
                                    cudaStream_t stream);
cudaError_t launch_skinny_nf4(const SkinnyGemm& a, bool x_is_half, SkinnyGemmPlan plan, cudaStream_t stream);

}  // namespace lowbit::cuda
