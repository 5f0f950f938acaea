#include "halves_floats.cuh"

namespace lowbit::cuda {

cudaError_t launch_halves_of_fp8(const Halves& a, int exponent, bool x_is_half, HalvesPlan plan, cudaStream_t stream) {
  return exponent == 4 ? launch_halves_of_format<FloatsOf<8, 4, Top::nan_where_all_ones>>(a, x_is_half, plan, stream)
                       : launch_halves_of_format<FloatsOf<8, 5, Top::infinity>>(a, x_is_half, plan, stream);
}

}  // namespace lowbit::cuda
