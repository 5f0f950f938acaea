// Launches tiles_gemm: which shape of block, in how many parts, with how many stages.
#pragma once

#include <algorithm>
#include <atomic>

#include "gemm.cuh"
#include "gemm_launch.h"

namespace lowbit::cuda {

using LaunchShape = cudaError_t (*)(Gemm, const void* x, int64_t k, int parts, bool is_early, cudaStream_t);

cudaError_t describe_x(CUtensorMap* map, bool x_is_half, const void* x, int64_t rows, int64_t k, int rows_of_box);
cudaError_t is_capturing(cudaStream_t stream, bool* answer);

template <class Codes, class T, class S>
cudaError_t launch_shape(Gemm a, const void* x, int64_t k, int parts, bool is_early, cudaStream_t stream) {
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
  // x: enough for every team; weights: what is left, but no more than a block has to do.
  a.x_stages = S::columns <= 16 ? 12 : S::columns <= 64 ? 6 : 4;
  a.weight_stages = std::clamp((a.units_of_row + parts - 1) / parts, 2, 6);
  while (a.weight_stages > 2 && GemmMemory<S>(a.unit.size, a.weight_stages, a.x_stages, parts, table).total > most_memory) a.weight_stages--;
  while (a.x_stages > 2 * S::teams && GemmMemory<S>(a.unit.size, a.weight_stages, a.x_stages, parts, table).total > most_memory) a.x_stages -= S::teams;

  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(parts, static_cast<unsigned>((a.tiles + tiles_of_block - 1) / tiles_of_block),
                        static_cast<unsigned>((a.m + S::columns - 1) / S::columns));
  config.blockDim = dim3(S::threads);
  config.dynamicSmemBytes = GemmMemory<S>(a.unit.size, a.weight_stages, a.x_stages, parts, table).total;
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(parts), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attributes;
  config.numAttrs = is_early ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, a);
}

// Microseconds that a block takes for what it does once, and for 512 columns of its 128 rows: what the choice goes by.
struct Cost {
  int columns;
  float once, columns_512;
};

