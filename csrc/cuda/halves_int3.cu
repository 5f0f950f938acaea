#include "halves_integers.cuh"

namespace lowbit::cuda {

template cudaError_t launch_halves_of_width<3>(const Halves&, bool, HalvesPlan, cudaStream_t);

}  // namespace lowbit::cuda
