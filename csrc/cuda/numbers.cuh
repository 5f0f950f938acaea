// Numbers of 16 bits and fp32, as the CUDA kernels read and write them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace lowbit::cuda {

enum class Stored { float32, bfloat16, float16 };

__device__ __forceinline__ float to_float(__half a) { return __half2float(a); }
__device__ __forceinline__ float to_float(__nv_bfloat16 a) { return __bfloat162float(a); }
template <typename T>
__device__ __forceinline__ T from_float(float a);
template <>
__device__ __forceinline__ __half from_float<__half>(float a) { return __float2half_rn(a); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float a) { return __float2bfloat16_rn(a); }

// The number at `i` of an array whose type is known only when the kernel runs.
__device__ __forceinline__ float number_at(const void* data, Stored stored, int64_t i) {
  switch (stored) {
    case Stored::float32: return static_cast<const float*>(data)[i];
    case Stored::bfloat16: return to_float(static_cast<const __nv_bfloat16*>(data)[i]);
    default: return to_float(static_cast<const __half*>(data)[i]);
  }
}

}  // namespace lowbit::cuda
