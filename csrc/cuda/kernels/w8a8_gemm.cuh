// GEMM of 8-bit codes: y = (x W^T) s_x s_w + bias, x [M, K] and W [N, K] with a scale for each row.
//
//    W [128 rows, K] --TMA, 128 columns a stage--> ring in shared memory --> operand A --+
//    x [T rows, K] ----TMA (multicast)----------> ring in shared memory --> operand B ---+--wgmma--> s32 (e4m3: f32)
//    y [M, N] <--transposed in shared memory-- s_x s_w, bias, round <-- sums [T, 128] <------------+
//
// One warp copies; two warpgroups multiply 64 rows of W each. W is operand A, so that few rows of x leave no part of the tensor
// cores idle: T is the width of the instruction. Blocks of a cluster either have neighbouring rows of W and share the copies of x
// (large M), or split K of one tile and add their sums in a fixed order through each other's shared memory (small M).
//
// Contract: exact: integer sums (e4m3: the tensor cores' fp32 sums), scaled in fp32, one rounding.
// Limit: the bytes of W up to M = 64, the dense 8-bit tensor throughput for large M.
// Reached (evals/results/gemv_h100.json, 8192 x 8192, int8, one H100): 24.2 us at M = 1, 0.88 of the time to read its bytes; 432
// us at M = 4096, 1273 TFLOP/s and 1.7 times as fast as bfloat16's F.linear.
#pragma once

#include <type_traits>

#include "../ptx/tma_cluster.cuh"
#include "../mma/wgmma_i8.cuh"
#include "../decode/scalar_types.cuh"

