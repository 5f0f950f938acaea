// A weight as a call passes it, checked: codes, scales, zero points and the values of the format.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include "../../decode.h"
#include "../pack/split_int8_plan.h"
#include "../isa/instruction_sets.h"
#include "../decode/interleaved.h"
#include "torch_helpers.h"

namespace lowbit::cpu {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline ArrayView view_of(const Tensor& t, const char* name) {
  ArrayView numbers;
  numbers.data = t.const_data_ptr();
  numbers.stride = t.dim() > 1 ? t.stride(t.dim() - 2) : 0;
  switch (t.scalar_type()) {
    case ScalarType::Float: numbers.dtype = Dtype::float32; break;
    case ScalarType::BFloat16: numbers.dtype = Dtype::bfloat16; break;
    case ScalarType::Half: numbers.dtype = Dtype::float16; break;
    case ScalarType::Byte: numbers.dtype = Dtype::bytes; break;
    default:
      STD_TORCH_CHECK(false, name, " must be float32, bfloat16, float16 or uint8, got ",
                      torch::headeronly::toString(t.scalar_type()));
  }
  return numbers;
}

inline bool is_float(const Tensor& t) {
  return t.scalar_type() == ScalarType::Float || t.scalar_type() == ScalarType::BFloat16 || t.scalar_type() == ScalarType::Half;
}

// `t` with contiguous rows; rows may be apart (a slice of a weight).
inline Tensor with_dense_rows(const Tensor& t) {
  const int64_t last = t.dim() - 1;
  return last < 0 || t.numel() == 0 || t.stride(last) == 1 || t.size(last) == 1 ? t : torch::stable::contiguous(t);
}

inline void check_weight_matrix(const Tensor& t, const char* name, int64_t rows, int64_t columns) {
  STD_TORCH_CHECK(t.is_cpu() && t.dim() == 2 && t.size(0) == rows && t.size(1) == columns, name, " must be a CPU tensor [", rows,
                  ", ", columns, "]");
}

// Bits of the codes, from values [2^bits].
inline int bits_of(const Tensor& values) {
  check_on_cpu(values, "values");
  STD_TORCH_CHECK(values.scalar_type() == ScalarType::Float && values.dim() == 1 && values.is_contiguous(),
                  "values must be contiguous float32 [2^bits] on the CPU");
  int bits = 0;
  while (bits < 8 && (1 << bits) < values.numel()) bits++;
  STD_TORCH_CHECK(bits >= 1 && 1 << bits == values.numel(), "values must hold 2^bits numbers for 1..8 bits, got ", values.numel());
  return bits;
}

// Group size in columns, at most k.
inline int64_t group_of(int64_t group_size, int64_t k) {
  STD_TORCH_CHECK(group_size == -1 || group_size >= 1, "group_size must be -1 or at least 1, got ", group_size);
  return std::max<int64_t>(group_size == -1 ? k : std::min(group_size, k), 1);
}

// Fills halves [256]; false where a value is not a 16-bit float.
inline bool to_half_table(const float* values, int bits, uint16_t* halves) {
  for (int code = 0; code < 1 << bits; code++) {
    const c10::Half half = static_cast<c10::Half>(values[code]);
    if (!std::isnan(values[code]) && static_cast<float>(half) != values[code]) return false;
    halves[code] = half.x;
  }
  return true;
}

// Whether the format is IEEE half without some bits.
inline bool to_truncated_half(const Linear& a, TruncatedHalf& truncated, float& unit) {
  struct Known {
    int bits;
    TruncatedHalf truncated;
    float unit;
  };
  constexpr Known known[] = {{8, {7, 0xbfff, true}, 256}, {8, {8, 0xffff, false}, 1}, {6, {8, 0x9fff, false}, 4096}};
  for (const Known& one : known) {
    if (one.bits != a.bits) continue;
    bool same = true;
    const int sign = 1 << (a.bits - 1);
    for (int code = 0; code < 1 << a.bits && same; code++) {
      const uint16_t half = static_cast<uint16_t>(static_cast<uint32_t>((code ^ sign) - sign) << one.truncated.up) & one.truncated.mask;
      const float number = lowbit::half_to_float(half) * one.unit;
      const bool nan = (one.truncated.has_nan && (code & 127) == 127) || std::isnan(number);
      same = nan ? std::isnan(a.values[code]) : number == a.values[code];
    }
    if (same) {
      truncated = one.truncated, unit = one.unit;
      return true;
    }
  }
  return false;
}

// Chooses how codes become values; fills `halves` where that needs it.
inline Codes codes_of(Linear& a, uint16_t* halves) {
  bool finite = true;
  for (int code = 0; code < 1 << a.bits; code++) finite = finite && std::isfinite(a.values[code]);
  if (a.bits == 4 && finite) return Codes::nibbles;
  a.is_signed = are_integers(a.values, a.bits, true);
  if (a.is_signed || are_integers(a.values, a.bits, false))
    return a.bits < 8 ? Codes::integers : a.is_signed ? Codes::signed_bytes : Codes::unsigned_bytes;
  for (int log = 1; log <= 8 && a.bits == 8; log++)
    if (are_integers(a.values, a.bits, true, static_cast<float>(1 << log))) {
      a.is_signed = true, a.unit = 1.0f / static_cast<float>(1 << log);
      return Codes::signed_bytes;
    }
  a.halves = halves;
  return to_half_table(a.values, a.bits, halves) ? Codes::halves : Codes::table;
}

// A checked weight, which keeps the tensors that its pointers refer to alive.
struct Weight {
  Linear a = {};
  int64_t groups = 0;
  uint16_t halves[256] = {};
  Tensor packed, scale, zero;
  const float* outer_ptr = nullptr;
  bool is_uncopied;  // no tensor had to be copied

