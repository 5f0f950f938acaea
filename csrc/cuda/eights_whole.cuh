// y = (x W^T) s_x s_w + bias in one kernel whose blocks have whole rows: for short rows of little x, where a block rounds all that
// it multiplies and waits for no other.
//
// A block has T rows of x and 64 or 128 of W, which come by tensor copies before x is there and stay; the blocks of a cluster have
// the same rows of W, and each copies a share of them to all. Each warp rounds rows of x into shared memory, in the order that
// tensor copies have. Four warpgroups then multiply 64 rows of W and a part of the columns each, and add their sums in a fixed
// order through the shared memory in which their part of W was.
#pragma once

#include "eights.cuh"
#include "rows_of_warp.cuh"

namespace lowbit::cuda::eights {

struct Whole {
  Product8 product;
  const void* x;             // [m, k] in rows on 16 bytes, whose k is a multiple of 8
  const float* fixed_scale;  // or null: each row its own
  int k;
};

constexpr int threads_of_whole = 512;
constexpr int least_steps_of_whole = 4;  // for which every warpgroup has a part, with room for its sums

// What a block of T rows of x has: rows of W, parts of the columns, columns at most (a warp holds whole rows), and where things are
// in shared memory behind W.
template <int T>
struct WholeShape {
  static constexpr int warpgroups_of_w = T == 64 ? 2 : 1, rows = 64 * warpgroups_of_w, parts = 4 / warpgroups_of_w;
  static constexpr int bytes_of_w = rows * columns_of_stage;  // a stage's worth
  static constexpr int most_columns = T == 64 ? 1024 : 2048;
  int x, scales, barriers, all;

