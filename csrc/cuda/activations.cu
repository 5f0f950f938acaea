// Launches round_activations.
#include <cuda_runtime_api.h>

#include <algorithm>

#include "activations.cuh"

namespace lowbit::cuda {

cudaError_t launch_activations(Activations a, Stored stored, cudaStream_t stream) {
  // A graph may let the product start while the kernel ahead ends; elsewhere weights may have been written just before.
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (const cudaError_t error = cudaStreamIsCapturing(stream, &capture); error != cudaSuccess) return error;
  a.is_early = capture == cudaStreamCaptureStatusActive;
  const int chunks = (a.k + chunk_of_activations - 1) / chunk_of_activations;
  const int wanted = (chunks + chunks_of_thread * 32 - 1) / (chunks_of_thread * 32) * 32;
  const auto threads = static_cast<unsigned>(std::clamp(wanted, 32, most_threads_of_row));
  const unsigned rows = threads == 32 && a.m > 4 * 132 ? 4 : 1;  // of a block
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
  switch (stored) {
    case Stored::float32: return start(a.is_float ? round_activations<float, true> : round_activations<float, false>);
    case Stored::bfloat16:
      return start(a.is_float ? round_activations<__nv_bfloat16, true> : round_activations<__nv_bfloat16, false>);
    default: return start(a.is_float ? round_activations<__half, true> : round_activations<__half, false>);
  }
}

}  // namespace lowbit::cuda