  Weight(const Tensor& packed_any, const Tensor& scale_any, const std::optional<Tensor>& zero_any, const std::optional<Tensor>& outer,
         const Tensor& values, const std::optional<Tensor>& scale_values, int64_t group_size, int64_t k, bool interleaved)
      : packed(dequantize_rows_as(packed_any, "packed")), scale(dequantize_rows_as(scale_any, "scale")), zero(scale) {
    is_uncopied = packed.get() == packed_any.get() && scale.get() == scale_any.get();
    STD_TORCH_CHECK(packed.dim() == 2 && packed.scalar_type() == ScalarType::Byte, "packed must be uint8 [N, bytes]");
    a.bits = bits_of(values);
    a.values = values.const_data_ptr<float>();
    a.codes = codes_of(a, halves);
    a.n = packed.size(0);
    a.k = k;
    STD_TORCH_CHECK(a.n < max_dim_size && a.k < max_dim_size, "a weight must have fewer than 2^40 rows and columns, got ", a.n,
                    " x ", a.k);
    if (a.codes == Codes::halves && (group_size == -1 || group_size % block == 0) && to_truncated_half(a, a.truncated_half, a.unit)) a.codes = Codes::truncated_half;
    a.group = group_of(group_size, a.k);
    groups = (a.k + a.group - 1) / a.group;

    check_weight_matrix(packed, "packed", a.n, lowbit::packed_size(a.bits, a.k));
    check_weight_matrix(scale, "scale", a.n, groups);
    a.packed = static_cast<const uint8_t*>(packed.const_data_ptr());
    a.packed_stride = packed.stride(0);
    a.scale = view_of(scale, "scale");
    STD_TORCH_CHECK((a.scale.dtype == Dtype::bytes) == scale_values.has_value(),
                    "scale_values go with scales of uint8, and only with them");
    if (scale_values) {
      check_storage(*scale_values, "scale_values");
      STD_TORCH_CHECK(scale_values->is_cpu() && scale_values->scalar_type() == ScalarType::Float && scale_values->numel() == 256 &&
                          scale_values->is_contiguous(),
                      "scale_values must be contiguous float32 [256] on the CPU, got ", scale_values->numel(), " numbers");
      a.scale.table = scale_values->const_data_ptr<float>();
    }
    if (zero_any) {
      zero = dequantize_rows_as(*zero_any, "zero_point");
      is_uncopied = is_uncopied && zero.get() == zero_any->get();
      check_weight_matrix(zero, "zero_point", a.n, groups);
      STD_TORCH_CHECK(!a.is_signed, "codes with a sign have no zero point");
      a.zero_point = view_of(zero, "zero_point");
    }
    a.interleaved = interleaved;
    STD_TORCH_CHECK(!interleaved || supports_interleaved(a.bits, a.group, a.n, a.k), "interleaved weights of ", a.bits,
                    " bits have rows in multiples of ", rows_per_block, " and columns and groups, of at least ",
                    min_interleaved_group, ", in multiples of ", columns_per_unit(a.bits), ", got ", a.n, " x ", a.k, " in groups of ", a.group);
    STD_TORCH_CHECK(!interleaved || (packed.is_contiguous() && scale.is_contiguous() && zero.is_contiguous()),
                    "interleaved weights must be contiguous");
    if (outer) {
      check_storage(*outer, "outer");
      STD_TORCH_CHECK(outer->is_cpu() && outer->numel() == 1 && outer->scalar_type() == ScalarType::Float,
                      "outer must be one float32 on the CPU");
      outer_ptr = outer->const_data_ptr<float>();
      a.outer = *outer_ptr;
      a.has_outer = true;
    }
  }
  Weight(const Weight&) = delete;

 private:
  static Tensor dequantize_rows_as(const Tensor& any, const char* name) {
    check_on_cpu(any, name);
    return with_dense_rows(any);
  }
};

inline Tensor checked_bias(const Tensor& bias, int64_t n) {
  check_storage(bias, "bias");
  STD_TORCH_CHECK(bias.is_cpu() && bias.dim() == 1 && bias.numel() == n && is_float(bias), "bias must be float32, bfloat16 or float16 [", n,
                  "] on the CPU");
  return dense(bias);
}

// y [m, n] of a weight with K = 0: the bias, or zeros.
inline void finish_without_columns(const Linear& weight, const ArrayView* bias, const Tensor& y) {
  const Dtype type = view_of(y, "y").dtype;
  const int64_t bytes = type == Dtype::float32 ? 4 : 2;
  const std::vector<float> zeros(weight.n);
  Linear a = weight;
  a.m = 1, a.y = const_cast<float*>(zeros.data());
  for (int64_t m = 0; m < weight.m; m++)
    instruction_set().write_output(a, {bias, nullptr, static_cast<char*>(y.mutable_data_ptr()) + m * a.n * bytes, type}, 0, a.n);
}

}  // namespace lowbit::cpu
