#include "../schedule/skinny_gemm_launch.cuh"
#include "../decode/nf4_lut.cuh"

namespace lowbit::cuda {

cudaError_t launch_skinny_nf4(const SkinnyGemm& a, bool x_is_half, SkinnyGemmPlan plan, cudaStream_t stream) {
  return launch_skinny<Nf4Decoder>(a, x_is_half, plan, stream);
}

}  // namespace lowbit::cuda
