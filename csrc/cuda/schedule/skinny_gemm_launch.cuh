// Launches skinny_gemm: number of blocks, warps, tiles in a batch and stages.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <type_traits>

#include "device_info.h"
#include "../kernels/skinny_gemm.cuh"
#include "skinny_gemm_launch.h"

namespace lowbit::cuda {

inline SkinnyGemmMemory memory_of(const SkinnyGemm& a, int octets, int stages, int table_bytes) {
  const int warps = a.slices_per_pass * a.tile_groups, max_tiles = a.min_tiles + (a.extra_clusters > 0);
  const int bytes_of_tile = outputs_per_tile(octets) * 4;
  const bool is_one_pass = a.passes == 1, is_one_batch = is_one_pass && max_tiles <= a.tiles_per_batch;
  SkinnyGemmMemory at = {};
  at.x = at.ring + warps * stages * a.unit.pitch();
  at.partial = at.x + warps * x_buffer_bytes;
  at.total = at.partial + (is_one_batch ? 1 : 2) * a.tiles_per_batch * a.slices_per_pass * bytes_of_tile;
  at.shares = at.total + (is_one_pass ? 0 : max_tiles * bytes_of_tile);
  const int tiles_per_share = (a.min_tiles + a.cluster_size) / a.cluster_size;
  at.table = at.shares + (a.cluster_size == 1 ? 0 : a.cluster_size * tiles_per_share * bytes_of_tile);
  at.barriers = at.table + table_bytes;
  at.all = at.barriers + warps * stages * 8;
  return at;
}

template <class F, class = void>
constexpr int skinny_table_bytes = 0;
template <class F>
constexpr int skinny_table_bytes<F, std::enable_if_t<(F::table_size > 0)>> = F::table_size * sizeof(uint2);

// Distributes tiles to clusters and slices to blocks, passes and warps, and lays out shared memory.
template <class F, int octets>
void plan_work(SkinnyGemm& a, const Gpu& device, bool has_ring, SkinnyGemmPlan plan) {
  constexpr int table_bytes = skinny_table_bytes<F>;
  constexpr int max_warps = max_skinny_warps(octets);
  const int all_slices = std::max((a.k + slice_k - 1) / slice_k, 1);
  const int warps = plan.warps ? std::min(plan.warps, max_warps) : max_warps;
  // Clusters of two where one block would need passes and few tiles are left to hide the cost of a cluster.
  const bool pays = all_slices > warps && a.tiles <= 4 * device.sms;
  a.cluster_size = !has_ring ? 1 : std::min(plan.cluster_size ? plan.cluster_size : pays ? 2 : 1, all_slices);
  const int slices = (all_slices + a.cluster_size - 1) / a.cluster_size;
  a.passes = (slices + warps - 1) / warps;
  a.slices_per_pass = (slices + a.passes - 1) / a.passes;
  for (int64_t max_tiles_of_block = 64; max_tiles_of_block; max_tiles_of_block /= 2) {
    const int64_t at_once = device.sms / a.cluster_size;
    a.clusters = std::min(a.tiles, std::max(at_once, (a.tiles + max_tiles_of_block - 1) / max_tiles_of_block));
    a.min_tiles = static_cast<int>(a.tiles / a.clusters);
    a.extra_clusters = static_cast<int>(a.tiles % a.clusters);
    const int max_tiles = a.min_tiles + (a.extra_clusters > 0);
    a.tile_groups = std::min(warps / a.slices_per_pass, max_tiles);
    const int tiles_per_group = (max_tiles + a.tile_groups - 1) / a.tile_groups;
    const int units_per_warp = tiles_per_group * a.passes * std::min(units_per_slice<F>, a.units_per_row);
    const int min_stages = has_ring ? 2 : 0;
    for (int tiles : {tiles_per_group <= 4 && a.passes == 1 ? tiles_per_group : 2, 1}) {
      a.tiles_per_batch = a.tile_groups * tiles;
      // Sixteen rows of x are so many bytes that a ring of more than 104 KB would delay their loads.
      const int enough = octets == 1 ? 4 : std::min(4, (104 << 10) / (a.slices_per_pass * a.tile_groups * a.unit.size));
      a.stages = has_ring ? std::max(min_stages, std::min(plan.stages ? plan.stages : enough, units_per_warp)) : 0;
      while (a.stages > min_stages && memory_of(a, octets, a.stages, table_bytes).all > device.memory) a.stages--;
      a.at = memory_of(a, octets, a.stages, table_bytes);
      if (a.at.all <= device.memory) return;
    }
  }
}

// Blocks for each of `rows` rows of experts: the fewest, of at most 64 tiles, that fill whole waves of multiprocessors to nine tenths.
inline int blocks_per_row(int64_t tiles, int rows, int sms) {
  const int fewest = static_cast<int>((tiles + 63) / 64);
  const auto filled = [&](int blocks) {
    const int all = blocks * rows, waves = (all + sms - 1) / sms;
    return static_cast<float>(all) / static_cast<float>(waves * sms);
  };
  int best = fewest;
  for (int blocks = fewest; blocks <= tiles && (blocks == fewest || blocks * rows <= 4 * sms); blocks++) {
    if (filled(blocks) > filled(best)) best = blocks;
    if (filled(best) >= 0.9f) break;
  }
  return best;
}

template <class F, class T, Scales scales, int run, int octets, bool of_experts = false>
cudaError_t launch_skinny_kernel(SkinnyGemm a, SkinnyGemmPlan plan, cudaStream_t stream) {
  const auto kernel = skinny_gemm<F, T, scales, run, octets, of_experts>;
  int index = 0;
  Gpu device = {};
  if (const cudaError_t error = this_gpu(index, device); error != cudaSuccess) return error;
  static std::atomic<bool> may_use_all[64];
  if (index >= 64 || !may_use_all[index]) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, device.memory);
    if (error != cudaSuccess) return error;
    if (index < 64) may_use_all[index] = true;
  }

  // Only code for sm_90 has bulk copies and PDL; newer devices run that for sm_80.
  const bool has_ring = device.generation == 90;
  // In a CUDA graph a kernel may start while its predecessor ends (PDL). Elsewhere the weights may have been written by the
  // kernel just before.
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (const cudaError_t error = cudaStreamIsCapturing(stream, &capture); error != cudaSuccess) return error;
  const bool is_early = has_ring && capture == cudaStreamCaptureStatusActive && plan.early_stages >= 0;

  Gpu share_of_device = device;
  if (of_experts) share_of_device.sms = blocks_per_row(a.tiles, a.of_experts.rows, device.sms), plan.cluster_size = 1;
  plan_work<F, octets>(a, share_of_device, has_ring, plan);
  // Few early copies a warp: more would delay the loads of x.
  const int few = octets == 1 && overlaps_x_load<F, scales> ? units_per_slice<F> : 1;
  a.early_stages = !is_early || of_experts ? 0 : std::min(a.stages - 1, plan.early_stages ? plan.early_stages : few);

  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(a.clusters * a.cluster_size), of_experts ? a.of_experts.rows : 1);
  config.blockDim = dim3(32, a.slices_per_pass, a.tile_groups);
  // At most two blocks on a multiprocessor: early blocks would otherwise crowd where the kernel before leaves most room.
  config.dynamicSmemBytes = is_early ? std::max(a.at.all, device.memory / 3) : a.at.all;
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  if (is_early) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (a.cluster_size > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(a.cluster_size), 1, 1};
  }
  return cudaLaunchKernelEx(&config, kernel, a);
}

