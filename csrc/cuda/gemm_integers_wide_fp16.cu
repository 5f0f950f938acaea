#include "gemm_launch.cuh"

namespace lowbit::cuda {

using T = __half;
template cudaError_t launch_family<Whole<T, 5>, T>(Gemm, const void*, int64_t, bool, bool, GemmPlan, cudaStream_t);
template cudaError_t launch_family<Whole<T, 6>, T>(Gemm, const void*, int64_t, bool, bool, GemmPlan, cudaStream_t);
template cudaError_t launch_family<Whole<T, 7>, T>(Gemm, const void*, int64_t, bool, bool, GemmPlan, cudaStream_t);
template cudaError_t launch_family<Whole<T, 8>, T>(Gemm, const void*, int64_t, bool, bool, GemmPlan, cudaStream_t);

}  // namespace lowbit::cuda
