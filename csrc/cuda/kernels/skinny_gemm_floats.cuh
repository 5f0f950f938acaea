// Instantiates skinny_gemm.cuh for float formats of one width.
#pragma once

#include "../schedule/skinny_gemm_launch.cuh"

namespace lowbit::cuda {

template <int bits, int exponent, TopExponent top>
struct FloatDecoderOf {
  template <class T>
  using Family = FloatDecoder<T, bits, exponent, top>;
};

template <class F>
cudaError_t launch_skinny_format(const SkinnyGemm& a, bool x_is_half, SkinnyGemmPlan plan, cudaStream_t stream) {
  if (a.scale_type == ScaleType::e8m0) return launch_skinny<F::template Family, Scales::e8m0, 32>(a, x_is_half, plan, stream);
  return launch_skinny<F::template Family>(a, x_is_half, plan, stream);
}

}  // namespace lowbit::cuda
