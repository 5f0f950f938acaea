// Launches mixed_gemm_kernel: block shape, split of K, stages.
#pragma once

#include <algorithm>
#include <atomic>

#include "../kernels/mixed_gemm.cuh"
#include "tile_scheduler.h"
#include "mixed_gemm_launch.h"
#include "device_info.h"
#include "../decode/nf4_pair_lut.cuh"

namespace lowbit::cuda {

using LaunchShape = cudaError_t (*)(MixedGemm, const void* x, int64_t k, bool is_early, cudaStream_t);

cudaError_t encode_x_tensormap(CUtensorMap* map, bool x_is_half, const void* x, int64_t rows, int64_t k, int rows_of_box);
cudaError_t is_capturing(cudaStream_t stream, bool* answer);

template <class Family, class T, class S>
cudaError_t launch_shape(MixedGemm a, const void* x, int64_t k, bool is_early, cudaStream_t stream) {
  using Codes = typename CodesOf<Family, S::columns>::Type;
  constexpr int max_memory = 227 * 1024, table = table_bytes_of<Codes>;
  const auto kernel = mixed_gemm_kernel<Codes, T, S>;
  static std::atomic<bool> may_use_all[64];
  int index = 0;
  Gpu device = {};
  if (const cudaError_t error = this_gpu(index, device); error != cudaSuccess) return error;
  if (index >= 64 || !may_use_all[index]) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, max_memory);
    if (error != cudaSuccess) return error;
    if (index < 64) may_use_all[index] = true;
  }
  const auto encode_tensormap = [&](CUtensorMap& map, int rows_of_box) {
    return encode_x_tensormap(&map, std::is_same_v<T, __half>, x, a.m, k, rows_of_box);
  };
  cudaError_t error = a.m < S::columns ? cudaSuccess : encode_tensormap(a.x, S::columns);
  if (error == cudaSuccess && a.m % S::columns) error = encode_tensormap(a.last_of_x, a.m % S::columns);
  if (error != cudaSuccess) return error;
  a.plain_x = x;
  a.k = static_cast<int>(k);
  // Shared memory: W gets as many stages as a block has work for, x the rest; a stage of either is 8 to 70 KB. Where reductions
  // have their own space, no block waits until others have read their copies, which is worth some stages.
  const int64_t tiles = (a.tiles + tiles_per_block - 1) / tiles_per_block * ((a.m + S::columns - 1) / S::columns);
  const int parts = a.unpaired_tiles == tiles ? a.blocks : 2 * a.blocks;
  a.by_blocks = FastDivide(a.blocks);
  a.by_rows = FastDivide(static_cast<uint32_t>((a.tiles + tiles_per_block - 1) / tiles_per_block));
  const int piece = k_per_piece(S::columns, a.unit.columns);
  a.pieces_per_row = static_cast<int>((k + piece - 1) / piece);
  const bool is_short = S::columns == 64 && a.unit.columns < 512;  // two stages of such units are consumed too quickly
  constexpr int max_x = S::columns <= 64 ? 6 : 4, run = stages_per_run<Codes, S>;
  constexpr bool is_fixed = is_ring_a_run<Codes, S>;
  static_assert(max_stages >= 6 && (is_fixed ? run == max_x : max_x % run == 0));
  const auto memory = [&] {
    a.at = shared_layout<S>(a, table);
    return a.at.total;
  };
  const auto fit = [&](int least_weights, int least_x) {
    a.x_stages = max_x;
    a.weight_stages = std::clamp((a.units_per_row + parts - 1) / parts, 2, 6);
    while (is_short && a.x_stages > 4 && memory() > max_memory) a.x_stages -= run;
    while (a.weight_stages > least_weights && memory() > max_memory) a.weight_stages--;
    while (!is_fixed && a.x_stages > least_x && memory() > max_memory) a.x_stages -= run;
    return memory() <= max_memory;
  };
  a.sums_apart = a.blocks > 1;
  if (!a.sums_apart || !fit(2, S::columns <= 64 ? 4 : 3)) {
    a.sums_apart = false;
    fit(2, 2);
  }

  // Small M waits for W, which should start as early as possible but not before its turn; large M waits for x, which would be
  // delayed by requests for W, and W may be in L2 by then.
  const bool is_wide = a.m > 64;
  a.before_x = !is_wide ? a.units_per_row : S::columns == 256 ? 2 : std::max(1, 512 / a.unit.columns);
  const int64_t clusters = 2 * tiles - a.unpaired_tiles, spare = device.sms - clusters * a.blocks;
  a.early = is_wide && is_early && spare > 0 && spare < device.sms / 2 ? static_cast<int>(spare) : 0;
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

