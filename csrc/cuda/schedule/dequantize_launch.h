// Interface of dequantize.cuh to its binding.
#pragma once

#include <cuda_runtime_api.h>

#include "../kernels/dequantize.cuh"
#include "../decode/format_family.h"

namespace lowbit::cuda {

cudaError_t launch_dequantize(Family family, const Dequantize& a, cudaStream_t stream);

}  // namespace lowbit::cuda
