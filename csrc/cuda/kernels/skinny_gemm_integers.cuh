// Instantiates skinny_gemm.cuh for integers of one width.
#pragma once

#include "../schedule/skinny_gemm_launch.cuh"

namespace lowbit::cuda {

template <int bits>
struct IntegerDecoderOf {
  template <class T>
  using Family = ScaledIntegerDecoder<T, bits>;
};

template <int bits>
cudaError_t launch_skinny_width(const SkinnyGemm& a, bool x_is_half, SkinnyGemmPlan plan, cudaStream_t stream) {
  if constexpr (bits == 8)
    if (a.scale_type == ScaleType::e8m0)
      return launch_skinny<IntegerDecoderOf<8>::Family, Scales::e8m0, 32>(a, x_is_half, plan, stream);
  return launch_skinny<IntegerDecoderOf<bits>::template Family>(a, x_is_half, plan, stream);
}

}  // namespace lowbit::cuda
