// Which blocks make a product of gemm.cuh: chosen without its kernels, which take long to compile.
#pragma once

#include <cuda_runtime_api.h>

#include "gemm_arguments.cuh"
#include "gemm_launch.h"

namespace lowbit::cuda {

// The kernels for the codes of a product: for how many rows of x a block there is one, and whether its operands are weights or
// else codes; what these codes are, which tells how long decoding takes. `any` of the kernels, with its threads: each takes most of
// a multiprocessor's shared memory.
struct Kernels {
  static constexpr int sizes = 5;
  static constexpr int columns(int size) { return 16 << size; }
  bool takes[sizes], are_weights[sizes];
  int bits;
  bool is_integer, is_table, is_narrow;
  const void* any;
  int threads;
};

// Who shares out the columns of W: the blocks of a cluster, and two clusters but for those tiles of y that one makes alone.
struct Cut {
  int columns = 0, blocks = 0;
  int64_t alone = 0;
  float us = 1e30f;
};

// `cudaErrorInvalidValue` where `plan` asks for what there is no kernel for.
cudaError_t cut_of(const Gemm& a, int64_t k, const GemmPlan& plan, const Kernels& kernels, Cut& cut);

}  // namespace lowbit::cuda
