// Launches eights_at_once.
#include "eights_at_once.cuh"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>

#include "eights_launch.h"
#include "gpu.h"

namespace lowbit::cuda::eights {

int blocks_at_once(int64_t m, int64_t n, int64_t k) {
  int device = 0;
  Gpu gpu = {};
  if (m > 8 * most_rows_at_once || k > most_columns_of_block || this_gpu(device, gpu) != cudaSuccess) return 0;
  const int processors = gpu.processors;
  const int64_t tiles = (n + rows_of_block - 1) / rows_of_block, steps = (k + columns_of_stage - 1) / columns_of_stage;
  // Pairs are always side by side; more of them may have to wait for others.
  int blocks = steps >= 4 && 8 * tiles <= processors ? 4 : steps >= 2 && 2 * tiles <= processors ? 2 : 1;
  // More rows are further tiles, as long as all of them run at once.
  const int64_t tiles_m = (m + most_rows_at_once - 1) / most_rows_at_once;
  while (tiles_m > 1 && blocks > 1 && tiles * tiles_m * blocks > processors) blocks /= 2;
  if (tiles_m > 1 && tiles * tiles_m * blocks > processors) return 0;
  const int64_t columns = (steps + blocks - 1) / blocks * columns_of_stage;
  const int64_t segments = std::min<int64_t>(m, most_rows_at_once) * ((columns + columns_of_segment - 1) / columns_of_segment);
  return columns <= most_columns_at_once && segments <= most_segments_of_warp * warps_that_multiply ? blocks : 0;
}

namespace {

template <class Number, class X, int T>
cudaError_t launch_with(const CUtensorMap& w, AtOnce a, cudaStream_t stream) {
  const auto kernel = eights_at_once<Number, X, T>;
  int device = 0;
  Gpu gpu = {};
  if (const cudaError_t error = this_gpu(device, gpu); error != cudaSuccess) return error;
  Product8& p = a.product;
  const int blocks = p.blocks_of_cluster;
  a.most_steps = (p.steps + blocks - 1) / blocks;
  a.most_rows = static_cast<int>(std::min<int64_t>(p.m, T));
  const int64_t tiles = static_cast<int64_t>(p.tiles_m) * p.tiles_n;
  const int64_t clusters = blocks == 1 && p.tiles_m == 1 ? std::min<int64_t>(tiles, gpu.processors) : tiles;
  p.stages = static_cast<int>(std::min<int64_t>(most_stages, (tiles + clusters - 1) / clusters * a.most_steps));
  const auto size = [&] { return AtOnceMemory<T>::of(p.stages, a.most_steps, a.most_rows, blocks).all; };
  while (p.stages > 2 && size() > gpu.memory) p.stages--;
  if (size() > gpu.memory) return cudaErrorInvalidConfiguration;
  static std::atomic<bool> may_use_all[64];
  if (device >= 64 || !may_use_all[device]) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, gpu.memory);
    if (error != cudaSuccess) return error;
    if (device < 64) may_use_all[device] = true;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(clusters * blocks));
  config.blockDim = dim3(threads_of_block<T, 8>);
  config.dynamicSmemBytes = size();
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  // A graph can let a kernel start while the one before it ends; elsewhere the weights may have been written just before.
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (const cudaError_t error = cudaStreamIsCapturing(stream, &capture); error != cudaSuccess) return error;
  if (capture == cudaStreamCaptureStatusActive) {
    // Two blocks fill a multiprocessor: else those that start early would gather where the kernel before leaves most room.
    config.dynamicSmemBytes = std::max(size(), gpu.memory / 3);
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (blocks > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  }
  return cudaLaunchKernelEx(&config, kernel, w, a);
}

template <class Number, class X>
cudaError_t launch_for(const CUtensorMap& w, const AtOnce& a, cudaStream_t stream) {
  return a.product.tiles_m == 1 && a.product.m <= 8 ? launch_with<Number, X, 8>(w, a, stream)
                                                    : launch_with<Number, X, 16>(w, a, stream);
}

}  // namespace

cudaError_t launch_at_once(AtOnce a, Codes codes, const Operand& w, bool x_is_half, int blocks, cudaStream_t stream) {
  Product8& p = a.product;
  p.steps = (a.k + columns_of_stage - 1) / columns_of_stage;
  while (blocks > p.steps) blocks /= 2;
  p.blocks_of_cluster = blocks;
  p.splits_columns = p.blocks_of_cluster > 1;
  p.tiles_m = static_cast<int>((p.m + most_rows_at_once - 1) / most_rows_at_once);
  p.tiles_n = static_cast<int>((p.n + rows_of_block - 1) / rows_of_block);
  CUtensorMap map = {};
  if (!describe(map, w, p.n, 8, rows_of_block)) return cudaErrorInvalidValue;
  if (codes == Codes::int8)
    return x_is_half ? launch_for<int32_t, __half>(map, a, stream)
                     : launch_for<int32_t, __nv_bfloat16>(map, a, stream);
  return x_is_half ? launch_for<float, __half>(map, a, stream)
                   : launch_for<float, __nv_bfloat16>(map, a, stream);
}

}  // namespace lowbit::cuda::eights
