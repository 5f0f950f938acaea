// Launches tiles_gemm: which shape of block, in how many parts, with how many stages.
#pragma once

#include <algorithm>
#include <atomic>

#include "gemm.cuh"
#include "gemm_launch.h"
#include "quantile_pairs.cuh"

namespace lowbit::cuda {

using LaunchShape = cudaError_t (*)(Gemm, const void* x, int64_t k, bool is_early, cudaStream_t);

cudaError_t describe_x(CUtensorMap* map, bool x_is_half, const void* x, int64_t rows, int64_t k, int rows_of_box);
cudaError_t is_capturing(cudaStream_t stream, bool* answer);

template <class Codes, class T, class S>
cudaError_t launch_shape(Gemm a, const void* x, int64_t k, bool is_early, cudaStream_t stream) {
  constexpr int most_memory = 227 * 1024, table = table_bytes_of<Codes>;
  const auto kernel = tiles_gemm<Codes, T, S>;
  static std::atomic<bool> may_use_all[64];
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (device >= 64 || !may_use_all[device]) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most_memory);
    if (error != cudaSuccess) return error;
    if (device < 64) may_use_all[device] = true;
  }
  if (const cudaError_t error = describe_x(&a.x, std::is_same_v<T, __half>, x, a.m, k, S::columns); error != cudaSuccess)
    return error;
  // Weights: no more than a block has to do; x: what is left. A stage of either is 8 to 70 KB. Where sums that meet have a place
  // of their own, no block has to wait until others have read what was copied: that is worth some stages.
  const int64_t tiles = (a.tiles + tiles_of_block - 1) / tiles_of_block * ((a.m + S::columns - 1) / S::columns);
  const int parts = a.alone == tiles ? a.blocks : 2 * a.blocks;
  const auto memory = [&] { return GemmMemory<S>(a.unit.size, a, table, 2048).total; };
  const auto fit = [&](int least_weights, int least_x) {
    a.x_stages = S::columns <= 64 ? 6 : 4;
    a.weight_stages = std::clamp((a.units_of_row + parts - 1) / parts, 2, 6);
    while (a.weight_stages > least_weights && memory() > most_memory) a.weight_stages--;
    while (a.x_stages > least_x && memory() > most_memory) a.x_stages--;
    return memory() <= most_memory;
  };
  a.sums_apart = a.blocks > 1;
  if (!a.sums_apart || !fit(2, S::columns <= 64 ? 4 : 3)) {
    a.sums_apart = false;
    fit(2, 2);
  }

  const int64_t clusters = 2 * tiles - a.alone;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(clusters * a.blocks));
  config.blockDim = dim3(S::threads);
  config.dynamicSmemBytes = memory();
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(a.blocks), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attributes;
  config.numAttrs = is_early ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, a);
}

// What two clusters need for each tile of y that they share.
inline int64_t bytes_of_pairs(int64_t pairs, int blocks, int columns) {
  return (pairs * blocks * 8 + 127) / 128 * 128 + pairs * 2 * rows_of_block * columns * 4;
}

// A number that memory does not hold by chance.
inline unsigned long long word_of_launch() {
  static std::atomic<unsigned long long> launches = 0;
  unsigned long long z = (launches++ + 1) * 0x9e3779b97f4a7c15ull + reinterpret_cast<uintptr_t>(&launches);
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return (z ^ z >> 31) | 1;
}

// Microseconds on an H200 that a block takes for what it does once, for meeting others of its cluster, for meeting another
// cluster, and for 512 columns of its 128 rows where their codes are plain ones of four bits.
struct Cost {
  int columns;
  float once, meeting, pair, columns_512;
};

// How many clusters of one to four blocks, whose multiprocessors they have for themselves, are on a device at once: not as many
// as there are multiprocessors for, since those of a cluster must be neighbours. Asked once for each device.
struct AtOnce {
  int clusters[5];
};
inline cudaError_t clusters_at_once(void (*kernel)(Gemm), int threads, int memory, AtOnce& most) {
  static std::atomic<int> known[64][5];
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const bool is_known = device < 64 && known[device][1] > 0;
  if (!is_known) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, memory);
    if (error != cudaSuccess) return error;
  }
  for (int blocks = 4; blocks > 0; blocks--) {  // that of one, which tells that all are known, is the last
    if (is_known) {
      most.clusters[blocks] = known[device][blocks];
      continue;
    }
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = memory;
    config.attrs = &attribute;
    config.numAttrs = 1;
    const cudaError_t error = cudaOccupancyMaxActiveClusters(&most.clusters[blocks], kernel, &config);
    if (error != cudaSuccess) return error;
    most.clusters[blocks] = std::max(most.clusters[blocks], 1);
    if (device < 64) known[device][blocks] = most.clusters[blocks];
  }
  return cudaSuccess;
}

