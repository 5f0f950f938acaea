// lowbit_cuda::split_int8_gemv: checks arguments and launches split_int8_gemv.cuh on torch's current stream.
// split_int8_gemv_prepare: only the checks, for prepared_linear.
#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "../schedule/split_int8_gemv_launch.cuh"
#include "prepared_call.h"

namespace lowbit::cuda {

extern template cudaError_t launch_split_int8<2>(SplitInt8Args, int, int, SplitInt8Plan, cudaStream_t);
extern template cudaError_t launch_split_int8<3>(SplitInt8Args, int, int, SplitInt8Plan, cudaStream_t);
extern template cudaError_t launch_split_int8<4>(SplitInt8Args, int, int, SplitInt8Plan, cudaStream_t);
extern template cudaError_t launch_split_int8<5>(SplitInt8Args, int, int, SplitInt8Plan, cudaStream_t);
extern template cudaError_t launch_split_int8<6>(SplitInt8Args, int, int, SplitInt8Plan, cudaStream_t);
extern template cudaError_t launch_split_int8<8>(SplitInt8Args, int, int, SplitInt8Plan, cudaStream_t);

}  // namespace lowbit::cuda

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using namespace lowbit::cuda;

Dtype dtype_of(const Tensor& scale) {
  switch (scale.scalar_type()) {
    case ScalarType::Float: return Dtype::float32;
    case ScalarType::BFloat16: return Dtype::bfloat16;
    case ScalarType::Half:
    case ScalarType::Byte: return Dtype::float16;  // the dtype of 8-bit scale codes is not used
    default:
      STD_TORCH_CHECK(false, "scale must be float32, bfloat16, float16 or uint8, got ",
                      torch::headeronly::toString(scale.scalar_type()));
  }
}

decltype(&launch_split_int8<4>) launcher_of(int64_t bits) {
  switch (bits) {
    case 2: return launch_split_int8<2>;
    case 3: return launch_split_int8<3>;
    case 4: return launch_split_int8<4>;
    case 5: return launch_split_int8<5>;
    case 6: return launch_split_int8<6>;
    case 8: return launch_split_int8<8>;
    default: return nullptr;
  }
}

// Whether there is a kernel for the format and the scheme; exponent: bits of a float's exponent, 0 for integers.
bool is_known(int64_t bits, int64_t exponent, int64_t group, const Tensor& scale, bool scale_is_e8m0) {
  const bool is_e2m1 = bits == 4 && exponent == 2;
  const bool is_e8m0 = scale.scalar_type() == ScalarType::Byte && scale_is_e8m0;
  if (is_e8m0) return group == 32 && (is_e2m1 || (exponent == 0 && bits == 8));
  if (scale.scalar_type() == ScalarType::Byte) return group == 16 && is_e2m1;
  return (is_e2m1 || (exponent == 0 && launcher_of(bits))) && (group == -1 || group == 32 || group == 64 || group == 128);
}

using LaunchSplitInt8 = decltype(&launch_split_int8<4>);

// Arguments and plan of a launch.
struct SplitInt8Call {
  SplitInt8Args arguments;
  SplitInt8Plan plan;
  LaunchSplitInt8 launch;
  int group;
};

cudaError_t launch_prepared(const PreparedCall& prepared, const void* x, void* y, int m, cudaStream_t stream) {
  auto [a, plan, launch, group] = prepared.load_args<SplitInt8Call>();
  a.x = x;
  a.y = y;
  a.x_on_16_bytes = is_on_16_bytes(x) && (m == 1 || a.k % 8 == 0);
  return launch(a, m, group, plan, stream);
}

