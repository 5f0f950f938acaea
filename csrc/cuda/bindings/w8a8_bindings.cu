// lowbit_cuda::w8a8_linear: checks arguments, quantizes x and multiplies on torch's current stream, in one kernel or two.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "../schedule/w8a8_launch.h"
#include "torch_helpers.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using namespace lowbit::cuda;

Dtype dtype_of(const Tensor& t, const char* name) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return Dtype::float32;
    case ScalarType::BFloat16: return Dtype::bfloat16;
    case ScalarType::Half: return Dtype::float16;
    default:
      STD_TORCH_CHECK(false, name, " must be float32, bfloat16 or float16, got ",
                      torch::headeronly::toString(t.scalar_type()));
  }
}

bool is_beside(const Tensor& t, const Tensor& x) { return t.is_cuda() && t.get_device_index() == x.get_device_index(); }

int64_t rounded_up(int64_t size, int64_t to) { return (size + to - 1) / to * to; }

void check(cudaError_t error) {
  STD_TORCH_CHECK(error == cudaSuccess, "the kernel could not be launched: ", cudaGetErrorString(error));
}

Tensor w8a8_linear_op(Tensor x_any, Tensor packed, Tensor scale_any, std::optional<Tensor> bias_any,
                        std::optional<Tensor> input_scale, std::string format, int64_t group_size, int64_t block_rows,
                        int64_t cluster_size, bool splits_columns, int64_t fused) {
  STD_TORCH_CHECK(format == "int8" || format == "fp8_e4m3fn" || format == "int4", "format must be int8, fp8_e4m3fn or int4, got ",
                  format);
  const bool is_float = format == "fp8_e4m3fn", is_four = format == "int4";
  STD_TORCH_CHECK(group_size == -1 || (is_four && (group_size == 32 || group_size == 64 || (group_size > 0 && group_size % 128 == 0))),
                  "group_size must be -1, and with int4 also 32, 64 or a multiple of 128, got ", group_size);
  STD_TORCH_CHECK(x_any.is_cuda() && x_any.dim() >= 1, "x must be [..., K] on a CUDA device");
  check_storage(x_any, "x"), check_storage(packed, "packed"), check_storage(scale_any, "scale");
  check_storage(bias_any, "bias"), check_storage(input_scale, "input_scale");
  const Dtype dtype = dtype_of(x_any, "x");
  const DeviceGuardIfNeeded guard(x_any.get_device_index());
  const Tensor x = dense(x_any);
  const int64_t k = x.size(x.dim() - 1);
  STD_TORCH_CHECK(k >= 1 && k <= 8 * int64_t{w8a8::max_block_columns}, "a weight must have 1 to ",
                  8 * int64_t{w8a8::max_block_columns}, " columns, got ", k);
  const int64_t row_bytes = is_four ? (k + 1) / 2 : k;
  STD_TORCH_CHECK(is_beside(packed, x) && packed.dim() == 2 && packed.size(1) == row_bytes && packed.scalar_type() == ScalarType::Byte,
                  "packed must be uint8 [N, ", row_bytes, "] on the device of x");
  const int64_t n = packed.size(0), groups = group_size == -1 ? 1 : (k + group_size - 1) / group_size;
  STD_TORCH_CHECK(is_beside(scale_any, x) && scale_any.dim() == 2 && scale_any.size(0) == n && scale_any.size(1) == groups,
                  "scale must be on the device of x and [", n, ", ", groups, "]");
  const Tensor scale = groups > 1 && scale_any.stride(1) != 1 ? torch::stable::contiguous(scale_any) : scale_any;
  const auto [shape, m] = ProductShape(x, n);
  STD_TORCH_CHECK(m < (int64_t{1} << 31) - 256 && n < (int64_t{1} << 31) - 256, "x and the weight must have fewer than 2^31 rows");

  w8a8::W8A8Args a = {};
  a.m = m;
  a.n = n;
  a.w_scale = scale.const_data_ptr();
  a.w_scale_stride = scale.stride(0);
  a.groups = static_cast<int>(groups);
  a.group_k = group_size == -1 ? 0 : static_cast<int>(std::min<int64_t>(group_size, 1 << 30));
  a.w_scale_dtype = dtype_of(scale, "scale");
  a.y_dtype = dtype;
  Tensor bias = scale;  // kept alive until the launch
  if (bias_any) {
    STD_TORCH_CHECK(is_beside(*bias_any, x) && bias_any->dim() == 1 && bias_any->numel() == n &&
                        bias_any->scalar_type() == x.scalar_type(),
                    "bias must have the dtype and device of x and shape [", n, "]");
    bias = dense(*bias_any);
    a.bias = bias.const_data_ptr();
  }
  if (input_scale)
    STD_TORCH_CHECK(is_beside(*input_scale, x) && input_scale->numel() == 1 && input_scale->scalar_type() == ScalarType::Float,
                    "input_scale must be one float32 on the device of x");
  Tensor y = empty_like(x, shape);
  if (m == 0 || n == 0) return y;
  a.y = y.mutable_data_ptr();
  a.can_store_16_bytes = dtype != Dtype::float32 && (reinterpret_cast<uintptr_t>(a.y) | n * 2) % 16 == 0;

  // TMA needs rows aligned to 16 bytes: other weights are copied.
  const int64_t pitch = rounded_up(k, 32), w_pitch = rounded_up(row_bytes, 16);
  const bool is_copied = reinterpret_cast<uintptr_t>(packed.const_data_ptr()) % 16 || packed.stride(0) % 16 ||
                         (row_bytes > 1 && packed.stride(1) != 1) || packed.stride(0) < row_bytes;
  const Tensor rows = is_copied ? torch::stable::contiguous(packed) : packed;
  const bool is_on_16_bytes = reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0 && k % chunk_columns == 0;
  const bool may_fuse = is_on_16_bytes && !is_four && dtype != Dtype::float32;
  const bool is_power = fused > 0 && fused <= 64 && (fused & (fused - 1)) == 0;
  STD_TORCH_CHECK(fused <= 0 || (is_power && may_fuse),
                  "fused must be -1, 0, or 1, 2, 4 ... 64 for rows of 16-bit x on 16 bytes and weights of 8 bits, got ", fused);
  w8a8::FullKPlan full_k = {fused >= 16 ? static_cast<int>(fused) : 0, std::max(static_cast<int>(cluster_size), 1)};
  if (fused < 0) {
    const bool may_choose = may_fuse && block_rows == 0;
    if (may_choose) full_k = w8a8::plan_full_k(m, n, k);
    fused = full_k.rows ? full_k.rows : may_choose ? w8a8::split_k_blocks(m, n, k) : 0;
  }
  const int64_t x_bytes = fused ? 0 : rounded_up(w8a8::padded_rows(m) * pitch, 256);
  const int64_t scale_bytes = fused ? 0 : rounded_up(m, 256) * 4;
  const int64_t workspace_bytes = x_bytes + scale_bytes + (is_copied ? n * w_pitch : 0);
  const Tensor room = workspace_bytes ? torch::stable::new_empty(x, {workspace_bytes}, ScalarType::Byte) : x;
  auto* const bytes = workspace_bytes ? static_cast<uint8_t*>(room.mutable_data_ptr()) : nullptr;

  void* torch_stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &torch_stream));
  const auto stream = static_cast<cudaStream_t>(torch_stream);
  w8a8::Operand w = {rows.const_data_ptr(), row_bytes, rows.stride(0)};
  if (is_copied) {
    uint8_t* const copy = bytes + x_bytes + scale_bytes;
    check(cudaMemcpy2DAsync(copy, w_pitch, w.data, w.stride, row_bytes, n, cudaMemcpyDeviceToDevice, stream));
    w = {copy, row_bytes, w_pitch};
  }

  const auto codes = is_four ? w8a8::Codes::int4 : is_float ? w8a8::Codes::e4m3 : w8a8::Codes::int8;
  const float* const fixed_scale = input_scale ? static_cast<const float*>(input_scale->const_data_ptr()) : nullptr;
  const bool x_is_half = dtype == Dtype::float16;
  if (full_k.rows) {
    check(w8a8::launch_fused_full_k({a, x.const_data_ptr(), fixed_scale, static_cast<int>(k)}, codes, w, x_is_half, full_k, stream));
    return y;
  }
  if (fused) {
    w8a8::FusedSplitK fused_args = {};
    fused_args.product = a;
    fused_args.x = x.const_data_ptr();
    fused_args.fixed_scale = fixed_scale;
    fused_args.k = static_cast<int>(k);
    check(w8a8::launch_fused_split_k(fused_args, codes, w, x_is_half, static_cast<int>(fused), stream));
    return y;
  }

  QuantizeActivations rounding = {};
  rounding.x = x.const_data_ptr();
  rounding.codes = bytes;
  rounding.scale = reinterpret_cast<float*>(bytes + x_bytes);
  rounding.fixed_scale = fixed_scale;
  rounding.m = m;
  rounding.k = static_cast<int>(k);
  rounding.pitch = pitch;
  rounding.is_float = is_float;
  rounding.even_first = is_four;
  rounding.has_full_chunks = is_on_16_bytes;
  check(launch_quantize_activations(rounding, dtype, stream));

  a.x_scale = rounding.scale;
  const int forced[3] = {static_cast<int>(block_rows), static_cast<int>(cluster_size), splits_columns};
  check(w8a8::launch(a, codes, w, {bytes, is_four ? pitch : k, pitch}, forced, stream));
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lowbit_cuda, m) {
  m.def(
      "w8a8_linear(Tensor x, Tensor packed, Tensor scale, Tensor? bias, Tensor? input_scale, str format, "
      "int group_size=-1, int block_rows=0, int cluster_size=0, bool splits_columns=False, int fused=-1) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(lowbit_cuda, CUDA, m) { m.impl("w8a8_linear", TORCH_BOX(&w8a8_linear_op)); }
