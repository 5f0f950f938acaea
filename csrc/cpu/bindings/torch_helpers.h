// Queries to torch in the cheapest ways of its stable ABI: a query through the dispatcher takes as long as a small layer.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../../storage_check.h"

namespace lowbit::cpu {

using lowbit::check_storage;
using lowbit::max_dim_size;

// Raises unless `t` is on the CPU and its storage holds what its sizes say.
inline void check_on_cpu(const torch::stable::Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.is_cpu(), name, " must be on the CPU");
  check_storage(t, name);
}
inline void check_on_cpu(const std::optional<torch::stable::Tensor>& t, const char* name) {
  if (t) check_on_cpu(*t, name);
}

// `t`, or a contiguous copy.
inline torch::stable::Tensor dense(const torch::stable::Tensor& t) {
  return t.is_contiguous() ? t : torch::stable::contiguous(t);
}

// Output tensor and M of x [..., K] times a weight of n rows.
struct Product {
  int64_t m = 1;
  torch::stable::Tensor y;

  Product(const torch::stable::Tensor& x, int64_t n) : y(make(x, n, m)) {}

 private:
  static AtenTensorHandle make(const torch::stable::Tensor& x, int64_t n, int64_t& m) {
    constexpr int64_t max_inline_dims = 4;  // more dimensions need an allocation
    const auto of_x = x.sizes();
    const int64_t dimensions = static_cast<int64_t>(of_x.size());
    int64_t temp[2 * max_inline_dims];
    std::vector<int64_t> many(dimensions > max_inline_dims ? 2 * dimensions : 0);
    int64_t *const sizes = dimensions > max_inline_dims ? many.data() : temp, *const strides = sizes + dimensions;
    std::copy(of_x.begin(), of_x.end(), sizes);
    sizes[dimensions - 1] = n;
    int64_t step = 1;
    for (int64_t i = dimensions; i-- > 0;) {
      strides[i] = step;
      STD_TORCH_CHECK(!__builtin_mul_overflow(step, sizes[i] > 1 ? sizes[i] : 1, &step), "x and a weight of ", n,
                      " rows have more products than memory could hold");
    }
    for (int64_t i = 0; i + 1 < dimensions; i++) m *= sizes[i];
    int32_t dtype = 0;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
    AtenTensorHandle y = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dimensions, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, &y));
    return y;
  }
};

}  // namespace lowbit::cpu
