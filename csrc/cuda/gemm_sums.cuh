// From the sums of a cluster's blocks to y.
//
// A block has sums for `columns` rows of y, sixteen of which are a strip. Where several blocks have cut the columns of W among
// them, each finishes some strips: the others store theirs into its memory, where a barrier counts the bytes, and it adds all
// of them in the order of the blocks.
#pragma once

#include "gemm_arguments.cuh"
#include "numbers.cuh"
#include "tiles.cuh"
#include "warpgroups.cuh"

namespace lowbit::cuda {

constexpr int rows_of_block = 128, tiles_of_block = rows_of_block / rows_of_tile, workers_of_block = 32 * tiles_of_block;

// Who finishes what, and where: block `strip % blocks`, in turn `strip / blocks`.
template <int columns>
struct Meeting {
  static constexpr int strips = columns / 16, half_bytes = workers_of_block * 16, y_pitch = (rows_of_block + 8) * 2;
  int blocks;
  __host__ __device__ explicit Meeting(int blocks) : blocks(blocks) {}
  __host__ __device__ int turns() const { return (strips + blocks - 1) / blocks; }
  // Where the sums of a block lie, 32 bytes a thread in two halves; behind them y.
  __host__ __device__ int at(int turn, int block) const { return (turn * blocks + block) * 2 * half_bytes; }
  __host__ __device__ int y_at() const { return blocks == 1 ? 0 : at(turns(), 0); }
  __host__ __device__ int bytes() const { return y_at() + turns() * 16 * y_pitch; }
};

// Barriers of the end: scales and biases of the rows are there; all blocks have read what was copied; the others' sums are there.
struct Arrivals {
  uint64_t *ends, *done, *sums;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// What a row's sums are multiplied by, and what is added to them.
template <class Codes, class T>
__device__ __forceinline__ float2 end_of(const Gemm& a, int64_t n) {
  float2 end = {1.0f, 0.0f};
  if (n >= a.n) return end;
  if (!a.unit.groups) end.x = scale_at(a.scale, a.scale_type, n);
  end.x *= a.factor;
  if (a.outer) end.x *= *a.outer;
  end.x *= Codes::factor;
  if (a.bias) end.y = to_float(static_cast<const T*>(a.bias)[n]);
  return end;
}

// Eight neighbours of a row of y.
template <class T>
__device__ __forceinline__ void store(const Gemm& a, int m, int64_t n, const uint4& eight) {
  T* to = static_cast<T*>(a.y) + m * a.n + n;
  if (a.n % 8 == 0) {
    *reinterpret_cast<uint4*>(to) = eight;
  } else {
#pragma unroll
    for (int j = 0; j < 8; j++)
      if (n + j < a.n) to[j] = reinterpret_cast<const T*>(&eight)[j];
  }
}

// `total`: the sums of a lane, as Product has them; `first_n`, `first_m`: where the block's part of y begins.
template <class T, int columns>
__device__ __forceinline__ void meet_and_write(const Gemm& a, int64_t first_n, int first_m, const Arrivals& arrivals,
                                               const float2* ends, uint8_t* memory, const float (&total)[columns / 2]) {
  using Place = Meeting<columns>;
  const int lane = threadIdx.x % 32, tile = threadIdx.x / 32, block = blockIdx.x;
  const Place meeting(gridDim.x);
  const uint32_t sums = shared_address(memory) + threadIdx.x * 16;
  if (meeting.blocks == 1) {
    wait_for_threads<1, workers_of_block>();  // all that was copied has been read: y takes its place
  } else {
    if (threadIdx.x == 0) {
      const int mine = (Place::strips - block + meeting.blocks - 1) / meeting.blocks;
      expect(arrivals.sums, mine * (meeting.blocks - 1) * 2 * Place::half_bytes);
    }
    wait_for_announcements();  // it has long begun
    if (lane < meeting.blocks) arrive_in_block(arrivals.done, lane);
    wait(arrivals.done, 0);
#pragma unroll
    for (int strip = 0, owner = 0, turn = 0; strip < Place::strips; strip++) {
      if (owner != block) {
        store_in_block(sums + meeting.at(turn, block), owner, total + 8 * strip, arrivals.sums);
        store_in_block(sums + meeting.at(turn, block) + Place::half_bytes, owner, total + 8 * strip + 4, arrivals.sums);
      }
      if (++owner == meeting.blocks) owner = 0, turn++;
    }
    wait(arrivals.sums, 0);
  }

  const float2 end = ends[tile * rows_of_tile + lane / 4], end8 = ends[tile * rows_of_tile + lane / 4 + 8];
  const uint32_t corner = shared_address(memory + meeting.y_at()) + (lane / 16 * 8 + lane % 8) * Place::y_pitch +
                          (tile * rows_of_tile + lane / 8 % 2 * 8) * 2;
#pragma unroll
  for (int strip = 0, owner = 0, turn = 0; strip < Place::strips; strip++) {
    if (owner == block) {
      const float* s = total + 8 * strip;
      float sum[8] = {s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]};
      if (meeting.blocks > 1) {
#pragma unroll
        for (int i = 0; i < 8; i++) sum[i] = 0;
#pragma unroll 1
        for (int b = 0; b < meeting.blocks; b++) {
          float4 low = {s[0], s[1], s[2], s[3]}, high = {s[4], s[5], s[6], s[7]};
          if (b != block) {
            const uint8_t* from = memory + meeting.at(turn, b) + threadIdx.x * 16;
            low = *reinterpret_cast<const float4*>(from);
            high = *reinterpret_cast<const float4*>(from + Place::half_bytes);
          }
          sum[0] += low.x, sum[1] += low.y, sum[2] += low.z, sum[3] += low.w;
          sum[4] += high.x, sum[5] += high.y, sum[6] += high.z, sum[7] += high.w;
        }
      }
      uint32_t two[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float2& e = i % 2 ? end8 : end;
        const T low = from_float<T>(fmaf(sum[2 * i], e.x, e.y)), high = from_float<T>(fmaf(sum[2 * i + 1], e.x, e.y));
        two[i] = reinterpret_cast<const uint16_t&>(low) | reinterpret_cast<const uint16_t&>(high) << 16;
      }
      store_transposed(corner + turn * 16 * Place::y_pitch, two);
    }
    if (++owner == meeting.blocks) owner = 0, turn++;
  }
  wait_for_threads<1, workers_of_block>();
  wait_for_predecessors();  // whose reads of y must have ended before it is written
  for (int i = threadIdx.x; i < meeting.turns() * 16 * (rows_of_block / 8); i += workers_of_block) {
    const int row = i / (rows_of_block / 8), at = i % (rows_of_block / 8) * 8, strip = row / 16 * meeting.blocks + block;
    const int m = first_m + strip * 16 + row % 16;
    if (strip < Place::strips && m < a.m && first_n + at < a.n)
      store<T>(a, m, first_n + at, *reinterpret_cast<const uint4*>(memory + meeting.y_at() + row * Place::y_pitch + at * 2));
  }
}
#endif

}  // namespace lowbit::cuda
