// Launches w8a8_fused_split_k.cuh.
#include "w8a8_fused_split_k.cuh"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>

#include "../schedule/w8a8_launch.h"
#include "../schedule/device_info.h"

namespace lowbit::cuda::w8a8 {

int split_k_blocks(int64_t m, int64_t n, int64_t k) {
  int device = 0;
  Gpu gpu = {};
  if (m > 8 * max_fused_rows || k > max_block_columns || this_gpu(device, gpu) != cudaSuccess) return 0;
  const int sms = gpu.sms;
  const int64_t tiles = (n + block_rows - 1) / block_rows, steps = (k + stage_k - 1) / stage_k;
  // Clusters of two are always scheduled; larger ones may have to wait for others.
  int blocks = steps >= 4 && 8 * tiles <= sms ? 4 : steps >= 2 && 2 * tiles <= sms ? 2 : 1;
  // More rows of x become further tiles, as long as all run at once.
  const int64_t tiles_m = (m + max_fused_rows - 1) / max_fused_rows;
  while (tiles_m > 1 && blocks > 1 && tiles * tiles_m * blocks > sms) blocks /= 2;
  if (tiles_m > 1 && tiles * tiles_m * blocks > sms) return 0;
  const int64_t columns = (steps + blocks - 1) / blocks * stage_k;
  const int64_t segments = std::min<int64_t>(m, max_fused_rows) * ((columns + segment_k - 1) / segment_k);
  return columns <= max_fused_columns && segments <= max_warp_segments * consumer_warps ? blocks : 0;
}

namespace {

template <class Number, class X, int T>
cudaError_t launch_with(const CUtensorMap& w, FusedSplitK a, cudaStream_t stream) {
  const auto kernel = w8a8_fused_split_k<Number, X, T>;
  int device = 0;
  Gpu gpu = {};
  if (const cudaError_t error = this_gpu(device, gpu); error != cudaSuccess) return error;
  W8A8Args& p = a.product;
  const int blocks = p.cluster_size;
  a.max_steps = (p.steps + blocks - 1) / blocks;
  a.max_rows = static_cast<int>(std::min<int64_t>(p.m, T));
  const int64_t tiles = static_cast<int64_t>(p.tiles_m) * p.tiles_n;
  const int64_t clusters = blocks == 1 && p.tiles_m == 1 ? std::min<int64_t>(tiles, gpu.sms) : tiles;
  p.stages = static_cast<int>(std::min<int64_t>(max_stages, (tiles + clusters - 1) / clusters * a.max_steps));
  const auto size = [&] { return FusedSplitKMemory<T>::of(p.stages, a.max_steps, a.max_rows, blocks).all; };
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
  config.blockDim = dim3(threads_per_block<T, 8>);
  config.dynamicSmemBytes = size();
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  // In a CUDA graph this kernel may start while its predecessor ends (PDL). Elsewhere the weights may have been written by the
  // kernel just before.
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (const cudaError_t error = cudaStreamIsCapturing(stream, &capture); error != cudaSuccess) return error;
  if (capture == cudaStreamCaptureStatusActive) {
    // At most two blocks on a multiprocessor: early blocks would otherwise crowd where the kernel before leaves most room.
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
cudaError_t launch_for(const CUtensorMap& w, const FusedSplitK& a, cudaStream_t stream) {
  return a.product.tiles_m == 1 && a.product.m <= 8 ? launch_with<Number, X, 8>(w, a, stream)
                                                    : launch_with<Number, X, 16>(w, a, stream);
}

}  // namespace

cudaError_t launch_fused_split_k(FusedSplitK a, Codes codes, const Operand& w, bool x_is_half, int blocks, cudaStream_t stream) {
  W8A8Args& p = a.product;
  p.steps = (a.k + stage_k - 1) / stage_k;
  while (blocks > p.steps) blocks /= 2;
  p.cluster_size = blocks;
  p.splits_columns = p.cluster_size > 1;
  p.tiles_m = static_cast<int>((p.m + max_fused_rows - 1) / max_fused_rows);
  p.tiles_n = static_cast<int>((p.n + block_rows - 1) / block_rows);
  CUtensorMap map = {};
  if (!encode_tensormap(map, w, p.n, 8, block_rows)) return cudaErrorInvalidValue;
  if (codes == Codes::int8)
    return x_is_half ? launch_for<int32_t, __half>(map, a, stream)
                     : launch_for<int32_t, __nv_bfloat16>(map, a, stream);
  return x_is_half ? launch_for<float, __half>(map, a, stream)
                   : launch_for<float, __nv_bfloat16>(map, a, stream);
}

}  // namespace lowbit::cuda::w8a8
