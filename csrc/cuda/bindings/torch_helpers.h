// Queries to torch in the cheapest ways of its stable ABI: half a dozen queries through the dispatcher cost as much host time as
// the launch.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "../../storage_check.h"

namespace lowbit::cuda {

using lowbit::check_storage;

// `t`, or a contiguous copy.
inline torch::stable::Tensor dense(const torch::stable::Tensor& t) {
  return t.is_contiguous() ? t : torch::stable::contiguous(t);
}

// The same, after checking its storage.
inline torch::stable::Tensor held_dense(const torch::stable::Tensor& t, const char* name) {
  check_storage(t, name);
  return dense(t);
}

// An uninitialized tensor of this shape with the dtype and device of `like`.
inline torch::stable::Tensor empty_like(const torch::stable::Tensor& like, const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size());
  int64_t step = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = step;
    step *= shape[i] > 1 ? shape[i] : 1;
  }
  int32_t dtype = 0, device_type = 0, device_index = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(), strides.data(), dtype,
                                                         device_type, device_index, &made));
  return torch::stable::Tensor(made);
}

// Output shape and M of x [..., K] times a weight of n rows.
struct ProductShape {
  std::vector<int64_t> sizes;
  int64_t m = 1;
  ProductShape(const torch::stable::Tensor& x, int64_t n) : sizes(x.sizes().begin(), x.sizes().end()) {
    sizes.back() = n;
    for (size_t i = 0; i + 1 < sizes.size(); i++) m *= sizes[i];
  }
};

// How a weight is decoded, in one integer, as lowbit_kernels/cuda.py encodes it: each argument of an operator costs time.
struct PackedFormat {
  int64_t bits, exponent, group_size;  // exponent: bits of a float's exponent, 0 for integers, -1 for a table; group_size: -1 for
                                       // the row
  bool is_signed, scale_is_e8m0;
  float factor;

  explicit PackedFormat(int64_t kind)
      : bits(kind & 15),
        exponent((kind >> 4 & 15) - 1),
        group_size((kind >> 16) - 1),
        is_signed(kind >> 8 & 1),
        scale_is_e8m0(kind >> 9 & 1),
        factor(1.0f / static_cast<float>(uint64_t{1} << (kind >> 10 & 63))) {}
};

// Makes `device` current for its lifetime; does not query torch where it already is.
class DeviceGuardIfNeeded {
 public:
  explicit DeviceGuardIfNeeded(int32_t device) {
    int current = -1;
    if (cudaGetDevice(&current) != cudaSuccess || current != device) guard_.emplace(device);
  }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

}  // namespace lowbit::cuda
