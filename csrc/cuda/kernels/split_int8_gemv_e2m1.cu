#include "../mma/split_int8_mma_e2m1.cuh"
#include "../schedule/split_int8_gemv_launch.cuh"

namespace lowbit::cuda {

cudaError_t launch_split_int8_e2m1(SplitInt8Args a, int, int group, SplitInt8Plan plan, cudaStream_t stream) {
  if (a.scale_size == 1)
    return group == 32 ? launch_split_int8_kernel<E2m1Weights<NarrowScale::e8m0, 32>, 1>(a, plan, stream)
                       : launch_split_int8_kernel<E2m1Weights<NarrowScale::e4m3, 16>, 1>(a, plan, stream);
  switch (group) {
    case 32: return launch_split_int8_kernel<E2m1Weights<NarrowScale::none, 32>, 1>(a, plan, stream);
    case 64: return launch_split_int8_kernel<E2m1Weights<NarrowScale::none, 64>, 1>(a, plan, stream);
    default: return launch_split_int8_kernel<E2m1Weights<NarrowScale::none, 128>, 1>(a, plan, stream);
  }
}

}  // namespace lowbit::cuda
