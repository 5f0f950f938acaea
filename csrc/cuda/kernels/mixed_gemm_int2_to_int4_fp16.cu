#include "../schedule/mixed_gemm_launch.cuh"

namespace lowbit::cuda {

using T = __half;
template cudaError_t launch_family<MixedIntegerDecoder<T, 2>, T>(MixedGemm, const void*, int64_t, bool, bool, MixedGemmPlan, cudaStream_t);
template cudaError_t launch_family<MixedIntegerDecoder<T, 3>, T>(MixedGemm, const void*, int64_t, bool, bool, MixedGemmPlan, cudaStream_t);
template cudaError_t launch_family<MixedIntegerDecoder<T, 4>, T>(MixedGemm, const void*, int64_t, bool, bool, MixedGemmPlan, cudaStream_t);

}  // namespace lowbit::cuda
