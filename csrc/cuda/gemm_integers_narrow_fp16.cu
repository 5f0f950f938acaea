#include "gemm_launch.cuh"

namespace lowbit::cuda {

using T = __half;
template cudaError_t launch_family<Whole<T, 2>, T>(Gemm, const void*, int64_t, bool, bool, GemmPlan, cudaStream_t);
template cudaError_t launch_family<Whole<T, 3>, T>(Gemm, const void*, int64_t, bool, bool, GemmPlan, cudaStream_t);
template cudaError_t launch_family<Whole<T, 4>, T>(Gemm, const void*, int64_t, bool, bool, GemmPlan, cudaStream_t);

}  // namespace lowbit::cuda
