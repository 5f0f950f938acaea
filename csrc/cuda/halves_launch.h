// What the bindings know of halves.cuh: its arguments, and a function for each family of formats.
#pragma once

#include <cuda_runtime_api.h>

#include "unit_scales.cuh"

namespace lowbit::cuda {

// Rows of x count in octets here: one or two of them, of which the first m rows are there.
constexpr int most_rows_of_halves = 16, most_blocks_of_cluster = 4;
__host__ __device__ constexpr int most_warps_of_halves(int octets) { return 16 / octets; }  // whose registers hold x

constexpr int columns_of_slice = 512, steps_of_slice = columns_of_slice / 32;
__host__ __device__ constexpr int outputs_of_tile(int octets) { return octets * 8 * rows_of_tile; }
constexpr int pitch_of_x = 144, bytes_of_x = 8 * pitch_of_x;  // 64 columns of each row of x, spread over all banks

// Where things are in a block's shared memory, each on 16 bytes.
struct HalvesMemory {
  int ring, x, partial, total, shares, table, barriers, all;
};

struct Halves {
  const uint8_t* units;  // [tiles][units_of_row] of unit.size bytes
  UnitPlan unit;
  const void* scale;  // [n] where a row is one group, else in the units
  ScaleType scale_type;
  const uint8_t* zero_point;  // [n] where a row is one group and has one, else null
  const float* outer;         // one number, or null
  float factor;               // of the format: its numbers are those of fragments.cuh times this
  const void* x;              // [m, k]
  const void* bias;           // [n] of x's type, or null
  void* y;                    // [m, n]
  int64_t n, tiles, clusters;
  int m, k, units_of_row;
  int blocks_of_cluster;               // they share out the slices of x and add their sums
  int passes, slices_of_pass, turns;   // a block's warps: one for each slice of a pass and each of so many tiles
  int tiles_of_batch;                  // whose slices are added at a time
  int stages, early_stages;            // of each warp's ring, one of them in use; copies that start before x is waited for
  int fewest_tiles, clusters_with_more;  // the first clusters have a tile more than the others
  int group_shift;                     // a group has 2^that columns
  HalvesMemory at;
  bool is_signed, has_zero, x_on_16_bytes;
};

// 0: the launcher chooses. `early_stages` -1: no copy before the predecessor has ended.
struct HalvesPlan {
  int warps, stages, early_stages, blocks_of_cluster;
};

// Those of one width are compiled in a file of their own.
template <int bits>
cudaError_t launch_halves_of_width(const Halves& a, bool x_is_half, HalvesPlan plan, cudaStream_t stream);
cudaError_t launch_halves_of_fp4(const Halves& a, bool x_is_half, HalvesPlan plan, cudaStream_t stream);
cudaError_t launch_halves_of_fp6(const Halves& a, int exponent, bool x_is_half, HalvesPlan plan, cudaStream_t stream);
cudaError_t launch_halves_of_fp8(const Halves& a, int exponent, bool x_is_half, HalvesPlan plan, cudaStream_t stream);

// Each takes a group of 32, 64, 128 columns or the row under plain scales; integers of 8 bits and floats a group of 32 under
// e8m0 as well, and e2m1 one of 16 under e4m3.
cudaError_t launch_halves_of_integers(const Halves& a, int bits, bool x_is_half, HalvesPlan plan, cudaStream_t stream);
cudaError_t launch_halves_of_floats(const Halves& a, int bits, int exponent, bool x_is_half, HalvesPlan plan,
                                    cudaStream_t stream);
cudaError_t launch_halves_of_quantiles(const Halves& a, bool x_is_half, HalvesPlan plan, cudaStream_t stream);

}  // namespace lowbit::cuda
