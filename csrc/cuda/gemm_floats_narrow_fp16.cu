#include "gemm_launch.cuh"

namespace lowbit::cuda {

using T = __half;
template cudaError_t launch_family<Floats<T, 4, 2, Top::number>, T>(Gemm, const void*, int64_t, bool, bool, GemmPlan,
                                                                              cudaStream_t);
template cudaError_t launch_family<Floats<T, 6, 2, Top::number>, T>(Gemm, const void*, int64_t, bool, bool, GemmPlan,
                                                                              cudaStream_t);
template cudaError_t launch_family<Floats<T, 6, 3, Top::number>, T>(Gemm, const void*, int64_t, bool, bool, GemmPlan,
                                                                              cudaStream_t);

}  // namespace lowbit::cuda
