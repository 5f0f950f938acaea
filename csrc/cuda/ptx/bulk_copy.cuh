// Bulk copies into shared memory, mbarriers and programmatic dependent launch of sm_90. For earlier architectures these compile
// to nothing and kernels load directly.
#pragma once

#include <cstdint>

namespace lowbit::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define LOWBIT_BULK_COPIES 1
#else
#define LOWBIT_BULK_COPIES 0
#endif

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Lets the next kernel of a graph start (griddepcontrol); it waits for this one before it reads what this one writes.
__device__ __forceinline__ void launch_dependents() {
#if LOWBIT_BULK_COPIES
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernels before this one have ended and their writes are visible.
__device__ __forceinline__ void wait_for_dependencies() {
#if LOWBIT_BULK_COPIES
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Named barrier of `threads` threads of a block, whole warps.
__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// The same for a warp that the others wait for and that waits for none.
__device__ __forceinline__ void arrive(int barrier, int threads) {
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Named barrier that also returns whether `holds` is true in all threads.
__device__ __forceinline__ bool named_barrier_and(int barrier, int threads, bool holds) {
  int all;
  asm volatile(
      "{\n\t.reg .pred one, all;\n\t"
      "setp.ne.s32 one, %1, 0;\n\t"
      "barrier.cta.red.and.pred all, %2, %3, one;\n\t"
      "selp.s32 %0, 1, 0, all;\n\t}"
      : "=r"(all)
      : "r"(static_cast<int>(holds)), "r"(barrier), "r"(threads)
      : "memory");
  return all;
}

#if LOWBIT_BULK_COPIES
__device__ __forceinline__ void mbarrier_init(uint32_t barrier_at, int arrivals = 1) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier_at), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, int arrivals = 1) {
  mbarrier_init(shared_address(barrier), arrivals);
}

__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async.shared::cta;" ::: "memory");
}

// Prefetches into L2: a multiple of 16 bytes.
__device__ __forceinline__ void prefetch(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// Weights are read once: they are evicted before activations.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void copy(uint32_t to, const void* from, int size, uint32_t barrier, uint64_t policy) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(size) : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(size), "r"(barrier), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void copy(void* to, const void* from, int size, uint64_t* barrier, uint64_t policy) {
  copy(shared_address(to), from, size, shared_address(barrier), policy);
}

// The two parts of a barrier with expected bytes: it may wait for several copies.
__device__ __forceinline__ void mbarrier_expect_tx(uint64_t* barrier, int size) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(size) : "memory");
}

__device__ __forceinline__ void bulk_copy(void* to, const void* from, int size, uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          shared_address(to)),
      "l"(from), "r"(size), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier_at) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier_at) : "memory");
}
__device__ __forceinline__ void arrive(uint64_t* barrier) { arrive(shared_address(barrier)); }

__device__ __forceinline__ void mbarrier_wait(uint32_t barrier_at, int parity) {
  asm volatile(
      "{\n\t.reg .pred done;\n\t"
      "again_%=:\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
      "@!done bra again_%=;\n\t}" ::"r"(barrier_at),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, int parity) { mbarrier_wait(shared_address(barrier), parity); }
#endif

}  // namespace lowbit::cuda