// Bytes of the buffer for tiles of y that two clusters share.
inline int64_t pair_buffer_bytes(int64_t pairs, int blocks, int columns) {
  return (pairs * blocks * 8 + 127) / 128 * 128 + pairs * 2 * block_rows * columns * 4;
}

// A value that memory is not likely to hold by chance.
inline unsigned long long make_launch_tag() {
  static std::atomic<unsigned long long> launches = 0;
  unsigned long long z = (launches++ + 1) * 0x9e3779b97f4a7c15ull + reinterpret_cast<uintptr_t>(&launches);
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return (z ^ z >> 31) | 1;
}

// Kernels whose operands are codes (exact). Formats of two parts take so many registers that batches are small.
template <class Codes, Scaling scaling, int columns, int group>
using ExactShape = Shape<columns, (Codes::parts > 1) ? 32 : std::min(columns == 64 ? 64 : 128, group), group, true, scaling,
                         Codes::parts>;
template <class Codes, class T, Scaling scaling, int columns>
LaunchShape exact_of(int group) {
  return group == 32   ? launch_shape<Codes, T, ExactShape<Codes, scaling, columns, 32>>
         : group == 64 ? launch_shape<Codes, T, ExactShape<Codes, scaling, columns, 64>>
                       : launch_shape<Codes, T, ExactShape<Codes, scaling, columns, 128>>;
}

// Kernels whose operands are weights (rounded), for `minimum` rows of x and more.
template <class Codes, class T, Scaling scaling, int group, int minimum = 16>
LaunchShape weights_of(int columns) {
  constexpr bool is_table = Codes::parts > 1;
  if constexpr (minimum <= 16)
    if (columns == 16) return launch_shape<Codes, T, Shape<16, 128, group, false, scaling>>;
  if constexpr (minimum <= 32)
    if (columns == 32) return launch_shape<Codes, T, Shape<32, is_table ? 32 : 128, group, false, scaling, is_table ? 2 : 1>>;
  if constexpr (minimum <= 64)
    if (columns == 64) return launch_shape<Codes, T, Shape<64, is_table ? 32 : 128, group, false, scaling, is_table ? 2 : 1>>;
  return columns == 128 ? launch_shape<Codes, T, Shape<128, 64, group, false, scaling>>
                        : launch_shape<Codes, T, Shape<256, 64, group, false, scaling>>;
}
template <class Codes, class T, Scaling scaling>
LaunchShape rounded_of(int columns, int group) {
  constexpr int minimum = Codes::parts > 1 ? 32 : 128;  // for few rows operands of one part are as good as codes
  return group == 32   ? weights_of<Codes, T, scaling, 32, minimum>(columns)
         : group == 64 ? weights_of<Codes, T, scaling, 64, minimum>(columns)
                       : weights_of<Codes, T, scaling, 128, minimum>(columns);
}

