// What the bindings know of mixed_gemm.cuh: a kernel for each family of codes and type of x.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../decode/format_family.h"
#include "mixed_gemm_args.cuh"

namespace lowbit::cuda {

// 0: the launcher chooses.
struct MixedGemmPlan {
  int columns, parts, early;  // rows of x a block, blocks a cluster, -1: not before its predecessor ends
  int shared;                 // tiles of y that two clusters make: 1, none; 2, those that are left for a last turn
  void* (*allocate)(void* holder, int64_t bytes);  // memory of the device until the kernel ends
  void* holder;
};

// `may_round`: weights times scales may be rounded to the type of x once; `rounds_nothing`: such products have few bits.
cudaError_t launch_mixed_gemm(Family family, bool x_is_half, MixedGemm a, const void* x, int64_t k, bool may_round, bool rounds_nothing,
                        MixedGemmPlan plan, cudaStream_t stream);

}  // namespace lowbit::cuda
