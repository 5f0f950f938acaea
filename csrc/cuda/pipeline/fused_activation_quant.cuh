// Quantizes a block's part of x into shared memory, in the swizzled order of TMA: the first half of w8a8_fused_split_k.cuh. The
// maxima of the parts of a row are exchanged first: each block writes its own into the shared memory of the others.
#pragma once

#include "quantize_activations.cuh"
#include "../kernels/w8a8_gemm.cuh"

namespace lowbit::cuda::w8a8 {

struct FusedSplitK {
  W8A8Args product;
  const void* x;             // [m, k], rows aligned to 16 bytes, k a multiple of 8
  const float* fixed_scale;  // the scale of all rows, or null: one for each row
  int k;
  int max_rows, max_steps;  // of x in a block
};

constexpr int segment_k = 256, consumer_warps = consumer_threads / 32;
constexpr int early_stages = 4;  // stages of W copied before x: more would delay the loads of x
// Limits beyond which a separate kernel for x is faster: rows of x in a tile, columns of a block, and segments of 256 columns
// that a warp quantizes.
constexpr int max_fused_rows = 16, max_fused_columns = 4096, max_warp_segments = 4;

// Offsets in a block's shared memory, behind the ring of W.
template <int T>
struct FusedSplitKMemory {
  static constexpr int bytes_of_sums = T * block_rows * 4;
  int x, floats, sums, maximum, scales, barriers, all;  // x: codes of x; floats: x as loaded

  __host__ __device__ static FusedSplitKMemory of(int stages, int steps, int rows, int blocks) {
    FusedSplitKMemory at = {};
    at.x = stages * w_stage_bytes<8>;
    at.floats = at.x + steps * T * stage_k;
    at.sums = at.floats + steps * rows * stage_k * 2;
    at.maximum = at.sums + (blocks > 1 ? bytes_of_sums : 0);
    at.scales = at.maximum + blocks * T * 4;
    at.barriers = at.scales + T * static_cast<int>(sizeof(RowScale));
    at.all = at.barriers + (2 * stages + 3) * 8 + 1024;
    return at;
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ void copy_row(uint32_t to, const void* from, int size, uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(size), "r"(barrier), "l"(policy)
      : "memory");
}

// Stores one value, or four, to an address in another block of the cluster, whose barrier counts the bytes.
__device__ __forceinline__ void store_remote(uint32_t there, uint32_t number, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(there), "r"(number),
               "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void store_remote(uint32_t there, int4 four, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(there),
               "r"(four.x), "r"(four.y), "r"(four.z), "r"(four.w), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void consumer_sync() {
  asm volatile("bar.sync 1, %0;" ::"n"(consumer_threads) : "memory");
}

// A block's part of x: `rows` rows; a warp handles 256 columns of one row at a time.
template <class Number, class X, int T>
struct ActivationPart {
  static constexpr bool is_float = std::is_same_v<Number, float>;
  const X* floats;                         // in shared memory, rows of `filled` columns
  int rows, columns, filled, segments;     // columns within K, and padded with zeros; segments in a row
  uint32_t inverse;                        // ceil(2^32 / segments), to divide by multiplication
  uint32_t to;                             // address in shared memory

  __device__ int count() const { return rows * segments; }
  __device__ int row_of(int segment) const { return segments == 1 ? segment : static_cast<int>(__umulhi(segment, inverse)); }
  __device__ int column_of(int segment, int row) const {
    return (segment - row * segments) * segment_k + threadIdx.x % 32 * chunk_columns;
  }
  __device__ Chunk<X> load(int row, int column) const {
    Chunk<X> chunk;
    chunk.clear();
    if (column < columns) chunk.load(floats + row * filled + column);
    return chunk;
  }

  // Updates `maximum` of each row, in shared memory and initially zero.
  __device__ void find_maximum(uint32_t* maximum) const {
#pragma unroll 4
    for (int segment = threadIdx.x / 32; segment < count(); segment += consumer_warps) {
      const int row = row_of(segment);
      const uint32_t found = __reduce_max_sync(~0u, Chunk<X>::found(load(row, column_of(segment, row)).maximum()));
      if (threadIdx.x % 32 == 0) atomicMax(maximum + row, found);
    }
  }

  // is_usual: all scales are of moderate size, and so are those of the rows.
  template <bool is_usual>
  __device__ void round(const RowScale* scales) const {
    constexpr int unrolled = is_usual ? 4 : 1;
#pragma unroll unrolled
    for (int segment = threadIdx.x / 32; segment < count(); segment += consumer_warps) {
      const int row = row_of(segment), column = column_of(segment, row), place = column / 16 % 8 ^ row % 8;
      const Chunk<X> chunk = load(row, column);
      const uint2 eight = quantize_chunk<is_float, is_usual>(chunk, scales[row]);
      if (column < filled)
        asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to + (column / stage_k * T + row) * stage_k +
                                                              place * 16 + column % 16),
                     "r"(eight.x), "r"(eight.y)
                     : "memory");
    }
  }
};

template <class Number, class X, int T>
__device__ __forceinline__ void quantize_part(const FusedSplitK& a, const ActivationPart<Number, X, T>& part, uint8_t* memory,
                                           const FusedSplitKMemory<T>& at, uint32_t arrived) {
  const int blocks = a.product.cluster_size, thread = threadIdx.x, block = blocks > 1 ? cluster_rank() : 0;
  uint32_t* const maximum = reinterpret_cast<uint32_t*>(memory + at.maximum);  // [block][T]
  RowScale* const scales = reinterpret_cast<RowScale*>(memory + at.scales);
  // This block's maxima are collected where the scales will be, since other blocks may already write to `maximum`.
  uint32_t* const self = blocks > 1 ? reinterpret_cast<uint32_t*>(scales) : maximum;
  part.find_maximum(self);
  consumer_sync();
  if (blocks > 1) {
#pragma unroll 1
    for (int i = thread; i < part.rows * blocks; i += consumer_threads) {
      const int other = i / part.rows, row = i - other * part.rows;
      store_remote(remote_address(shared_address(maximum + block * T + row), other), self[row], remote_address(arrived, other));
    }
    consumer_sync();  // `self` has been read
    wait_for_remote_stores(arrived);
  }
  bool is_usual = true;
  if (thread < part.rows) {
    uint32_t row_maximum = 0;
#pragma unroll 1
    for (int other = 0; other < blocks; other++) row_maximum = max(row_maximum, maximum[other * T + thread]);
    const float largest = __uint_as_float(row_maximum);
    const RowScale scale = a.fixed_scale ? given_scale(*a.fixed_scale, largest) : row_scale<X, part.is_float>(largest);
    is_usual = scale.is_usual();
    scales[thread] = scale;
  }
  if (named_barrier_and(1, consumer_threads, is_usual)) {
    part.template round<true>(scales);
  } else {
    part.template round<false>(scales);
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // makes the generic stores visible to the tensor cores
  consumer_sync();
}

#endif

}  // namespace lowbit::cuda::w8a8
