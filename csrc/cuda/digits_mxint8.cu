#include "digits_launch.cuh"

namespace lowbit::cuda {

cudaError_t launch_digits_of_mxint8(Digits a, int m, int, DigitsPlan plan, cudaStream_t stream) {
  using W = IntegerWeights<8, 1, false, true>;
  return m == 1 ? launch_digits_kernel<W, 1>(a, plan, stream) : launch_digits_kernel<W, 2>(a, plan, stream);
}

}  // namespace lowbit::cuda
