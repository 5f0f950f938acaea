// Blocks of a cluster: a barrier of all their threads, and numbers from one block into the shared memory of another.
// Earlier architectures than sm_90 have no clusters and compile to nothing here.
#pragma once

#include "bulk_copy.cuh"

namespace lowbit::cuda {

// The first half of a barrier of the cluster's threads: what they wrote before it can be read behind the second.
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

// Writes to where `beside` is, in the shared memory of `block` of the cluster.
__device__ __forceinline__ void store_remote(float* beside, int block, float number) {
#if LOWBIT_BULK_COPIES
  asm volatile(
      "{\n\t.reg .b32 there;\n\t"
      "mapa.shared::cluster.u32 there, %0, %1;\n\t"
      "st.shared::cluster.f32 [there], %2;\n\t}" ::"r"(shared_address(beside)),
      "r"(block), "f"(number)
      : "memory");
#endif
}

}  // namespace lowbit::cuda
