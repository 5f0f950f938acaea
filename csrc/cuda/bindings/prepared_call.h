// Products with a weight that was checked before. Checking a dozen arguments dominates the host time of a small product; a weight
// that stays where it is needs it once.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "torch_helpers.h"
#include "fragment_weight.h"

namespace lowbit::cuda {

// All arguments of a launch but x and y, in a byte tensor on the CPU that the caller keeps.
struct PreparedCall {
  // With m rows of x.
  using Launch = cudaError_t (*)(const PreparedCall&, const void* x, void* y, int m, cudaStream_t);

  uint64_t sign;  // rejects other bytes
  Launch launch;
  int64_t n, k, max_rows;
  int32_t device, dtype;
  alignas(16) uint8_t arguments[480];

  static constexpr uint64_t tag = 0x6c6f776269740001;

  PreparedCall(const torch::stable::Tensor& x, const FragmentWeight& weight, int64_t max_rows, Launch launch)
      : sign(tag), launch(launch), n(weight.n), k(weight.k), max_rows(max_rows), device(x.get_device_index()) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  }

  template <class A>
  void store_args(const A& a) {
    static_assert(std::is_trivially_copyable_v<A> && sizeof(A) <= sizeof(arguments));
    std::memcpy(arguments, &a, sizeof(A));
  }
  template <class A>
  A load_args() const {
    A a;
    std::memcpy(&a, arguments, sizeof(A));
    return a;
  }
};

// x [..., K] times the weight on the current stream, in a new tensor.
inline torch::stable::Tensor product_of(const PreparedCall& prepared, const torch::stable::Tensor& x_any) {
  const torch::stable::Tensor x = held_dense(x_any, "x");
  const auto [shape, m] = ProductShape(x, prepared.n);
  STD_TORCH_CHECK(m <= prepared.max_rows, "x must have at most ", prepared.max_rows, " rows, got ", m);
  torch::stable::Tensor y = empty_like(x, shape);
  if (m == 0 || prepared.n == 0) return y;
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(prepared.device, &stream));
  const cudaError_t error = prepared.launch(prepared, x.const_data_ptr(), y.mutable_data_ptr(), static_cast<int>(m),
                                            static_cast<cudaStream_t>(stream));
  STD_TORCH_CHECK(error == cudaSuccess, "the kernel could not be launched: ", cudaGetErrorString(error));
  return y;
}

// The PreparedCall as bytes; empty where the weight had to be copied, since nobody would own the copy.
inline torch::stable::Tensor bytes_of(const PreparedCall& prepared, const FragmentWeight& weight) {
  static_assert(std::is_trivially_copyable_v<PreparedCall>);
  const int64_t size = weight.is_uncopied ? static_cast<int64_t>(sizeof(PreparedCall)) : 0, stride = 1;
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, &size, &stride, aoti_torch_dtype_uint8(), aoti_torch_device_type_cpu(), 0,
                                                         &made));
  torch::stable::Tensor bytes(made);
  if (size) std::memcpy(bytes.mutable_data_ptr(), &prepared, sizeof(PreparedCall));
  return bytes;
}

}  // namespace lowbit::cuda
