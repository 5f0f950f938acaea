#include "../schedule/split_int8_gemv_launch.cuh"

namespace lowbit::cuda {

template cudaError_t launch_split_int8<3>(SplitInt8Args a, int m, int group, SplitInt8Plan plan, cudaStream_t stream);

}  // namespace lowbit::cuda
