// TMA copies into the shared memory of a cluster's blocks, and the mbarriers of a ring's stages.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "bulk_copy.cuh"

namespace lowbit::cuda::w8a8 {

#if LOWBIT_BULK_COPIES

__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Barrier of all threads of the cluster; earlier writes to shared memory are visible afterwards.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The same address in the shared memory of another block of the cluster.
__device__ __forceinline__ uint32_t remote_address(uint32_t local_address, int block) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(local_address), "r"(block));
  return there;
}

__device__ __forceinline__ int4 load_remote(uint32_t address) {
  int4 value;
  asm volatile("ld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Tells another block that this warp has read a stage. No data is handed over, so block scope is enough and free; cluster scope
// would wait for all outstanding memory operations.
__device__ __forceinline__ void arrive_remote(uint32_t barrier, int block) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote_address(barrier, block)) : "memory");
}

__device__ __forceinline__ void mbarrier_expect_tx(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n\t.reg .pred done;\n\t"
      "again_%=:\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
      "@!done bra again_%=;\n\t}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Waits for the stores of other blocks of the cluster.
__device__ __forceinline__ void wait_for_remote_stores(uint32_t barrier) {
  asm volatile(
      "{\n\t.reg .pred done;\n\t"
      "again_%=:\n\t"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n\t"
      "@!done bra again_%=;\n\t}" ::"r"(barrier)
      : "memory");
}

// Loads the box at (column, row); zeros beyond the tensor.
__device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap& from, int column, int row, uint32_t barrier,
                                         uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], "
      "[%4], %5;" ::"r"(to),
      "l"(&from), "r"(column), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}

// Loads into the same address in every block of the cluster whose bit in `blocks` is set; the barrier of each counts the bytes.
__device__ __forceinline__ void tma_load_multicast(uint32_t to, const CUtensorMap& from, int column, int row, uint32_t barrier,
                                                uint16_t blocks, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], "
      "[%1, {%2, %3}], [%4], %5, %6;" ::"r"(to),
      "l"(&from), "r"(column), "r"(row), "r"(barrier), "h"(blocks), "l"(policy)
      : "memory");
}

__device__ __forceinline__ uint64_t evict_normal_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

#endif

}  // namespace lowbit::cuda::w8a8