// Calls `then` with the arguments for such a weight and x, and with the tensors to keep until the launch.
template <class Then>
Tensor prepare(const Tensor& x, const Tensor& packed, const Tensor& scale, const std::optional<Tensor>& zero_point,
               const std::optional<Tensor>& outer, const std::optional<Tensor>& bias, const PackedFormat& kind, SplitInt8Plan plan,
               Then then) {
  const auto [bits, exponent, group_size, is_signed, scale_is_e8m0, factor] = kind;
  const ScalarType dtype = x.scalar_type();
  STD_TORCH_CHECK(x.is_cuda() && x.dim() >= 1 && (dtype == ScalarType::Half || dtype == ScalarType::BFloat16),
                  "x must be float16 or bfloat16 [..., K] on a CUDA device");
  STD_TORCH_CHECK(is_known(bits, exponent, group_size, scale, scale_is_e8m0), "there is no kernel for ", bits,
                  " bits, an exponent of ", exponent, " and groups of ", group_size, " under such scales");
  STD_TORCH_CHECK(plan.column_warps >= 0 && plan.column_warps <= max_split_int8_warps, "column_warps must be 0..",
                  max_split_int8_warps, ", got ", plan.column_warps);
  STD_TORCH_CHECK(!zero_point || exponent == 0, "a zero point goes with integers");
  STD_TORCH_CHECK(!outer || group_size == 16, "outer goes with groups of 16 under e4m3, got groups of ", group_size);
  const DeviceGuardIfNeeded guard(x.get_device_index());
  SplitInt8Args a = {};
  a.scale_dtype = dtype_of(scale);
  a.scale_size = are_codes(scale) ? 1 : a.scale_dtype == Dtype::float32 ? 4 : 2;
  const FragmentWeight weight(x, x.size(x.dim() - 1), packed, scale, zero_point, outer, bias, bits, group_size, a.scale_size);
  a.n = weight.n;
  a.k = weight.k;
  a.tiles = weight.tiles;
  a.units_per_row = weight.units_per_row;
  a.unit_size = weight.unit.size;
  a.row_is_group = group_size == -1 && a.k > 0;  // without columns there is no scale
  a.has_zero = weight.has_zero;
  a.factor = factor;
  a.units = weight.units();
  a.scale = weight.scale.const_data_ptr();
  a.zero_point = weight.zeros();
  a.outer = weight.outer_scale();
  a.bias = weight.biases();
  a.x_is_half = dtype == ScalarType::Half;
  if (!a.k) plan.early = -1;
  const LaunchSplitInt8 launch = exponent ? launch_split_int8_e2m1 : are_codes(scale) ? launch_split_int8_mxint8 : launcher_of(bits);
  PreparedCall prepared(x, weight, exponent ? 1 : max_split_int8_rows, launch_prepared);
  prepared.store_args(SplitInt8Call{a, plan, launch, group_size == -1 ? 0 : static_cast<int>(group_size)});
  return then(prepared, weight);
}

Tensor split_int8_gemv_op(Tensor x, Tensor packed, Tensor scale, std::optional<Tensor> zero_point, std::optional<Tensor> outer,
                        std::optional<Tensor> bias, int64_t kind, int64_t column_warps, int64_t tile_warps, int64_t stages,
                        int64_t max_in_flight, int64_t early) {
  const SplitInt8Plan plan = {static_cast<int>(column_warps), static_cast<int>(tile_warps), static_cast<int>(stages),
                           static_cast<int>(max_in_flight), static_cast<int>(early)};
  const auto multiply = [&](const PreparedCall& prepared, const FragmentWeight&) { return product_of(prepared, x); };
  return prepare(x, packed, scale, zero_point, outer, bias, PackedFormat(kind), plan, multiply);
}

Tensor split_int8_gemv_prepare(Tensor x, Tensor packed, Tensor scale, std::optional<Tensor> zero_point, std::optional<Tensor> outer,
                       std::optional<Tensor> bias, int64_t kind) {
  return prepare(x, packed, scale, zero_point, outer, bias, PackedFormat(kind), {}, bytes_of);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lowbit_cuda, m) {
  m.def(
      "split_int8_gemv(Tensor x, Tensor packed, Tensor scale, Tensor? zero_point, Tensor? outer, Tensor? bias, int kind, "
      "int column_warps=0, int tile_warps=0, int stages=0, int max_in_flight=0, int early=0) -> Tensor");
  m.def(
      "split_int8_gemv_prepare(Tensor x, Tensor packed, Tensor scale, Tensor? zero_point, Tensor? outer, Tensor? bias, int kind) "
      "-> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(lowbit_cuda, CUDA, m) {
  m.impl("split_int8_gemv", TORCH_BOX(&split_int8_gemv_op));
  m.impl("split_int8_gemv_prepare", TORCH_BOX(&split_int8_gemv_prepare));
}
