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
  // Weights: no more than a block has to do; x: what is left. A stage of either is 8 to 70 KB.
  const auto fits = [&] { return GemmMemory<S>(a.unit.size, a.weight_stages, a.x_stages, parts, table).total <= most_memory; };
  a.x_stages = S::columns <= 64 ? 6 : 4;
  a.weight_stages = std::clamp((a.units_of_row + parts - 1) / parts, 2, 6);
  while (a.weight_stages > 2 && !fits()) a.weight_stages--;
  while (a.x_stages > 2 && !fits()) a.x_stages--;

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

// Microseconds that a block takes for what it does once, for meeting others, and for 512 columns of its 128 rows.
struct Cost {
  int columns;
  float once, meeting, columns_512;
};

// Kernels whose operands are codes. Products of a whole group are under way together where registers hold as many operands.
template <class Codes, class T, Scaling scaling, int columns>
LaunchShape exact_of(int group) {
  constexpr int most = Codes::parts == 1 ? 128 : 64;
  return group == 32   ? launch_shape<Codes, T, Shape<columns, 32, 32, true, scaling>>
         : group == 64 ? launch_shape<Codes, T, Shape<columns, std::min(most, 64), 64, true, scaling>>
                       : launch_shape<Codes, T, Shape<columns, most, 128, true, scaling>>;
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
  static constexpr Cost costs[] = {
      {16, 3.0f, 1.0f, 1.3f}, {64, 3.0f, 1.5f, 2.0f}, {128, 3.0f, 2.0f, 3.0f}, {256, 2.5f, 3.0f, 5.0f}};
  int columns = plan.columns, parts = plan.parts;
  float least = 1e30f;
  for (const Cost& cost : costs) {
    if (plan.columns && cost.columns != plan.columns) continue;
    if (cost.columns == 16 ? !has_16 : cost.columns > 64 && !weights_many) continue;
    for (int p = 1; p <= 4; p++) {
      if (plan.parts ? p != plan.parts : p > a.units_of_row) continue;
      static constexpr int at_once[] = {0, 132, 66, 39, 30};
      const int64_t blocks = (a.tiles + tiles_of_block - 1) / tiles_of_block * ((a.m + cost.columns - 1) / cost.columns);
      const int64_t turns = (blocks + at_once[p] - 1) / at_once[p];
      const int units = (a.units_of_row + p - 1) / p;
      const float us = turns * (cost.once + cost.meeting * (p > 1) + units * (a.unit.columns / 512.0f) * cost.columns_512);
      if (us < least) least = us, columns = cost.columns, parts = p;
    }
  }
  if (least == 1e30f) return cudaErrorInvalidValue;  // a plan that is not for such weights

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
  bool captures = false;
  if (const cudaError_t error = is_capturing(stream, &captures); error != cudaSuccess) return error;
  return launch(a, x, k, parts, captures && plan.early >= 0, stream);
}

}  // namespace lowbit::cuda
