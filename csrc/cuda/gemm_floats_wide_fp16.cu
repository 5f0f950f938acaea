#include "gemm_launch.cuh"

namespace lowbit::cuda {

using T = __half;
template cudaError_t launch_family<Floats<T, 8, 4, Top::nan_where_all_ones>, T>(Gemm, const void*, int64_t, bool, bool, GemmPlan,
                                                                              cudaStream_t);
template cudaError_t launch_family<Floats<T, 8, 5, Top::infinity>, T>(Gemm, const void*, int64_t, bool, bool, GemmPlan,
                                                                              cudaStream_t);
template cudaError_t launch_family<QuantilePairs<T>, T>(Gemm, const void*, int64_t, bool, bool, GemmPlan, cudaStream_t);

}  // namespace lowbit::cuda
