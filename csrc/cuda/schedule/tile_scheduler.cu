// Chooses the split of a product over blocks and clusters by a cost model.
#include "tile_scheduler.h"

#include <algorithm>
#include <atomic>

#include "../epilogue/splitk_reduce.cuh"

namespace lowbit::cuda {

// Microseconds on an H200: fixed cost of a block, and more where blocks fill the device, since the next kernel cannot begin
// before they end (none up to half of it, all of it at full); cost of each other block of the cluster; of a second cluster; and
// of 512 columns of 128 rows with plain 4-bit codes. Fitted to measured times of the plans of 162 products with weights of 1024
// to 4096 rows, and checked against larger ones. Meant for choosing, not for predicting.
struct Cost {
  float fixed, crowded, cluster_reduce, pair_reduce, columns_512;
};
constexpr Cost costs[KernelSet::sizes] = {{1.92f, 0.8f, 0.0f, 1.46f, 1.02f},
                                        {1.31f, 0.5f, 0.22f, 1.97f, 1.41f},
                                        {2.43f, 0.42f, 0.05f, 1.5f, 1.55f},
                                        {2.57f, 0.55f, 0.41f, 2.45f, 2.6f},
                                        {3.86f, 2.72f, 0.67f, 4.43f, 4.12f}};

// Extra cost of 512 columns for other codes: up to 64 rows of x, 128, and 256.
struct Decoding {
  float few, many, maximum;
};
static Decoding decoding_of(const KernelSet& kernels) {
  if (kernels.is_table) return {1.47f, 1.41f, 1.01f};
  if (kernels.is_integer) {
    if (kernels.is_narrow) return {0.5f, 0.12f, 0.29f};
    return kernels.bits <= 4 ? Decoding{0.0f, 0.0f, 0.0f} : kernels.bits == 8 ? Decoding{0.15f, 0.0f, 0.1f} : Decoding{0.32f, 0.0f, 0.15f};
  }
  switch (kernels.bits) {
    case 4: return kernels.is_narrow ? Decoding{0.55f, 0.17f, 0.15f} : Decoding{0.59f, 0.1f, 0.24f};
    case 6: return kernels.is_narrow ? Decoding{0.52f, 0.18f, 0.25f} : Decoding{0.36f, 0.08f, 0.19f};
    default: return kernels.is_narrow ? Decoding{0.72f, 0.66f, 0.65f} : Decoding{0.51f, 0.26f, 0.21f};
  }
}
static float decoding(const KernelSet& kernels, int size) {
  if (kernels.is_table && !kernels.are_weights[size]) return 1.85f;
  const Decoding of = decoding_of(kernels);
  return KernelSet::columns(size) == 256 ? of.maximum : KernelSet::columns(size) == 128 ? of.many : of.few;
}

// How many clusters of one to four blocks fit the device at once, if alone on their multiprocessors: fewer than the
// multiprocessors would allow, since a cluster stays within a GPC. Queried once for each device.
struct MaxClusters {
  int clusters[max_cluster_blocks + 1];
};
static cudaError_t query_max_clusters(const KernelSet& kernels, MaxClusters& maximum) {
  static std::atomic<int> known[64][max_cluster_blocks + 1];
  constexpr int memory = 220 * 1024;
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const bool is_known = device < 64 && known[device][1] > 0;
  if (!is_known) {
    const cudaError_t error = cudaFuncSetAttribute(kernels.any, cudaFuncAttributeMaxDynamicSharedMemorySize, memory);
    if (error != cudaSuccess) return error;
  }
  for (int blocks = max_cluster_blocks; blocks > 0; blocks--) {  // the entry of one block is written last: it tells that all are
                                                                 // known
    if (is_known) {
      maximum.clusters[blocks] = known[device][blocks];
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
    const cudaError_t error = cudaOccupancyMaxActiveClusters(&maximum.clusters[blocks], kernels.any, &config);
    if (error != cudaSuccess) return error;
    maximum.clusters[blocks] = std::max(maximum.clusters[blocks], 1);
    if (device < 64) known[device][blocks] = maximum.clusters[blocks];
  }
  return cudaSuccess;
}

cudaError_t schedule_for(const MixedGemm& a, int64_t k, const MixedGemmPlan& plan, const KernelSet& kernels, Schedule& best) {
  MaxClusters max_clusters = {};
  if (const cudaError_t error = query_max_clusters(kernels, max_clusters); error != cudaSuccess) return error;
  for (int size = 0; size < KernelSet::sizes; size++) {
    const int block_columns = KernelSet::columns(size);
    if (!kernels.takes[size] || (plan.columns && block_columns != plan.columns)) continue;
    const Cost& cost = costs[size];
    const float each = cost.columns_512 + decoding(kernels, size);
    const int piece = k_per_piece(block_columns, a.unit.columns), pieces = static_cast<int>((k + piece - 1) / piece);
    const int64_t tiles = (a.tiles + tiles_per_block - 1) / tiles_per_block * ((a.m + block_columns - 1) / block_columns);
    for (int blocks = 1; blocks <= max_cluster_blocks; blocks++) {
      if (plan.parts ? blocks != plan.parts : blocks > pieces) continue;
      const int64_t maximum = max_clusters.clusters[blocks];
      const auto us_of = [&](int64_t clusters, int parts) {
        const float filled = static_cast<float>(blocks * clusters) / static_cast<float>(max_clusters.clusters[1]);
        const float crowd = std::clamp(2 * filled - 1, 0.0f, 1.0f);
        const int columns = (pieces + parts - 1) / parts * piece;
        const float us = cost.fixed + cost.cluster_reduce * (blocks - 1) + cost.crowded * crowd + columns / 512.0f * each;
        return us * static_cast<float>((clusters + maximum - 1) / maximum);
      };
      const int64_t last = tiles % maximum;
      for (const int64_t shared : {int64_t{0}, last}) {  // none, or those of the last wave
        const bool is_shared = shared > 0;
        if (plan.shared == 0 ? is_shared && pieces < 2 * blocks : (plan.shared == 2 && last > 0) != is_shared) continue;
        float us = us_of(tiles - shared, blocks);
        if (is_shared) us += us_of(2 * shared, 2 * blocks) + cost.pair_reduce * static_cast<float>((2 * shared + maximum - 1) / maximum);
        if (us < best.us) best = {block_columns, blocks, tiles - shared, us};
      }
    }
  }
  return best.columns ? cudaSuccess : cudaErrorInvalidValue;  // the plan does not suit these weights
}

}  // namespace lowbit::cuda
