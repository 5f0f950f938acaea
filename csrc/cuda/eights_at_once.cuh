// y = (x W^T) s_x s_w + bias in one kernel that rounds x itself: for little x, where a kernel of its own would cost more time
// than the product.
//
// A block multiplies 128 rows of W by T rows of x and a part of the columns; the blocks of a cluster have the other parts. Each
// rounds its part of x into shared memory, in the order that tensor copies have, where it stays for all that the block
// multiplies. The largest magnitudes of the parts meet first: each block writes its own into the memory of the others. The sums
// of a tile go to the block of the cluster that writes these rows of W, and are added in a fixed order.
//
// One warp copies W, which never changes, so that it starts before the kernel that writes x has ended.
#pragma once

#include "clusters.cuh"
#include "eights_rounding.cuh"

namespace lowbit::cuda::eights {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The four numbers of a thread in eight rows of x, from sums that are complete.
template <int T, class Number>
__device__ __forceinline__ void write_of_tile(const Product8& a, const Rows& rows, const Number* sums, const RowScale* scales,
                                              int octet, int64_t m, int64_t n) {
  const int row = octet * 8 + threadIdx.x % 4 * 2;
  write_eight(a, rows, sums, float2{scales[row].scale, scales[row + 1].scale}, m + row, n);
}

template <class Number, int T>
__device__ __forceinline__ void multiply_part(const Product8& a, Ring<T, 8>& ring, uint32_t x, int steps, Number (&sums)[T / 2]) {
  constexpr bool leaves_cores = std::is_same_v<Number, float>;
  const int lane = threadIdx.x % 32;
  uint32_t before = 0;
  if (leaves_cores || steps == 0)
#pragma unroll
    for (int e = 0; e < T / 2; e++) sums[e] = 0;
#pragma unroll 1
  for (int step = 0; step < steps; step++, ring.advance()) {
    wait_for(ring.full(), ring.turn);
    const uint64_t w_at = operand(ring.memory + ring.at * bytes_of_w<8> + threadIdx.x / 128 * (bytes_of_w<8> / 2));
    const uint64_t x_at = operand(x + step * T * columns_of_stage);
    if constexpr (leaves_cores) {
      float part[T / 2];
      fence_products();
#pragma unroll
      for (int k = 0; k < columns_of_stage / 32; k++) add<T>(part, w_at + 2 * k, x_at + 2 * k, k > 0);
      commit_products();
      wait_for_products<0>();
      if (lane == 0) arrive_in(ring.free(), block_of_cluster());
#pragma unroll
      for (int e = 0; e < T / 2; e++) sums[e] += part[e];
    } else {
      fence_products();
#pragma unroll
      for (int k = 0; k < columns_of_stage / 32; k++) add<T>(sums, w_at + 2 * k, x_at + 2 * k, step > 0 || k > 0);
      commit_products();
      if (step > 0) {
        wait_for_products<1>();
        if (lane == 0) arrive_in(before, block_of_cluster());
      }
      before = ring.free();
    }
  }
  if constexpr (!leaves_cores) {
    wait_for_products<0>();
    if (steps > 0 && lane == 0) arrive_in(before, block_of_cluster());
  }
}

// What a block has of the product: rows of x, columns and tiles, of which it takes each `step_of_tiles`-th.
struct Part {
  uint32_t tiles_m, tiles, first_tile, step_of_tiles;
  int first, steps, columns, rows_of_x;  // first: stage's worth of columns; columns: those that are there
  int64_t m;

