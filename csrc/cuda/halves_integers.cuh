// Integers of one width for halves.cuh.
#pragma once

#include "halves_launch.cuh"

namespace lowbit::cuda {

template <int bits>
struct IntegersOf {
  template <class T>
  using Family = ScaledIntegers<T, bits>;
};

template <int bits>
cudaError_t launch_halves_of_width(const Halves& a, bool x_is_half, HalvesPlan plan, cudaStream_t stream) {
  if constexpr (bits == 8)
    if (a.scale_type == ScaleType::e8m0)
      return launch_halves_of<IntegersOf<8>::Family, Scales::e8m0, 32>(a, x_is_half, plan, stream);
  return launch_halves_of<IntegersOf<bits>::template Family>(a, x_is_half, plan, stream);
}

}  // namespace lowbit::cuda
