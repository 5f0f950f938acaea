// Launches tiles_gemm: which shape of block, in how many parts, with how many stages.
#pragma once

#include <algorithm>
#include <atomic>

#include "gemm.cuh"
#include "gemm_cut.h"
#include "gemm_launch.h"
#include "gpu.h"
#include "quantile_pairs.cuh"

namespace lowbit::cuda {

using LaunchShape = cudaError_t (*)(Gemm, const void* x, int64_t k, bool is_early, cudaStream_t);

cudaError_t describe_x(CUtensorMap* map, bool x_is_half, const void* x, int64_t rows, int64_t k, int rows_of_box);
cudaError_t is_capturing(cudaStream_t stream, bool* answer);

template <class Family, class T, class S>
cudaError_t launch_shape(Gemm a, const void* x, int64_t k, bool is_early, cudaStream_t stream) {
  using Codes = typename CodesOf<Family, S::columns>::Type;
  constexpr int most_memory = 227 * 1024, table = table_bytes_of<Codes>;
  const auto kernel = tiles_gemm<Codes, T, S>;
  static std::atomic<bool> may_use_all[64];
  int index = 0;
  Gpu device = {};
  if (const cudaError_t error = this_gpu(index, device); error != cudaSuccess) return error;
  if (index >= 64 || !may_use_all[index]) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most_memory);
    if (error != cudaSuccess) return error;
    if (index < 64) may_use_all[index] = true;
  }
  const auto describe = [&](CUtensorMap& map, int rows_of_box) {
    return describe_x(&map, std::is_same_v<T, __half>, x, a.m, k, rows_of_box);
  };
  cudaError_t error = a.m < S::columns ? cudaSuccess : describe(a.x, S::columns);
  if (error == cudaSuccess && a.m % S::columns) error = describe(a.last_of_x, a.m % S::columns);
  if (error != cudaSuccess) return error;
  a.plain_x = x;
  a.k = static_cast<int>(k);
  // Weights: no more than a block has to do; x: what is left. A stage of either is 8 to 70 KB. Where sums that meet have a place
  // of their own, no block has to wait until others have read what was copied: that is worth some stages.
  const int64_t tiles = (a.tiles + tiles_of_block - 1) / tiles_of_block * ((a.m + S::columns - 1) / S::columns);
  const int parts = a.alone == tiles ? a.blocks : 2 * a.blocks;
  a.by_blocks = Divisor(a.blocks);
  a.by_rows = Divisor(static_cast<uint32_t>((a.tiles + tiles_of_block - 1) / tiles_of_block));
  const int piece = columns_of_piece(S::columns, a.unit.columns);
  a.pieces_of_row = static_cast<int>((k + piece - 1) / piece);
  const bool is_short = S::columns == 64 && a.unit.columns < 512;  // two stages of such units are soon over
  constexpr int most_x = S::columns <= 64 ? 6 : 4, run = stages_of_run<Codes, S>;
  constexpr bool is_fixed = is_ring_a_run<Codes, S>;
  static_assert(most_stages >= 6 && (is_fixed ? run == most_x : most_x % run == 0));
  const auto memory = [&] {
    a.at = places_of<S>(a, table);
    return a.at.total;
  };
  const auto fit = [&](int least_weights, int least_x) {
    a.x_stages = most_x;
    a.weight_stages = std::clamp((a.units_of_row + parts - 1) / parts, 2, 6);
    while (is_short && a.x_stages > 4 && memory() > most_memory) a.x_stages -= run;
    while (a.weight_stages > least_weights && memory() > most_memory) a.weight_stages--;
    while (!is_fixed && a.x_stages > least_x && memory() > most_memory) a.x_stages -= run;
    return memory() <= most_memory;
  };
  a.sums_apart = a.blocks > 1;
  if (!a.sums_apart || !fit(2, S::columns <= 64 ? 4 : 3)) {
    a.sums_apart = false;
    fit(2, 2);
  }

  // Few rows of x wait for W, which is to come as soon as it can and not before its turn; many wait for x, which comes late where
  // all of W is ahead of it, and W may be in the cache by then.
  const bool is_wide = a.m > 64;
  a.before_x = !is_wide ? a.units_of_row : S::columns == 256 ? 2 : std::max(1, 512 / a.unit.columns);
  const int64_t clusters = 2 * tiles - a.alone, spare = device.processors - clusters * a.blocks;
  a.early = is_wide && is_early && spare > 0 && spare < device.processors / 2 ? static_cast<int>(spare) : 0;
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

// Kernels whose operands are codes. Those of two parts take so many registers that batches are small.
template <class Codes, Scaling scaling, int columns, int group>
using ExactShape = Shape<columns, (Codes::parts > 1) ? 32 : std::min(columns == 64 ? 64 : 128, group), group, true, scaling,
                         Codes::parts>;
