// Launches digits_linear: how many blocks, warps and stages, and how much of x a block holds at a time.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>

#include "digits.cuh"

namespace lowbit::cuda {

// 0: the launcher chooses.
struct DigitsPlan {
  int warps, stages, early_stages;
};

template <int bits>
cudaError_t launch_digits(Digits a, int group, DigitsPlan plan, cudaStream_t stream);

struct Device {
  int processors, memory, generation;  // generation: 80, 90, ...
};

inline cudaError_t this_device(int& index, Device& device) {
  static std::atomic<int> known[64][3];
  if (const cudaError_t error = cudaGetDevice(&index); error != cudaSuccess) return error;
  std::atomic<int>(&kept)[3] = known[index % 64];
  if (kept[2] == 0 || index >= 64) {
    int major = 0, minor = 0, processors = 0, memory = 0;
    for (const auto& [to, what] : {std::pair{&major, cudaDevAttrComputeCapabilityMajor},
                                   std::pair{&minor, cudaDevAttrComputeCapabilityMinor},
                                   std::pair{&processors, cudaDevAttrMultiProcessorCount},
                                   std::pair{&memory, cudaDevAttrMaxSharedMemoryPerBlockOptin}})
      if (const cudaError_t error = cudaDeviceGetAttribute(to, what, index); error != cudaSuccess) return error;
    kept[0] = processors, kept[1] = memory, kept[2] = 10 * major + minor;
  }
  device = {kept[0], kept[1], kept[2]};
  return cudaSuccess;
}

template <int bits, int group, bool has_zero, int M>
cudaError_t launch_digits_kernel(Digits a, DigitsPlan plan, cudaStream_t stream) {
  using U = Unit<bits, group, has_zero>;
  const auto kernel = digits_linear<bits, group, has_zero, M>;
  int index = 0;
  Device device = {};
  if (const cudaError_t error = this_device(index, device); error != cudaSuccess) return error;
  static std::atomic<bool> may_use_all[64];
  if (index >= 64 || !may_use_all[index]) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, device.memory);
    if (error != cudaSuccess) return error;
    if (index < 64) may_use_all[index] = true;
  }

  // Only the code for 9.0 has bulk copies and can wait for its predecessor; newer devices compile that for 8.0.
  const bool has_ring = device.generation == 90;

  // A graph can let a kernel start while the one before it ends. Outside of one the launches themselves are slower than what
  // that hides, and the weights may have been written by the kernel just before.
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (const cudaError_t error = cudaStreamIsCapturing(stream, &capture); error != cudaSuccess) return error;
  const bool is_early = has_ring && capture == cudaStreamCaptureStatusActive && plan.early_stages >= 0;

  constexpr int tiles_of_block = M <= 4 ? 32 : 16;
  const int64_t blocks = std::min(a.tiles, std::max<int64_t>(device.processors, (a.tiles + tiles_of_block - 1) / tiles_of_block));
  a.fewest_tiles = static_cast<int>(a.tiles / blocks);
  a.blocks_with_more = static_cast<int>(a.tiles % blocks);
  const int most_tiles = a.fewest_tiles + (a.blocks_with_more > 0);
  int warps = plan.warps;
  const auto memory_with = [&](int stages, int units) {
    return DigitsMemory(M, warps, stages, a.unit_size, U::steps, has_zero ? std::max(U::groups, 1) : 0, units, most_tiles).total;
  };
  const int fewest = has_ring ? 2 : 0, wanted = has_ring ? (plan.stages ? plan.stages : 3) : 0;
  if (warps == 0) {  // more of them where they have more to do for each byte of weights, unless x has to come in passes then
    warps = most_warps_of_digits;
    const bool is_little = M == 1 && most_tiles * a.units_of_row < 100;
    if (is_little || memory_with(M <= 2 ? wanted : fewest, a.units_of_row) > device.memory) warps = 8;
  }
  a.units_of_pass = a.units_of_row;
  while (a.units_of_pass > 1 && memory_with(fewest, a.units_of_pass) > device.memory) a.units_of_pass = (a.units_of_pass + 1) / 2;
  a.stages = wanted;
  while (a.stages > fewest && memory_with(a.stages, a.units_of_pass) > device.memory) a.stages--;
  // Copies that start before x is there delay x: all are worth it where they are all that a warp has to copy, more than one
  // where it has many. A ring no longer than needed leaves room for the next kernel's blocks.
  const int units_of_warp = (most_tiles * a.units_of_row + warps - 1) / warps;
  if (has_ring && !plan.stages) a.stages = std::min(a.stages, std::max(fewest, units_of_warp));
  const int early = units_of_warp <= a.stages ? a.stages : units_of_warp > 10 ? 2 : 1;
  a.early_stages = !is_early ? 0 : std::min(a.stages, plan.early_stages ? plan.early_stages : early);

  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(warps * 32);
  config.dynamicSmemBytes = memory_with(a.stages, a.units_of_pass);
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = is_early;
  return cudaLaunchKernelEx(&config, kernel, a);
}

template <int bits>
cudaError_t launch_digits(Digits a, int group, DigitsPlan plan, cudaStream_t stream) {
  const auto with = [&](auto size, auto zero) {
    constexpr int group = size.value;
    constexpr bool has_zero = zero.value;
    return a.m == 1   ? launch_digits_kernel<bits, group, has_zero, 1>(a, plan, stream)
           : a.m == 2 ? launch_digits_kernel<bits, group, has_zero, 2>(a, plan, stream)
           : a.m <= 4 ? launch_digits_kernel<bits, group, has_zero, 4>(a, plan, stream)
                      : launch_digits_kernel<bits, group, has_zero, 8>(a, plan, stream);
  };
  const auto with_zero = [&](auto zero) {
    switch (group) {
      case 32: return with(std::integral_constant<int, 32>(), zero);
      case 64: return with(std::integral_constant<int, 64>(), zero);
      case 128: return with(std::integral_constant<int, 128>(), zero);
      default: return with(std::integral_constant<int, 0>(), zero);
    }
  };
  return a.has_zero ? with_zero(std::true_type()) : with_zero(std::false_type());
}

}  // namespace lowbit::cuda
