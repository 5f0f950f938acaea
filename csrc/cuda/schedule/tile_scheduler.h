// Which blocks make a product of mixed_gemm.cuh: chosen without its kernels, which take long to compile.
#pragma once

#include <cuda_runtime_api.h>

#include "mixed_gemm_args.cuh"
#include "mixed_gemm_launch.h"

namespace lowbit::cuda {

// The kernels for the codes of a product: for how many rows of x a block there is one, and whether its operands are weights or
// else codes; what these codes are, which tells how long decoding takes. `any` of the kernels, with its threads: each takes most of
// a multiprocessor's shared memory.
struct KernelSet {
  static constexpr int sizes = 5;
  static constexpr int columns(int size) { return 16 << size; }
  bool takes[sizes], are_weights[sizes];
  int bits;
  bool is_integer, is_table, is_narrow;
  const void* any;
  int threads;
};

// Who shares out the columns of W: the blocks of a cluster, and two clusters but for those tiles of y that one makes alone.
struct Schedule {
  int columns = 0, blocks = 0;
  int64_t unpaired_tiles = 0;
  float us = 1e30f;
};

// `cudaErrorInvalidValue` where `plan` asks for what there is no kernel for.
cudaError_t schedule_for(const MixedGemm& a, int64_t k, const MixedGemmPlan& plan, const KernelSet& kernels, Schedule& cut);

}  // namespace lowbit::cuda
