// Wrappers of PTX for warp-specialized kernels on sm_90a: mbarriers, TMA, register reallocation, clusters.
#pragma once

#include <cuda.h>

#include "bulk_copy.cuh"

namespace lowbit::cuda {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Weights that other blocks read too get the normal eviction policy.
__device__ __forceinline__ uint64_t evict_normal_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void tma_load(void* to, const CUtensorMap* map, int column, int row, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          shared_address(to)),
      "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier))
      : "memory");
}

// Prefetches a tensor map.
__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Arrives at the barrier at the same address in another block of the cluster.
__device__ __forceinline__ void arrive_remote(uint64_t* barrier, int block) {
  asm volatile(
      "{\n\t.reg .u32 there;\n\tmapa.shared::cluster.u32 there, %0, %1;\n\t"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n\t}" ::"r"(shared_address(barrier)),
      "r"(block)
      : "memory");
}

// Waits until other blocks of the cluster have arrived; their earlier writes are visible.
__device__ __forceinline__ void mbarrier_wait_cluster(uint64_t* barrier, int parity) {
  asm volatile(
      "{\n\t.reg .pred done;\n\t"
      "again_%=:\n\t"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n\t"
      "@!done bra again_%=;\n\t}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

template <int registers>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int barrier, int threads>
__device__ __forceinline__ void bar_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(barrier), "n"(threads) : "memory");
}

// Stores four 8 x 8 matrices of 16-bit values, as mma holds them, transposed: a lane gives the address of a column.
__device__ __forceinline__ void store_transposed(uint32_t address, const uint32_t (&matrices)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(matrices[0]),
               "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
               : "memory");
}

// Arrive: this block's barriers are initialized. Wait: so are those of all blocks of the cluster.
__device__ __forceinline__ void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait_acquire() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Stores four floats into the shared memory of `block`; address and barrier are those of this block.
__device__ __forceinline__ void store_remote_v4(uint32_t address, int block, const float* four, uint64_t* barrier) {
  asm volatile(
      "{\n\t.reg .u32 there, counts;\n\tmapa.shared::cluster.u32 there, %0, %1;\n\tmapa.shared::cluster.u32 counts, %2, %1;\n\t"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%3, %4, %5, %6}, [counts];\n\t}" ::"r"(address),
      "r"(block), "r"(shared_address(barrier)), "f"(four[0]), "f"(four[1]), "f"(four[2]), "f"(four[3])
      : "memory");
}
#endif

}  // namespace lowbit::cuda
