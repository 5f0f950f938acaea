#include "../schedule/mixed_gemm_launch.cuh"

namespace lowbit::cuda {

using T = __half;
template cudaError_t launch_family<FloatDecoder<T, 8, 4, TopExponent::nan_where_all_ones>, T>(MixedGemm, const void*, int64_t, bool, bool, MixedGemmPlan,
                                                                              cudaStream_t);
template cudaError_t launch_family<FloatDecoder<T, 8, 5, TopExponent::infinity>, T>(MixedGemm, const void*, int64_t, bool, bool, MixedGemmPlan,
                                                                              cudaStream_t);
template cudaError_t launch_family<Nf4PairDecoder<T>, T>(MixedGemm, const void*, int64_t, bool, bool, MixedGemmPlan, cudaStream_t);

}  // namespace lowbit::cuda
