// lowbit_cuda::digits_linear: checks what it is given and launches digits.cuh on torch's current stream.
#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "digits_launch.cuh"
#include "host.h"

namespace lowbit::cuda {

extern template cudaError_t launch_digits<2>(Digits, int, int, DigitsPlan, cudaStream_t);
extern template cudaError_t launch_digits<3>(Digits, int, int, DigitsPlan, cudaStream_t);
extern template cudaError_t launch_digits<4>(Digits, int, int, DigitsPlan, cudaStream_t);
extern template cudaError_t launch_digits<5>(Digits, int, int, DigitsPlan, cudaStream_t);
extern template cudaError_t launch_digits<6>(Digits, int, int, DigitsPlan, cudaStream_t);
extern template cudaError_t launch_digits<8>(Digits, int, int, DigitsPlan, cudaStream_t);

}  // namespace lowbit::cuda

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using namespace lowbit::cuda;

bool is_on_16_bytes(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

Stored stored_as(const Tensor& scale) {
  switch (scale.scalar_type()) {
    case ScalarType::Float: return Stored::float32;
    case ScalarType::BFloat16: return Stored::bfloat16;
    case ScalarType::Half:
    case ScalarType::Byte: return Stored::float16;  // the codes of a format say nothing here
    default:
      STD_TORCH_CHECK(false, "scale must be float32, bfloat16, float16 or uint8, got ",
                      torch::headeronly::toString(scale.scalar_type()));
  }
}

decltype(&launch_digits<4>) launcher_of(int64_t bits) {
  switch (bits) {
    case 2: return launch_digits<2>;
    case 3: return launch_digits<3>;
    case 4: return launch_digits<4>;
    case 5: return launch_digits<5>;
    case 6: return launch_digits<6>;
    case 8: return launch_digits<8>;
    default: return nullptr;
  }
}

void check(const Tensor& t, const char* name, const Tensor& x, int64_t rows, int64_t columns) {
  const bool right = t.dim() == 2 && t.size(0) == rows && t.size(1) == columns;
  STD_TORCH_CHECK(t.is_cuda() && t.get_device_index() == x.get_device_index() && right, name, " must be on the device of x and [",
                  rows, ", ", columns, "]");
}

// Whether there is a kernel for the format and the scheme; `exponent`: bits of a float's, 0 for integers.
bool is_known(int64_t bits, int64_t exponent, int64_t group, const Tensor& scale, bool scale_is_e8m0) {
  const bool is_e2m1 = bits == 4 && exponent == 2;
  const bool is_e8m0 = scale.scalar_type() == ScalarType::Byte && scale_is_e8m0;
  if (is_e8m0) return group == 32 && (is_e2m1 || (exponent == 0 && bits == 8));
  if (scale.scalar_type() == ScalarType::Byte) return group == 16 && is_e2m1;
  return (is_e2m1 || (exponent == 0 && launcher_of(bits))) && (group == -1 || group == 32 || group == 64 || group == 128);
}

Tensor linear_by_digits(Tensor x_any, Tensor packed_any, Tensor scale_any, std::optional<Tensor> zero_any,
                        std::optional<Tensor> outer_any, std::optional<Tensor> bias_any, int64_t kind, int64_t column_warps,
                        int64_t tile_warps, int64_t stages, int64_t most_under_way, int64_t early) {
  [[maybe_unused]] const auto [bits, exponent, group_size, is_signed, scale_is_e8m0, factor] = Kind(kind);
  const ScalarType dtype = x_any.scalar_type();
  STD_TORCH_CHECK(x_any.is_cuda() && x_any.dim() >= 1 && (dtype == ScalarType::Half || dtype == ScalarType::BFloat16),
                  "x must be float16 or bfloat16 [..., K] on a CUDA device");
  STD_TORCH_CHECK(packed_any.dim() == 2 && packed_any.scalar_type() == ScalarType::Byte, "packed must be uint8 [N, bytes]");
  STD_TORCH_CHECK(is_known(bits, exponent, group_size, scale_any, scale_is_e8m0), "there is no kernel for ", bits,
                  " bits, an exponent of ", exponent, " and groups of ", group_size, " under such scales");
  const auto launch = exponent                                          ? launch_digits_of_e2m1
                      : scale_any.scalar_type() == ScalarType::Byte ? launch_digits_of_mxint8
                                                                    : launcher_of(bits);
  STD_TORCH_CHECK(column_warps >= 0 && column_warps <= most_warps_of_digits, "column_warps must be 0..", most_warps_of_digits,
                  ", got ", column_warps);
  const OnDevice guard(x_any.get_device_index());
  const Tensor x = dense(x_any), scale = dense(scale_any);
  Tensor packed = dense(packed_any), zero = scale, outer = scale, bias = scale;  // kept until the launch
  if (!is_on_16_bytes(packed.const_data_ptr())) packed = torch::stable::clone(packed);

  Digits a = {};
  a.n = packed.size(0);
  const int64_t k = x.size(x.dim() - 1);
  STD_TORCH_CHECK(k < (int64_t{1} << 31) - 512, "a weight must have fewer than 2^31 - 512 columns, got ", k);
  a.k = static_cast<int>(k);
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = a.n;
  int64_t m = 1;
  for (size_t i = 0; i + 1 < shape.size(); i++) m *= shape[i];
  const int most = exponent ? 1 : most_rows_of_digits;
  STD_TORCH_CHECK(m <= most, "x must have at most ", most, " rows, got ", m);
  a.row_is_group = group_size == -1 && a.k > 0;  // without columns there is no scale
  a.scale_stored = stored_as(scale);
  a.scale_size = scale.scalar_type() == ScalarType::Byte ? 1 : a.scale_stored == Stored::float32 ? 4 : 2;
  a.has_zero = zero_any.has_value();
  a.factor = factor;
  STD_TORCH_CHECK(!a.has_zero || exponent == 0, "a zero point goes with integers");
  const int columns = bits <= 4 ? 512 : 256, groups = group_size == -1 ? 0 : columns / static_cast<int>(group_size);
  a.tiles = (a.n + rows_of_tile - 1) / rows_of_tile;
  a.units_of_row = (a.k + columns - 1) / columns;
  const int used = rows_of_tile * (columns * static_cast<int>(bits) / 8 + groups * (a.scale_size + a.has_zero));
  a.unit_size = (used + 15) / 16 * 16;
  check(packed, "packed", x, a.n, a.n ? (a.tiles * a.units_of_row * a.unit_size + a.n - 1) / a.n : packed.size(1));
  check(scale, "scale", x, a.n, group_size == -1 && a.k > 0);
  a.units = static_cast<const uint8_t*>(packed.const_data_ptr());
  a.scale = scale.const_data_ptr();
  if (zero_any) {
    zero = dense(*zero_any);
    check(zero, "zero_point", x, a.n, scale.size(1));
    STD_TORCH_CHECK(zero.scalar_type() == ScalarType::Byte, "zero_point must be uint8, got ",
                    torch::headeronly::toString(zero.scalar_type()));
    a.zero_point = static_cast<const uint8_t*>(zero.const_data_ptr());
  }
  if (outer_any) {
    STD_TORCH_CHECK(group_size == 16, "outer goes with groups of 16 under e4m3, got groups of ", group_size);
    STD_TORCH_CHECK(outer_any->is_cuda() && outer_any->numel() == 1 && outer_any->scalar_type() == ScalarType::Float,
                    "outer must be one float32 on the device of x");
    outer = *outer_any;
    a.outer = static_cast<const float*>(outer.const_data_ptr());
  }
  if (bias_any) {
    STD_TORCH_CHECK(bias_any->is_cuda() && bias_any->dim() == 1 && bias_any->numel() == a.n && bias_any->scalar_type() == dtype,
                    "bias must have the dtype and device of x and shape [", a.n, "]");
    bias = dense(*bias_any);
    a.bias = bias.const_data_ptr();
  }
  Tensor y = empty_like(x, shape);
  if (m == 0 || a.n == 0) return y;
  a.x = x.const_data_ptr();
  a.y = y.mutable_data_ptr();
  a.x_is_half = dtype == ScalarType::Half;
  a.x_on_16_bytes = reinterpret_cast<uintptr_t>(a.x) % 16 == 0 && (m == 1 || a.k % 8 == 0);

  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  const DigitsPlan plan = {static_cast<int>(column_warps), static_cast<int>(tile_warps), static_cast<int>(stages),
                           static_cast<int>(most_under_way), static_cast<int>(a.k ? early : -1)};
  const cudaError_t error = launch(a, static_cast<int>(m), group_size == -1 ? 0 : static_cast<int>(group_size), plan, static_cast<cudaStream_t>(stream));
  STD_TORCH_CHECK(error == cudaSuccess, "the kernel could not be launched: ", cudaGetErrorString(error));
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lowbit_cuda, m) {
  m.def(
      "digits_linear(Tensor x, Tensor packed, Tensor scale, Tensor? zero_point, Tensor? outer, Tensor? bias, int kind, "
      "int column_warps=0, int tile_warps=0, int stages=0, int most_under_way=0, int early=0) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(lowbit_cuda, CUDA, m) { m.impl("digits_linear", TORCH_BOX(&linear_by_digits)); }
