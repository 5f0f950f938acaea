// Launches quantize_activations.cuh.
#include <cuda_runtime_api.h>

#include <algorithm>

#include "../pipeline/quantize_activations.cuh"

namespace lowbit::cuda {

cudaError_t launch_quantize_activations(QuantizeActivations a, Dtype dtype, cudaStream_t stream) {
  // In a CUDA graph the next product may start while this kernel's predecessor ends (PDL). Elsewhere the weights may have been
  // written by the kernel just before.
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (const cudaError_t error = cudaStreamIsCapturing(stream, &capture); error != cudaSuccess) return error;
  a.is_early = capture == cudaStreamCaptureStatusActive;
  const int chunks = (a.k + chunk_columns - 1) / chunk_columns;
  const int wanted = (chunks + chunks_per_thread * 32 - 1) / (chunks_per_thread * 32) * 32;
  const auto threads = static_cast<unsigned>(std::clamp(wanted, 32, max_threads_per_row));
  const unsigned rows = threads == 32 && a.m > 4 * 132 ? 4 : 1;  // rows in a block
  const auto blocks = static_cast<unsigned>(std::min<int64_t>((a.m + rows - 1) / rows, 1 << 30));
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads, rows);
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  const auto start = [&](auto kernel) { return cudaLaunchKernelEx(&config, kernel, a); };
  switch (dtype) {
    case Dtype::float32: return start(a.is_float ? quantize_activations<float, true> : quantize_activations<float, false>);
    case Dtype::bfloat16:
      return start(a.is_float ? quantize_activations<__nv_bfloat16, true> : quantize_activations<__nv_bfloat16, false>);
    default: return start(a.is_float ? quantize_activations<__half, true> : quantize_activations<__half, false>);
  }
}

}  // namespace lowbit::cuda
