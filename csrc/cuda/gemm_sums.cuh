// From the sums of a cluster's blocks to y.
//
// A block has sums for `columns` rows of y, sixteen of which are a strip. Where several blocks have cut the columns of W among
// them, each finishes some strips: the others store theirs into its memory, where a barrier counts the bytes, and it adds
// them to its own in the order of the blocks.
//
// Only so many clusters are on a device at once. Where two of them share out the columns of W, neither waits for the other: a
// block leaves its sums in memory and then a word that says so in the place of the other's; who finds that word there already
// adds the other's sums to its own, two numbers, whose order does not matter, and takes the word away for the next run. What
// lies there before the first run is anything but the word, which is a number of 64 bits that is drawn for each launch.
#pragma once

#include "gemm_arguments.cuh"
#include "numbers.cuh"
#include "tiles.cuh"
#include "warpgroups.cuh"

namespace lowbit::cuda {

constexpr int most_of_cluster = 4, rows_of_block = 128;
constexpr int tiles_of_block = rows_of_block / rows_of_tile, workers_of_block = 32 * tiles_of_block;

// Columns of W that blocks share out and work on at a time: all of a unit for few rows of x, which take little time.
__host__ __device__ constexpr int columns_of_piece(int columns, int unit_columns) { return columns == 16 ? unit_columns : 256; }

// Who finishes what, and where: block `strip % blocks`, in turn `strip / blocks`.
template <int columns, int blocks>
struct Meeting {
  static constexpr int strips = columns / 16, half_bytes = workers_of_block * 16, y_pitch = (rows_of_block + 8) * 2;
  static constexpr int turns = (strips + blocks - 1) / blocks;
  // Where the sums of a block lie, 32 bytes a thread in two halves; behind them y.
  __host__ __device__ static constexpr int at(int turn, int block) { return (turn * blocks + block) * 2 * half_bytes; }
  static constexpr int y_at = blocks == 1 ? 0 : (turns * blocks) * 2 * half_bytes;
  static constexpr int bytes = y_at + turns * 16 * y_pitch;
};
template <int columns>
__host__ __device__ constexpr int bytes_of_meeting(int blocks) {
  return blocks == 1   ? Meeting<columns, 1>::bytes
         : blocks == 2 ? Meeting<columns, 2>::bytes
         : blocks == 3 ? Meeting<columns, 3>::bytes
                       : Meeting<columns, 4>::bytes;
}

// Barriers of the end: scales and biases of the rows are there, for which every thread that stored some arrives itself; all
// blocks have read what was copied; the others' sums are there. And one for when x has begun to come, and a place for what one
// thread tells the others.
struct Arrivals {
  uint64_t *ends, *done, *sums, *x, *told;
  __device__ explicit Arrivals(uint64_t* barriers)
      : ends(barriers), done(barriers + 1), sums(barriers + 2), x(barriers + 3), told(barriers + 4) {}
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __device__ __forceinline__ void start(int blocks) const {
    start_barrier(ends, 64);
    start_barrier(done, blocks * tiles_of_block);
    start_barrier(sums, 1);
    start_barrier(x, 1);
  }
#endif
};

// Which part of which tile of y a block works on: the block of which cluster, of one or two; the tile's rows of W and of x, as
// counted in tiles of y.
struct Part {
  uint32_t tile;
  int block, cluster, clusters;
  uint32_t rows, rows_of_x;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Asked for again rather than kept in registers.
__device__ __forceinline__ Part part_of(const Gemm& a) {
  uint32_t place;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(place));
  const uint32_t cluster = a.by_blocks.divide(place), block = place - cluster * a.by_blocks.by;
  Part part = {cluster, static_cast<int>(block), 0, 1};
  if (cluster >= a.alone) part = {a.alone + (cluster - a.alone) / 2, part.block, static_cast<int>(cluster - a.alone) % 2, 2};
  part.rows_of_x = a.by_rows.divide(part.tile), part.rows = part.tile - part.rows_of_x * a.by_rows.by;
  return part;
}

// What a row's sums are multiplied by, and what is added to them. `factor`: what they have been divided by.
template <class Codes, class T>
__device__ __forceinline__ float2 end_of(const Gemm& a, int64_t n, float factor) {
  float2 end = {1.0f, 0.0f};
  if (n >= a.n) return end;
  if (!a.unit.groups) end.x = scale_at(a.scale, a.scale_type, n);
  end.x *= a.factor;
  if (a.outer) end.x *= *a.outer;
  end.x *= Codes::factor * factor;
  if (a.bias) end.y = to_float(static_cast<const T*>(a.bias)[n]);
  return end;
}

// The strips that a block finishes, from its memory to y: a thread has eight neighbours of a row of each.
template <class T, int columns, int blocks, int block>
__device__ __forceinline__ void store_strips(const Gemm& a, int64_t first_n, int first_m, const uint8_t* memory) {
  using Place = Meeting<columns, blocks>;
  constexpr int eights = rows_of_block / 8, turns = (Place::strips - block + blocks - 1) / blocks;
  static_assert(workers_of_block == 16 * eights);
  const int row = threadIdx.x / eights, at = threadIdx.x % eights * 8, first = first_m + block * 16 + row;
  const int64_t n = first_n + at;
  if (n >= a.n) return;
  const uint8_t* from = memory + row * Place::y_pitch + at * 2;
  T* to = static_cast<T*>(a.y) + first * a.n + n;
  const int64_t step = blocks * 16 * a.n;
  if (a.n % 8) {
#pragma unroll 1
    for (int turn = 0; turn < turns && first + turn * blocks * 16 < a.m; turn++)
      for (int j = 0; j < 8 && n + j < a.n; j++)
        to[turn * step + j] = reinterpret_cast<const T*>(from + turn * 16 * Place::y_pitch)[j];
    return;
  }
  constexpr int at_once = turns > 8 ? 8 : turns > 0 ? turns : 1;
#pragma unroll
  for (int t = 0; t < turns; t += at_once) {
    uint4 eight[at_once];
#pragma unroll
    for (int i = 0; i < at_once; i++)
      if (t + i < turns) eight[i] = *reinterpret_cast<const uint4*>(from + (t + i) * 16 * Place::y_pitch);
#pragma unroll
    for (int i = 0; i < at_once; i++, to += step)
      if (t + i < turns && first + (t + i) * blocks * 16 < a.m) store_sixteen(to, eight[i]);
  }
}

// What was written before, also by threads that this one has met at a barrier, can be seen by who finds the word; and the same
// the other way round.
__device__ __forceinline__ unsigned long long exchange(unsigned long long* word, unsigned long long here) {
  unsigned long long found;
  asm volatile("atom.exch.acq_rel.gpu.global.b64 %0, [%1], %2;" : "=l"(found) : "l"(word), "l"(here) : "memory");
  return found;
}

// Leaves the sums of a block for the same block of the other cluster, or adds those that it left: whether this one is the last.
template <int columns, int blocks, int block>
__device__ __forceinline__ bool meet_other_cluster(const Gemm& a, const Part& part, uint64_t* told, float (&total)[columns / 2]) {
  using Place = Meeting<columns, blocks>;
  const int64_t pair = part.tile - a.alone, pairs = (gridDim.x / blocks - a.alone) / 2;
  auto* word = reinterpret_cast<unsigned long long*>(a.pairs) + pair * blocks + block;
  uint8_t* sums = a.pairs + (pairs * blocks * sizeof(uint64_t) + 127) / 128 * 128 + threadIdx.x * 16;
  const auto place = [&](int cluster, int strip) {
    return reinterpret_cast<float4*>(sums + ((pair * 2 + cluster) * Place::strips + strip) * 2 * Place::half_bytes);
  };
  constexpr int half = Place::half_bytes / 16;
  wait_for_predecessors();  // which may have used this memory
#pragma unroll
  for (int strip = block; strip < Place::strips; strip += blocks) {
    const float* s = total + 8 * strip;
    __stcg(place(part.cluster, strip), make_float4(s[0], s[1], s[2], s[3]));
    __stcg(place(part.cluster, strip) + half, make_float4(s[4], s[5], s[6], s[7]));
  }
  wait_for_threads<1, workers_of_block>();
  if (threadIdx.x == 0) *told = exchange(word, a.here);
  wait_for_threads<1, workers_of_block>();
  if (*told != a.here) return false;
#pragma unroll
  for (int strip = block; strip < Place::strips; strip += blocks) {
    float* s = total + 8 * strip;
    const float4 low = __ldcg(place(1 - part.cluster, strip)), high = __ldcg(place(1 - part.cluster, strip) + half);
    s[0] += low.x, s[1] += low.y, s[2] += low.z, s[3] += low.w;
    s[4] += high.x, s[5] += high.y, s[6] += high.z, s[7] += high.w;
  }
  if (threadIdx.x == 0) *word = 0;
  return true;
}

// What block `block` of `blocks` does, known when this is compiled: so are the registers of its strips, and what runs once, and
// has to be fetched from far away first, is short and in one piece.
template <class T, int columns, int blocks, int block>
__device__ __forceinline__ void finish(const Gemm& a, const Part& part, const Arrivals& arrivals, const float2* ends,
                                       uint8_t* memory, float (&total)[columns / 2]) {
  using Place = Meeting<columns, blocks>;
  const int64_t first_n = static_cast<int64_t>(part.rows) * rows_of_block;
  const int first_m = static_cast<int>(part.rows_of_x) * columns;
  const int lane = threadIdx.x % 32, tile = threadIdx.x / 32;
  if constexpr (blocks == 1) {
    wait_for_threads<1, workers_of_block>();  // all that was copied has been read: y takes its place
  } else {
    const uint32_t sums = shared_address(memory) + threadIdx.x * 16;
    if (threadIdx.x == 0) {
      constexpr int mine = (Place::strips - block + blocks - 1) / blocks;
      expect(arrivals.sums, mine * (blocks - 1) * 2 * Place::half_bytes);
    }
    wait_for_announcements();  // it has long begun
    if (!a.sums_apart) {
      __syncwarp();  // all lanes have read what they read
      if (lane < blocks) arrive_in_block(arrivals.done, lane);
      wait_for_cluster(arrivals.done, 0);
    }
#pragma unroll
    for (int strip = 0; strip < Place::strips; strip++) {
      if (strip % blocks == block) continue;
      const uint32_t to = sums + Place::at(strip / blocks, block);
      store_in_block(to, strip % blocks, total + 8 * strip, arrivals.sums);
      store_in_block(to + Place::half_bytes, strip % blocks, total + 8 * strip + 4, arrivals.sums);
    }
    wait_for_cluster(arrivals.sums, 0);
#pragma unroll
    for (int strip = block; strip < Place::strips; strip += blocks) {
      float* s = total + 8 * strip;
#pragma unroll
      for (int i = 0; i < blocks; i++) {
        if (i == block) continue;
        const uint8_t* from = memory + Place::at(strip / blocks, i) + threadIdx.x * 16;
        const float4 low = *reinterpret_cast<const float4*>(from);
        const float4 high = *reinterpret_cast<const float4*>(from + Place::half_bytes);
        s[0] += low.x, s[1] += low.y, s[2] += low.z, s[3] += low.w;
        s[4] += high.x, s[5] += high.y, s[6] += high.z, s[7] += high.w;
      }
    }
  }
  if (part.clusters == 2 && !meet_other_cluster<columns, blocks, block>(a, part, arrivals.told, total)) return;

  const float2 end = ends[tile * rows_of_tile + lane / 4], end8 = ends[tile * rows_of_tile + lane / 4 + 8];
  const uint32_t corner = shared_address(memory + Place::y_at) + (lane / 16 * 8 + lane % 8) * Place::y_pitch +
                          (tile * rows_of_tile + lane / 8 % 2 * 8) * 2;
#pragma unroll
  for (int strip = block; strip < Place::strips; strip += blocks) {
    const float* s = total + 8 * strip;
    uint32_t two[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2& e = i % 2 ? end8 : end;
      const T low = from_float<T>(fmaf(s[2 * i], e.x, e.y)), high = from_float<T>(fmaf(s[2 * i + 1], e.x, e.y));
      two[i] = reinterpret_cast<const uint16_t&>(low) | reinterpret_cast<const uint16_t&>(high) << 16;
    }
    store_transposed(corner + strip / blocks * 16 * Place::y_pitch, two);
  }
  wait_for_threads<1, workers_of_block>();
  wait_for_predecessors();  // whose reads of y must have ended before it is written
  store_strips<T, columns, blocks, block>(a, first_n, first_m, memory + Place::y_at);
}

template <class T, int columns, int blocks, int block = 0>
__device__ __forceinline__ void finish_of(const Gemm& a, const Part& part, const Arrivals& arrivals, const float2* ends,
                                          uint8_t* memory, float (&total)[columns / 2]) {
  if constexpr (block + 1 < blocks) {
    uint32_t own = part.block;
    hide(own);  // else the compiler takes the way from a table, which lies far away
    if (own != block) return finish_of<T, columns, blocks, block + 1>(a, part, arrivals, ends, memory, total);
  }
  finish<T, columns, blocks, block>(a, part, arrivals, ends, memory, total);
}

// `total`: the sums of a lane, as Product has them.
template <class T, int columns>
__device__ __forceinline__ void meet_and_write(const Gemm& a, const Arrivals& arrivals, const float2* ends, uint8_t* memory,
                                               float (&total)[columns / 2]) {
  const Part part = part_of(a);
  static_assert(most_of_cluster == 4);
  if (a.blocks == 1)
    finish_of<T, columns, 1>(a, part, arrivals, ends, memory, total);
  else if (a.blocks == 2)
    finish_of<T, columns, 2>(a, part, arrivals, ends, memory, total);
  else if (a.blocks == 3)
    finish_of<T, columns, 3>(a, part, arrivals, ends, memory, total);
  else
    finish_of<T, columns, 4>(a, part, arrivals, ends, memory, total);
}
#endif

}  // namespace lowbit::cuda
