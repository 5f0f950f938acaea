// Products of experts: whose weight a row of y is made with.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace lowbit::cuda {

// A weight [E, N, K] is one of E N rows, whose experts are equal runs of tiles. Row i of y [rows, N] is row i / share of x times the
// matrix of chosen[i], or 0 where that is no index of an expert.
struct ExpertRows {
  const int64_t* chosen;  // [rows]
  int rows, experts, share;

  __host__ __device__ bool is_used() const { return rows > 0; }
  // The expert of a row of y; -1 where there is none.
  __device__ __forceinline__ int expert_of(int row) const {
    const int64_t expert = chosen[row];
    return expert >= 0 && expert < experts ? static_cast<int>(expert) : -1;
  }
};

}  // namespace lowbit::cuda
