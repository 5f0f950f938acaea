#include "halves_launch.cuh"

namespace lowbit::cuda {
namespace {

template <int bits, int exponent, Top top>
struct Of {
  template <class T>
  using Family = Floats<T, bits, exponent, top>;
};

template <class F>
cudaError_t launch(const Halves& a, bool x_is_half, HalvesPlan plan, cudaStream_t stream) {
  if (a.scale_type == ScaleType::e8m0) return launch_halves_of<F::template Family, Scales::e8m0, 32>(a, x_is_half, plan, stream);
  return launch_halves_of<F::template Family>(a, x_is_half, plan, stream);
}

}  // namespace

cudaError_t launch_halves_of_floats(const Halves& a, int bits, int exponent, bool x_is_half, HalvesPlan plan,
                                    cudaStream_t stream) {
  using E2m1 = Of<4, 2, Top::number>;
  if (a.scale_type == ScaleType::e4m3) return launch_halves_of<E2m1::Family, Scales::e4m3, 16>(a, x_is_half, plan, stream);
  if (bits == 4) return launch<E2m1>(a, x_is_half, plan, stream);
  if (bits == 6)
    return exponent == 2 ? launch<Of<6, 2, Top::number>>(a, x_is_half, plan, stream)
                         : launch<Of<6, 3, Top::number>>(a, x_is_half, plan, stream);
  return exponent == 4 ? launch<Of<8, 4, Top::nan_where_all_ones>>(a, x_is_half, plan, stream)
                       : launch<Of<8, 5, Top::infinity>>(a, x_is_half, plan, stream);
}

}  // namespace lowbit::cuda
