// Products of experts: which rows of y a block computes, and with whose weight.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace lowbit::cuda {

// Rows [first, first + count) of a list of rows of y in the order of their experts, all of `expert`. count 0: nothing.
struct Segment {
  int expert, first, count, unused;
};

// A weight [E, N, K] is one of E N rows, whose experts are equal runs of tiles. Row i of y [rows, N] is row i / share of x times the
// matrix of experts[i].
struct ExpertRows {
  const int64_t* experts;   // [rows]: each row of y is a segment, in order; else null
  const Segment* segments;  // [max_segments]
  const int* order;         // [rows]: rows of y in the order of their experts
  int max_segments, share;

  __host__ __device__ bool is_used() const { return max_segments > 0; }
  // Row of y at a position of the order.
  __device__ __forceinline__ int row_of_y(int position) const { return order ? order[position] : position; }
  __device__ __forceinline__ int row_of_x(int position) const { return row_of_y(position) / share; }
  __device__ __forceinline__ Segment segment(int index, int num_experts) const {
    if (!experts) return segments[index];
    const int64_t expert = experts[index];
    const bool is_here = expert >= 0 && expert < num_experts;
    return {is_here ? static_cast<int>(expert) : 0, index, is_here, 0};
  }
};

// Fills `segments` (each of at most rows_per_segment) and `order` by a stable counting sort of experts [rows]. Rows of no expert
// (an index outside of 0 .. num_experts - 1) are in no segment.
cudaError_t launch_sort_by_expert(const int64_t* experts, int rows, int num_experts, int rows_per_segment, Segment* segments,
                                  int max_segments, int* order, cudaStream_t stream);

}  // namespace lowbit::cuda
