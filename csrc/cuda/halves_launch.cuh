// Launches halves_linear: how many blocks, warps, tiles of a batch and stages.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <type_traits>

#include "gpu.h"
#include "halves.cuh"
#include "halves_launch.h"

namespace lowbit::cuda {

inline HalvesMemory memory_of(const Halves& a, int octets, int stages, int table_bytes) {
  const int warps = a.slices_of_pass * a.turns, most_tiles = a.fewest_tiles + (a.clusters_with_more > 0);
  const int bytes_of_tile = outputs_of_tile(octets) * 4;
  const bool is_one_pass = a.passes == 1, is_one_batch = is_one_pass && most_tiles <= a.tiles_of_batch;
  HalvesMemory at = {};
  at.x = at.ring + warps * stages * a.unit.pitch();
  at.partial = at.x + warps * bytes_of_x;
  at.total = at.partial + (is_one_batch ? 1 : 2) * a.tiles_of_batch * a.slices_of_pass * bytes_of_tile;
  at.shares = at.total + (is_one_pass ? 0 : most_tiles * bytes_of_tile);
  const int tiles_of_share = (a.fewest_tiles + a.blocks_of_cluster) / a.blocks_of_cluster;
  at.table = at.shares + (a.blocks_of_cluster == 1 ? 0 : a.blocks_of_cluster * tiles_of_share * bytes_of_tile);
  at.barriers = at.table + table_bytes;
  at.all = at.barriers + warps * stages * 8;
  return at;
}

template <class F, class = void>
constexpr int table_bytes_of_halves = 0;
template <class F>
constexpr int table_bytes_of_halves<F, std::enable_if_t<(F::table_size > 0)>> = F::table_size * sizeof(uint2);

// Tiles to clusters, slices to blocks, passes and warps, and shared memory to what they need.
template <class F, int octets>
void share_out(Halves& a, const Gpu& device, bool has_ring, HalvesPlan plan) {
  constexpr int table_bytes = table_bytes_of_halves<F>;
  constexpr int most_warps = most_warps_of_halves(octets);
  const int all_slices = std::max((a.k + columns_of_slice - 1) / columns_of_slice, 1);
  const int warps = plan.warps ? std::min(plan.warps, most_warps) : most_warps;
  // Two blocks where one would work in passes and a few tiles are left to hide what a cluster costs.
  const bool pays = all_slices > warps && a.tiles <= 4 * device.processors;
  a.blocks_of_cluster = !has_ring ? 1 : std::min(plan.blocks_of_cluster ? plan.blocks_of_cluster : pays ? 2 : 1, all_slices);
  const int slices = (all_slices + a.blocks_of_cluster - 1) / a.blocks_of_cluster;
  a.passes = (slices + warps - 1) / warps;
  a.slices_of_pass = (slices + a.passes - 1) / a.passes;
  for (int64_t most_of_block = 64; most_of_block; most_of_block /= 2) {
    const int64_t at_once = device.processors / a.blocks_of_cluster;
    a.clusters = std::min(a.tiles, std::max(at_once, (a.tiles + most_of_block - 1) / most_of_block));
    a.fewest_tiles = static_cast<int>(a.tiles / a.clusters);
    a.clusters_with_more = static_cast<int>(a.tiles % a.clusters);
    const int most_tiles = a.fewest_tiles + (a.clusters_with_more > 0);
    a.turns = std::min(warps / a.slices_of_pass, most_tiles);
    const int tiles_of_turn = (most_tiles + a.turns - 1) / a.turns;
    const int units_of_warp = tiles_of_turn * a.passes * std::min(units_of_slice<F>, a.units_of_row);
    const int fewest = has_ring ? 2 : 0;
    for (int tiles : {tiles_of_turn <= 4 && a.passes == 1 ? tiles_of_turn : 2, 1}) {
      a.tiles_of_batch = a.turns * tiles;
      // Sixteen rows of x are so many bytes that a ring of 104 KB, and no more, leaves them time to come.
      const int enough = octets == 1 ? 4 : std::min(4, (104 << 10) / (a.slices_of_pass * a.turns * a.unit.size));
      a.stages = has_ring ? std::max(fewest, std::min(plan.stages ? plan.stages : enough, units_of_warp)) : 0;
      while (a.stages > fewest && memory_of(a, octets, a.stages, table_bytes).all > device.memory) a.stages--;
      a.at = memory_of(a, octets, a.stages, table_bytes);
      if (a.at.all <= device.memory) return;
    }
  }
}

template <class F, class T, Scales scales, int run, int octets>
cudaError_t launch_halves_kernel(Halves a, HalvesPlan plan, cudaStream_t stream) {
  const auto kernel = halves_linear<F, T, scales, run, octets>;
  int index = 0;
  Gpu device = {};
  if (const cudaError_t error = this_gpu(index, device); error != cudaSuccess) return error;
  static std::atomic<bool> may_use_all[64];
  if (index >= 64 || !may_use_all[index]) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, device.memory);
    if (error != cudaSuccess) return error;
    if (index < 64) may_use_all[index] = true;
  }

  // Only the code for 9.0 has bulk copies and can wait for its predecessor; newer devices compile that for 8.0.
  const bool has_ring = device.generation == 90;
  // A graph can let a kernel start while the one before it ends; elsewhere the weights may have been written just before.
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (const cudaError_t error = cudaStreamIsCapturing(stream, &capture); error != cudaSuccess) return error;
  const bool is_early = has_ring && capture == cudaStreamCaptureStatusActive && plan.early_stages >= 0;

  share_out<F, octets>(a, device, has_ring, plan);
  // Few early copies a warp: more of them would be ahead of x.
  const int few = octets == 1 && meets_x_early<F, scales> ? units_of_slice<F> : 1;
  a.early_stages = !is_early ? 0 : std::min(a.stages - 1, plan.early_stages ? plan.early_stages : few);

  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(a.clusters * a.blocks_of_cluster));
  config.blockDim = dim3(32, a.slices_of_pass, a.turns);
  // Two blocks fill a multiprocessor: else those that start early would gather where the kernel before leaves most room.
  config.dynamicSmemBytes = is_early ? std::max(a.at.all, device.memory / 3) : a.at.all;
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  if (is_early) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (a.blocks_of_cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(a.blocks_of_cluster), 1, 1};
  }
  return cudaLaunchKernelEx(&config, kernel, a);
}