namespace lowbit::cuda::w8a8 {

constexpr int block_rows = 128, stage_k = 128;
constexpr int consumer_threads = 256;
// One warp copies. Where sums take most registers it is a whole warpgroup with three idle warps, since only whole warpgroups can
// give up registers (setmaxnreg).
template <int T, int bits>
constexpr int threads_per_block = consumer_threads + (T == 256 || (T == 128 && bits == 4) ? 128 : 32);
template <int bits>
constexpr int w_stage_bytes = block_rows * stage_k * bits / 8;
constexpr int max_block_columns = (1 << 17) - stage_k;
constexpr int max_stages = 12;

struct W8A8Args {
  const float* x_scale;  // [m], padded to a multiple of 256
  const void* w_scale;
  const void* bias;  // [n], or null
  void* y;
  int64_t w_scale_stride, m, n;
  int groups, group_k;  // of W; group_k: columns of a group, 0 where the whole row is one
  int steps;                     // stages of columns
  int tiles_m, tiles_n, stages, cluster_size;
  bool splits_columns;
  bool can_store_16_bytes;  // y and its rows are aligned to 16 bytes
  Dtype w_scale_dtype, y_dtype;
};

// Blocks on a multiprocessor where there are enough blocks.
template <int T, int bits>
constexpr int blocks_per_sm = T == 16 || (T == 64 && bits == 8) ? 2 : 1;

// Bytes that a warpgroup needs to transpose 64 rows of y by 64 columns.
template <int T>
constexpr int staging_bytes = T >= 128 ? 8192 : 0;

template <int T, int bits>
struct Memory {
  static constexpr int stage = w_stage_bytes<bits> + T * stage_k;
  static constexpr int scales = T >= 128 ? 2 * T * 4 : 0;  // scales of x, for each warpgroup
  static constexpr int size(int stages) {
    return 1024 + stages * stage + 2 * staging_bytes<T> + scales + 2 * 8 * max_stages;
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Order of tiles: eight along M are consecutive, so that they share one read of W and both operands stay in L2.
struct TileIndex {
  int m, n;

  __device__ TileIndex(int64_t i, int tiles_m, int groups_n) {
    constexpr int side = 8;
    const int64_t band = i / (static_cast<int64_t>(side) * groups_n);
    const int first = static_cast<int>(band) * side, width = min(side, tiles_m - first);
    const int rest = static_cast<int>(i - band * side * groups_n);
    m = first + rest % width;
    n = rest / width;
  }
};

__device__ __forceinline__ void store(const W8A8Args& a, int64_t at, float value) {
  switch (a.y_dtype) {
    case Dtype::float32: static_cast<float*>(a.y)[at] = value; break;
    case Dtype::bfloat16: static_cast<__nv_bfloat16*>(a.y)[at] = __float2bfloat16_rn(value); break;
    default: static_cast<__half*>(a.y)[at] = __float2half_rn(value);
  }
}

__device__ __forceinline__ uint32_t pair_of(Dtype dtype, float low, float high) {
  if (dtype == Dtype::bfloat16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// Factor and bias of a thread's two rows of W.
struct Rows {
  float scale[2], bias[2];

  __device__ Rows(const W8A8Args& a, int64_t n) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int64_t row = n + 8 * h;
      scale[h] = row < a.n ? load_float(a.w_scale, a.w_scale_dtype, row * a.w_scale_stride) : 0.0f;
      bias[h] = a.bias && row < a.n ? load_float(a.bias, a.y_dtype, row) : 0.0f;
    }
  }

  // A thread's four values in eight rows of x. s_w cannot push sum * s_w out of fp32's range where the result is inside; s_x can,
  // so it multiplies last.
  template <class Number>
  __device__ void finish(const Number* sums, float2 x_scale, float (&y)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; i++)
      y[i] = __fadd_rn(__fmul_rn(__fmul_rn(static_cast<float>(sums[i]), scale[i / 2]), i % 2 ? x_scale.y : x_scale.x), bias[i / 2]);
  }
};

// Element by element: for any N, and for small y.
template <class Number>
__device__ __forceinline__ void write_eight(const W8A8Args& a, const Rows& rows, const Number* sums, float2 x_scale, int64_t m,
                                            int64_t n) {
  float y[4];
  rows.finish(sums, x_scale, y);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int64_t row = m + i % 2, column = n + i / 2 * 8;
    if (row < a.m && column < a.n) store(a, row * a.n + column, y[i]);
  }
}

// Synchronizes the four warps that multiply the same 64 rows of W.
__device__ __forceinline__ void warpgroup_sync() {
  asm volatile("bar.sync %0, 128;" ::"r"(2 + threadIdx.x / 128) : "memory");
}

// Transposes 64 rows of y at a time through shared memory, so that the 64 16-bit values of a row are stored together. staging: 64
// rows of 128 bytes, 16-byte parts swizzled.
template <class Number, int T>
__device__ __forceinline__ void write_transposed(const W8A8Args& a, const Rows& rows, const Number (&sums)[T / 2], int64_t m, int64_t n,
                                             uint32_t staging, const float2* x_scale) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int64_t first_n = n - lane / 4 - 16 * warp + lane % 8 * 8;
  uint16_t* const y = static_cast<uint16_t*>(a.y) + first_n;
  const int64_t first_m = m - lane % 4 * 2 + 16 * warp + lane / 8;
#pragma unroll
  for (int part = 0; part < T / 64; part++) {
    warpgroup_sync();  // the previous part has been read
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      uint32_t pairs[4];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float y[4];
        const int eight = 8 * part + j + e;
        rows.finish(sums + 4 * eight, x_scale[4 * eight + lane % 4], y);
        pairs[2 * e] = pair_of(a.y_dtype, y[0], y[1]);
        pairs[2 * e + 1] = pair_of(a.y_dtype, y[2], y[3]);
      }
      const int row = 8 * (j + lane / 16) + lane % 8, place = (2 * warp + lane / 8 % 2) ^ row % 8;
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(staging + 128 * row + 16 * place),
                   "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
                   : "memory");
    }
    warpgroup_sync();
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = 16 * warp + 4 * i + lane / 8, place = lane % 8 ^ row % 8;
      const uint4 eight = load_sixteen_shared(staging + 128 * row + 16 * place);
      const int64_t at_m = first_m + 64 * part + 4 * i;
      if (at_m < a.m && first_n < a.n) store_sixteen(y + at_m * a.n, eight);
    }
  }
}

