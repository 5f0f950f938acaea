// Launches w8a8_fused_full_k.cuh.
#include "w8a8_fused_full_k.cuh"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>

#include "../schedule/w8a8_launch.h"
#include "../schedule/device_info.h"

namespace lowbit::cuda::w8a8 {

namespace {

constexpr int64_t max_full_k_rows = 1 << 14;

template <class Number, class X, int T>
cudaError_t launch_with(const Operand& of_w, FusedFullK a, cudaStream_t stream) {
  using Shape = FullKShape<T>;
  const auto kernel = w8a8_fused_full_k<Number, X, T>;
  int device = 0;
  Gpu gpu = {};
  if (const cudaError_t error = this_gpu(device, gpu); error != cudaSuccess) return error;
  W8A8Args& p = a.product;
  p.tiles_m = static_cast<int>((p.m + T - 1) / T);
  p.tiles_n = static_cast<int>((p.n + Shape::rows - 1) / Shape::rows);
  while (p.tiles_m % p.cluster_size) p.cluster_size--;
  const int size = Shape(p.steps).all;
  CUtensorMap w = {};
  if (a.k > Shape::max_columns || size > gpu.memory || !encode_tensormap(w, of_w, p.n, 8, Shape::rows)) return cudaErrorInvalidValue;
  static std::atomic<bool> may_use_all[64];
  if (device >= 64 || !may_use_all[device]) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, gpu.memory);
    if (error != cudaSuccess) return error;
    if (device < 64) may_use_all[device] = true;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(p.tiles_m * p.tiles_n));
  config.blockDim = dim3(full_k_threads);
  config.dynamicSmemBytes = size;
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  // In a CUDA graph this kernel may start while its predecessor ends (PDL). Elsewhere the weights may have been written by the
  // kernel just before.
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (const cudaError_t error = cudaStreamIsCapturing(stream, &capture); error != cudaSuccess) return error;
  if (capture == cudaStreamCaptureStatusActive) {
    // At most two blocks on a multiprocessor: early blocks would otherwise crowd where the kernel before leaves most room.
    config.dynamicSmemBytes = std::max(size, gpu.memory / 3);
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (p.cluster_size > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(p.cluster_size), 1, 1};
  }
  return cudaLaunchKernelEx(&config, kernel, w, a);
}

template <class Number, class X>
cudaError_t launch_for(const Operand& w, const FusedFullK& a, int rows, cudaStream_t stream) {
  switch (rows) {
    case 16: return launch_with<Number, X, 16>(w, a, stream);
    case 32: return launch_with<Number, X, 32>(w, a, stream);
    default: return launch_with<Number, X, 64>(w, a, stream);
  }
}

}  // namespace

FullKPlan plan_full_k(int64_t m, int64_t n, int64_t k) {
  int device = 0;
  Gpu gpu = {};
  const int64_t steps = (k + stage_k - 1) / stage_k;
  if (m > max_full_k_rows || steps < min_full_k_steps || k > FullKShape<16>::max_columns) return {};
  if (this_gpu(device, gpu) != cudaSuccess) return {};
  const int sms = gpu.sms, max_in_clusters = sms * 3 / 4;  // clusters of four leave some multiprocessors empty
  const auto blocks_of = [&](int rows, int rows_of_w) { return (m + rows - 1) / rows * ((n + rows_of_w - 1) / rows_of_w); };
  const int64_t small = blocks_of(16, FullKShape<16>::rows), usual = blocks_of(32, FullKShape<32>::rows);
  const int64_t large = blocks_of(64, FullKShape<64>::rows);
  // Fastest on an H100: small tiles where they leave some multiprocessors to the next kernel.
  if (small <= max_in_clusters) {
    const int64_t tiles = (m + 15) / 16;
    if (k <= FullKShape<64>::max_columns && small < sms / 3) return {16, 1};
    return {16, tiles % 4 == 0 && k <= FullKShape<64>::max_columns ? 4 : 2};
  }
  if (m > 16 && usual <= sms) return {32, k <= FullKShape<64>::max_columns && usual > max_in_clusters ? 1 : 2};
  if (m > 16 && k <= FullKShape<64>::max_columns && large <= sms / 2) return {64, 2};
  return {};
}

cudaError_t launch_fused_full_k(FusedFullK a, Codes codes, const Operand& w, bool x_is_half, FullKPlan plan, cudaStream_t stream) {
  W8A8Args& p = a.product;
  p.steps = (a.k + stage_k - 1) / stage_k;
  p.cluster_size = plan.blocks;
  if (p.steps < min_full_k_steps || p.m > max_full_k_rows || p.n > 1 << 20) return cudaErrorInvalidValue;
  if (codes == Codes::int8)
    return x_is_half ? launch_for<int32_t, __half>(w, a, plan.rows, stream)
                     : launch_for<int32_t, __nv_bfloat16>(w, a, plan.rows, stream);
  return x_is_half ? launch_for<float, __half>(w, a, plan.rows, stream) : launch_for<float, __nv_bfloat16>(w, a, plan.rows, stream);
}

}  // namespace lowbit::cuda::w8a8
