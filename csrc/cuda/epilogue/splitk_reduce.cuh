// Reduction of split K and writing of y for mixed_gemm.cuh.
//
// A block has sums for `columns` rows of y; sixteen of them are a strip. Where the blocks of a cluster split K, each finishes
// some strips: the others store theirs into its shared memory, where a barrier counts the bytes, and it adds them in block order.
//
// Where two clusters split K, neither waits for the other, since both need not be on the device at once: a block leaves its sums
// in global memory and then swaps a word in the other's slot; whoever finds that word already there adds the other's sums to its
// own (two values, whose order does not matter) and clears the word for the next launch. The word is a 64-bit number drawn for
// each launch, so that stale memory is not mistaken for it.
#pragma once

#include "../schedule/mixed_gemm_args.cuh"
#include "../decode/scalar_types.cuh"
#include "../decode/mma_fragment_layout.cuh"
#include "../ptx/sm90_ptx.cuh"

namespace lowbit::cuda {

constexpr int max_cluster_blocks = 4, block_rows = 128;
constexpr int tiles_per_block = block_rows / tile_rows, mma_threads = 32 * tiles_per_block;

// Columns of W in a piece, the granularity of splitting K: a whole unit for few rows of x, which take little time.
__host__ __device__ constexpr int k_per_piece(int columns, int unit_columns) { return columns == 16 ? unit_columns : 256; }

// Which block finishes which strip: block strip % blocks, in round strip / blocks.
template <int columns, int blocks>
struct ReduceLayout {
  static constexpr int strips = columns / 16, half_bytes = mma_threads * 16, y_pitch = (block_rows + 8) * 2;
  static constexpr int tile_groups = (strips + blocks - 1) / blocks;
  // Offset of a block's sums, 32 bytes for a thread in two parts; behind them y.
  __host__ __device__ static constexpr int at(int tile_group, int block) { return (tile_group * blocks + block) * 2 * half_bytes; }
  static constexpr int y_at = blocks == 1 ? 0 : (tile_groups * blocks) * 2 * half_bytes;
  static constexpr int bytes = y_at + tile_groups * 16 * y_pitch;
};
template <int columns>
__host__ __device__ constexpr int reduce_bytes(int blocks) {
  return blocks == 1   ? ReduceLayout<columns, 1>::bytes
         : blocks == 2 ? ReduceLayout<columns, 2>::bytes
         : blocks == 3 ? ReduceLayout<columns, 3>::bytes
                       : ReduceLayout<columns, 4>::bytes;
}

// Barriers of the epilogue: scales and biases are loaded (every storing thread arrives); all blocks have read their copies; the
// others' sums have arrived. Also one for the first arrival of x, and a slot for a message from one thread to all.
struct EpilogueBarriers {
  uint64_t *row_epilogues, *done, *sums, *x, *broadcast_slot;
  __device__ explicit EpilogueBarriers(uint64_t* barriers)
      : row_epilogues(barriers), done(barriers + 1), sums(barriers + 2), x(barriers + 3), broadcast_slot(barriers + 4) {}
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __device__ __forceinline__ void start(int blocks) const {
    mbarrier_init(row_epilogues, 64);
    mbarrier_init(done, blocks * tiles_per_block);
    mbarrier_init(sums, 1);
    mbarrier_init(x, 1);
  }
#endif
};

// A block's part of the product: block of which cluster, of one or two; its tiles of W and of x.
struct BlockPart {
  uint32_t tile;
  int block, cluster, clusters;
  uint32_t rows, rows_of_x;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Recomputed rather than kept in registers.
__device__ __forceinline__ BlockPart block_part(const MixedGemm& a) {
  uint32_t place;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(place));
  const uint32_t cluster = a.by_blocks.divide(place), block = place - cluster * a.by_blocks.by;
  BlockPart part = {cluster, static_cast<int>(block), 0, 1};
  if (cluster >= a.unpaired_tiles) part = {a.unpaired_tiles + (cluster - a.unpaired_tiles) / 2, part.block, static_cast<int>(cluster - a.unpaired_tiles) % 2, 2};
  part.rows_of_x = a.by_rows.divide(part.tile), part.rows = part.tile - part.rows_of_x * a.by_rows.by;
  return part;
}

// Factor and bias of a row's sums. factor: what the sums have been divided by.
template <class Codes, class T>
__device__ __forceinline__ float2 row_epilogue(const MixedGemm& a, int64_t n, float factor) {
  float2 end = {1.0f, 0.0f};
  if (n >= a.n) return end;
  if (!a.unit.groups) end.x = scale_at(a.scale, a.scale_type, n);
  end.x *= a.factor;
  if (a.outer) end.x *= *a.outer;
  end.x *= Codes::factor * factor;
  if (a.bias) end.y = to_float(static_cast<const T*>(a.bias)[n]);
  return end;
}

// Writes the strips that a block finishes to y: a thread has eight neighbours of a row in each.
template <class T, int columns, int blocks, int block>
__device__ __forceinline__ void store_strips(const MixedGemm& a, int64_t first_n, int first_m, const uint8_t* memory) {
  using Layout = ReduceLayout<columns, blocks>;
  constexpr int w8a8 = block_rows / 8, tile_groups = (Layout::strips - block + blocks - 1) / blocks;
  static_assert(mma_threads == 16 * w8a8);
  const int row = threadIdx.x / w8a8, at = threadIdx.x % w8a8 * 8, first = first_m + block * 16 + row;
  const int64_t n = first_n + at;
  if (n >= a.n) return;
  const uint8_t* from = memory + row * Layout::y_pitch + at * 2;
  T* to = static_cast<T*>(a.y) + first * a.n + n;
  const int64_t step = blocks * 16 * a.n;
  if (a.n % 8) {
#pragma unroll 1
    for (int tile_group = 0; tile_group < tile_groups && first + tile_group * blocks * 16 < a.m; tile_group++)
      for (int j = 0; j < 8 && n + j < a.n; j++)
        to[tile_group * step + j] = reinterpret_cast<const T*>(from + tile_group * 16 * Layout::y_pitch)[j];
    return;
  }
  constexpr int at_once = tile_groups > 8 ? 8 : tile_groups > 0 ? tile_groups : 1;
#pragma unroll
  for (int t = 0; t < tile_groups; t += at_once) {
    uint4 eight[at_once];
#pragma unroll
    for (int i = 0; i < at_once; i++)
      if (t + i < tile_groups) eight[i] = *reinterpret_cast<const uint4*>(from + (t + i) * 16 * Layout::y_pitch);
#pragma unroll
    for (int i = 0; i < at_once; i++, to += step)
      if (t + i < tile_groups && first + (t + i) * blocks * 16 < a.m) store_sixteen(to, eight[i]);
  }
}

// Atomic exchange with release and acquire semantics: earlier writes, also of threads this one has synchronized with, are visible
// to whoever finds the word, and vice versa.
__device__ __forceinline__ unsigned long long exchange(unsigned long long* word, unsigned long long launch_tag) {
  unsigned long long found;
  asm volatile("atom.exch.acq_rel.gpu.global.b64 %0, [%1], %2;" : "=l"(found) : "l"(word), "l"(launch_tag) : "memory");
  return found;
}

// Leaves a block's sums for the same block of the other cluster, or adds those it has left; returns whether this one is the last.
template <int columns, int blocks, int block>
__device__ __forceinline__ bool reduce_with_other_cluster(const MixedGemm& a, const BlockPart& part, uint64_t* broadcast_slot, float (&total)[columns / 2]) {
  using Layout = ReduceLayout<columns, blocks>;
  const int64_t pair = part.tile - a.unpaired_tiles, pairs = (gridDim.x / blocks - a.unpaired_tiles) / 2;
  auto* word = reinterpret_cast<unsigned long long*>(a.pairs) + pair * blocks + block;
  uint8_t* sums = a.pairs + (pairs * blocks * sizeof(uint64_t) + 127) / 128 * 128 + threadIdx.x * 16;
  const auto place = [&](int cluster, int strip) {
    return reinterpret_cast<float4*>(sums + ((pair * 2 + cluster) * Layout::strips + strip) * 2 * Layout::half_bytes);
  };
  constexpr int half = Layout::half_bytes / 16;
  wait_for_dependencies();  // kernels before this one may have used this memory
#pragma unroll
  for (int strip = block; strip < Layout::strips; strip += blocks) {
    const float* s = total + 8 * strip;
    __stcg(place(part.cluster, strip), make_float4(s[0], s[1], s[2], s[3]));
    __stcg(place(part.cluster, strip) + half, make_float4(s[4], s[5], s[6], s[7]));
  }
  bar_sync<1, mma_threads>();
  if (threadIdx.x == 0) *broadcast_slot = exchange(word, a.launch_tag);
  bar_sync<1, mma_threads>();
  if (*broadcast_slot != a.launch_tag) return false;
#pragma unroll
  for (int strip = block; strip < Layout::strips; strip += blocks) {
    float* s = total + 8 * strip;
    const float4 low = __ldcg(place(1 - part.cluster, strip)), high = __ldcg(place(1 - part.cluster, strip) + half);
    s[0] += low.x, s[1] += low.y, s[2] += low.z, s[3] += low.w;
    s[4] += high.x, s[5] += high.y, s[6] += high.z, s[7] += high.w;
  }
  if (threadIdx.x == 0) *word = 0;
  return true;
}

// What block `block` of `blocks` does. Compile time, so that its strips stay in registers and the code, which runs once and has
// to be fetched first, is short and contiguous.
template <class T, int columns, int blocks, int block>
__device__ __forceinline__ void finish(const MixedGemm& a, const BlockPart& part, const EpilogueBarriers& arrivals, const float2* row_epilogues,
                                       uint8_t* memory, float (&total)[columns / 2]) {
  using Layout = ReduceLayout<columns, blocks>;
  const int64_t first_n = static_cast<int64_t>(part.rows) * block_rows;
  const int first_m = static_cast<int>(part.rows_of_x) * columns;
  const int lane = threadIdx.x % 32, tile = threadIdx.x / 32;
  if constexpr (blocks == 1) {
    bar_sync<1, mma_threads>();  // all copies have been read: y overwrites them
  } else {
    const uint32_t sums = shared_address(memory) + threadIdx.x * 16;
    if (threadIdx.x == 0) {
      constexpr int self = (Layout::strips - block + blocks - 1) / blocks;
      mbarrier_expect_tx(arrivals.sums, self * (blocks - 1) * 2 * Layout::half_bytes);
    }
    cluster_wait_acquire();  // the other blocks have long started
    if (!a.sums_apart) {
      __syncwarp();  // all lanes have read
      if (lane < blocks) arrive_remote(arrivals.done, lane);
      mbarrier_wait_cluster(arrivals.done, 0);
    }
#pragma unroll
    for (int strip = 0; strip < Layout::strips; strip++) {
      if (strip % blocks == block) continue;
      const uint32_t to = sums + Layout::at(strip / blocks, block);
      store_remote_v4(to, strip % blocks, total + 8 * strip, arrivals.sums);
      store_remote_v4(to + Layout::half_bytes, strip % blocks, total + 8 * strip + 4, arrivals.sums);
    }
    mbarrier_wait_cluster(arrivals.sums, 0);
#pragma unroll
    for (int strip = block; strip < Layout::strips; strip += blocks) {
      float* s = total + 8 * strip;
#pragma unroll
      for (int i = 0; i < blocks; i++) {
        if (i == block) continue;
        const uint8_t* from = memory + Layout::at(strip / blocks, i) + threadIdx.x * 16;
        const float4 low = *reinterpret_cast<const float4*>(from);
        const float4 high = *reinterpret_cast<const float4*>(from + Layout::half_bytes);
        s[0] += low.x, s[1] += low.y, s[2] += low.z, s[3] += low.w;
        s[4] += high.x, s[5] += high.y, s[6] += high.z, s[7] += high.w;
      }
    }
  }
  if (part.clusters == 2 && !reduce_with_other_cluster<columns, blocks, block>(a, part, arrivals.broadcast_slot, total)) return;

  const float2 end = row_epilogues[tile * tile_rows + lane / 4], end8 = row_epilogues[tile * tile_rows + lane / 4 + 8];
  const uint32_t corner = shared_address(memory + Layout::y_at) + (lane / 16 * 8 + lane % 8) * Layout::y_pitch +
                          (tile * tile_rows + lane / 8 % 2 * 8) * 2;
#pragma unroll
  for (int strip = block; strip < Layout::strips; strip += blocks) {
    const float* s = total + 8 * strip;
    uint32_t two[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2& e = i % 2 ? end8 : end;
      const T low = from_float<T>(fmaf(s[2 * i], e.x, e.y)), high = from_float<T>(fmaf(s[2 * i + 1], e.x, e.y));
      two[i] = reinterpret_cast<const uint16_t&>(low) | reinterpret_cast<const uint16_t&>(high) << 16;
    }
    store_transposed(corner + strip / blocks * 16 * Layout::y_pitch, two);
  }
  bar_sync<1, mma_threads>();
  wait_for_dependencies();  // reads of y must have ended before it is written
  store_strips<T, columns, blocks, block>(a, first_n, first_m, memory + Layout::y_at);
}

template <class T, int columns, int blocks, int block = 0>
__device__ __forceinline__ void finish_of(const MixedGemm& a, const BlockPart& part, const EpilogueBarriers& arrivals, const float2* row_epilogues,
                                          uint8_t* memory, float (&total)[columns / 2]) {
  if constexpr (block + 1 < blocks) {
    uint32_t local = part.block;
    opaque(local);  // otherwise the compiler makes a jump table, which is far away in memory
    if (local != block) return finish_of<T, columns, blocks, block + 1>(a, part, arrivals, row_epilogues, memory, total);
  }
  finish<T, columns, blocks, block>(a, part, arrivals, row_epilogues, memory, total);
}

// total: a lane's sums, as in mixed_gemm.cuh.
template <class T, int columns>
__device__ __forceinline__ void reduce_and_write(const MixedGemm& a, const EpilogueBarriers& arrivals, const float2* row_epilogues, uint8_t* memory,
                                               float (&total)[columns / 2]) {
  const BlockPart part = block_part(a);
  static_assert(max_cluster_blocks == 4);
  if (a.blocks == 1)
    finish_of<T, columns, 1>(a, part, arrivals, row_epilogues, memory, total);
  else if (a.blocks == 2)
    finish_of<T, columns, 2>(a, part, arrivals, row_epilogues, memory, total);
  else if (a.blocks == 3)
    finish_of<T, columns, 3>(a, part, arrivals, row_epilogues, memory, total);
  else
    finish_of<T, columns, 4>(a, part, arrivals, row_epilogues, memory, total);
}
#endif

}  // namespace lowbit::cuda
