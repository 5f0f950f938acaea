// lowbit_cuda::skinny_gemm: checks arguments and launches skinny_gemm.cuh on torch's current stream. skinny_gemm_prepare: only
// the checks, for prepared_linear. experts_skinny_gemm: the same for rows of x with weights of their own.
#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "../schedule/skinny_gemm_launch.h"
#include "prepared_call.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using namespace lowbit::cuda;

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

// Whether there is a kernel for the format and the scheme; exponent: bits of a float's exponent, 0 for integers, -1 for nf4.
bool is_known(int64_t bits, int64_t exponent, int64_t group, ScaleType scale) {
  const bool is_integer = exponent == 0 && bits >= 2 && bits <= 8;
  const bool is_float = (bits == 4 && exponent == 2) || (bits == 6 && (exponent == 2 || exponent == 3)) ||
                        (bits == 8 && (exponent == 4 || exponent == 5));
  if (scale == ScaleType::e8m0) return group == 32 && (is_float || (is_integer && bits == 8));
  if (scale == ScaleType::e4m3) return group == 16 && is_float && bits == 4;
  return (is_integer || is_float || (exponent == -1 && bits == 4)) && (group == -1 || group == 32 || group == 64 || group == 128);
}

struct SkinnyGemmCall {
  SkinnyGemm arguments;
  SkinnyGemmPlan plan;
  int bits, exponent;
  bool x_is_half;
};

cudaError_t launch_call(SkinnyGemmCall call, const void* x, void* y, int m, cudaStream_t stream) {
  auto& [a, plan, bits, exponent, x_is_half] = call;
  a.x = x;
  a.y = y;
  a.m = m;
  a.x_on_16_bytes = is_on_16_bytes(x) && a.k % 8 == 0;
  return exponent == 0  ? launch_skinny_integers(a, bits, x_is_half, plan, stream)
         : exponent > 0 ? launch_skinny_floats(a, bits, exponent, x_is_half, plan, stream)
                        : launch_skinny_nf4(a, x_is_half, plan, stream);
}

cudaError_t launch_prepared(const PreparedCall& prepared, const void* x, void* y, int m, cudaStream_t stream) {
  return launch_call(prepared.load_args<SkinnyGemmCall>(), x, y, m, stream);
}

// Calls `then` with the arguments for such a weight and x, and with the tensors to keep until the launch.
template <class Then>
Tensor prepare(const Tensor& x, const Tensor& packed, const Tensor& scale, const std::optional<Tensor>& zero_point,
               const std::optional<Tensor>& outer, const std::optional<Tensor>& bias, const PackedFormat& kind, SkinnyGemmPlan plan,
               Then then, int64_t experts = 1) {
  const auto [bits, exponent, group_size, is_signed, scale_is_e8m0, factor] = kind;
  const ScalarType dtype = x.scalar_type();
  STD_TORCH_CHECK(x.is_cuda() && x.dim() >= 1 && (dtype == ScalarType::Half || dtype == ScalarType::BFloat16),
                  "x must be float16 or bfloat16 [..., K] on a CUDA device");
  SkinnyGemm a = {};
  a.scale_type = type_of(scale, scale_is_e8m0);
  STD_TORCH_CHECK(is_known(bits, exponent, group_size, a.scale_type), "there is no kernel for ", bits, " bits, an exponent of ",
                  exponent, " and groups of ", group_size, " under such scales");
  STD_TORCH_CHECK(plan.warps >= 0 && plan.warps <= 16, "warps must be 0..16, got ", plan.warps);
  STD_TORCH_CHECK(plan.cluster_size >= 0 && plan.cluster_size <= max_cluster_size, "cluster_size must be 0..",
                  max_cluster_size, ", got ", plan.cluster_size);
  STD_TORCH_CHECK(!zero_point || exponent == 0, "a zero point goes with integers");
  const DeviceGuardIfNeeded guard(x.get_device_index());
  const FragmentWeight weight(x, x.size(x.dim() - 1), packed, scale, zero_point, outer, bias, bits, group_size,
                             size_of(a.scale_type), experts);
  a.n = weight.n / experts;
  a.k = weight.k;
  a.tiles = weight.tiles / experts;
  a.units_per_row = weight.units_per_row;
  a.unit = weight.unit;
  if (a.k == 0) a.unit.groups = 1;  // without columns there is no scale
  while (1 << a.group_shift < a.unit.group) a.group_shift++;
  a.has_zero = weight.has_zero;
  a.is_signed = is_signed;
  a.factor = factor;
  a.units = weight.units();
  a.scale = weight.scale.const_data_ptr();
  a.zero_point = weight.zeros_of_rows();
  a.outer = weight.outer_scale();
  a.bias = weight.biases();
  if (!a.k) plan.early_stages = -1;
  PreparedCall prepared(x, weight, max_skinny_rows, launch_prepared);
  prepared.store_args(SkinnyGemmCall{a, plan, static_cast<int>(bits), static_cast<int>(exponent), dtype == ScalarType::Half});
  return then(prepared, weight);
}

