// y = (x W^T) s_x s_w + bias for 8-bit codes: x [M, K] with a scale a row, W [N, K] with a scale a row.
//
// A block multiplies 128 rows of W by T rows of x. One warp copies both, 128 columns a stage, by tensor copies into a ring in
// shared memory; two warpgroups of four warps multiply 64 rows of W each. W is operand A, so that few rows of x leave no part
// of the tensor cores idle, and a block's T rows of x are the width of its products.
//
// A cluster's blocks either take neighbouring rows of W and share the copies of x (much x), or share the columns of one tile
// and add their sums in a fixed order through each other's shared memory (little x, where W's rows alone are too few tiles).
//
// Sums of int8 are exact: a block takes fewer than 2^17 columns. Sums of e4m3 leave the tensor cores every 128 columns,
// because those keep about 14 bits of a sum.
#pragma once

#include <type_traits>

#include "eights_pipeline.cuh"
#include "eights_products.cuh"
#include "numbers.cuh"

namespace lowbit::cuda::eights {

constexpr int rows_of_block = 128, columns_of_stage = 128;
constexpr int threads_that_multiply = 256;
// One warp copies. Where sums take most registers it comes with three idle ones, since only whole warpgroups can give theirs.
template <int T, int bits>
constexpr int threads_of_block = threads_that_multiply + (T == 256 || (T == 128 && bits == 4) ? 128 : 32);
template <int bits>
constexpr int bytes_of_w = rows_of_block * columns_of_stage * bits / 8;
constexpr int most_columns_of_block = (1 << 17) - columns_of_stage;
constexpr int most_stages = 12;

struct Product8 {
  const float* x_scale;  // [m], and room to the next multiple of 256
  const void* w_scale;
  const void* bias;  // or null
  void* y;
  int64_t w_scale_stride, m, n;
  int groups, columns_of_group;  // of W; columns_of_group: 0 where the whole row is one
  int steps;                     // stages' worth of columns
  int tiles_m, tiles_n, stages, blocks_of_cluster;
  bool splits_columns;
  bool can_store_16_bytes;  // y and its rows lie on 16 bytes
  Stored w_scale_stored, y_stored;
};

// Blocks that share a multiprocessor where there are enough of them.
template <int T, int bits>
constexpr int blocks_of_processor = T == 16 || (T == 64 && bits == 8) ? 2 : 1;

// Of a warpgroup, for turning 64 rows of y by 64 columns.
template <int T>
constexpr int bytes_of_staging = T >= 128 ? 8192 : 0;

template <int T, int bits>
struct Memory {
  static constexpr int stage = bytes_of_w<bits> + T * columns_of_stage;
  static constexpr int scales = T >= 128 ? 2 * T * 4 : 0;  // those of x, for each warpgroup
  static constexpr int size(int stages) {
    return 1024 + stages * stage + 2 * bytes_of_staging<T> + scales + 2 * 8 * most_stages;
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Which tile is next: eight tiles along M lie side by side in time, so that W is read once for all of them and both stay in L2.
struct Place {
  int m, n;

  __device__ Place(int64_t i, int tiles_m, int groups_n) {
    constexpr int side = 8;
    const int64_t band = i / (static_cast<int64_t>(side) * groups_n);
    const int first = static_cast<int>(band) * side, width = min(side, tiles_m - first);
    const int rest = static_cast<int>(i - band * side * groups_n);
    m = first + rest % width;
    n = rest / width;
  }
};

__device__ __forceinline__ void store(const Product8& a, int64_t at, float value) {
  switch (a.y_stored) {
    case Stored::float32: static_cast<float*>(a.y)[at] = value; break;
    case Stored::bfloat16: static_cast<__nv_bfloat16*>(a.y)[at] = __float2bfloat16_rn(value); break;
    default: static_cast<__half*>(a.y)[at] = __float2half_rn(value);
  }
}

__device__ __forceinline__ uint32_t pair_of(Stored stored, float low, float high) {
  if (stored == Stored::bfloat16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// What a thread multiplies its sums with and adds to them: those of its two rows of W.
struct Rows {
  float scale[2], bias[2];

  __device__ Rows(const Product8& a, int64_t n) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int64_t row = n + 8 * h;
      scale[h] = row < a.n ? number_at(a.w_scale, a.w_scale_stored, row * a.w_scale_stride) : 0.0f;
      bias[h] = a.bias && row < a.n ? number_at(a.bias, a.y_stored, row) : 0.0f;
    }
  }

  // The four numbers of eight rows of x, as `add` leaves them. A scale of W is never so large or small that sum times it
  // leaves the range of fp32 where the result is in it; a scale of x may be.
  template <class Number>
  __device__ void finish(const Number* sums, float2 x_scale, float (&y)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; i++)
      y[i] = __fadd_rn(__fmul_rn(__fmul_rn(static_cast<float>(sums[i]), scale[i / 2]), i % 2 ? x_scale.y : x_scale.x), bias[i / 2]);
  }
};

// Element by element: for any N, and where y is small.
template <class Number>
__device__ __forceinline__ void write_eight(const Product8& a, const Rows& rows, const Number* sums, float2 x_scale, int64_t m,
                                            int64_t n) {
  float y[4];
  rows.finish(sums, x_scale, y);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int64_t row = m + i % 2, column = n + i / 2 * 8;
    if (row < a.m && column < a.n) store(a, row * a.n + column, y[i]);
  }
}

// The four warps that multiply 64 rows of W together.
__device__ __forceinline__ void wait_for_warpgroup() {
  asm volatile("bar.sync %0, 128;" ::"r"(2 + threadIdx.x / 128) : "memory");
}

// 64 rows of y at a time are turned in shared memory, where four warps put their columns side by side, so that a row's 64
// numbers of 16 bits are stored together. `staging`: 64 rows of 128 bytes, whose parts of 16 bytes are swizzled.
template <class Number, int T>
__device__ __forceinline__ void write_turned(const Product8& a, const Rows& rows, const Number (&sums)[T / 2], int64_t m, int64_t n,
                                             uint32_t staging, const float2* x_scale) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int64_t first_n = n - lane / 4 - 16 * warp + lane % 8 * 8;
  uint16_t* const y = static_cast<uint16_t*>(a.y) + first_n;
  const int64_t first_m = m - lane % 4 * 2 + 16 * warp + lane / 8;
#pragma unroll
  for (int part = 0; part < T / 64; part++) {
    wait_for_warpgroup();  // the part before has been read
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      uint32_t pairs[4];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float y[4];
        const int eight = 8 * part + j + e;
        rows.finish(sums + 4 * eight, x_scale[4 * eight + lane % 4], y);
        pairs[2 * e] = pair_of(a.y_stored, y[0], y[1]);
        pairs[2 * e + 1] = pair_of(a.y_stored, y[2], y[3]);
      }
      const int row = 8 * (j + lane / 16) + lane % 8, place = (2 * warp + lane / 8 % 2) ^ row % 8;
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(staging + 128 * row + 16 * place),
                   "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
                   : "memory");
    }
    wait_for_warpgroup();
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = 16 * warp + 4 * i + lane / 8, place = lane % 8 ^ row % 8;
      const uint4 eight = load_sixteen_shared(staging + 128 * row + 16 * place);
      const int64_t at_m = first_m + 64 * part + 4 * i;
      if (at_m < a.m && first_n < a.n) store_sixteen(y + at_m * a.n, eight);
    }
  }
}

