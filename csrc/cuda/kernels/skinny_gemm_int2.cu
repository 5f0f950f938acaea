#include "skinny_gemm_integers.cuh"

namespace lowbit::cuda {

template cudaError_t launch_skinny_width<2>(const SkinnyGemm&, bool, SkinnyGemmPlan, cudaStream_t);

}  // namespace lowbit::cuda
