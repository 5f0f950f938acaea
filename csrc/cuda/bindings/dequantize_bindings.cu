// lowbit_cuda::fragment_dequantize: checks arguments and launches dequantize.cuh on torch's current stream.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <string>

#include "../schedule/dequantize_launch.h"
#include "format_table.h"
#include "fragment_weight.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using namespace lowbit::cuda;

// Rows of the weight from `first` on, as many as `out` has.
void fragment_dequantize(Tensor out, Tensor packed, Tensor scale, std::optional<Tensor> zero_point, std::optional<Tensor> outer,
                      std::string format, std::string scale_name, int64_t group_size, int64_t first) {
  STD_TORCH_CHECK(out.is_cuda() && out.dim() == 2 && out.is_contiguous() && out.scalar_type() == ScalarType::BFloat16,
                  "out must be contiguous bfloat16 [rows, K] on a CUDA device");
  check_storage(out, "out");
  const KnownFormat& known = known_format(format);
  check_group_size(group_size);
  const DeviceGuardIfNeeded guard(out.get_device_index());
  const ScaleType scale_type = scale_type_of(scale, scale_name);
  const FragmentWeight weight(out, out.size(1), packed, scale, zero_point, outer, std::nullopt, known.bits, group_size, size_of(scale_type));
  const int64_t rows = out.size(0);
  STD_TORCH_CHECK(first >= 0 && first % tile_rows == 0 && first + rows <= weight.n, "first must be a multiple of ", tile_rows,
                  ", and no more than ", weight.n, " rows lie behind it, got ", first, " and ", rows, " rows");
  STD_TORCH_CHECK(is_on_16_bytes(out.const_data_ptr()), "out must begin on 16 bytes");
  if (rows == 0 || weight.k == 0) return;
  Dequantize a = {};
  a.unit = weight.unit;
  a.scale_type = scale_type;
  a.units = weight.units() + first / tile_rows * weight.units_per_row * a.unit.size;
  a.scale = static_cast<const uint8_t*>(weight.scale.const_data_ptr()) + (a.unit.groups ? 0 : first * size_of(scale_type));
  a.zero_point = weight.zeros_of_rows() ? weight.zeros_of_rows() + first : nullptr;
  a.outer = weight.outer_scale();
  a.factor = known.factor;
  a.to = static_cast<__nv_bfloat16*>(out.mutable_data_ptr());
  a.rows = rows;
  a.tiles = (rows + tile_rows - 1) / tile_rows;
  a.k = weight.k;
  a.units_per_row = weight.units_per_row;
  a.has_zero = weight.has_zero;
  a.is_signed = known.is_signed;
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(out.get_device_index(), &stream));
  const cudaError_t error = launch_dequantize(known.family, a, static_cast<cudaStream_t>(stream));
  STD_TORCH_CHECK(error == cudaSuccess, "the kernel could not be launched: ", cudaGetErrorString(error));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lowbit_cuda, m) {
  m.def(
      "fragment_dequantize(Tensor(a!) out, Tensor packed, Tensor scale, Tensor? zero_point, Tensor? outer, str format, "
      "str scale_format, int group_size, int first=0) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(lowbit_cuda, CUDA, m) { m.impl("fragment_dequantize", TORCH_BOX(&fragment_dequantize)); }
