// Selects the launcher of skinny_gemm.cuh for a format.
#include "skinny_gemm_launch.h"

namespace lowbit::cuda {

cudaError_t launch_skinny_integers(const SkinnyGemm& a, int bits, bool x_is_half, SkinnyGemmPlan plan, cudaStream_t stream) {
  switch (bits) {
    case 2: return launch_skinny_width<2>(a, x_is_half, plan, stream);
    case 3: return launch_skinny_width<3>(a, x_is_half, plan, stream);
    case 4: return launch_skinny_width<4>(a, x_is_half, plan, stream);
    case 5: return launch_skinny_width<5>(a, x_is_half, plan, stream);
    case 6: return launch_skinny_width<6>(a, x_is_half, plan, stream);
    case 7: return launch_skinny_width<7>(a, x_is_half, plan, stream);
    default: return launch_skinny_width<8>(a, x_is_half, plan, stream);
  }
}

cudaError_t launch_skinny_floats(const SkinnyGemm& a, int bits, int exponent, bool x_is_half, SkinnyGemmPlan plan,
                                    cudaStream_t stream) {
  if (bits == 4) return launch_skinny_fp4(a, x_is_half, plan, stream);
  if (bits == 6) return launch_skinny_fp6(a, exponent, x_is_half, plan, stream);
  return launch_skinny_fp8(a, exponent, x_is_half, plan, stream);
}

}  // namespace lowbit::cuda