// Adds the sums of the cluster's blocks, block 0's first; each block adds and writes its share of the rows of x.
template <class Number, int T>
__device__ __forceinline__ void add_and_write(const W8A8Args& a, const Rows& rows, const Number (&sums)[T / 2], int64_t m, int64_t n,
                                              uint32_t memory) {
  const int thread = threadIdx.x, block = cluster_rank();
  const auto place = [&](int j) { return memory + ((thread / 128 * (T / 8) + j) * 128 + thread % 128) * 16; };
  asm volatile("bar.sync 1, %0;" ::"n"(consumer_threads) : "memory");  // both warpgroups have read the last stage
#pragma unroll
  for (int j = 0; j < T / 8; j++) {
    const int4* four = reinterpret_cast<const int4*>(sums + 4 * j);
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(place(j)), "r"(four->x), "r"(four->y), "r"(four->z), "r"(four->w)
                 : "memory");
  }
  cluster_sync();
  for (int j = block; j < T / 8; j += a.cluster_size) {
    if (m - threadIdx.x % 4 * 2 + 8 * j >= a.m) break;
    std::conditional_t<std::is_same_v<Number, int32_t>, int64_t, float> total[4] = {};  // 64 bits: any number of columns
    for (int other = 0; other < a.cluster_size; other++) {
      const int4 four = load_remote(remote_address(place(j), other));
      const Number* part = reinterpret_cast<const Number*>(&four);
#pragma unroll
      for (int i = 0; i < 4; i++) total[i] += part[i];
    }
    write_eight(a, rows, total, *reinterpret_cast<const float2*>(a.x_scale + m + 8 * j), m + 8 * j, n);
  }
}

// Writes y of a tile in the way its plan chose. x_scale: this thread's part of the tile's scales of x.
template <class Number, int T>
__device__ __forceinline__ void write_tile(const W8A8Args& a, const Rows& rows, const Number (&sums)[T / 2],
                                           const float (&x_scale)[T / 128 + 1], int64_t m, int64_t n, uint32_t memory,
                                           uint32_t staging, float* scales) {
  const int thread = threadIdx.x, lane = thread % 32;
  if (a.splits_columns) {
    add_and_write<Number, T>(a, rows, sums, m, n, memory);
  } else if constexpr (T >= 128) {
    float* const shared = scales + thread / 128 * T;
    warpgroup_sync();  // the scales of the previous tile have been read
#pragma unroll
    for (int e = 0; e < T / 128; e++) shared[128 * e + thread % 128] = x_scale[e];
    warpgroup_sync();
    const float2* const pairs = reinterpret_cast<const float2*>(shared);
    if (a.can_store_16_bytes) {
      write_transposed<Number, T>(a, rows, sums, m, n, staging + thread / 128 * staging_bytes<T>, pairs);
    } else {
#pragma unroll
      for (int j = 0; j < T / 8; j++) write_eight(a, rows, sums + 4 * j, pairs[4 * j + lane % 4], m + 8 * j, n);
    }
  } else {
#pragma unroll
    for (int j = 0; j < T / 8; j++)
      write_eight(a, rows, sums + 4 * j, *reinterpret_cast<const float2*>(a.x_scale + m + 8 * j), m + 8 * j, n);
  }
}

// The ring: addresses of stages and of their full and free barriers.
template <int T, int bits>
struct Ring {
  uint32_t memory, barriers;
  int stages, at = 0, parity = 0;

  __device__ uint32_t w() const { return memory + at * Memory<T, bits>::stage; }
  __device__ uint32_t x() const { return w() + w_stage_bytes<bits>; }
  __device__ uint32_t full() const { return barriers + 16 * at; }
  __device__ uint32_t free() const { return full() + 8; }
  __device__ void advance() {
    if (++at == stages) at = 0, parity ^= 1;
  }
};