// Adds the sums of the cluster's blocks, those of block 0 first; each block adds and writes its share of the rows of x.
template <class Number, int T>
__device__ __forceinline__ void add_and_write(const Product8& a, const Rows& rows, const Number (&sums)[T / 2], int64_t m, int64_t n,
                                              uint32_t memory) {
  const int thread = threadIdx.x, block = block_of_cluster();
  const auto place = [&](int j) { return memory + ((thread / 128 * (T / 8) + j) * 128 + thread % 128) * 16; };
  asm volatile("bar.sync 1, %0;" ::"n"(threads_that_multiply) : "memory");  // both warpgroups have read the last stage
#pragma unroll
  for (int j = 0; j < T / 8; j++) {
    const int4* four = reinterpret_cast<const int4*>(sums + 4 * j);
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(place(j)), "r"(four->x), "r"(four->y), "r"(four->z), "r"(four->w)
                 : "memory");
  }
  wait_for_cluster();
  for (int j = block; j < T / 8; j += a.blocks_of_cluster) {
    if (m - threadIdx.x % 4 * 2 + 8 * j >= a.m) break;
    std::conditional_t<std::is_same_v<Number, int32_t>, int64_t, float> total[4] = {};  // of all columns, however many
    for (int other = 0; other < a.blocks_of_cluster; other++) {
      const int4 four = load_from(address_in(place(j), other));
      const Number* part = reinterpret_cast<const Number*>(&four);
#pragma unroll
      for (int i = 0; i < 4; i++) total[i] += part[i];
    }
    write_eight(a, rows, total, *reinterpret_cast<const float2*>(a.x_scale + m + 8 * j), m + 8 * j, n);
  }
}

