// lowbit_cuda::halves_linear: checks what it is given and launches halves.cuh on torch's current stream.
#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "halves_launch.h"
#include "host.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using namespace lowbit::cuda;

bool is_on_16_bytes(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

ScaleType type_of(const Tensor& scale, bool is_e8m0) {
  switch (scale.scalar_type()) {
    case ScalarType::Float: return ScaleType::float32;
    case ScalarType::BFloat16: return ScaleType::bfloat16;
    case ScalarType::Half: return ScaleType::float16;
    case ScalarType::Byte: return is_e8m0 ? ScaleType::e8m0 : ScaleType::e4m3;
    default:
      STD_TORCH_CHECK(false, "scale must be float32, bfloat16, float16 or uint8, got ",
                      torch::headeronly::toString(scale.scalar_type()));
  }
}

void check(const Tensor& t, const char* name, const Tensor& x, int64_t rows, int64_t columns) {
  const bool right = t.dim() == 2 && t.size(0) == rows && t.size(1) == columns;
  STD_TORCH_CHECK(t.is_cuda() && t.get_device_index() == x.get_device_index() && right, name, " must be on the device of x and [",
                  rows, ", ", columns, "]");
}

// Whether there is a kernel for the format and the scheme; `exponent`: bits of a float's, 0 for integers, -1 for nf4.
bool is_known(int64_t bits, int64_t exponent, int64_t group, ScaleType scale) {
  const bool is_integer = exponent == 0 && bits >= 2 && bits <= 8;
  const bool is_float = (bits == 4 && exponent == 2) || (bits == 6 && (exponent == 2 || exponent == 3)) ||
                        (bits == 8 && (exponent == 4 || exponent == 5));
  if (scale == ScaleType::e8m0) return group == 32 && (is_float || (is_integer && bits == 8));
  if (scale == ScaleType::e4m3) return group == 16 && is_float && bits == 4;
  return (is_integer || is_float || (exponent == -1 && bits == 4)) && (group == -1 || group == 32 || group == 64 || group == 128);
}

Tensor linear_by_halves(Tensor x_any, Tensor packed_any, Tensor scale_any, std::optional<Tensor> zero_any,
                        std::optional<Tensor> outer_any, std::optional<Tensor> bias_any, int64_t kind, int64_t warps,
                        int64_t stages, int64_t early_stages, int64_t blocks_of_cluster) {
  const auto [bits, exponent, group_size, is_signed, scale_is_e8m0, factor] = Kind(kind);
  const ScalarType dtype = x_any.scalar_type();
  STD_TORCH_CHECK(x_any.is_cuda() && x_any.dim() >= 1 && (dtype == ScalarType::Half || dtype == ScalarType::BFloat16),
                  "x must be float16 or bfloat16 [..., K] on a CUDA device");
  STD_TORCH_CHECK(packed_any.dim() == 2 && packed_any.scalar_type() == ScalarType::Byte, "packed must be uint8 [N, bytes]");
  Halves a = {};
  a.scale_type = type_of(scale_any, scale_is_e8m0);
  STD_TORCH_CHECK(is_known(bits, exponent, group_size, a.scale_type), "there is no kernel for ", bits, " bits, an exponent of ",
                  exponent, " and groups of ", group_size, " under such scales");
  STD_TORCH_CHECK(warps >= 0 && warps <= 16, "warps must be 0..16, got ", warps);
  STD_TORCH_CHECK(blocks_of_cluster >= 0 && blocks_of_cluster <= most_blocks_of_cluster, "blocks_of_cluster must be 0..",
                  most_blocks_of_cluster, ", got ", blocks_of_cluster);
  const OnDevice guard(x_any.get_device_index());
  const Tensor x = dense(x_any), scale = dense(scale_any);
  Tensor packed = dense(packed_any), zero = scale, outer = scale, bias = scale;  // kept until the launch
  if (!is_on_16_bytes(packed.const_data_ptr())) packed = torch::stable::clone(packed);

  a.n = packed.size(0);
  const int64_t k = x.size(x.dim() - 1);
  STD_TORCH_CHECK(k < (int64_t{1} << 31) - 512, "a weight must have fewer than 2^31 - 512 columns, got ", k);
  a.k = static_cast<int>(k);
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = a.n;
  int64_t m = 1;
  for (size_t i = 0; i + 1 < shape.size(); i++) m *= shape[i];
  STD_TORCH_CHECK(m <= most_rows_of_halves, "x must have at most ", most_rows_of_halves, " rows, got ", m);

  a.m = static_cast<int>(m);
  a.has_zero = zero_any.has_value();
  STD_TORCH_CHECK(!a.has_zero || exponent == 0, "a zero point goes with integers");
  a.is_signed = is_signed;
  a.factor = factor;
  a.unit = UnitPlan::of(static_cast<int>(bits), static_cast<int>(group_size), size_of(a.scale_type), a.has_zero);
  while (1 << a.group_shift < a.unit.group) a.group_shift++;
  a.tiles = (a.n + rows_of_tile - 1) / rows_of_tile;
  a.units_of_row = (a.k + a.unit.columns - 1) / a.unit.columns;
  check(packed, "packed", x, a.n, a.n ? (a.tiles * a.units_of_row * a.unit.size + a.n - 1) / a.n : packed.size(1));
  check(scale, "scale", x, a.n, group_size == -1 && a.k > 0);
  a.units = static_cast<const uint8_t*>(packed.const_data_ptr());
  a.scale = scale.const_data_ptr();
  if (zero_any) {
    zero = dense(*zero_any);
    check(zero, "zero_point", x, a.n, scale.size(1));
    STD_TORCH_CHECK(zero.scalar_type() == ScalarType::Byte, "zero_point must be uint8, got ",
                    torch::headeronly::toString(zero.scalar_type()));
    if (a.unit.groups == 0) a.zero_point = static_cast<const uint8_t*>(zero.const_data_ptr());
  }
  if (outer_any) {
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
  if (a.k == 0) a.unit.groups = 1;  // without columns there is no scale
  a.x = x.const_data_ptr();
  a.y = y.mutable_data_ptr();
  a.x_on_16_bytes = is_on_16_bytes(a.x) && a.k % 8 == 0;

  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  const HalvesPlan plan = {static_cast<int>(warps), static_cast<int>(stages), static_cast<int>(a.k ? early_stages : -1),
                           static_cast<int>(blocks_of_cluster)};
  const bool is_half = dtype == ScalarType::Half;
  const auto on = static_cast<cudaStream_t>(stream);
  const cudaError_t error =
      exponent == 0   ? launch_halves_of_integers(a, static_cast<int>(bits), is_half, plan, on)
      : exponent > 0 ? launch_halves_of_floats(a, static_cast<int>(bits), static_cast<int>(exponent), is_half, plan, on)
                     : launch_halves_of_quantiles(a, is_half, plan, on);
  STD_TORCH_CHECK(error == cudaSuccess, "the kernel could not be launched: ", cudaGetErrorString(error));
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lowbit_cuda, m) {
  m.def(
      "halves_linear(Tensor x, Tensor packed, Tensor scale, Tensor? zero_point, Tensor? outer, Tensor? bias, int kind, "
      "int warps=0, int stages=0, "
      "int early_stages=0, int blocks_of_cluster=0) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(lowbit_cuda, CUDA, m) { m.impl("halves_linear", TORCH_BOX(&linear_by_halves)); }