// `run`: columns whose sum is scaled at once.
template <class F, class T, Scales scales, int run>
cudaError_t launch_halves_for(const Halves& a, HalvesPlan plan, cudaStream_t stream) {
  return a.m <= 8 ? launch_halves_kernel<F, T, scales, run, 1>(a, plan, stream)
                  : launch_halves_kernel<F, T, scales, run, 2>(a, plan, stream);
}

template <template <class> class Family, Scales scales, int run>
cudaError_t launch_halves_of(const Halves& a, bool x_is_half, HalvesPlan plan, cudaStream_t stream) {
  return x_is_half ? launch_halves_for<Family<__half>, __half, scales, run>(a, plan, stream)
                   : launch_halves_for<Family<__nv_bfloat16>, __nv_bfloat16, scales, run>(a, plan, stream);
}

template <template <class> class Family>
cudaError_t launch_halves_of(const Halves& a, bool x_is_half, HalvesPlan plan, cudaStream_t stream) {
  // Without groups in the unit the type of a scale does not matter there.
  if (a.scale_type != ScaleType::bfloat16 && a.unit.groups)
    return launch_halves_of<Family, Scales::plain, 32>(a, x_is_half, plan, stream);
  return a.unit.group < 128 ? launch_halves_of<Family, Scales::bfloat16, 32>(a, x_is_half, plan, stream)
                            : launch_halves_of<Family, Scales::bfloat16, 128>(a, x_is_half, plan, stream);
}

}  // namespace lowbit::cuda
