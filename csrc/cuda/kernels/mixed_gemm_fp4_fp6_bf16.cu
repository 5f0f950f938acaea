#include "../schedule/mixed_gemm_launch.cuh"

namespace lowbit::cuda {

using T = __nv_bfloat16;
template cudaError_t launch_family<FloatDecoder<T, 4, 2, TopExponent::number>, T>(MixedGemm, const void*, int64_t, bool, bool, MixedGemmPlan,
                                                                              cudaStream_t);
template cudaError_t launch_family<FloatDecoder<T, 6, 2, TopExponent::number>, T>(MixedGemm, const void*, int64_t, bool, bool, MixedGemmPlan,
                                                                              cudaStream_t);
template cudaError_t launch_family<FloatDecoder<T, 6, 3, TopExponent::number>, T>(MixedGemm, const void*, int64_t, bool, bool, MixedGemmPlan,
                                                                              cudaStream_t);

}  // namespace lowbit::cuda
