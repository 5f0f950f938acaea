// wgmma.mma_async of sm_90a on 8-bit values: 64 rows of weights times T rows of x, both in shared memory, 32 columns at a time;
// int8 sums in int32, e4m3 in the tensor cores' fp32.
#pragma once

#include <cstdint>

namespace lowbit::cuda::w8a8 {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Descriptor of an operand: rows of 128 bytes as TMA with 128-byte swizzle stores them, eight rows in 1024 bytes.
__device__ __forceinline__ uint64_t smem_descriptor(uint32_t address) {
  constexpr uint64_t swizzle_of_128_bytes = uint64_t{1} << 62, eight_rows = uint64_t{1024 >> 4} << 32, unused = uint64_t{1} << 16;
  return swizzle_of_128_bytes | eight_rows | unused | (address & 0x3ffff) >> 4;
}

// Orders register writes before the wgmma that read them.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int left>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory");
}

// c = keep * c + a b^T. For each eight rows of x a thread holds rows lane / 4 and lane / 4 + 8 of its warp's 16 rows of W at two
// neighbouring rows of x.
template <int T>
__device__ void add(int32_t (&c)[T / 2], uint64_t a, uint64_t b, int store_args);
template <int T>
__device__ void add(float (&c)[T / 2], uint64_t a, uint64_t b, int store_args);

// The same with W from registers: rows lane / 4 and lane / 4 + 8 at columns 4 (lane % 4), then 16 further.
template <int T>
__device__ void add(int32_t (&c)[T / 2], const uint32_t (&a)[4], uint64_t b, int store_args);

// clang-format off
#define LOWBIT_8(k, i) k(c[i]), k(c[i + 1]), k(c[i + 2]), k(c[i + 3]), k(c[i + 4]), k(c[i + 5]), k(c[i + 6]), k(c[i + 7])
#define LOWBIT_32(k, i) LOWBIT_8(k, i), LOWBIT_8(k, i + 8), LOWBIT_8(k, i + 16), LOWBIT_8(k, i + 24)
#define LOWBIT_NAMES_8 "%0, %1, %2, %3"
#define LOWBIT_NAMES_16 \
  "%0, %1, %2, %3, %4, %5, %6, %7"
#define LOWBIT_NAMES_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define LOWBIT_NAMES_64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LOWBIT_NAMES_128 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define LOWBIT_NAMES_256 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define LOWBIT_SUMS_8(k) k(c[0]), k(c[1]), k(c[2]), k(c[3])
#define LOWBIT_SUMS_16(k) LOWBIT_8(k, 0)
#define LOWBIT_SUMS_32(k) LOWBIT_8(k, 0), LOWBIT_8(k, 8)
#define LOWBIT_SUMS_64(k) LOWBIT_32(k, 0)
#define LOWBIT_SUMS_128(k) LOWBIT_32(k, 0), LOWBIT_32(k, 32)
#define LOWBIT_SUMS_256(k) LOWBIT_32(k, 0), LOWBIT_32(k, 32), LOWBIT_32(k, 64), LOWBIT_32(k, 96)
#define LOWBIT_PRODUCT(T, number, types, constraint, signs, a_at, b_at, keep_at) \
  template <> \
  __device__ __forceinline__ void add<T>(number (&c)[T / 2], uint64_t a, uint64_t b, int store_args) { \
    asm volatile("{\n\t.reg .pred keep;\n\tsetp.ne.b32 keep, " keep_at ", 0;\n\t" \
                 "wgmma.mma_async.sync.aligned.m64n" #T "k32." types " {" LOWBIT_NAMES_##T "}, " a_at ", " b_at ", keep" signs ";\n\t}" \
                 : LOWBIT_SUMS_##T(constraint) : "l"(a), "l"(b), "r"(store_args)); \
  }
LOWBIT_PRODUCT(8, int32_t, "s32.s8.s8", "+r", "", "%4", "%5", "%6")
LOWBIT_PRODUCT(16, int32_t, "s32.s8.s8", "+r", "", "%8", "%9", "%10")
LOWBIT_PRODUCT(32, int32_t, "s32.s8.s8", "+r", "", "%16", "%17", "%18")
LOWBIT_PRODUCT(64, int32_t, "s32.s8.s8", "+r", "", "%32", "%33", "%34")
LOWBIT_PRODUCT(128, int32_t, "s32.s8.s8", "+r", "", "%64", "%65", "%66")
LOWBIT_PRODUCT(256, int32_t, "s32.s8.s8", "+r", "", "%128", "%129", "%130")
LOWBIT_PRODUCT(8, float, "f32.e4m3.e4m3", "+f", ", 1, 1", "%4", "%5", "%6")
LOWBIT_PRODUCT(16, float, "f32.e4m3.e4m3", "+f", ", 1, 1", "%8", "%9", "%10")
LOWBIT_PRODUCT(32, float, "f32.e4m3.e4m3", "+f", ", 1, 1", "%16", "%17", "%18")
LOWBIT_PRODUCT(64, float, "f32.e4m3.e4m3", "+f", ", 1, 1", "%32", "%33", "%34")
LOWBIT_PRODUCT(128, float, "f32.e4m3.e4m3", "+f", ", 1, 1", "%64", "%65", "%66")
#define LOWBIT_PRODUCT_OF_REGISTERS(T, a0, a1, a2, a3, b_at, keep_at) \
  template <> \
  __device__ __forceinline__ void add<T>(int32_t (&c)[T / 2], const uint32_t (&a)[4], uint64_t b, int store_args) { \
    asm volatile("{\n\t.reg .pred keep;\n\tsetp.ne.b32 keep, " keep_at ", 0;\n\t" \
                 "wgmma.mma_async.sync.aligned.m64n" #T "k32.s32.s8.s8 {" LOWBIT_NAMES_##T "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " b_at \
                 ", keep;\n\t}" \
                 : LOWBIT_SUMS_##T("+r") : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(store_args)); \
  }
LOWBIT_PRODUCT_OF_REGISTERS(16, "%8", "%9", "%10", "%11", "%12", "%13")
LOWBIT_PRODUCT_OF_REGISTERS(64, "%32", "%33", "%34", "%35", "%36", "%37")
LOWBIT_PRODUCT_OF_REGISTERS(128, "%64", "%65", "%66", "%67", "%68", "%69")
#undef LOWBIT_PRODUCT_OF_REGISTERS
#undef LOWBIT_PRODUCT
#undef LOWBIT_SUMS_8
#undef LOWBIT_NAMES_8
#undef LOWBIT_SUMS_16
#undef LOWBIT_NAMES_16
#undef LOWBIT_SUMS_32
#undef LOWBIT_NAMES_32
#undef LOWBIT_SUMS_64
#undef LOWBIT_NAMES_64
#undef LOWBIT_SUMS_128
#undef LOWBIT_NAMES_128
#undef LOWBIT_SUMS_256
#undef LOWBIT_NAMES_256
#undef LOWBIT_32
#undef LOWBIT_8
// clang-format on

#endif

}  // namespace lowbit::cuda::w8a8