template <class Codes, class T>
cudaError_t launch_family(Gemm a, const void* x, int64_t k, bool may_round, bool rounds_nothing, GemmPlan plan, cudaStream_t stream) {
  constexpr bool is_integer = std::is_same_v<Codes, Integers<T, Codes::bits>>, is_table = Codes::parts > 1;
  constexpr bool takes_e8m0 = !is_table && (!is_integer || Codes::bits == 8), takes_e4m3 = !is_integer && Codes::bits == 4;
  const bool has_narrow_scales = a.unit.groups && size_of(a.scale_type) == 1, has_own_scales =
      !a.unit.groups || a.scale_type == (std::is_same_v<T, __half> ? ScaleType::float16 : ScaleType::bfloat16);
  // Operands get scales for many rows of x where they may be rounded, and for few ones of narrow floats, which are not.
  const bool scales_few = rounds_nothing && !is_integer && has_narrow_scales, scales_many = may_round && (a.m > 64 || scales_few);
  static constexpr Cost costs[] = {{16, 3.5f, 1.6f}, {64, 3.5f, 2.1f}, {128, 5.0f, 3.4f}, {256, 6.0f, 5.75f}};
  int columns = plan.columns, parts = plan.parts;
  float least = 1e30f;
  for (const Cost& cost : costs) {
    if (plan.columns && cost.columns != plan.columns) continue;
    if (cost.columns > 64 && (!scales_many || (cost.columns == 128 && !has_own_scales && !has_narrow_scales))) continue;
    for (int p = 1; p <= 4; p++) {
      if (plan.parts ? p != plan.parts : p > a.units_of_row) continue;
      static constexpr int at_once[] = {0, 132, 66, 39, 30};
      const int64_t blocks = (a.tiles + tiles_of_block - 1) / tiles_of_block * ((a.m + cost.columns - 1) / cost.columns);
      const int64_t turns = (blocks + at_once[p] - 1) / at_once[p];
      const int units = (a.units_of_row + p - 1) / p;
      const float us = turns * (cost.once + 1.5f * (p > 1) + units * (a.unit.columns / 512.0f) * cost.columns_512);
      if (us < least) least = us, columns = cost.columns, parts = p;
    }
  }
  if (columns == 0) return cudaErrorInvalidValue;

  LaunchShape launch = nullptr;
  const int group = a.unit.groups ? a.unit.group : 128;
  if (columns > 64) {
    if (has_own_scales) {
      launch = columns == 128 ? launch_shape<Codes, T, Shape<128, 64, 1, 0, false, Scaling::own>>
                              : launch_shape<Codes, T, Shape<256, 64, 1, 0, false, Scaling::own>>;
    } else if (!has_narrow_scales) {
      launch = launch_shape<Codes, T, Shape<256, 64, 1, 0, false, Scaling::plain>>;
    } else if (a.scale_type == ScaleType::e8m0 && group == 32) {
      if constexpr (takes_e8m0 && !std::is_same_v<T, __half>)
        launch = columns == 128 ? launch_shape<Codes, T, Shape<128, 64, 1, 32, false, Scaling::e8m0>>
                                : launch_shape<Codes, T, Shape<256, 64, 1, 32, false, Scaling::e8m0>>;
    } else if (a.scale_type == ScaleType::e4m3 && group == 16) {
      if constexpr (takes_e4m3)
        launch = columns == 128 ? launch_shape<Codes, T, Shape<128, 64, 1, 16, false, Scaling::e4m3>>
                                : launch_shape<Codes, T, Shape<256, 64, 1, 16, false, Scaling::e4m3>>;
    }
  } else if (scales_few) {
    if (a.scale_type == ScaleType::e8m0 && group == 32) {
      if constexpr (takes_e8m0 && !is_integer && !std::is_same_v<T, __half>)
        launch = columns == 16 ? launch_shape<Codes, T, Shape<16, 64, 2, 32, false, Scaling::e8m0>>
                               : launch_shape<Codes, T, Shape<64, 64, 1, 32, false, Scaling::e8m0>>;
    } else if (a.scale_type == ScaleType::e4m3 && group == 16) {
      if constexpr (takes_e4m3)
        launch = columns == 16 ? launch_shape<Codes, T, Shape<16, 64, 2, 16, false, Scaling::e4m3>>
                               : launch_shape<Codes, T, Shape<64, 64, 1, 16, false, Scaling::e4m3>>;
    }
  } else if (has_narrow_scales) {
    if constexpr (takes_e8m0)
      if (a.scale_type == ScaleType::e8m0 && group == 32)
        launch = columns == 16 ? launch_shape<Codes, T, Shape<16, 32, 2, 32, true, Scaling::e8m0>>
                               : launch_shape<Codes, T, Shape<64, 32, 1, 32, true, Scaling::e8m0>>;
  } else {
    constexpr int teams = is_table ? 1 : 2, least = is_table ? 32 : 64, most = is_table ? 32 : 128;  // registers are what limits
    if (columns == 16)
      launch = group == 32   ? launch_shape<Codes, T, Shape<16, 32, teams, 32, true, Scaling::plain>>
               : group == 64 ? launch_shape<Codes, T, Shape<16, Codes::bits < 4 ? 32 : least, teams, 64, true, Scaling::plain>>
                             : launch_shape<Codes, T, Shape<16, least, teams, 128, true, Scaling::plain>>;
    else
      launch = group == 32   ? launch_shape<Codes, T, Shape<64, 32, 1, 32, true, Scaling::plain>>
               : group == 64 ? launch_shape<Codes, T, Shape<64, least, 1, 64, true, Scaling::plain>>
                             : launch_shape<Codes, T, Shape<64, most, 1, 128, true, Scaling::plain>>;
  }
  if (launch == nullptr) return cudaErrorInvalidValue;
  bool captures = false;
  if (const cudaError_t error = is_capturing(stream, &captures); error != cudaSuccess) return error;
  return launch(a, x, k, parts, captures && plan.early >= 0, stream);
}


}  // namespace lowbit::cuda
