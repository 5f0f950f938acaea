// lowbit_cuda::mixed_gemm: checks arguments and launches mixed_gemm.cuh on torch's current stream.
#include <cuda_runtime_api.h>
#include <cudaTypedefs.h>
#include <torch/csrc/stable/library.h>

#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "../schedule/mixed_gemm_launch.h"
#include "format_table.h"
#include "fragment_weight.h"

namespace lowbit::cuda {

// The driver's function is looked up at run time, so that the library loads without a driver.
cudaError_t encode_x_tensormap(CUtensorMap* map, bool x_is_half, const void* x, int64_t rows, int64_t k, int rows_of_box) {
  static std::atomic<void*> known = nullptr;
  void* found = known;
  if (found == nullptr) {
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    if (error != cudaSuccess) return error;
    if (result != cudaDriverEntryPointSuccess) return cudaErrorSymbolNotFound;
    known = found;
  }
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(k), static_cast<cuuint64_t>(rows)}, pitches[] = {static_cast<cuuint64_t>(k) * 2};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(rows_of_box)}, steps[] = {1, 1};
  const CUresult result = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found)(
      map, x_is_half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(x), sizes, pitches, box,
      steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t is_capturing(cudaStream_t stream, bool* answer) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(stream, &capture);
  *answer = capture == cudaStreamCaptureStatusActive;
  return error;
}

}  // namespace lowbit::cuda

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using namespace lowbit::cuda;

Tensor mixed_gemm(Tensor x_any, Tensor packed, Tensor scale, std::optional<Tensor> zero_point, std::optional<Tensor> outer,
                    std::optional<Tensor> bias, std::string format, std::string scale_name, int64_t group_size,
                    int64_t columns, int64_t parts, int64_t early, int64_t shared) {
  const ScalarType dtype = x_any.scalar_type();
  STD_TORCH_CHECK(x_any.is_cuda() && x_any.dim() >= 1 && (dtype == ScalarType::Half || dtype == ScalarType::BFloat16),
                  "x must be float16 or bfloat16 [..., K] on a CUDA device");
  const KnownFormat& known = known_format(format);
  check_group_size(group_size);
  STD_TORCH_CHECK(columns == 0 || columns == 16 || columns == 32 || columns == 64 || columns == 128 || columns == 256,
                  "columns must be 0 (chosen), 16, 32, 64, 128 or 256, got ", columns);
  STD_TORCH_CHECK(parts >= 0 && parts <= 4, "parts must be 0 (chosen) to 4, got ", parts);
  STD_TORCH_CHECK(shared >= 0 && shared <= 2, "shared must be 0 (chosen), 1 (no tiles) or 2 (those of the last wave), got ",
                  shared);
  const DeviceGuardIfNeeded guard(x_any.get_device_index());
  Tensor x = held_dense(x_any, "x");
  const int64_t k = x.size(x.dim() - 1);
  STD_TORCH_CHECK(k > 0 && k % 8 == 0, "x must have a multiple of 8 columns, got ", k);
  MixedGemm a = {};
  a.scale_type = scale_type_of(scale, scale_name);
  const FragmentWeight weight(x, k, packed, scale, zero_point, outer, bias, known.bits, group_size, size_of(a.scale_type));
  a.n = weight.n;
  const auto [shape, m] = ProductShape(x, a.n);
  STD_TORCH_CHECK(m < (int64_t{1} << 20), "x must have fewer than 2^20 rows, got ", m);
  a.m = static_cast<int>(m);
  a.has_zero = weight.has_zero;
  a.is_signed = known.is_signed;
  a.factor = known.factor;
  a.unit = weight.unit;
  for (a.group_shift = 4; 1 << a.group_shift < a.unit.group;) a.group_shift++;
  a.tiles = weight.tiles;
  a.units_per_row = weight.units_per_row;
  a.units = weight.units();
  a.scale = weight.scale.const_data_ptr();
  a.zero_point = weight.zeros_of_rows();
  a.outer = weight.outer_scale();
  a.bias = weight.biases();
  Tensor y = empty_like(x, shape);
  if (m == 0 || a.n == 0) return y;
  if (!is_on_16_bytes(x.const_data_ptr())) x = torch::stable::clone(x);
  a.y = y.mutable_data_ptr();

  const bool x_is_half = dtype == ScalarType::Half, is_e2m1 = known.family == Family::e2m1, is_nf4 = known.family == Family::nf4;
  const bool has_row_scales = a.unit.groups == 0, is_e4m3 = a.scale_type == ScaleType::e4m3;
  // What exceeds float16 is not rounded to it. 2-bit values times 4-bit scales have six bits, and a power of two adds none.
  const bool may_round = !x_is_half || (!is_nf4 && (has_row_scales || a.scale_type == ScaleType::float16 || (is_e2m1 && is_e4m3)));
  const bool rounds_nothing = !is_nf4 && may_round && (has_row_scales || a.scale_type == ScaleType::e8m0 || (is_e2m1 && is_e4m3));

  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  struct Holder {
    const Tensor& like;
    std::optional<Tensor> load_args;
  } holder = {weight.packed, {}};
  const auto allocate = [](void* to, int64_t bytes) -> void* {
    Holder& h = *static_cast<Holder*>(to);
    h.load_args = empty_like(h.like, {bytes});
    return h.load_args->mutable_data_ptr();
  };
  const MixedGemmPlan plan = {static_cast<int>(columns), static_cast<int>(parts), static_cast<int>(early), static_cast<int>(shared),
                         allocate, &holder};
  const cudaError_t error = launch_mixed_gemm(known.family, x_is_half, a, x.const_data_ptr(), k, may_round, rounds_nothing, plan,
                                        static_cast<cudaStream_t>(stream));
  STD_TORCH_CHECK(error == cudaSuccess, "the kernel could not be launched: ", cudaGetErrorString(error));
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lowbit_cuda, m) {
  m.def(
      "mixed_gemm(Tensor x, Tensor packed, Tensor scale, Tensor? zero_point, Tensor? outer, Tensor? bias, str format, "
      "str scale_format, int group_size, int columns=0, int parts=0, int early=0, int shared=0) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(lowbit_cuda, CUDA, m) { m.impl("mixed_gemm", TORCH_BOX(&mixed_gemm)); }
