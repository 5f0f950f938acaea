#include "skinny_gemm_floats.cuh"

namespace lowbit::cuda {

cudaError_t launch_skinny_fp6(const SkinnyGemm& a, int exponent, bool x_is_half, SkinnyGemmPlan plan, cudaStream_t stream) {
  return exponent == 2 ? launch_skinny_format<FloatDecoderOf<6, 2, TopExponent::number>>(a, x_is_half, plan, stream)
                       : launch_skinny_format<FloatDecoderOf<6, 3, TopExponent::number>>(a, x_is_half, plan, stream);
}

}  // namespace lowbit::cuda