template <int T, int bits>
__device__ __forceinline__ void copy_tiles(const CUtensorMap& w, const CUtensorMap& x, const W8A8Args& a, Ring<T, bits> ring,
                                           int64_t tiles, int groups_n) {
  const int block = cluster_rank(), sharing = a.splits_columns ? 1 : a.cluster_size;
  const uint16_t all = static_cast<uint16_t>((1 << sharing) - 1);
  const int rows_to_copy = T / sharing;
  const uint64_t w_policy = a.tiles_m > 1 ? evict_normal_policy() : evict_first_policy(), x_policy = evict_normal_policy();
  int early = 0;  // stages whose W is copied before x is ready (PDL)
  Ring<T, bits> late = ring;
  const auto copy_x = [&](const Ring<T, bits>& to, int step, int m) {
    const uint32_t place = to.x() + block * (sharing > 1) * rows_to_copy * stage_k;
    if (sharing > 1)
      tma_load_multicast(place, x, step * stage_k, m * T + block * rows_to_copy, to.full(), all, x_policy);
    else
      tma_load(place, x, step * stage_k, m * T, to.full(), x_policy);
  };
  for (int64_t i = blockIdx.x / a.cluster_size; i < tiles; i += gridDim.x / a.cluster_size) {
    const TileIndex place(i, a.tiles_m, groups_n);
    const int n = a.splits_columns ? place.n : place.n * a.cluster_size + block;
    const int first = a.splits_columns ? static_cast<int>(static_cast<int64_t>(a.steps) * block / a.cluster_size) : 0;
    const int last = a.splits_columns ? static_cast<int>(static_cast<int64_t>(a.steps) * (block + 1) / a.cluster_size) : a.steps;
    if (i == blockIdx.x / a.cluster_size) {
      early = min(last - first, a.stages);
      for (int step = first; step < first + early; step++, ring.advance()) {
        mbarrier_expect_tx(ring.full(), Memory<T, bits>::stage);
        tma_load(ring.w(), w, step * stage_k * bits / 8, n * block_rows, ring.full(), w_policy);
      }
      wait_for_dependencies();
      for (int step = first; step < first + early; step++, late.advance()) copy_x(late, step, place.m);
    }
    for (int step = first + early; step < last; step++, ring.advance()) {
      mbarrier_wait(ring.free(), ring.parity ^ 1);
      mbarrier_expect_tx(ring.full(), Memory<T, bits>::stage);
      tma_load(ring.w(), w, step * stage_k * bits / 8, n * block_rows, ring.full(), w_policy);
      copy_x(ring, step, place.m);
    }
    early = 0;
  }
}

// Products with W of 8 bits.
template <class Number, int T>
__device__ __forceinline__ void multiply_tiles(const W8A8Args& a, Ring<T, 8> ring, int64_t tiles, int groups_n, uint32_t staging,
                                               float* scales) {
  constexpr bool leaves_cores = std::is_same_v<Number, float>;
  const int thread = threadIdx.x, lane = thread % 32, block = cluster_rank();
  const int sharing = a.splits_columns ? 1 : a.cluster_size;
  const auto release = [&](uint32_t barrier) {  // arrives in every block that copies into this one's stage
    if (lane < sharing) arrive_remote(barrier, a.splits_columns ? block : lane);
  };
  Number sums[T / 2];
  wait_for_dependencies();  // the scales of x are written by the kernel before
  for (int64_t i = blockIdx.x / a.cluster_size; i < tiles; i += gridDim.x / a.cluster_size) {
    const TileIndex place(i, a.tiles_m, groups_n);
    const int64_t n = (a.splits_columns ? place.n : static_cast<int64_t>(place.n) * a.cluster_size + block) * block_rows +
                      thread / 32 * 16 + lane / 4;
    const int64_t m = static_cast<int64_t>(place.m) * T + lane % 4 * 2;
    const Rows rows(a, n);  // loaded while the tensor cores work
    float x_scale[T / 128 + 1];
#pragma unroll
    for (int e = 0; e < T / 128; e++) x_scale[e] = a.x_scale[static_cast<int64_t>(place.m) * T + 128 * e + thread % 128];
    const int first = a.splits_columns ? static_cast<int>(static_cast<int64_t>(a.steps) * block / a.cluster_size) : 0;
    const int last = a.splits_columns ? static_cast<int>(static_cast<int64_t>(a.steps) * (block + 1) / a.cluster_size) : a.steps;
    const auto multiply_stage = [&](Number(&c)[T / 2], bool starts) {
      mbarrier_wait(ring.full(), ring.parity);
      const uint64_t w = smem_descriptor(ring.w() + thread / 128 * (w_stage_bytes<8> / 2)), x = smem_descriptor(ring.x());
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < stage_k / 32; k++) add<T>(c, w + 2 * k, x + 2 * k, !starts || k > 0);
      wgmma_commit();
    };
    if constexpr (leaves_cores) {
#pragma unroll
      for (int e = 0; e < T / 2; e++) sums[e] = 0;
      for (int step = first; step < last; step++, ring.advance()) {
        float part[T / 2];
        multiply_stage(part, true);
        wgmma_wait<0>();
        release(ring.free());
#pragma unroll
        for (int e = 0; e < T / 2; e++) sums[e] += part[e];
      }
    } else {
      uint32_t before = 0;
      for (int step = first; step < last; step++, ring.advance()) {
        multiply_stage(sums, step == first);
        if (step > first) {
          wgmma_wait<1>();
          release(before);
        }
        before = ring.free();
      }
      wgmma_wait<0>();
      if (last > first) release(before);
      if (first == last)
#pragma unroll
        for (int e = 0; e < T / 2; e++) sums[e] = 0;
    }

    write_tile<Number, T>(a, rows, sums, x_scale, m, n, ring.memory, staging, scales);
  }
}