// y of a tile, by the way its plan takes. `x_scale`: what this thread read of the tile's scales of x.
template <class Number, int T>
__device__ __forceinline__ void write_tile(const Product8& a, const Rows& rows, const Number (&sums)[T / 2],
                                           const float (&x_scale)[T / 128 + 1], int64_t m, int64_t n, uint32_t memory,
                                           uint32_t staging, float* scales) {
  const int thread = threadIdx.x, lane = thread % 32;
  if (a.splits_columns) {
    add_and_write<Number, T>(a, rows, sums, m, n, memory);
  } else if constexpr (T >= 128) {
    float* const shared = scales + thread / 128 * T;
    wait_for_warpgroup();  // it has read those of the tile before
#pragma unroll
    for (int e = 0; e < T / 128; e++) shared[128 * e + thread % 128] = x_scale[e];
    wait_for_warpgroup();
    const float2* const pairs = reinterpret_cast<const float2*>(shared);
    if (a.can_store_16_bytes) {
      write_turned<Number, T>(a, rows, sums, m, n, staging + thread / 128 * bytes_of_staging<T>, pairs);
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

// The ring: where a stage lies and which of its barriers says what.
template <int T, int bits>
struct Ring {
  uint32_t memory, barriers;
  int stages, at = 0, turn = 0;

  __device__ uint32_t w() const { return memory + at * Memory<T, bits>::stage; }
  __device__ uint32_t x() const { return w() + bytes_of_w<bits>; }
  __device__ uint32_t full() const { return barriers + 16 * at; }
  __device__ uint32_t free() const { return full() + 8; }
  __device__ void advance() {
    if (++at == stages) at = 0, turn ^= 1;
  }
};

template <int T, int bits>
__device__ __forceinline__ void copy_tiles(const CUtensorMap& w, const CUtensorMap& x, const Product8& a, Ring<T, bits> ring,
                                           int64_t tiles, int groups_n) {
  const int block = block_of_cluster(), sharing = a.splits_columns ? 1 : a.blocks_of_cluster;
  const uint16_t all = static_cast<uint16_t>((1 << sharing) - 1);
  const int rows_to_copy = T / sharing;
  const uint64_t w_policy = a.tiles_m > 1 ? read_again() : read_once(), x_policy = read_again();
  int early = 0;  // stages whose W was copied before x was there
  Ring<T, bits> late = ring;
  const auto copy_x = [&](const Ring<T, bits>& to, int step, int m) {
    const uint32_t place = to.x() + block * (sharing > 1) * rows_to_copy * columns_of_stage;
    if (sharing > 1)
      copy_box_to_all(place, x, step * columns_of_stage, m * T + block * rows_to_copy, to.full(), all, x_policy);
    else
      copy_box(place, x, step * columns_of_stage, m * T, to.full(), x_policy);
  };
  for (int64_t i = blockIdx.x / a.blocks_of_cluster; i < tiles; i += gridDim.x / a.blocks_of_cluster) {
    const Place place(i, a.tiles_m, groups_n);
    const int n = a.splits_columns ? place.n : place.n * a.blocks_of_cluster + block;
    const int first = a.splits_columns ? static_cast<int>(static_cast<int64_t>(a.steps) * block / a.blocks_of_cluster) : 0;
    const int last = a.splits_columns ? static_cast<int>(static_cast<int64_t>(a.steps) * (block + 1) / a.blocks_of_cluster) : a.steps;
    if (i == blockIdx.x / a.blocks_of_cluster) {
      early = min(last - first, a.stages);
      for (int step = first; step < first + early; step++, ring.advance()) {
        expect_bytes(ring.full(), Memory<T, bits>::stage);
        copy_box(ring.w(), w, step * columns_of_stage * bits / 8, n * rows_of_block, ring.full(), w_policy);
      }
      wait_for_predecessors();
      for (int step = first; step < first + early; step++, late.advance()) copy_x(late, step, place.m);
    }
    for (int step = first + early; step < last; step++, ring.advance()) {
      wait_for(ring.free(), ring.turn ^ 1);
      expect_bytes(ring.full(), Memory<T, bits>::stage);
      copy_box(ring.w(), w, step * columns_of_stage * bits / 8, n * rows_of_block, ring.full(), w_policy);
      copy_x(ring, step, place.m);
    }
    early = 0;
  }
}

// W of 8 bits.
template <class Number, int T>
__device__ __forceinline__ void multiply_tiles(const Product8& a, Ring<T, 8> ring, int64_t tiles, int groups_n, uint32_t staging,
                                               float* scales) {
  constexpr bool leaves_cores = std::is_same_v<Number, float>;
  const int thread = threadIdx.x, lane = thread % 32, block = block_of_cluster();
  const int sharing = a.splits_columns ? 1 : a.blocks_of_cluster;
  const auto release = [&](uint32_t barrier) {  // in every block that copies to this one's stage
    if (lane < sharing) arrive_in(barrier, a.splits_columns ? block : lane);
  };
  Number sums[T / 2];
  wait_for_predecessors();  // for the scales of x
  for (int64_t i = blockIdx.x / a.blocks_of_cluster; i < tiles; i += gridDim.x / a.blocks_of_cluster) {
    const Place place(i, a.tiles_m, groups_n);
    const int64_t n = (a.splits_columns ? place.n : static_cast<int64_t>(place.n) * a.blocks_of_cluster + block) * rows_of_block +
                      thread / 32 * 16 + lane / 4;
    const int64_t m = static_cast<int64_t>(place.m) * T + lane % 4 * 2;
    const Rows rows(a, n);  // these and the scales of x are there by the time the sums are
    float x_scale[T / 128 + 1];
#pragma unroll
    for (int e = 0; e < T / 128; e++) x_scale[e] = a.x_scale[static_cast<int64_t>(place.m) * T + 128 * e + thread % 128];
    const int first = a.splits_columns ? static_cast<int>(static_cast<int64_t>(a.steps) * block / a.blocks_of_cluster) : 0;
    const int last = a.splits_columns ? static_cast<int>(static_cast<int64_t>(a.steps) * (block + 1) / a.blocks_of_cluster) : a.steps;
    const auto multiply_stage = [&](Number(&c)[T / 2], bool starts) {
      wait_for(ring.full(), ring.turn);
      const uint64_t w = operand(ring.w() + thread / 128 * (bytes_of_w<8> / 2)), x = operand(ring.x());
      fence_products();
#pragma unroll
      for (int k = 0; k < columns_of_stage / 32; k++) add<T>(c, w + 2 * k, x + 2 * k, !starts || k > 0);
      commit_products();
    };
    if constexpr (leaves_cores) {
#pragma unroll
      for (int e = 0; e < T / 2; e++) sums[e] = 0;
      for (int step = first; step < last; step++, ring.advance()) {
        float part[T / 2];
        multiply_stage(part, true);
        wait_for_products<0>();
        release(ring.free());
#pragma unroll
        for (int e = 0; e < T / 2; e++) sums[e] += part[e];
      }
    } else {
      uint32_t before = 0;
      for (int step = first; step < last; step++, ring.advance()) {
        multiply_stage(sums, step == first);
        if (step > first) {
          wait_for_products<1>();
          release(before);
        }
        before = ring.free();
      }
      wait_for_products<0>();
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

// What every kernel does around its products: sets up the ring, and gives one warp the copies and eight the rest.
template <int T, int bits, class Multiply>
__device__ __forceinline__ void run_tiles(const CUtensorMap& w, const CUtensorMap& x, const Product8& a, const Multiply& multiply) {
  let_dependents_start();
  extern __shared__ uint8_t unaligned[];
  constexpr bool gives_registers = threads_of_block<T, bits> > threads_that_multiply + 32;
  Ring<T, bits> ring;
  ring.memory = (shared_address(unaligned) + 1023) / 1024 * 1024;
  ring.stages = a.stages;
  const uint32_t staging = ring.memory + a.stages * Memory<T, bits>::stage;
  const uint32_t scales_at = staging + 2 * bytes_of_staging<T>;
  float* const scales = reinterpret_cast<float*>(unaligned + (scales_at - shared_address(unaligned)));
  ring.barriers = scales_at + Memory<T, bits>::scales;
  if (threadIdx.x == 0) {
    const int releases = 8 * (a.splits_columns ? 1 : a.blocks_of_cluster);
    for (int i = 0; i < a.stages; i++) {
      init_barrier(ring.barriers + 16 * i, 1);
      init_barrier(ring.barriers + 16 * i + 8, releases);
    }
    show_barriers_to_copies();
  }
  __syncthreads();
  wait_for_cluster();

  const int groups_n = a.splits_columns ? a.tiles_n : (a.tiles_n + a.blocks_of_cluster - 1) / a.blocks_of_cluster;
  const int64_t tiles = static_cast<int64_t>(a.tiles_m) * groups_n;
  if (threadIdx.x >= threads_that_multiply) {
    if constexpr (gives_registers) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == threads_that_multiply) copy_tiles<T, bits>(w, x, a, ring, tiles, groups_n);
    __syncwarp();
    if (a.splits_columns) wait_for_cluster();
  } else {
    if constexpr (gives_registers) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    multiply(ring, tiles, groups_n, staging, scales);
  }
  wait_for_cluster();  // blocks of the cluster write into each other's shared memory to the end
}

#endif

// Number: what products are summed in, int32_t for int8 codes and float for e4m3. With `splits_columns` each cluster has one
// tile; otherwise clusters take one tile after another.
template <class Number, int T>
__global__ void __launch_bounds__(threads_of_block<T, 8>, blocks_of_processor<T, 8>)
    eights_linear(const __grid_constant__ CUtensorMap w, const __grid_constant__ CUtensorMap x, const Product8 a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  run_tiles<T, 8>(w, x, a, [&](const Ring<T, 8>& ring, int64_t tiles, int groups_n, uint32_t staging, float* scales) {
    multiply_tiles<Number, T>(a, ring, tiles, groups_n, staging, scales);
  });
#endif
}

}  // namespace lowbit::cuda::eights
