// Chooses among the cuts of a product by what each would take.
#include "gemm_cut.h"

#include <algorithm>
#include <atomic>

#include "gemm_sums.cuh"

namespace lowbit::cuda {

// Microseconds on an H200 that a block takes for what it does once, for meeting each other one of its cluster, for meeting
// another cluster, and for 512 columns of its 128 rows where their codes are plain ones of four bits. They were fitted
// to measured times of all plans of 140 products with weights of 1024 to 28672 rows: for a quick choice, not for the times.
struct Cost {
  float once, meeting, pair, columns_512;
};
constexpr Cost costs[Kernels::sizes] = {{1.95f, 0.18f, 1.2f, 1.2f},
                                        {1.93f, 0.23f, 1.2f, 1.43f},
                                        {2.5f, 0.33f, 1.4f, 1.67f},
                                        {3.1f, 0.45f, 2.3f, 2.64f},
                                        {2.2f, 5.5f, 6.6f, 4.5f}};
// What blocks that fill the device take more, since no other kernel can begin before they end, and which part of the time for
// columns, since they share the memory: of that none up to half of the device, and all the more between.
constexpr float crowded = 0.62f, shared_memory = 0.12f;

// What 512 columns take more than those plain codes.
static float decoding(const Gemm& a, const Kernels& kernels, int size) {
  const int columns = Kernels::columns(size), bits = kernels.bits;
  if (kernels.is_table) return !kernels.are_weights[size] ? 1.85f : columns == 256 ? 0.6f : columns == 128 ? 1.2f : 1.0f;
  const bool is_quick = bits <= 4 || (bits == 8 && a.m > 64 && !kernels.is_narrow);  // as a sweep with many rows found
  const float own = kernels.is_integer ? (is_quick ? 0.0f : bits == 8 ? 0.3f : 0.1f) : (bits == 4 ? 0.45f : bits == 6 ? 0.15f : 0.5f);
  return (own + (kernels.is_narrow ? 0.2f : 0.0f)) * (columns == 256 ? 0.6f : 1.0f);
}

// How many clusters of one to four blocks, whose multiprocessors they have for themselves, are on a device at once: not as many
// as there are multiprocessors for, since those of a cluster must be neighbours. Asked once for each device.
struct AtOnce {
  int clusters[most_of_cluster + 1];
};
static cudaError_t clusters_at_once(const Kernels& kernels, AtOnce& most) {
  static std::atomic<int> known[64][most_of_cluster + 1];
  constexpr int memory = 220 * 1024;
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const bool is_known = device < 64 && known[device][1] > 0;
  if (!is_known) {
    const cudaError_t error = cudaFuncSetAttribute(kernels.any, cudaFuncAttributeMaxDynamicSharedMemorySize, memory);
    if (error != cudaSuccess) return error;
  }
  for (int blocks = most_of_cluster; blocks > 0; blocks--) {  // that of one, which tells that all are known, is the last
    if (is_known) {
      most.clusters[blocks] = known[device][blocks];
      continue;
    }
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(kernels.threads);
    config.dynamicSmemBytes = memory;
    config.attrs = &attribute;
    config.numAttrs = 1;
    const cudaError_t error = cudaOccupancyMaxActiveClusters(&most.clusters[blocks], kernels.any, &config);
    if (error != cudaSuccess) return error;
    most.clusters[blocks] = std::max(most.clusters[blocks], 1);
    if (device < 64) known[device][blocks] = most.clusters[blocks];
  }
  return cudaSuccess;
}

cudaError_t cut_of(const Gemm& a, int64_t k, const GemmPlan& plan, const Kernels& kernels, Cut& best) {
  AtOnce at_once = {};
  if (const cudaError_t error = clusters_at_once(kernels, at_once); error != cudaSuccess) return error;
  for (int size = 0; size < Kernels::sizes; size++) {
    const int block_columns = Kernels::columns(size);
    if (!kernels.takes[size] || (plan.columns && block_columns != plan.columns)) continue;
    const Cost& cost = costs[size];
    const float decoded = decoding(a, kernels, size);
    const int piece = columns_of_piece(block_columns, a.unit.columns), pieces = static_cast<int>((k + piece - 1) / piece);
    const int64_t tiles = (a.tiles + tiles_of_block - 1) / tiles_of_block * ((a.m + block_columns - 1) / block_columns);
    for (int blocks = 1; blocks <= most_of_cluster; blocks++) {
      if (plan.parts ? blocks != plan.parts : blocks > pieces) continue;
      const int64_t most = at_once.clusters[blocks];
      const auto us_of = [&](int64_t clusters, int parts) {
        const float filled = static_cast<float>(blocks * clusters) / static_cast<float>(at_once.clusters[1]);
        const float crowd = std::clamp(2 * filled - 1, 0.0f, 1.0f);
        const float each = cost.columns_512 * (1 + shared_memory * crowd) + decoded;
        const int columns = (pieces + parts - 1) / parts * piece;
        const float us = cost.once + cost.meeting * (blocks - 1) + crowded * crowd + columns / 512.0f * each;
        return us * static_cast<float>((clusters + most - 1) / most);
      };
      const int64_t last = tiles % most;
      for (const int64_t shared : {int64_t{0}, last}) {  // none, or those of the last turn
        const bool is_shared = shared > 0;
        if (plan.shared == 0 ? is_shared && pieces < 2 * blocks : (plan.shared == 2 && last > 0) != is_shared) continue;
        float us = us_of(tiles - shared, blocks);
        if (is_shared) us += us_of(2 * shared, 2 * blocks) + cost.pair * static_cast<float>((2 * shared + most - 1) / most);
        if (us < best.us) best = {block_columns, blocks, tiles - shared, us};
      }
    }
  }
  return best.columns ? cudaSuccess : cudaErrorInvalidValue;  // a plan that is not for such weights
}

}  // namespace lowbit::cuda
