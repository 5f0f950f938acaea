// Stable counting sort of the rows of a mixture of experts by their expert, by one block.
//
//    experts [rows] --match within a warp--> counts [warp][expert] --prefix over warps and experts--> order [rows], segments
//
// Each warp has a run of rows, counts them by expert, and later places them behind those of the warps before it. Two passes over
// experts; nothing is sent to the host.
//
// Contract: exact; rows of an expert keep their order.
// Limit: latency, a few microseconds up to some thousand rows; no figures yet.
#include <algorithm>

#include "../schedule/segments.h"
#include "../ptx/bulk_copy.cuh"

namespace lowbit::cuda {
namespace {

constexpr int sort_warps = 32;

// The exclusive prefix sum of a warp's values, to which their total is added in `carry`.
__device__ __forceinline__ int prefix_of_warp(int value, int& carry) {
  int sum = value;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, sum, d);
    if (static_cast<int>(threadIdx.x % 32) >= d) sum += other;
  }
  const int before = carry + sum - value;
  carry += __shfl_sync(~0u, sum, 31);
  return before;
}

__global__ void __launch_bounds__(sort_warps * 32) sort_by_expert(const int64_t* experts, int rows, int num_experts, int rows_per_segment,
                                                                  Segment* segments, int max_segments, int* order) {
  extern __shared__ int memory[];
  int* counts = memory;                               // [warp][expert]
  int* first_of = memory + sort_warps * num_experts;  // [expert]
  int* segment_of = first_of + num_experts;           // [expert]; behind them the number of segments and of rows
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, threads = blockDim.x;
  const int run = ((rows + sort_warps - 1) / sort_warps + 31) / 32 * 32;
  const int first = warp * run, last = min(first + run, rows);
  launch_dependents();
  for (int i = threadIdx.x; i < sort_warps * num_experts; i += threads) counts[i] = 0;
  wait_for_dependencies();
  __syncthreads();
  const auto walk = [&](auto visit) {
    for (int i = first; i < last; i += 32) {
      const int64_t expert = i + lane < last ? experts[i + lane] : -1;
      const bool is_here = expert >= 0 && expert < num_experts;
      const int key = is_here ? static_cast<int>(expert) : -1;
      const unsigned same = __match_any_sync(~0u, key);
      const int rank = __popc(same & (1u << lane) - 1);
      int* count = counts + warp * num_experts + key;
      const int before = is_here ? *count : 0;
      __syncwarp();
      if (is_here && rank == 0) *count = before + __popc(same);
      __syncwarp();
      if (is_here) visit(i + lane, key, before + rank);
    }
  };
  walk([](int, int, int) {});
  __syncthreads();
  for (int e = threadIdx.x; e < num_experts; e += threads) {  // counts of a warp become the number of rows of warps before it
    int sum = 0;
    for (int w = 0; w < sort_warps; w++) {
      const int count = counts[w * num_experts + e];
      counts[w * num_experts + e] = sum;
      sum += count;
    }
    first_of[e] = sum;
  }
  __syncthreads();
  if (warp == 0) {
    int rows_before = 0, segments_before = 0;
    for (int e = 0; e < num_experts; e += 32) {
      const bool is_there = e + lane < num_experts;
      const int count = is_there ? first_of[e + lane] : 0;
      const int at = prefix_of_warp(count, rows_before);
      const int segment = prefix_of_warp((count + rows_per_segment - 1) / rows_per_segment, segments_before);
      if (is_there) first_of[e + lane] = at, segment_of[e + lane] = segment;
    }
    if (lane == 0) segment_of[num_experts] = segments_before;
    if (lane == 0) segment_of[num_experts + 1] = rows_before;
  }
  __syncthreads();
  const int all_rows = segment_of[num_experts + 1];
  for (int e = threadIdx.x; e < num_experts; e += threads) {
    const int end = e + 1 < num_experts ? first_of[e + 1] : all_rows;
    int segment = segment_of[e];
    for (int at = first_of[e]; at < end; at += rows_per_segment)
      segments[segment++] = {e, at, min(rows_per_segment, end - at), 0};
  }
  for (int i = segment_of[num_experts] + threadIdx.x; i < max_segments; i += threads) segments[i] = {0, 0, 0, 0};
  for (int i = all_rows + threadIdx.x; i < rows; i += threads) order[i] = 0;  // a row that exists
  walk([&](int row, int expert, int at) { order[first_of[expert] + at] = row; });
}

}  // namespace

cudaError_t launch_sort_by_expert(const int64_t* experts, int rows, int num_experts, int rows_per_segment, Segment* segments,
                                  int max_segments, int* order, cudaStream_t stream) {
  const int bytes = ((sort_warps + 2) * num_experts + 2) * static_cast<int>(sizeof(int));
  if (bytes > 48 << 10) {
    const cudaError_t error = cudaFuncSetAttribute(sort_by_expert, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
  }
  sort_by_expert<<<1, sort_warps * 32, bytes, stream>>>(experts, rows, num_experts, rows_per_segment, segments, max_segments, order);
  return cudaGetLastError();
}

}  // namespace lowbit::cuda