  __host__ __device__ explicit WholeShape(int steps) {
    x = steps * bytes_of_w;
    scales = x + steps * T * columns_of_stage;
    barriers = scales + T * 4;
    all = barriers + parts * 8 + 1024;
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Rounds the block's rows of x.
template <bool is_float, class X, int T, int chunks>
__device__ __forceinline__ void round_whole(const Whole& all, int64_t m, int steps, uint32_t to, float* scales) {
  constexpr int warps = threads_of_whole / 32, rows = T / warps;
  const int warp = threadIdx.x / 32, there = static_cast<int>(min(all.product.m - m, static_cast<int64_t>(T)));
  const int count = there > warp ? (there - warp + warps - 1) / warps : 0;
  const X* const x = static_cast<const X*>(all.x) + (m + warp) * all.k;
  const RowsOfWarp<X, is_float, rows, chunks> held(x, static_cast<int64_t>(warps) * all.k, all.k, count);
  // A chunk of 256 columns is two stages' worth, of which half the warp has one each.
  const int lane = threadIdx.x % 32;
  const uint32_t at = to + lane / 16 * T * columns_of_stage + lane % 2 * 8;
  held.round(
      all.fixed_scale, steps * columns_of_stage,
      [&](int r, int chunk, uint2 codes) {
        const int row = warp + r * warps, place = lane / 2 % 8 ^ row % 8;
        const uint32_t there = at + row * columns_of_stage + place * 16 + chunk * 2 * T * columns_of_stage;
        asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(there), "r"(codes.x), "r"(codes.y) : "memory");
      },
      [&](int r, float scale) { scales[warp + r * warps] = scale; });
}

// The sums of this warpgroup's part of the columns.
template <class Number, int T>
__device__ __forceinline__ void multiply_whole(uint32_t w, uint32_t x, int first, int last, Number (&sums)[T / 2]) {
  constexpr int bytes_of_w = WholeShape<T>::bytes_of_w;
  if constexpr (std::is_same_v<Number, float>) {
#pragma unroll
    for (int e = 0; e < T / 2; e++) sums[e] = 0;
#pragma unroll 1
    for (int step = first; step < last; step++) {
      float part[T / 2];
      const uint64_t w_at = operand(w + step * bytes_of_w), x_at = operand(x + step * T * columns_of_stage);
      fence_products();
#pragma unroll
      for (int k = 0; k < columns_of_stage / 32; k++) add<T>(part, w_at + 2 * k, x_at + 2 * k, k > 0);
      commit_products();
      wait_for_products<0>();
#pragma unroll
      for (int e = 0; e < T / 2; e++) sums[e] += part[e];
    }
  } else {
#pragma unroll 1
    for (int step = first; step < last; step++) {
      const uint64_t w_at = operand(w + step * bytes_of_w), x_at = operand(x + step * T * columns_of_stage);
      fence_products();
#pragma unroll
      for (int k = 0; k < columns_of_stage / 32; k++) add<T>(sums, w_at + 2 * k, x_at + 2 * k, step > first || k > 0);
      commit_products();
    }
    wait_for_products<0>();
  }
}

// By one thread: W of the block, of which each block of the cluster copies some stages' worth to all.
template <int T>
__device__ __forceinline__ void copy_whole(const CUtensorMap& w, const Product8& a, int tile_n, uint32_t to, uint32_t barriers) {
  using Shape = WholeShape<T>;
  const int blocks = a.blocks_of_cluster, block = blocks > 1 ? block_of_cluster() : 0;
  const uint64_t policy = a.tiles_m > blocks ? read_again() : read_once();
  const auto to_all = static_cast<uint16_t>((1 << blocks) - 1);
#pragma unroll 1
  for (int part = 0, step = 0; part < Shape::parts; part++) {
    const int last = a.steps * (part + 1) / Shape::parts;
    const uint32_t barrier = barriers + 8 * part;
    expect_bytes(barrier, (last - step) * Shape::bytes_of_w);
#pragma unroll 1
    for (; step < last; step++) {
      const uint32_t place = to + step * Shape::bytes_of_w;
      if (blocks == 1)
        copy_box(place, w, step * columns_of_stage, tile_n * Shape::rows, barrier, policy);
      else if (step % blocks == block)
        copy_box_to_all(place, w, step * columns_of_stage, tile_n * Shape::rows, barrier, to_all, policy);
    }
  }
}

#endif

template <class Number, class X, int T>
__global__ void __launch_bounds__(threads_of_whole, T == 16 ? 2 : 1)
    eights_whole(const __grid_constant__ CUtensorMap w, const __grid_constant__ Whole all) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr bool is_float = std::is_same_v<Number, float>;
  using Shape = WholeShape<T>;
  let_dependents_start();
  extern __shared__ uint8_t unaligned[];
  const Product8& a = all.product;
  uint8_t* const memory = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  const Shape at(a.steps);
  const uint32_t w_at = shared_address(memory), x_at = w_at + at.x, barriers = w_at + at.barriers;
  float* const scales = reinterpret_cast<float*>(memory + at.scales);
  const int tile_n = blockIdx.x / a.tiles_m;
  const int64_t m = static_cast<int64_t>(blockIdx.x - tile_n * a.tiles_m) * T;
  if (threadIdx.x == 0) {
#pragma unroll
    for (int part = 0; part < Shape::parts; part++) init_barrier(barriers + 8 * part, 1);
    show_barriers_to_copies();
  }
  __syncwarp();
  if (a.blocks_of_cluster > 1) wait_for_cluster();  // all of it has barriers
  if (threadIdx.x == 0) copy_whole<T>(w, a, tile_n, w_at, barriers);
  __syncwarp();
  const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int part = warpgroup / Shape::warpgroups_of_w, part_of_w = warpgroup % Shape::warpgroups_of_w;
  const int64_t n = static_cast<int64_t>(tile_n) * Shape::rows + part_of_w * 64 + warp * 16 + lane / 4;
  const Rows rows(a, n);
  wait_for_predecessors();
  if (all.k <= 1024) {
    round_whole<is_float, X, T, 4>(all, m, a.steps, x_at, scales);
  } else if constexpr (Shape::most_columns > 1024) {
    round_whole<is_float, X, T, 8>(all, m, a.steps, x_at, scales);
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the tensor cores read what was stored here
  __syncthreads();

  Number sums[T / 2];
  const auto first_of = [&](int part) { return a.steps * part / Shape::parts; };
  const uint32_t own_w = w_at + part_of_w * 64 * columns_of_stage;
  wait_for(barriers + 8 * part, 0);
  multiply_whole<Number, T>(own_w, x_at, first_of(part), first_of(part + 1), sums);
  wait_for_warpgroup();  // all of it has read its part of W, in whose place its sums lie now
  const auto place = [&](int from, int octet) {
    return own_w + (first_of(from) + octet / 4) * Shape::bytes_of_w + (octet % 4 * 128 + threadIdx.x % 128) * 16;
  };
#pragma unroll
  for (int j = 0; j < T / 8; j++) {
    const int4 four = *reinterpret_cast<const int4*>(sums + 4 * j);
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(place(part, j)), "r"(four.x), "r"(four.y), "r"(four.z),
                 "r"(four.w)
                 : "memory");
  }
  __syncthreads();
  for (int j = part; j < T / 8; j += Shape::parts) {
    Number total[4] = {};
#pragma unroll
    for (int from = 0; from < Shape::parts; from++) {
      const uint4 four = load_sixteen_shared(place(from, j));
      const Number* number = reinterpret_cast<const Number*>(&four);
#pragma unroll
      for (int i = 0; i < 4; i++) total[i] += number[i];
    }
    const int row = 8 * j + lane % 4 * 2;
    write_eight(a, rows, total, float2{scales[row], scales[row + 1]}, m + row, n);
  }
#endif
}

}  // namespace lowbit::cuda::eights
