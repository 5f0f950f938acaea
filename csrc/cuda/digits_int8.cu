#include "digits_launch.cuh"

namespace lowbit::cuda {

template cudaError_t launch_digits<8>(Digits a, int m, int group, DigitsPlan plan, cudaStream_t stream);

}  // namespace lowbit::cuda