// Who shares out the columns of W: the blocks of a cluster, and two clusters but for those tiles of y that one makes alone.
struct Cut {
  int columns = 0, blocks = 0;
  int64_t alone = 0;
  float us = 1e30f;
};

// `decoding`: what 512 columns take more than those plain codes, into as many operands as that many rows of x need.
template <class Decoding>
Cut cut_of(const Gemm& a, GemmPlan plan, const AtOnce& at_once, bool has_16, bool has_many, Decoding decoding) {
  static constexpr Cost costs[] = {{16, 3.0f, 1.0f, 1.3f, 1.2f},
                                   {64, 3.0f, 1.5f, 1.7f, 2.05f},
                                   {128, 3.0f, 2.0f, 2.4f, 2.95f},
                                   {256, 2.5f, 3.0f, 6.6f, 5.0f}};
  Cut best;
  for (const Cost& cost : costs) {
    if (plan.columns && cost.columns != plan.columns) continue;
    if (cost.columns == 16 ? !has_16 : cost.columns > 64 && !has_many) continue;
    const int64_t tiles = (a.tiles + tiles_of_block - 1) / tiles_of_block * ((a.m + cost.columns - 1) / cost.columns);
    for (int blocks = 1; blocks <= 4; blocks++) {
      if (plan.parts ? blocks != plan.parts : blocks > a.units_of_row) continue;
      const auto us_of = [&](int parts) {
        const int units = (a.units_of_row + parts - 1) / parts;
        const float of_units = units * (a.unit.columns / 512.0f) * (cost.columns_512 + decoding(cost.columns));
        return cost.once + cost.meeting * (blocks > 1) + of_units;
      };
      const int64_t most = at_once.clusters[blocks];
      const auto turns_of = [&](int64_t clusters) { return (clusters + most - 1) / most; };
      const int64_t last = tiles % most;
      for (const int64_t shared : {int64_t{0}, last}) {  // none, or those of the last turn
        const bool is_shared = shared > 0;
        if (plan.shared == 0 ? is_shared && a.units_of_row < 2 * blocks : (plan.shared == 2 && last > 0) != is_shared) continue;
        float us = turns_of(tiles - shared) * us_of(blocks);
        if (is_shared) us += turns_of(2 * shared) * (us_of(2 * blocks) + cost.pair);
        if (us < best.us) best = {cost.columns, blocks, tiles - shared, us};
      }
    }
  }
  return best;
}

// Kernels whose operands are codes. Products of a whole group are under way together where registers hold as many operands.
template <class Codes, Scaling scaling, int columns, int group>
using ExactShape =
    Shape<columns, std::min(Codes::parts == 1 ? 128 : scaling == Scaling::plain ? 32 : 64, group), group, true, scaling>;
template <class Codes, class T, Scaling scaling, int columns>
LaunchShape exact_of(int group) {
  return group == 32   ? launch_shape<Codes, T, ExactShape<Codes, scaling, columns, 32>>
         : group == 64 ? launch_shape<Codes, T, ExactShape<Codes, scaling, columns, 64>>
                       : launch_shape<Codes, T, ExactShape<Codes, scaling, columns, 128>>;
}

// Kernels whose operands are weights.
template <class Codes, class T, Scaling scaling, int group, int least = 16>
LaunchShape weights_of(int columns) {
  if constexpr (least == 16)
    if (columns == 16) return launch_shape<Codes, T, Shape<16, 128, group, false, scaling>>;
  if constexpr (least <= 64)
    if (columns == 64) return launch_shape<Codes, T, Shape<64, 128, group, false, scaling>>;
  return columns == 128 ? launch_shape<Codes, T, Shape<128, 64, group, false, scaling>>
                        : launch_shape<Codes, T, Shape<256, 64, group, false, scaling>>;
}
template <class Codes, class T, Scaling scaling>
LaunchShape rounded_of(int columns, int group) {
  return group == 32   ? weights_of<Codes, T, scaling, 32, 128>(columns)
         : group == 64 ? weights_of<Codes, T, scaling, 64, 128>(columns)
                       : weights_of<Codes, T, scaling, 128, 128>(columns);
}

