#include "digits_e2m1.cuh"
#include "digits_launch.cuh"

namespace lowbit::cuda {

cudaError_t launch_digits_of_e2m1(Digits a, int, int group, DigitsPlan plan, cudaStream_t stream) {
  if (a.scale_size == 1)
    return group == 32 ? launch_digits_kernel<E2m1Weights<Narrow::e8m0, 32>, 1>(a, plan, stream)
                       : launch_digits_kernel<E2m1Weights<Narrow::e4m3, 16>, 1>(a, plan, stream);
  switch (group) {
    case 32: return launch_digits_kernel<E2m1Weights<Narrow::none, 32>, 1>(a, plan, stream);
    case 64: return launch_digits_kernel<E2m1Weights<Narrow::none, 64>, 1>(a, plan, stream);
    default: return launch_digits_kernel<E2m1Weights<Narrow::none, 128>, 1>(a, plan, stream);
  }
}

}  // namespace lowbit::cuda
