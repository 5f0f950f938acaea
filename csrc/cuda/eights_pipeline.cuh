// Tensor copies into the shared memory of a cluster's blocks, and the barriers that say when a stage is full or free.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "asynchrony.cuh"

namespace lowbit::cuda::eights {

#if LOWBIT_BULK_COPIES

__device__ __forceinline__ int block_of_cluster() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of all blocks of the cluster; what they wrote to shared memory before can be read after.
__device__ __forceinline__ void wait_for_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The same place in the shared memory of another block of the cluster.
__device__ __forceinline__ uint32_t address_in(uint32_t here, int block) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(block));
  return there;
}

__device__ __forceinline__ int4 load_from(uint32_t address) {
  int4 value;
  asm volatile("ld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Says that this warp has read a stage. It hands over no data, so that it needs no order beyond that of its own block, which
// costs nothing; the cluster's would wait for all memory each time.
__device__ __forceinline__ void arrive_in(uint32_t barrier, int block) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in(barrier, block)) : "memory");
}

__device__ __forceinline__ void expect_bytes(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait_for(uint32_t barrier, int parity) {
  asm volatile(
      "{\n\t.reg .pred done;\n\t"
      "again_%=:\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
      "@!done bra again_%=;\n\t}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Until what other blocks of the cluster send has come.
__device__ __forceinline__ void wait_for_sent(uint32_t barrier) {
  asm volatile(
      "{\n\t.reg .pred done;\n\t"
      "again_%=:\n\t"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n\t"
      "@!done bra again_%=;\n\t}" ::"r"(barrier)
      : "memory");
}

// The box of the tensor at (column, row); beyond the tensor it is zeros.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap& from, int column, int row, uint32_t barrier,
                                         uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], "
      "[%4], %5;" ::"r"(to),
      "l"(&from), "r"(column), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}

// To the same place in every block of the cluster that `blocks` has a bit for, each of whose barriers counts the bytes.
__device__ __forceinline__ void copy_box_to_all(uint32_t to, const CUtensorMap& from, int column, int row, uint32_t barrier,
                                                uint16_t blocks, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], "
      "[%1, {%2, %3}], [%4], %5, %6;" ::"r"(to),
      "l"(&from), "r"(column), "r"(row), "r"(barrier), "h"(blocks), "l"(policy)
      : "memory");
}

__device__ __forceinline__ uint64_t read_again() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

#endif

}  // namespace lowbit::cuda::eights
