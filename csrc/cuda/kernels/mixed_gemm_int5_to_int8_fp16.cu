#include "../schedule/mixed_gemm_launch.cuh"

namespace lowbit::cuda {

using T = __half;
template cudaError_t launch_family<MixedIntegerDecoder<T, 5>, T>(MixedGemm, const void*, int64_t, bool, bool, MixedGemmPlan, cudaStream_t);
template cudaError_t launch_family<MixedIntegerDecoder<T, 6>, T>(MixedGemm, const void*, int64_t, bool, bool, MixedGemmPlan, cudaStream_t);
template cudaError_t launch_family<MixedIntegerDecoder<T, 7>, T>(MixedGemm, const void*, int64_t, bool, bool, MixedGemmPlan, cudaStream_t);
template cudaError_t launch_family<MixedIntegerDecoder<T, 8>, T>(MixedGemm, const void*, int64_t, bool, bool, MixedGemmPlan, cudaStream_t);

}  // namespace lowbit::cuda
