// Checks, once where a call enters C++, that a tensor's storage holds what its sizes say. A storage may have been freed or shrunk
// under a tensor, which torch does not notice until the memory is read.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <optional>

#ifndef STABLE_TORCH_ERROR_CODE_CHECK  // torch before 2.12
#define STABLE_TORCH_ERROR_CODE_CHECK TORCH_ERROR_CODE_CHECK
#endif

namespace lowbit {

// Larger sizes could overflow 64 bits in products.
constexpr int64_t max_dim_size = int64_t{1} << 40;

// Raises where elements of `t` lie outside its storage.
inline void check_storage(const torch::stable::Tensor& t, const char* name) {
  const AtenTensorHandle handle = t.get();
  int64_t dimensions = 0, bytes = 0, offset = 0, *sizes = nullptr, *strides = nullptr;
  int32_t dtype = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(handle, &bytes));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle, &dimensions));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle, &sizes));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle, &strides));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(handle, &offset));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle, &dtype));
  __int128 last = offset;
  bool is_empty = false;
  for (int64_t i = 0; i < dimensions; i++) {
    is_empty = is_empty || sizes[i] == 0;
    last += static_cast<__int128>(sizes[i] - 1) * strides[i];
  }
  const bool is_inside = is_empty || (last + 1) * static_cast<__int128>(aoti_torch_dtype_element_size(dtype)) <= bytes;
  STD_TORCH_CHECK(is_inside, name, " has ", t.numel(), " elements, which its storage of ", bytes,
                  " bytes does not hold: it was freed or resized, give a tensor that has its memory");
}

inline void check_storage(const std::optional<torch::stable::Tensor>& t, const char* name) {
  if (t) check_storage(*t, name);
}

}  // namespace lowbit
