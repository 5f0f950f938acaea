// A weight in the layout mma_fragment as a binding receives it: checked, and as kernels take it.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

#include "torch_helpers.h"
#include "../decode/unit_scales.cuh"

namespace lowbit::cuda {

inline bool is_on_16_bytes(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

// Whether these are 8-bit codes of a scale format.
inline bool are_codes(const torch::stable::Tensor& t) { return t.scalar_type() == torch::headeronly::ScalarType::Byte; }

// The tensors of a product but x. Absent ones are set to `scale`.
struct FragmentWeight {
  using Tensor = torch::stable::Tensor;
  using ScalarType = torch::headeronly::ScalarType;

  Tensor packed, scale, zero, outer, bias;  // kept alive until the launch
  UnitLayout unit;
  int64_t n, tiles;
  int k, units_per_row;
  bool has_zero, has_outer, has_bias;
  bool is_uncopied;  // none of them is a copy

  // For products with `x` of k columns; group_size -1: the row. Raises what is wrong with any of them. With several experts `n`
  // and `tiles` are those of all, [E N, ...].
  FragmentWeight(const Tensor& x, int64_t columns, const Tensor& packed_any, const Tensor& scale_any,
                const std::optional<Tensor>& zero_any, const std::optional<Tensor>& outer_any,
                const std::optional<Tensor>& bias_any, int64_t bits, int64_t group_size, int scale_size, int64_t experts = 1)
      : packed(held_dense(packed_any, "packed")), scale(held_dense(scale_any, "scale")), zero(scale), outer(scale), bias(scale) {
    STD_TORCH_CHECK(packed.dim() == 2 && are_codes(packed), "packed must be uint8 [N, bytes]");
    STD_TORCH_CHECK(columns < (int64_t{1} << 31) - 512, "a weight must have fewer than 2^31 - 512 columns, got ", columns);
    if (!is_on_16_bytes(packed.const_data_ptr())) packed = torch::stable::clone(packed);
    n = packed.size(0);
    k = static_cast<int>(columns);
    has_zero = zero_any.has_value(), has_outer = outer_any.has_value(), has_bias = bias_any.has_value();
    unit = UnitLayout::of(static_cast<int>(bits), static_cast<int>(group_size), scale_size, has_zero);
    tiles = (n + tile_rows - 1) / tile_rows;
    units_per_row = (k + unit.columns - 1) / unit.columns;
    check(packed, "packed", x, n, n ? (tiles * units_per_row * unit.size + n - 1) / n : packed.size(1));
    check(scale, "scale", x, n, group_size == -1 && k > 0);
    if (has_zero) {
      zero = held_dense(*zero_any, "zero_point");
      check(zero, "zero_point", x, n, scale.size(1));
      STD_TORCH_CHECK(are_codes(zero), "zero_point must be uint8, got ", torch::headeronly::toString(zero.scalar_type()));
    }
    if (has_outer) {
      outer = *outer_any;
      check_storage(outer, "outer");
      STD_TORCH_CHECK(is_beside(outer, x) && outer.numel() == experts && outer.scalar_type() == ScalarType::Float,
                      "outer must be one float32 for each weight, on the device of x");
    }
    if (has_bias) {
      bias = held_dense(*bias_any, "bias");
      STD_TORCH_CHECK(is_beside(bias, x) && bias.dim() == 1 && bias.numel() == n && bias.scalar_type() == x.scalar_type(),
                      "bias must have the dtype and device of x and shape [", n, "]");
    }
    const auto is_same = [](const Tensor& local, const Tensor& any) { return local.const_data_ptr() == any.const_data_ptr(); };
    is_uncopied = is_same(packed, packed_any) && is_same(scale, scale_any) && (!has_zero || is_same(zero, *zero_any)) &&
                  (!has_bias || is_same(bias, *bias_any));
  }

  const uint8_t* units() const { return static_cast<const uint8_t*>(packed.const_data_ptr()); }
  const uint8_t* zeros() const { return has_zero ? static_cast<const uint8_t*>(zero.const_data_ptr()) : nullptr; }
  const uint8_t* zeros_of_rows() const { return unit.groups ? nullptr : zeros(); }  // otherwise they are in the units
  const float* outer_scale() const { return has_outer ? static_cast<const float*>(outer.const_data_ptr()) : nullptr; }
  const void* biases() const { return has_bias ? bias.const_data_ptr() : nullptr; }

 private:
  static bool is_beside(const Tensor& t, const Tensor& x) { return t.is_cuda() && t.get_device_index() == x.get_device_index(); }
  static void check(const Tensor& t, const char* name, const Tensor& x, int64_t rows, int64_t columns) {
    const bool right = t.dim() == 2 && t.size(0) == rows && t.size(1) == columns;
    STD_TORCH_CHECK(is_beside(t, x) && right, name, " must be on the device of x and [", rows, ", ", columns, "]");
  }
};

}  // namespace lowbit::cuda