// run: columns whose sum is scaled at once.
template <class F, class T, Scales scales, int run>
cudaError_t launch_skinny_for(const SkinnyGemm& a, SkinnyGemmPlan plan, cudaStream_t stream) {
  if (a.of_experts.is_used()) return launch_skinny_kernel<F, T, scales, run, 1, true>(a, plan, stream);
  return a.m <= 8 ? launch_skinny_kernel<F, T, scales, run, 1>(a, plan, stream)
                  : launch_skinny_kernel<F, T, scales, run, 2>(a, plan, stream);
}

template <template <class> class Family, Scales scales, int run>
cudaError_t launch_skinny(const SkinnyGemm& a, bool x_is_half, SkinnyGemmPlan plan, cudaStream_t stream) {
  return x_is_half ? launch_skinny_for<Family<__half>, __half, scales, run>(a, plan, stream)
                   : launch_skinny_for<Family<__nv_bfloat16>, __nv_bfloat16, scales, run>(a, plan, stream);
}

template <template <class> class Family>
cudaError_t launch_skinny(const SkinnyGemm& a, bool x_is_half, SkinnyGemmPlan plan, cudaStream_t stream) {
  // without groups in the unit the type of the scales does not matter there
  if (a.scale_type != ScaleType::bfloat16 && a.unit.groups)
    return launch_skinny<Family, Scales::plain, 32>(a, x_is_half, plan, stream);
  return a.unit.group < 128 ? launch_skinny<Family, Scales::bfloat16, 32>(a, x_is_half, plan, stream)
                            : launch_skinny<Family, Scales::bfloat16, 128>(a, x_is_half, plan, stream);
}

}  // namespace lowbit::cuda
