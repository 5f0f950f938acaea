// From the sums of a cluster's teams to y.
//
// A block makes `columns` rows of y, sixteen of which are a strip. Where several teams, of one block or of a cluster, have sums
// for the same part of y, each finishes some strips: the others store theirs into its block's memory, where a barrier counts
// the bytes, and it adds all of them in the order of the teams.
#pragma once

#include "gemm_arguments.cuh"
#include "numbers.cuh"
#include "tiles.cuh"
#include "warpgroups.cuh"

namespace lowbit::cuda {

constexpr int rows_of_block = 128, tiles_of_block = rows_of_block / rows_of_tile, threads_of_team = 32 * tiles_of_block;

// Who finishes what. `teams`: of the cluster; `team`: this one.
template <class S>
struct Meeting {
  static constexpr int strips = S::columns / 16, floats = 8, strip_bytes = threads_of_team * floats * 4, y_pitch = rows_of_block + 8;
  int teams, team, part;
  __host__ __device__ Meeting(int parts, int part, int team_of_block)
      : teams(parts * S::teams), team(part * S::teams + team_of_block), part(part) {}
  // Strips that a team, and a block, finishes at most; the sums for those, then y.
  __host__ __device__ int turns() const { return (strips + teams - 1) / teams; }
  __host__ __device__ int places() const { return turns() * S::teams; }
  __host__ __device__ int y_at() const { return teams == 1 ? 0 : places() * teams * strip_bytes; }
  __host__ __device__ int bytes() const { return y_at() + places() * 16 * y_pitch * 2; }
  // Where a team's sums of a strip lie, by the strip's place in its block.
  __host__ __device__ int at(int place, int team) const { return (place * teams + team) * strip_bytes; }
};

// Barriers of the end: scale and bias of the rows are there; all teams have read what was copied; the other teams' sums are there.
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
template <class T, class S>
__device__ __forceinline__ void meet_and_write(const Gemm& a, int64_t first_n, int first_m, const Arrivals& arrivals,
                                               const float2* ends, uint8_t* memory, float (&total)[S::columns / 2]) {
  const int lane = threadIdx.x % 32, tile = threadIdx.x / 32 % tiles_of_block, thread = threadIdx.x % threads_of_team;
  const Meeting<S> meeting(gridDim.x, blockIdx.x, S::teams == 1 ? 0 : __shfl_sync(~0u, threadIdx.x / threads_of_team, 0));
  const uint32_t sums = shared_address(memory) + thread * 16, y = shared_address(memory + meeting.y_at());
  if (meeting.teams == 1) {
    wait_for_threads<1, S::workers>();  // all that was copied has been read: y takes its place
  } else {
    if (threadIdx.x == 0) {
      int mine = 0;
      for (int strip = 0; strip < Meeting<S>::strips; strip++) mine += strip % meeting.teams / S::teams == meeting.part;
      expect(arrivals.sums, mine * (meeting.teams - 1) * Meeting<S>::strip_bytes);
    }
    if (gridDim.x > 1) wait_for_cluster_to_arrive();  // it has long begun
    if (lane < gridDim.x) arrive_in_block(arrivals.done, lane);
    wait(arrivals.done, 0);
#pragma unroll
    for (int strip = 0, owner = 0, turn = 0; strip < Meeting<S>::strips; strip++) {
      if (owner != meeting.team) {
        const uint32_t to = sums + meeting.at(turn * S::teams + owner % S::teams, meeting.team);
        const float* s = total + 8 * strip;
        store_in_block(to, owner / S::teams, s, arrivals.sums);
        store_in_block(to + threads_of_team * 16, owner / S::teams, s + 4, arrivals.sums);
      }
      if (++owner == meeting.teams) owner = 0, turn++;
    }
    wait(arrivals.sums, 0);
  }

  const float2 end = ends[tile * rows_of_tile + lane / 4], end8 = ends[tile * rows_of_tile + lane / 4 + 8];
  const uint32_t corner = y + ((lane / 16 * 8 + lane % 8) * Meeting<S>::y_pitch + tile * rows_of_tile + lane / 8 % 2 * 8) * 2;
#pragma unroll
  for (int strip = 0, owner = 0, turn = 0; strip < Meeting<S>::strips; strip++) {
    if (owner == meeting.team) {
      const int place = turn * S::teams + owner % S::teams;
      const float* s = total + 8 * strip;
      float sum[8] = {s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]};
      if (meeting.teams > 1) {
#pragma unroll
        for (int i = 0; i < 8; i++) sum[i] = 0;
#pragma unroll 1
        for (int t = 0; t < meeting.teams; t++) {
          float4 low = {s[0], s[1], s[2], s[3]}, high = {s[4], s[5], s[6], s[7]};
          if (t != meeting.team) {
            const uint8_t* from = memory + meeting.at(place, t) + thread * 16;
            low = *reinterpret_cast<const float4*>(from);
            high = *reinterpret_cast<const float4*>(from + threads_of_team * 16);
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
      store_transposed(corner + place * 16 * Meeting<S>::y_pitch * 2, two);
    }
    if (++owner == meeting.teams) owner = 0, turn++;
  }
  wait_for_threads<1, S::workers>();
  wait_for_predecessors();  // whose reads of y must have ended before it is written
  for (int i = threadIdx.x; i < meeting.places() * 16 * (rows_of_block / 8); i += S::workers) {
    const int row = i / (rows_of_block / 8), at = i % (rows_of_block / 8) * 8, place = row / 16;
    const int strip = place / S::teams * meeting.teams + meeting.part * S::teams + place % S::teams, m = first_m + strip * 16 + row % 16;
    if (strip < Meeting<S>::strips && m < a.m && first_n + at < a.n)
      store<T>(a, m, first_n + at, *reinterpret_cast<const uint4*>(memory + meeting.y_at() + (row * Meeting<S>::y_pitch + at) * 2));
  }
}
#endif

}  // namespace lowbit::cuda
