// Floats of one width for halves.cuh.
#pragma once

#include "halves_launch.cuh"

namespace lowbit::cuda {

template <int bits, int exponent, Top top>
struct FloatsOf {
  template <class T>
  using Family = Floats<T, bits, exponent, top>;
};

template <class F>
cudaError_t launch_halves_of_format(const Halves& a, bool x_is_half, HalvesPlan plan, cudaStream_t stream) {
  if (a.scale_type == ScaleType::e8m0) return launch_halves_of<F::template Family, Scales::e8m0, 32>(a, x_is_half, plan, stream);
  return launch_halves_of<F::template Family>(a, x_is_half, plan, stream);
}

}  // namespace lowbit::cuda
