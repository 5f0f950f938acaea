#include "skinny_gemm_floats.cuh"

namespace lowbit::cuda {

cudaError_t launch_skinny_fp4(const SkinnyGemm& a, bool x_is_half, SkinnyGemmPlan plan, cudaStream_t stream) {
  using E2m1 = FloatDecoderOf<4, 2, TopExponent::number>;
  if (a.scale_type == ScaleType::e4m3) return launch_skinny<E2m1::Family, Scales::e4m3, 16>(a, x_is_half, plan, stream);
  return launch_skinny_format<E2m1>(a, x_is_half, plan, stream);
}

}  // namespace lowbit::cuda
