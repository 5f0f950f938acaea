// Cluster barrier, and stores into the shared memory of another block. Before sm_90 these compile to nothing.
#pragma once

#include "bulk_copy.cuh"

namespace lowbit::cuda {

// First half of the cluster barrier: writes before it are visible after the second half.
__device__ __forceinline__ void cluster_arrive() {
#if LOWBIT_BULK_COPIES
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if LOWBIT_BULK_COPIES
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Stores `number` in the shared memory of `block`, at the place of `local_address` in this block's.
__device__ __forceinline__ void store_remote(float* local_address, int block, float number) {
#if LOWBIT_BULK_COPIES
  asm volatile(
      "{\n\t.reg .b32 there;\n\t"
      "mapa.shared::cluster.u32 there, %0, %1;\n\t"
      "st.shared::cluster.f32 [there], %2;\n\t}" ::"r"(shared_address(local_address)),
      "r"(block), "f"(number)
      : "memory");
#endif
}

}  // namespace lowbit::cuda
