#include "halves_launch.cuh"
#include "quantiles.cuh"

namespace lowbit::cuda {

cudaError_t launch_halves_of_quantiles(const Halves& a, bool x_is_half, HalvesPlan plan, cudaStream_t stream) {
  return launch_halves_of<Quantiles>(a, x_is_half, plan, stream);
}

}  // namespace lowbit::cuda
