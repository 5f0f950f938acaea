#include "halves_floats.cuh"

namespace lowbit::cuda {

cudaError_t launch_halves_of_fp4(const Halves& a, bool x_is_half, HalvesPlan plan, cudaStream_t stream) {
  using E2m1 = FloatsOf<4, 2, Top::number>;
  if (a.scale_type == ScaleType::e4m3) return launch_halves_of<E2m1::Family, Scales::e4m3, 16>(a, x_is_half, plan, stream);
  return launch_halves_of_format<E2m1>(a, x_is_half, plan, stream);
}

}  // namespace lowbit::cuda
