// lowbit_cpu::quantize and lowbit_cpu::dequantize.
#include <torch/csrc/stable/library.h>

#include <atomic>
#include <string>

#include "../decode/deinterleave.h"
#include "../schedule/parallel.h"
#include "weight.h"

namespace {

using namespace lowbit::cpu;

// Dequantizes a weight into out [N, K].
void dequantize_rows(Tensor out, Tensor packed, Tensor scale, std::optional<Tensor> zero, std::optional<Tensor> outer, Tensor values,
           std::optional<Tensor> scale_values, int64_t group_size, std::string instructions, bool interleaved) {
  check_on_cpu(out, "out");
  STD_TORCH_CHECK(out.dim() == 2 && is_float(out) && out.is_contiguous() && packed.dim() == 2 && out.size(0) == packed.size(0),
                  "out must be contiguous float32, bfloat16 or float16 [N, K] on the CPU");
  const Weight weight(packed, scale, zero, outer, values, scale_values, group_size, out.size(1), interleaved);
  const InstructionSet& set = instruction_set(instructions.c_str());
  if (weight.a.n == 0 || weight.a.k == 0) return;
  const Dtype type = view_of(out, "out").dtype;
  char* to = static_cast<char*>(out.mutable_data_ptr());
  const int64_t k = out.size(1), row = k * (type == Dtype::float32 ? 4 : 2);
  parallel_rows(weight.a, [&](int64_t begin, int64_t end) {
    for_canonical_rows(weight.a, begin, end, [&](const Linear& rows, int64_t first, int64_t stop) {
      set.dequantize_rows(rows, type, to + first * row, k, first, stop);
    });
  });
}

// Quantizes w [N, K] into the given tensors; false where a weight or a scale cannot be represented.
bool quantize(Tensor w_any, Tensor packed, Tensor scale, std::optional<Tensor> zero, int64_t bits, int64_t group_size, double low,
              double high, double largest, std::optional<double> reach, std::string instructions) {
  check_on_cpu(w_any, "w"), check_on_cpu(packed, "packed"), check_on_cpu(scale, "scale"), check_on_cpu(zero, "zero_point");
  STD_TORCH_CHECK(w_any.dim() == 2 && is_float(w_any), "w must be float32, bfloat16 or float16 [N, K] on the CPU");
  STD_TORCH_CHECK(bits >= 1 && bits <= 8 && group_size >= 1, "bits must be 1..8 and group_size at least 1, got ", bits, " and ",
                  group_size);
  const Tensor w = with_dense_rows(w_any);
  Quantize a = {};
  a.n = w.size(0), a.k = w.size(1), a.group = group_of(group_size, a.k), a.bits = static_cast<int>(bits);
  STD_TORCH_CHECK(a.n < max_dim_size && a.k < max_dim_size, "a weight must have fewer than 2^40 rows and columns, got ", a.n,
                  " x ", a.k);
  const int64_t groups = (a.k + a.group - 1) / a.group;
  check_weight_matrix(packed, "packed", a.n, lowbit::packed_size(a.bits, a.k));
  check_weight_matrix(scale, "scale", a.n, groups);
  STD_TORCH_CHECK(packed.is_contiguous() && scale.is_contiguous() && is_float(scale) && packed.scalar_type() == ScalarType::Byte,
                  "packed must be contiguous uint8 and scale contiguous float32, bfloat16 or float16");
  a.w = view_of(w, "w");
  a.low = static_cast<float>(low), a.high = static_cast<float>(high);
  a.largest = static_cast<float>(largest), a.reach = static_cast<float>(reach.value_or(largest));
  a.dtype = view_of(scale, "scale").dtype;
  a.scale = scale.mutable_data_ptr();
  a.packed = static_cast<uint8_t*>(packed.mutable_data_ptr());
  if (zero) {
    check_weight_matrix(*zero, "zero_point", a.n, groups);
    STD_TORCH_CHECK(zero->is_contiguous() && zero->scalar_type() == ScalarType::Byte, "zero_point must be contiguous uint8");
    a.zero = static_cast<uint8_t*>(zero->mutable_data_ptr());
  }
  const InstructionSet& set = instruction_set(instructions.c_str());
  if (a.n == 0 || a.k == 0) return true;
  std::atomic<bool> ok{true};
  Linear size = {};
  size.n = a.n, size.k = a.k;
  parallel_rows(size, [&](int64_t begin, int64_t end) {
    if (!set.quantize(a, begin, end)) ok = false;
  });
  return ok;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lowbit_cpu, m) {
  m.def(
      "quantize(Tensor w, Tensor(a!) packed, Tensor(b!) scale, Tensor(c!)? zero_point, int bits, int group_size, float low, "
      "float high, float largest, float? reach=None, str instructions='') -> bool");
  m.def(
      "dequantize(Tensor(a!) out, Tensor packed, Tensor scale, Tensor? zero_point, Tensor? outer, Tensor values, "
      "Tensor? scale_values, int group_size, str instructions='', bool interleaved=False) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(lowbit_cpu, CompositeExplicitAutograd, m) {
  m.impl("dequantize", TORCH_BOX(&dequantize_rows));
  m.impl("quantize", TORCH_BOX(&quantize));
}
