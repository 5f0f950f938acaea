// Properties of the current device that launchers need.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>

namespace lowbit::cuda {

struct Gpu {
  int sms, memory, generation;  // memory: shared memory that a block may have; generation: 80, 90, ...
};

// Queried once for each device: the driver takes a microsecond to answer.
inline cudaError_t this_gpu(int& index, Gpu& gpu) {
  static std::atomic<int> known[64][3];
  if (const cudaError_t error = cudaGetDevice(&index); error != cudaSuccess) return error;
  if (index < 64 && known[index][2] != 0) {
    gpu = {known[index][0], known[index][1], known[index][2]};
    return cudaSuccess;
  }
  int major = 0, minor = 0;
  const struct {
    int* to;
    cudaDeviceAttr what;
  } asked[] = {{&major, cudaDevAttrComputeCapabilityMajor},
               {&minor, cudaDevAttrComputeCapabilityMinor},
               {&gpu.sms, cudaDevAttrMultiProcessorCount},
               {&gpu.memory, cudaDevAttrMaxSharedMemoryPerBlockOptin}};
  for (const auto& one : asked)
    if (const cudaError_t error = cudaDeviceGetAttribute(one.to, one.what, index); error != cudaSuccess) return error;
  gpu.generation = 10 * major + minor;
  if (index < 64) known[index][0] = gpu.sms, known[index][1] = gpu.memory, known[index][2] = gpu.generation;
  return cudaSuccess;
}

}  // namespace lowbit::cuda
