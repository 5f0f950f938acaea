// lowbit_cuda::sort_by_expert: checks arguments and launches sort_by_expert.cu on torch's current stream.
#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <tuple>

#include "../schedule/segments.h"
#include "torch_helpers.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using namespace lowbit::cuda;

// experts int64 [rows] as (order int32 [rows], segments int32 [S, 4]).
std::tuple<Tensor, Tensor> sort_by_expert(Tensor experts, int64_t num_experts, int64_t rows_per_segment) {
  STD_TORCH_CHECK(experts.is_cuda() && experts.dim() == 1 && experts.scalar_type() == ScalarType::Long && experts.is_contiguous(),
                  "experts must be contiguous int64 [rows] on a CUDA device");
  STD_TORCH_CHECK(num_experts >= 1 && num_experts <= 1024, "there must be 1 to 1024 experts, got ", num_experts);
  STD_TORCH_CHECK(rows_per_segment >= 1, "rows_per_segment must be at least 1, got ", rows_per_segment);
  const int64_t rows = experts.size(0);
  STD_TORCH_CHECK(rows < (int64_t{1} << 30), "there must be fewer than 2^30 rows, got ", rows);
  const DeviceGuardIfNeeded guard(experts.get_device_index());
  const int64_t max_segments = std::min(rows, std::min(rows, num_experts) + rows / rows_per_segment);
  Tensor order = torch::stable::new_empty(experts, {rows}, ScalarType::Int);
  Tensor segments = torch::stable::new_empty(experts, {max_segments, 4}, ScalarType::Int);
  if (rows == 0) return {order, segments};
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(experts.get_device_index(), &stream));
  const cudaError_t error = launch_sort_by_expert(
      static_cast<const int64_t*>(experts.const_data_ptr()), static_cast<int>(rows), static_cast<int>(num_experts),
      static_cast<int>(rows_per_segment), static_cast<Segment*>(segments.mutable_data_ptr()), static_cast<int>(max_segments),
      static_cast<int*>(order.mutable_data_ptr()), static_cast<cudaStream_t>(stream));
  STD_TORCH_CHECK(error == cudaSuccess, "the kernel could not be launched: ", cudaGetErrorString(error));
  return {order, segments};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lowbit_cuda, m) {
  m.def("sort_by_expert(Tensor experts, int num_experts, int rows_per_segment) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(lowbit_cuda, CUDA, m) { m.impl("sort_by_expert", TORCH_BOX(&sort_by_expert)); }