template <class Codes, class T, Scaling scaling, int columns>
LaunchShape exact_of(int group) {
  return group == 32   ? launch_shape<Codes, T, ExactShape<Codes, scaling, columns, 32>>
         : group == 64 ? launch_shape<Codes, T, ExactShape<Codes, scaling, columns, 64>>
                       : launch_shape<Codes, T, ExactShape<Codes, scaling, columns, 128>>;
}

// Kernels whose operands are weights, for `least` rows of x and more.
template <class Codes, class T, Scaling scaling, int group, int least = 16>
LaunchShape weights_of(int columns) {
  constexpr bool is_table = Codes::parts > 1;
  if constexpr (least <= 16)
    if (columns == 16) return launch_shape<Codes, T, Shape<16, 128, group, false, scaling>>;
  if constexpr (least <= 32)
    if (columns == 32) return launch_shape<Codes, T, Shape<32, is_table ? 32 : 128, group, false, scaling, is_table ? 2 : 1>>;
  if constexpr (least <= 64)
    if (columns == 64) return launch_shape<Codes, T, Shape<64, is_table ? 32 : 128, group, false, scaling, is_table ? 2 : 1>>;
  return columns == 128 ? launch_shape<Codes, T, Shape<128, 64, group, false, scaling>>
                        : launch_shape<Codes, T, Shape<256, 64, group, false, scaling>>;
}
template <class Codes, class T, Scaling scaling>
LaunchShape rounded_of(int columns, int group) {
  constexpr int least = Codes::parts > 1 ? 32 : 128;  // operands of one part are as good as codes for few rows
  return group == 32   ? weights_of<Codes, T, scaling, 32, least>(columns)
         : group == 64 ? weights_of<Codes, T, scaling, 64, least>(columns)
                       : weights_of<Codes, T, scaling, 128, least>(columns);
}

template <class Codes, class T>
cudaError_t launch_family(Gemm a, const void* x, int64_t k, bool may_round, bool rounds_nothing, GemmPlan plan,
                          cudaStream_t stream) {
  constexpr bool is_integer = Codes::takes_zero, is_table = Codes::parts > 1, is_half = std::is_same_v<T, __half>;
  constexpr bool takes_e8m0 = !is_table && (!is_integer || Codes::bits == 8), takes_e4m3 = !is_table && !is_integer && Codes::bits == 4;
  // float16 holds neither NF4's numbers nor, times any but its own scales, those of others: `may_round` is false for them.
  constexpr bool rounds_own = !is_half || !is_table;
  const int group = a.unit.groups ? a.unit.group : 0;
  const bool is_e8m0 = a.scale_type == ScaleType::e8m0, is_e4m3 = a.scale_type == ScaleType::e4m3;
  const bool is_own = a.scale_type == (is_half ? ScaleType::float16 : ScaleType::bfloat16);
  const bool is_narrow = group && (is_e8m0 || is_e4m3);
  if (group && (is_e4m3 ? group != 16 : is_e8m0 ? group != 32 : group == 16)) return cudaErrorInvalidValue;
  // Weights are operands for many rows of x where they may be rounded, and for few ones where they are codes, or are not rounded.
  const bool weights_few = group ? is_narrow && rounds_nothing : !is_table, weights_many = weights_few || (may_round && a.m > 64);
  const auto are_weights = [&](int columns) { return weights_few || columns > 64 || (is_table && group && weights_many); };
  const auto takes = [&](int columns) {
    if (are_weights(columns)) return weights_few || (weights_many && columns > 16);
    return columns == 64 || (group && is_own);
  };
  using Some = ExactShape<Codes, Scaling::plain, 64, 128>;
  const auto some = tiles_gemm<typename CodesOf<Codes, Some::columns>::Type, T, Some>;
  Kernels kernels = {{}, {}, Codes::bits, is_integer, is_table, is_narrow, reinterpret_cast<const void*>(some), Some::threads};
  for (int i = 0; i < Kernels::sizes; i++) {
    kernels.takes[i] = takes(Kernels::columns(i));
    kernels.are_weights[i] = are_weights(Kernels::columns(i));
  }
  Cut cut;
  if (const cudaError_t error = cut_of(a, k, plan, kernels, cut); error != cudaSuccess) return error;
  const int columns = cut.columns;
  a.blocks = cut.blocks;
  a.alone = static_cast<uint32_t>(cut.alone);

  LaunchShape launch = nullptr;
  if (are_weights(columns)) {
    if (!group) {
      if constexpr (rounds_own) launch = weights_of<Codes, T, Scaling::row, 128, is_table ? 128 : 16>(columns);
    } else if (!is_narrow) {
      if (is_own) {
        if constexpr (rounds_own) launch = rounded_of<Codes, T, Scaling::own>(columns, group);
      } else {
        if constexpr (!is_half) launch = rounded_of<Codes, T, Scaling::plain>(columns, group);
      }
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
             : columns == 32 ? exact_of<Codes, T, Scaling::own, 32>(group)
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