template <class Codes, class T>
cudaError_t launch_family(MixedGemm a, const void* x, int64_t k, bool may_round, bool rounds_nothing, MixedGemmPlan plan,
                          cudaStream_t stream) {
  constexpr bool is_integer = Codes::supports_zero, is_table = Codes::parts > 1, is_half = std::is_same_v<T, __half>;
  constexpr bool supports_e8m0 = !is_table && (!is_integer || Codes::bits == 8), supports_e4m3 = !is_table && !is_integer && Codes::bits == 4;
  // float16 cannot hold NF4's values, nor products of others with scales of other types: may_round is false for them.
  constexpr bool rounds_own = !is_half || !is_table;
  const int group = a.unit.groups ? a.unit.group : 0;
  const bool is_e8m0 = a.scale_type == ScaleType::e8m0, is_e4m3 = a.scale_type == ScaleType::e4m3;
  const bool is_own = a.scale_type == (is_half ? ScaleType::float16 : ScaleType::bfloat16);
  const bool is_narrow = group && (is_e8m0 || is_e4m3);
  if (group && (is_e4m3 ? group != 16 : is_e8m0 ? group != 32 : group == 16)) return cudaErrorInvalidValue;
  // Weights are operands for many rows of x where they may be rounded, and for few rows where that is exact.
  const bool weights_few = group ? is_narrow && rounds_nothing : !is_table, weights_many = weights_few || (may_round && a.m > 64);
  const auto are_weights = [&](int columns) { return weights_few || columns > 64 || (is_table && group && weights_many); };
  const auto takes = [&](int columns) {
    if (are_weights(columns)) return weights_few || (weights_many && columns > 16);
    return columns == 64 || (group && is_own);
  };
  using Some = ExactShape<Codes, Scaling::plain, 64, 128>;
  const auto some = mixed_gemm_kernel<typename CodesOf<Codes, Some::columns>::Type, T, Some>;
  KernelSet kernels = {{}, {}, Codes::bits, is_integer, is_table, is_narrow, reinterpret_cast<const void*>(some), Some::threads};
  for (int i = 0; i < KernelSet::sizes; i++) {
    kernels.takes[i] = takes(KernelSet::columns(i));
    kernels.are_weights[i] = are_weights(KernelSet::columns(i));
  }
  Schedule cut;
  if (const cudaError_t error = schedule_for(a, k, plan, kernels, cut); error != cudaSuccess) return error;
  const int columns = cut.columns;
  a.blocks = cut.blocks;
  a.unpaired_tiles = static_cast<uint32_t>(cut.unpaired_tiles);

  LaunchShape launch = nullptr;
  if (are_weights(columns)) {
    if (!group) {
      if constexpr (rounds_own) launch = weights_of<Codes, T, Scaling::row, 128, is_table ? 128 : 16>(columns);
    } else if (!is_narrow) {
      if (is_own) {
        if constexpr (rounds_own) launch = rounded_of<Codes, T, Scaling::local>(columns, group);
      } else {
        if constexpr (!is_half) launch = rounded_of<Codes, T, Scaling::plain>(columns, group);
      }
    } else if (is_e8m0) {
      if constexpr (supports_e8m0 && !is_half) launch = weights_of<Codes, T, Scaling::e8m0, 32>(columns);
    } else {
      if constexpr (supports_e4m3) launch = weights_of<Codes, T, Scaling::e4m3, 16>(columns);
    }
  } else if (!group) {
    if constexpr (is_table) launch = launch_shape<Codes, T, Shape<64, 64, 128, true, Scaling::row>>;
  } else if (!is_narrow) {
    launch = !is_own         ? exact_of<Codes, T, Scaling::plain, 64>(group)
             : columns == 16 ? exact_of<Codes, T, Scaling::local, 16>(group)
             : columns == 32 ? exact_of<Codes, T, Scaling::local, 32>(group)
                             : exact_of<Codes, T, Scaling::local, 64>(group);
  } else if (is_e8m0) {
    if constexpr (supports_e8m0) launch = launch_shape<Codes, T, Shape<64, 32, 32, true, Scaling::e8m0>>;
  }
  if (launch == nullptr) return cudaErrorInvalidValue;
  const int64_t tiles = (a.tiles + tiles_per_block - 1) / tiles_per_block * ((a.m + columns - 1) / columns);
  if (a.unpaired_tiles < tiles) {
    a.launch_tag = make_launch_tag();
    a.pairs = static_cast<uint8_t*>(plan.allocate(plan.holder, pair_buffer_bytes(tiles - a.unpaired_tiles, a.blocks, columns)));
  }
  bool captures = false;
  if (const cudaError_t error = is_capturing(stream, &captures); error != cudaSuccess) return error;
  return launch(a, x, k, captures && plan.early >= 0, stream);
}

}  // namespace lowbit::cuda
