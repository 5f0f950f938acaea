// Schedule of a product of mixed_gemm.cuh, separate from its kernels, which take long to compile.
#pragma once

#include <cuda_runtime_api.h>

#include "mixed_gemm_args.cuh"
#include "mixed_gemm_launch.h"

namespace lowbit::cuda {

// The kernels for a product's codes: for which rows of x in a block there is one, and whether its operands are weights (rounded)
// or codes (exact); the kind of codes, for the cost of decoding. any: one of the kernels, with its threads, for occupancy
// queries.
struct KernelSet {
  static constexpr int sizes = 5;
  static constexpr int columns(int size) { return 16 << size; }
  bool takes[sizes], are_weights[sizes];
  int bits;
  bool is_integer, is_table, is_narrow;
  const void* any;
  int threads;
};

// Who splits K: the blocks of a cluster, and pairs of clusters for all tiles of y but the unpaired ones.
struct Schedule {
  int columns = 0, blocks = 0;
  int64_t unpaired_tiles = 0;
  float us = 1e30f;
};

// cudaErrorInvalidValue where `plan` asks for a kernel that does not exist.
cudaError_t schedule_for(const MixedGemm& a, int64_t k, const MixedGemmPlan& plan, const KernelSet& kernels, Schedule& cut);

}  // namespace lowbit::cuda