#endif

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Common to all kernels: initializes the ring, then one warp copies and eight multiply.
template <int T, int bits, class Multiply>
__device__ __forceinline__ void run_tiles(const CUtensorMap& w, const CUtensorMap& x, const W8A8Args& a, const Multiply& multiply) {
  launch_dependents();
  extern __shared__ uint8_t unaligned[];
  constexpr bool gives_registers = threads_per_block<T, bits> > consumer_threads + 32;
  Ring<T, bits> ring;
  ring.memory = (shared_address(unaligned) + 1023) / 1024 * 1024;
  ring.stages = a.stages;
  const uint32_t staging = ring.memory + a.stages * Memory<T, bits>::stage;
  const uint32_t scales_at = staging + 2 * staging_bytes<T>;
  float* const scales = reinterpret_cast<float*>(unaligned + (scales_at - shared_address(unaligned)));
  ring.barriers = scales_at + Memory<T, bits>::scales;
  if (threadIdx.x == 0) {
    const int releases = 8 * (a.splits_columns ? 1 : a.cluster_size);
    for (int i = 0; i < a.stages; i++) {
      mbarrier_init(ring.barriers + 16 * i, 1);
      mbarrier_init(ring.barriers + 16 * i + 8, releases);
    }
    fence_barrier_init();
  }
  __syncthreads();
  cluster_sync();

  const int groups_n = a.splits_columns ? a.tiles_n : (a.tiles_n + a.cluster_size - 1) / a.cluster_size;
  const int64_t tiles = static_cast<int64_t>(a.tiles_m) * groups_n;
  if (threadIdx.x >= consumer_threads) {
    if constexpr (gives_registers) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == consumer_threads) copy_tiles<T, bits>(w, x, a, ring, tiles, groups_n);
    __syncwarp();
    if (a.splits_columns) cluster_sync();
  } else {
    if constexpr (gives_registers) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    multiply(ring, tiles, groups_n, staging, scales);
  }
  cluster_sync();  // blocks of the cluster write into each other's shared memory until the end
}

#endif

// Number: type of the sums, int32_t for int8 and float for e4m3. With splits_columns each cluster has one tile; otherwise
// clusters take one tile after another.
template <class Number, int T>
__global__ void __launch_bounds__(threads_per_block<T, 8>, blocks_per_sm<T, 8>)
    w8a8_linear(const __grid_constant__ CUtensorMap w, const __grid_constant__ CUtensorMap x, const W8A8Args a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  run_tiles<T, 8>(w, x, a, [&](const Ring<T, 8>& ring, int64_t tiles, int groups_n, uint32_t staging, float* scales) {
    multiply_tiles<Number, T>(a, ring, tiles, groups_n, staging, scales);
  });
#endif
}

}  // namespace lowbit::cuda::w8a8