template <class Codes, class T>
cudaError_t launch_family(Gemm a, const void* x, int64_t k, bool may_round, bool rounds_nothing, GemmPlan plan,
                          cudaStream_t stream) {
  constexpr bool is_integer = Codes::takes_zero, is_table = Codes::parts > 1, is_half = std::is_same_v<T, __half>;
  constexpr bool takes_e8m0 = !is_table && (!is_integer || Codes::bits == 8), takes_e4m3 = !is_integer && Codes::bits == 4;
  const int group = a.unit.groups ? a.unit.group : 0;
  const bool is_e8m0 = a.scale_type == ScaleType::e8m0, is_e4m3 = a.scale_type == ScaleType::e4m3;
  const bool is_own = a.scale_type == (is_half ? ScaleType::float16 : ScaleType::bfloat16);
  const bool is_narrow = group && (is_e8m0 || is_e4m3);
  if (group && (is_e4m3 ? group != 16 : is_e8m0 ? group != 32 : group == 16)) return cudaErrorInvalidValue;
  // Weights are operands for many rows of x where they may be rounded, and for few ones where they are codes, or are not rounded.
  const bool weights_few = group ? is_narrow && rounds_nothing : !is_table, weights_many = weights_few || (may_round && a.m > 64);
  const bool has_16 = weights_few || (group && is_own);
  const auto decoding = [&](int of) {
    if (is_table) return of == 64 ? 1.8f : of == 256 ? 0.9f : 1.2f;
    const float own = is_integer ? (Codes::bits <= 4 ? 0.0f : Codes::bits == 8 ? 0.15f : 0.45f)
                                 : (Codes::bits == 4 ? 0.45f : Codes::bits == 6 ? 0.8f : 0.7f);
    return (own + (is_narrow ? 0.25f : 0.0f)) * (of == 256 ? 0.5f : 1.0f);
  };
  using Some = ExactShape<Codes, Scaling::plain, 64, 128>;
  AtOnce at_once = {};
  if (const cudaError_t error = clusters_at_once(tiles_gemm<Codes, T, Some>, Some::threads, 220 * 1024, at_once);
      error != cudaSuccess)
    return error;
  const Cut cut = cut_of(a, plan, at_once, has_16, weights_many, decoding);
  const int columns = cut.columns;
  if (columns == 0) return cudaErrorInvalidValue;  // a plan that is not for such weights
  a.blocks = cut.blocks;
  a.alone = static_cast<uint32_t>(cut.alone);

  LaunchShape launch = nullptr;
  if (columns > 64 || weights_few) {
    if (!group) {
      launch = weights_of<Codes, T, Scaling::row, 128>(columns);
    } else if (!is_narrow) {
      launch = is_own ? rounded_of<Codes, T, Scaling::own>(columns, group) : rounded_of<Codes, T, Scaling::plain>(columns, group);
    } else if (is_e8m0) {
      if constexpr (takes_e8m0 && !is_half) launch = weights_of<Codes, T, Scaling::e8m0, 32>(columns);
    } else {
      if constexpr (takes_e4m3) launch = weights_of<Codes, T, Scaling::e4m3, 16>(columns);
    }
  } else if (!group) {
    if constexpr (is_table) launch = launch_shape<Codes, T, Shape<64, 64, 128, true, Scaling::row>>;
  } else if (!is_narrow) {
    launch = !is_own         ? exact_of<Codes, T, Scaling::plain, 64>(group)
             : columns == 16 ? exact_of<Codes, T, Scaling::own, 16>(group)
                             : exact_of<Codes, T, Scaling::own, 64>(group);
  } else if (is_e8m0) {
    if constexpr (takes_e8m0) launch = launch_shape<Codes, T, Shape<64, 32, 32, true, Scaling::e8m0>>;
  }
  if (launch == nullptr) return cudaErrorInvalidValue;
  const int64_t tiles = (a.tiles + tiles_of_block - 1) / tiles_of_block * ((a.m + columns - 1) / columns);
  if (a.alone < tiles) {
    a.here = word_of_launch();
    a.pairs = static_cast<uint8_t*>(plan.allocate(plan.holder, bytes_of_pairs(tiles - a.alone, a.blocks, columns)));
  }
  bool captures = false;
  if (const cudaError_t error = is_capturing(stream, &captures); error != cudaSuccess) return error;
  return launch(a, x, k, captures && plan.early >= 0, stream);
}

}  // namespace lowbit::cuda
