#include "../schedule/split_int8_gemv_launch.cuh"

namespace lowbit::cuda {

cudaError_t launch_split_int8_mxint8(SplitInt8Args a, int m, int, SplitInt8Plan plan, cudaStream_t stream) {
  using W = IntegerWeights<8, 1, false, true>;
  return m == 1 ? launch_split_int8_kernel<W, 1>(a, plan, stream) : launch_split_int8_kernel<W, 2>(a, plan, stream);
}

}  // namespace lowbit::cuda
