// 16-bit floats and fp32, as the CUDA kernels read and write them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace lowbit::cuda {

enum class Dtype { float32, bfloat16, float16 };

__device__ __forceinline__ float to_float(__half a) { return __half2float(a); }
__device__ __forceinline__ float to_float(__nv_bfloat16 a) { return __bfloat162float(a); }
template <typename T>
__device__ __forceinline__ T from_float(float a);
template <>
__device__ __forceinline__ __half from_float<__half>(float a) { return __float2half_rn(a); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float a) { return __float2bfloat16_rn(a); }

// Stores 16 bytes in one access: nvcc splits plain assignments into four, each of which writes a quarter of the sectors it
// touches.
__device__ __forceinline__ void store_sixteen(void* to, uint4 four) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(four.x), "r"(four.y), "r"(four.z),
               "r"(four.w)
               : "memory");
}
__device__ __forceinline__ uint4 load_sixteen_shared(uint32_t address) {
  uint4 four;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
               : "r"(address)
               : "memory");
  return four;
}

// Element i of an array whose type is known at run time.
__device__ __forceinline__ float load_float(const void* data, Dtype dtype, int64_t i) {
  switch (dtype) {
    case Dtype::float32: return static_cast<const float*>(data)[i];
    case Dtype::bfloat16: return to_float(static_cast<const __nv_bfloat16*>(data)[i]);
    default: return to_float(static_cast<const __half*>(data)[i]);
  }
}

}  // namespace lowbit::cuda
