// lowbit_cuda::linear: checks arguments and launches gemv.cuh on torch's current stream.
#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "../kernels/gemv.cuh"
#include "torch_helpers.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using namespace lowbit::cuda;

// `t` with contiguous rows; rows may be apart (a slice of a weight).
Tensor with_dense_rows(const Tensor& t) {
  const int64_t last = t.dim() - 1;
  return last < 0 || t.numel() == 0 || t.stride(last) == 1 || t.size(last) == 1 ? t : dense(t);
}

void check_matrix(const Tensor& t, const char* name, const Tensor& x, int64_t rows, int64_t columns) {
  const bool right_shape = t.dim() == 2 && t.size(0) == rows && t.size(1) == columns;
  STD_TORCH_CHECK(t.is_cuda() && t.get_device_index() == x.get_device_index() && right_shape, name,
                  " must be on the device of x and [", rows, ", ", columns, "]");
}

bool on_16_bytes(const void* data, int64_t stride) { return (reinterpret_cast<uintptr_t>(data) | stride) % 16 == 0; }

template <int bits, typename T>
void launch(const Gemv& a, cudaStream_t stream) {
  constexpr int chunk = 128 / bits;
  const bool is_aligned = on_16_bytes(a.packed, a.packed_stride) && on_16_bytes(a.x, 0) && a.k % chunk == 0 &&
                          a.group % chunk == 0 && a.k < (int64_t{1} << 31);
  const auto blocks = [&](int rows) { return static_cast<unsigned>((a.n + rows - 1) / rows); };
  if (!is_aligned) {
    gemv_any<bits, T><<<blocks(1), warps * 32, 0, stream>>>(a);
  } else if (a.m == 1) {
    gemv_aligned<bits, T, 1><<<blocks(block_rows<1>), warps * 32, 0, stream>>>(a);
  } else if (a.m == 2) {
    gemv_aligned<bits, T, 2><<<blocks(block_rows<2>), warps * 32, 0, stream>>>(a);
  } else if (a.m <= 4) {
    gemv_aligned<bits, T, 4><<<blocks(block_rows<4>), warps * 32, 0, stream>>>(a);
  } else {
    gemv_aligned<bits, T, 8><<<blocks(block_rows<8>), warps * 32, 0, stream>>>(a);
  }
}

Tensor linear(Tensor x_any, Tensor packed_any, Tensor scale_any, std::optional<Tensor> zero_any,
              std::optional<Tensor> bias_any, int64_t bits, bool is_signed, int64_t group_size) {
  const ScalarType dtype = x_any.scalar_type();
  STD_TORCH_CHECK(x_any.is_cuda() && x_any.dim() >= 1 && (dtype == ScalarType::Half || dtype == ScalarType::BFloat16),
                  "x must be float16 or bfloat16 [..., K] on a CUDA device");
  STD_TORCH_CHECK(packed_any.dim() == 2 && packed_any.scalar_type() == ScalarType::Byte, "packed must be uint8 [N, bytes]");
  STD_TORCH_CHECK(bits == 4 || bits == 8, "bits must be 4 or 8, got ", bits);
  STD_TORCH_CHECK(group_size == -1 || group_size >= 1, "group_size must be -1 or at least 1, got ", group_size);
  STD_TORCH_CHECK(!is_signed || !zero_any, "a zero point goes with unsigned codes: is_signed must be False");
  check_storage(x_any, "x"), check_storage(packed_any, "packed"), check_storage(scale_any, "scale");
  check_storage(zero_any, "zero_point"), check_storage(bias_any, "bias");
  const DeviceGuardIfNeeded guard(x_any.get_device_index());
  const Tensor x = dense(x_any), packed = with_dense_rows(packed_any), scale = with_dense_rows(scale_any);

  Gemv a = {};
  a.n = packed.size(0);
  a.k = x.size(x.dim() - 1);
  const auto [shape, m] = ProductShape(x, a.n);
  STD_TORCH_CHECK(m <= max_rows, "x must have at most ", max_rows, " rows, got ", m);
  a.m = static_cast<int>(m);
  a.group = group_size == -1 ? (a.k > 0 ? a.k : 1) : std::min<int64_t>(group_size, 1 << 30);
  a.is_signed = is_signed;
  const int64_t groups = (a.k + a.group - 1) / a.group;
  STD_TORCH_CHECK(a.n < (int64_t{1} << 31), "a weight must have fewer than 2^31 rows, got ", a.n);

  check_matrix(packed, "packed", x, a.n, lowbit::packed_size(static_cast<int>(bits), a.k));
  a.packed = static_cast<const uint8_t*>(packed.const_data_ptr());
  a.packed_stride = packed.stride(0);
  check_matrix(scale, "scale", x, a.n, groups);
  a.scale = scale.const_data_ptr();
  a.scale_stride = scale.stride(0);
  switch (scale.scalar_type()) {
    case ScalarType::Float: a.scale_dtype = Dtype::float32; break;
    case ScalarType::BFloat16: a.scale_dtype = Dtype::bfloat16; break;
    case ScalarType::Half: a.scale_dtype = Dtype::float16; break;
    default:
      STD_TORCH_CHECK(false, "scale must be float32, bfloat16 or float16, got ",
                      torch::headeronly::toString(scale.scalar_type()));
  }
  Tensor zero = scale, bias = scale;  // kept alive until the launch
  if (zero_any) {
    zero = with_dense_rows(*zero_any);
    check_matrix(zero, "zero_point", x, a.n, groups);
    STD_TORCH_CHECK(zero.scalar_type() == ScalarType::Byte, "zero_point must be uint8, got ",
                    torch::headeronly::toString(zero.scalar_type()));
    a.zero_point = static_cast<const uint8_t*>(zero.const_data_ptr());
    a.zero_stride = zero.stride(0);
  }
  if (bias_any) {
    STD_TORCH_CHECK(bias_any->is_cuda() && bias_any->dim() == 1 && bias_any->numel() == a.n && bias_any->scalar_type() == dtype,
                    "bias must have the dtype and device of x and shape [", a.n, "]");
    bias = dense(*bias_any);
    a.bias = bias.const_data_ptr();
  }
  Tensor y = empty_like(x, shape);
  if (a.m == 0 || a.n == 0) return y;
  a.x = x.const_data_ptr();
  a.y = y.mutable_data_ptr();

  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (dtype == ScalarType::Half) {
    bits == 4 ? launch<4, __half>(a, cuda_stream) : launch<8, __half>(a, cuda_stream);
  } else {
    bits == 4 ? launch<4, __nv_bfloat16>(a, cuda_stream) : launch<8, __nv_bfloat16>(a, cuda_stream);
  }
  const cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, "the kernel could not be launched: ", cudaGetErrorString(error));
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY(lowbit_cuda, m) {
  m.def(
      "linear(Tensor x, Tensor packed, Tensor scale, Tensor? zero_point, Tensor? bias, int bits, bool is_signed, int group_size) "
      "-> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(lowbit_cuda, CUDA, m) { m.impl("linear", TORCH_BOX(&linear)); }
