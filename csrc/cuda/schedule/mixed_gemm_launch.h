// Interface of mixed_gemm.cuh to its binding: a launcher for each family of formats and type of x.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../decode/format_family.h"
#include "mixed_gemm_args.cuh"

namespace lowbit::cuda {

// 0: chosen by the scheduler.
struct MixedGemmPlan {
  int columns, parts, early;  // rows of x in a block, blocks of a cluster; early -1: not before the predecessor ends
  int shared;                 // tiles of y shared by two clusters: 1 none, 2 those of the last wave
  void* (*allocate)(void* holder, int64_t bytes);  // allocates device memory that lives until the kernel ends
  void* holder;
};

// may_round: value * scale may be rounded once to the type of x; rounds_nothing: such products are exact.
cudaError_t launch_mixed_gemm(Family family, bool x_is_half, MixedGemm a, const void* x, int64_t k, bool may_round, bool rounds_nothing,
                        MixedGemmPlan plan, cudaStream_t stream);

}  // namespace lowbit::cuda
