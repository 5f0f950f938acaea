// What a binding asks of torch in each call, in the quickest ways that the stable ABI has: a question through torch's dispatcher
// takes as long as a small layer.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <vector>

namespace lowbit::cpu {

// The tensor itself, or a copy without gaps.
inline torch::stable::Tensor dense(const torch::stable::Tensor& t) {
  return t.is_contiguous() ? t : torch::stable::contiguous(t);
}

// What x [..., K] times a weight of n rows is written to, and how many rows of x there are.
struct Product {
  torch::stable::Tensor y;
  int64_t m = 1;

  Product(const torch::stable::Tensor& x, int64_t n) {
    std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end()), strides(sizes.size());
    sizes.back() = n;
    for (size_t i = 0; i + 1 < sizes.size(); i++) m *= sizes[i];
    int64_t step = 1;
    for (size_t i = sizes.size(); i-- > 0;) {
      strides[i] = step;
      step *= sizes[i] > 1 ? sizes[i] : 1;
    }
    int32_t dtype = 0;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
    AtenTensorHandle made = nullptr;
    const int64_t dimensions = static_cast<int64_t>(sizes.size());
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dimensions, sizes.data(), strides.data(), dtype,
                                                           aoti_torch_device_type_cpu(), 0, &made));
    y = torch::stable::Tensor(made);
  }
};

}  // namespace lowbit::cpu