Tensor skinny_gemm_op(Tensor x, Tensor packed, Tensor scale, std::optional<Tensor> zero_point, std::optional<Tensor> outer,
                        std::optional<Tensor> bias, int64_t kind, int64_t warps, int64_t stages, int64_t early_stages,
                        int64_t cluster_size) {
  const SkinnyGemmPlan plan = {static_cast<int>(warps), static_cast<int>(stages), static_cast<int>(early_stages),
                           static_cast<int>(cluster_size)};
  const auto multiply = [&](const PreparedCall& prepared, const FragmentWeight&) { return product_of(prepared, x); };
  return prepare(x, packed, scale, zero_point, outer, bias, PackedFormat(kind), plan, multiply);
}

Tensor skinny_gemm_prepare(Tensor x, Tensor packed, Tensor scale, std::optional<Tensor> zero_point, std::optional<Tensor> outer,
                       std::optional<Tensor> bias, int64_t kind) {
  return prepare(x, packed, scale, zero_point, outer, bias, PackedFormat(kind), {}, bytes_of);
}

// Rows of x [T, K] times the experts that they chose [S]: y [S, N]. The weight is [E N, K], N a multiple of 16.
Tensor experts_skinny_gemm(Tensor x_any, Tensor packed, Tensor scale, std::optional<Tensor> zero_point, std::optional<Tensor> outer,
                           std::optional<Tensor> bias, Tensor chosen_any, int64_t experts, int64_t kind) {
  const Tensor x = held_dense(x_any, "x"), chosen = held_dense(chosen_any, "experts");
  STD_TORCH_CHECK(chosen.is_cuda() && chosen.get_device_index() == x.get_device_index() && chosen.dim() == 1 &&
                      chosen.scalar_type() == ScalarType::Long,
                  "experts must be int64 [rows] on the device of x");
  const int64_t rows = chosen.size(0), of_x = x.dim() == 2 ? x.size(0) : 0;
  STD_TORCH_CHECK(of_x ? rows % of_x == 0 : rows == 0, "x must be [T, K] and experts a multiple of T, got ", rows, " for ", of_x, " rows");
  STD_TORCH_CHECK(rows < 65536 && experts >= 1, "there must be experts and fewer than 65536 rows, got ", experts, " and ", rows);
  const auto multiply = [&](const PreparedCall& prepared, const FragmentWeight& weight) {
    auto call = prepared.load_args<SkinnyGemmCall>();
    STD_TORCH_CHECK(weight.n % experts == 0 && call.arguments.n % 16 == 0, "experts must have a multiple of 16 rows, got ", weight.n,
                    " rows of ", experts);
    const Tensor y = empty_like(x, {rows, call.arguments.n});
    if (rows == 0 || call.arguments.n == 0) return y;
    call.arguments.of_experts = {static_cast<const int64_t*>(chosen.const_data_ptr()), static_cast<int>(rows), static_cast<int>(experts),
                                 static_cast<int>(rows / of_x)};
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
    const cudaError_t error = launch_call(call, x.const_data_ptr(), y.mutable_data_ptr(), 1, static_cast<cudaStream_t>(stream));
    STD_TORCH_CHECK(error == cudaSuccess, "the kernel could not be launched: ", cudaGetErrorString(error));
    return y;
  };
  return prepare(x, packed, scale, zero_point, outer, bias, PackedFormat(kind), {}, multiply, experts);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lowbit_cuda, m) {
  m.def(
      "skinny_gemm(Tensor x, Tensor packed, Tensor scale, Tensor? zero_point, Tensor? outer, Tensor? bias, int kind, "
      "int warps=0, int stages=0, "
      "int early_stages=0, int cluster_size=0) -> Tensor");
  m.def(
      "experts_skinny_gemm(Tensor x, Tensor packed, Tensor scale, Tensor? zero_point, Tensor? outer, Tensor? bias, Tensor experts, "
      "int num_experts, int kind) -> Tensor");
  m.def(
      "skinny_gemm_prepare(Tensor x, Tensor packed, Tensor scale, Tensor? zero_point, Tensor? outer, Tensor? bias, int kind) "
      "-> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(lowbit_cuda, CUDA, m) {
  m.impl("skinny_gemm", TORCH_BOX(&skinny_gemm_op));
  m.impl("experts_skinny_gemm", TORCH_BOX(&experts_skinny_gemm));
  m.impl("skinny_gemm_prepare", TORCH_BOX(&skinny_gemm_prepare));
}
