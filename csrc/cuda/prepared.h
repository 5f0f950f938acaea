// Products whose weight was checked before. Most of the host time of a small product goes into asking a dozen arguments what
// they are; a weight that stays where it is need be asked once.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "host.h"
#include "weight_in_tiles.h"

namespace lowbit::cuda {

// All that a launch takes but x and y, as it lies in a tensor of bytes on the CPU that whoever prepared it keeps.
struct Prepared {
  // With m rows of x.
  using Launch = cudaError_t (*)(const Prepared&, const void* x, void* y, int m, cudaStream_t);

  uint64_t sign;  // tells such bytes from others
  Launch launch;
  int64_t n, k, most_rows;
  int32_t device, dtype;
  alignas(16) uint8_t arguments[480];

  static constexpr uint64_t own_sign = 0x6c6f776269740001;

  Prepared(const torch::stable::Tensor& x, const WeightInTiles& weight, int64_t most_rows, Launch launch)
      : sign(own_sign), launch(launch), n(weight.n), k(weight.k), most_rows(most_rows), device(x.get_device_index()) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  }

  template <class A>
  void keep(const A& a) {
    static_assert(std::is_trivially_copyable_v<A> && sizeof(A) <= sizeof(arguments));
    std::memcpy(arguments, &a, sizeof(A));
  }
  template <class A>
  A kept() const {
    A a;
    std::memcpy(&a, arguments, sizeof(A));
    return a;
  }
};

// On the current stream: x [..., K] times the weight, in a new tensor.
inline torch::stable::Tensor product_of(const Prepared& prepared, const torch::stable::Tensor& x_any) {
  const torch::stable::Tensor x = held_dense(x_any, "x");
  const auto [shape, m] = ShapeOfProduct(x, prepared.n);
  STD_TORCH_CHECK(m <= prepared.most_rows, "x must have at most ", prepared.most_rows, " rows, got ", m);
  torch::stable::Tensor y = empty_like(x, shape);
  if (m == 0 || prepared.n == 0) return y;
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(prepared.device, &stream));
  const cudaError_t error = prepared.launch(prepared, x.const_data_ptr(), y.mutable_data_ptr(), static_cast<int>(m),
                                            static_cast<cudaStream_t>(stream));
  STD_TORCH_CHECK(error == cudaSuccess, "the kernel could not be launched: ", cudaGetErrorString(error));
  return y;
}

// Its bytes; none where the weight had to be copied, which somebody would have to keep.
inline torch::stable::Tensor bytes_of(const Prepared& prepared, const WeightInTiles& weight) {
  static_assert(std::is_trivially_copyable_v<Prepared>);
  const int64_t size = weight.is_as_given ? static_cast<int64_t>(sizeof(Prepared)) : 0, stride = 1;
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, &size, &stride, aoti_torch_dtype_uint8(), aoti_torch_device_type_cpu(), 0,
                                                         &made));
  torch::stable::Tensor bytes(made);
  if (size) std::memcpy(bytes.mutable_data_ptr(), &prepared, sizeof(Prepared));
  return bytes;
}

}  // namespace lowbit::cuda
