// Arithmetic on pairs of float16 or bfloat16 in a register, and mma.m16n8k16 on them.
#pragma once

#include "../decode/scalar_types.cuh"

namespace lowbit::cuda {

template <class T>
struct F16Traits;
template <>
struct F16Traits<__nv_bfloat16> {
  static constexpr int mantissa = 7, bias = 127;
};
template <>
struct F16Traits<__half> {
  static constexpr int mantissa = 10, bias = 15;
};

__host__ __device__ constexpr uint32_t dup_u16(uint32_t a) { return a * 0x00010001u; }

template <class T>
__host__ __device__ constexpr uint32_t dup_power_of_two(int e) {
  return dup_u16(static_cast<uint32_t>(e + F16Traits<T>::bias) << F16Traits<T>::mantissa);
}

template <class T>
__device__ __forceinline__ uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  if constexpr (F16Traits<T>::mantissa == 7)
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  else
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// Keeps a constant in a register: an instruction with three operands has room for only one immediate.
__device__ __forceinline__ void opaque(uint32_t& constant) { asm("" : "+r"(constant)); }

template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (F16Traits<T>::mantissa == 7)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace lowbit::cuda
