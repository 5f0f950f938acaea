#include "halves_floats.cuh"

namespace lowbit::cuda {

cudaError_t launch_halves_of_fp6(const Halves& a, int exponent, bool x_is_half, HalvesPlan plan, cudaStream_t stream) {
  return exponent == 2 ? launch_halves_of_format<FloatsOf<6, 2, Top::number>>(a, x_is_half, plan, stream)
                       : launch_halves_of_format<FloatsOf<6, 3, Top::number>>(a, x_is_half, plan, stream);
}

}  // namespace lowbit::cuda