  __device__ Part(const AtOnce& all, int T, int blocks, int block) {
    const Product8& a = all.product;
    tiles_m = a.tiles_m, tiles = tiles_m * a.tiles_n, step_of_tiles = gridDim.x / blocks, first_tile = blockIdx.x / blocks;
    first = a.steps * block / blocks, steps = a.steps * (block + 1) / blocks - first;
    columns = min(steps * columns_of_stage, all.k - first * columns_of_stage);
    m = static_cast<int64_t>(first_tile % tiles_m) * T;  // a block keeps its rows of x
    rows_of_x = static_cast<int>(min(a.m - m, static_cast<int64_t>(T)));
  }
};

// By the warp that copies: some of W, then x, then the rest of W.
template <class X, int T>
__device__ __forceinline__ void copy_part(const CUtensorMap& w, const AtOnce& all, Ring<T, 8> ring, const Part& part,
                                          const AtOnceMemory<T>& at, uint32_t x_arrived) {
  const int lane = threadIdx.x % 32;
  const bool is_cluster = all.product.blocks_of_cluster > 1;
  if (is_cluster) arrive_at_cluster();
  const uint64_t policy = part.tiles_m > 1 ? read_again() : read_once(), x_policy = read_again();
  const auto copy_w = [&](uint32_t tile, int step) {
    wait_for(ring.free(), ring.turn ^ 1);
    expect_bytes(ring.full(), bytes_of_w<8>);
    copy_box(ring.memory + ring.at * bytes_of_w<8>, w, (part.first + step) * columns_of_stage, tile / part.tiles_m * rows_of_block,
             ring.full(), policy);
    ring.advance();
  };
  const int early = min(min(early_stages, ring.stages), part.steps);
  if (lane == 0)
#pragma unroll 1
    for (int step = 0; step < early; step++) copy_w(part.first_tile, step);
  __syncwarp();
  wait_for_predecessors();
  const X* const x = static_cast<const X*>(all.x) + part.m * all.k + part.first * columns_of_stage;
#pragma unroll 1
  for (int row = lane; row < part.rows_of_x; row += 32)
    copy_row(ring.memory + at.floats + row * part.steps * columns_of_stage * 2, x + static_cast<int64_t>(row) * all.k,
             part.columns * 2, x_arrived, x_policy);
  __syncwarp();
  if (lane == 0)
    for (uint32_t tile = part.first_tile; tile < part.tiles; tile += part.step_of_tiles)
#pragma unroll 1
      for (int step = tile == part.first_tile ? early : 0; step < part.steps; step++) copy_w(tile, step);
  __syncwarp();
  if (is_cluster) wait_at_cluster();
}

// Sends the sums of each warp to the block that writes its rows of W, and adds and writes those of this one, block 0's first.
template <class Number, int T>
__device__ __forceinline__ void add_parts(const Product8& a, uint32_t memory, const Number (&sums)[T / 2], const Rows& rows,
                                          const RowScale* scales, int octets, int64_t m, int64_t n, uint32_t arrived) {
  const int blocks = a.blocks_of_cluster, block = block_of_cluster(), share = warps_that_multiply / blocks;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, owner = warp / share;
  const auto place = [&](int from, int j) {
    return memory + (((from * octets + j) * share + warp % share) * 32 + lane) * 16;
  };
#pragma unroll
  for (int j = 0; j < T / 8; j++)
    if (j < octets)
      send(address_in(place(block, j), owner), *reinterpret_cast<const int4*>(sums + 4 * j), address_in(arrived, owner));
  wait_for_sent(arrived);
#pragma unroll 1
  for (int j = warp / share; j < octets; j += blocks) {
    Number total[4] = {};
#pragma unroll 2
    for (int from = 0; from < blocks; from++) {
      const uint4 four = load_sixteen_shared(place(from, j));
      const Number* number = reinterpret_cast<const Number*>(&four);
#pragma unroll
      for (int i = 0; i < 4; i++) total[i] += number[i];
    }
    write_of_tile<T>(a, rows, total, scales, j, m, n);
  }
}

#endif

template <class Number, class X, int T>
__global__ void __launch_bounds__(threads_of_block<T, 8>, 2)
    eights_at_once(const __grid_constant__ CUtensorMap w, const __grid_constant__ AtOnce all) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  let_dependents_start();
  extern __shared__ uint8_t unaligned[];
  const Product8& a = all.product;
  uint8_t* const memory = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  const int blocks = a.blocks_of_cluster, block = blocks > 1 ? block_of_cluster() : 0;
  const auto at = AtOnceMemory<T>::of(a.stages, all.most_steps, all.most_rows, blocks);
  const Part part(all, T, blocks, block);
  const int octets = (part.rows_of_x + 7) / 8;
  Ring<T, 8> ring;
  ring.memory = shared_address(memory);
  ring.stages = a.stages;
  ring.barriers = ring.memory + at.barriers;
  const uint32_t most_arrived = ring.barriers + 16 * a.stages, sums_arrived = most_arrived + 8, x_arrived = sums_arrived + 8;
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int i = 0; i < a.stages; i++) {
      init_barrier(ring.barriers + 16 * i, 1);
      init_barrier(ring.barriers + 16 * i + 8, warps_that_multiply);
    }
    init_barrier(most_arrived, 1);
    init_barrier(sums_arrived, 1);
    init_barrier(x_arrived, 1);
    show_barriers_to_copies();
    expect_bytes(most_arrived, blocks * part.rows_of_x * 4);
    expect_bytes(x_arrived, part.rows_of_x * part.columns * 2);
    expect_bytes(sums_arrived, octets * 8 * rows_of_block * 4);
  }
  uint32_t* const gathered = reinterpret_cast<uint32_t*>(memory + (blocks > 1 ? at.scales : at.most));
#pragma unroll 1
  for (int i = threadIdx.x; i < T; i += blockDim.x) gathered[i] = 0;
  __syncthreads();

  if (threadIdx.x >= threads_that_multiply) {
    copy_part<X, T>(w, all, ring, part, at, x_arrived);
    return;
  }

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, share = warps_that_multiply / blocks;  // warps' rows of a block
  const int row_in_tile = (blocks > 1 ? block * share + warp % share : warp) * 16 + lane / 4;
  const auto n_of = [&](uint32_t tile) { return static_cast<int64_t>(tile / part.tiles_m) * rows_of_block + row_in_tile; };
  Rows rows(a, n_of(part.first_tile));
  if (blocks > 1) wait_for_cluster();  // all blocks have started, so that they can be sent to
  PartOfX<Number, X, T> x;
  x.floats = reinterpret_cast<const X*>(memory + at.floats);
  x.rows = part.rows_of_x;
  x.columns = part.columns;
  x.filled = part.steps * columns_of_stage;
  x.segments = (x.filled + columns_of_segment - 1) / columns_of_segment;
  x.inverse = ~0u / x.segments + 1;
  x.to = ring.memory + at.x;
  wait_for(x_arrived, 0);  // the kernels before have ended, too
  round_part<Number, X, T>(all, x, memory, at, most_arrived);

  const RowScale* const scales = reinterpret_cast<const RowScale*>(memory + at.scales);
  for (uint32_t tile = part.first_tile; tile < part.tiles; tile += part.step_of_tiles) {
    Number sums[T / 2];
    multiply_part<Number, T>(a, ring, x.to, part.steps, sums);
    const int64_t n = n_of(tile);
    if (blocks == 1) {
      if (tile != part.first_tile) rows = Rows(a, n);
#pragma unroll
      for (int j = 0; j < T / 8; j++)
        if (j < octets) write_of_tile<T>(a, rows, sums + 4 * j, scales, j, part.m, n);
      continue;
    }
    add_parts<Number, T>(a, ring.memory + at.sums, sums, rows, scales, octets, part.m, n, sums_arrived);
  }
#endif
}

}  // namespace lowbit::cuda::eights
