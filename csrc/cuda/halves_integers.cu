#include "halves_launch.cuh"

namespace lowbit::cuda {
namespace {

template <int bits>
struct Of {
  template <class T>
  using Family = ScaledIntegers<T, bits>;
};

}  // namespace

cudaError_t launch_halves_of_integers(const Halves& a, int bits, bool x_is_half, HalvesPlan plan, cudaStream_t stream) {
  if (a.scale_type == ScaleType::e8m0) return launch_halves_of<Of<8>::Family, Scales::e8m0, 32>(a, x_is_half, plan, stream);
  switch (bits) {
    case 2: return launch_halves_of<Of<2>::Family>(a, x_is_half, plan, stream);
    case 3: return launch_halves_of<Of<3>::Family>(a, x_is_half, plan, stream);
    case 4: return launch_halves_of<Of<4>::Family>(a, x_is_half, plan, stream);
    case 5: return launch_halves_of<Of<5>::Family>(a, x_is_half, plan, stream);
    case 6: return launch_halves_of<Of<6>::Family>(a, x_is_half, plan, stream);
    case 7: return launch_halves_of<Of<7>::Family>(a, x_is_half, plan, stream);
    default: return launch_halves_of<Of<8>::Family>(a, x_is_half, plan, stream);
  }
}

}  // namespace lowbit::cuda
