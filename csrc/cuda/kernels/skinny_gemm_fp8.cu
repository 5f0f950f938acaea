#include "skinny_gemm_floats.cuh"

namespace lowbit::cuda {

cudaError_t launch_skinny_fp8(const SkinnyGemm& a, int exponent, bool x_is_half, SkinnyGemmPlan plan, cudaStream_t stream) {
  return exponent == 4 ? launch_skinny_format<FloatDecoderOf<8, 4, TopExponent::nan_where_all_ones>>(a, x_is_half, plan, stream)
                       : launch_skinny_format<FloatDecoderOf<8, 5, TopExponent::infinity>>(a, x_is_half, plan, stream);
}

}  // namespace lowbit::cuda
