// lowbit_cpu::linear and the split-int8 operators: check arguments and choose the instruction set.
#include <torch/csrc/stable/library.h>

#include <string>

#include "prepared_call.h"
#include "../kernels/gemv_dispatch.h"

namespace {

using namespace lowbit::cpu;

std::string best_instructions() { return instruction_set().name; }

// Whether split_int8_gemv supports a format with these values [2^bits] on this processor.
bool supports_split_int8(Tensor values, bool zero_points) {
  if (!instruction_set().steps) return false;
  Linear a = {};
  a.bits = bits_of(values);
  a.values = values.const_data_ptr<float>();
  ByteDecoding decoding;
  uint8_t table[64];
  return a.bits > 1 && to_byte_decoding(a, decoding, table) && sums_fit_int32(a, decoding, zero_points);
}

// The static scale of x, allowed with one limb only.
const float* checked_scale(const std::optional<Tensor>& input_scale, int limbs) {
  if (!input_scale) return nullptr;
  check_storage(*input_scale, "input_scale");
  STD_TORCH_CHECK(limbs == 1 && input_scale->is_cpu() && input_scale->numel() == 1 && input_scale->scalar_type() == ScalarType::Float,
                  "input_scale must be one float32 on the CPU, and goes with one limb");
  return input_scale->const_data_ptr<float>();
}

void check_limbs(int64_t limbs, const Linear& a) {
  STD_TORCH_CHECK(limbs >= 1 && limbs <= 3, "limbs must be 1, 2 or 3, got ", limbs);
  STD_TORCH_CHECK(!a.zero_point.data || a.zero_point.dtype == Dtype::bytes, "limbs take zero points that are integers");
}

void check_x(const Tensor& x) {
  check_on_cpu(x, "x");
  STD_TORCH_CHECK(x.dim() >= 1 && is_float(x), "x must be float32, bfloat16 or float16 [..., K] on the CPU");
}

// Limits M, but with one limb.
void check_rows(int64_t m, int limbs) {
  STD_TORCH_CHECK(m <= max_rows || limbs == 1, "x must have at most ", max_rows, " rows, got ", m);
}

Tensor product(int limbs, Tensor x_any, Tensor packed, Tensor scale, std::optional<Tensor> zero, std::optional<Tensor> outer,
               std::optional<Tensor> bias_any, Tensor values, std::optional<Tensor> scale_values, int64_t group_size,
               const char* instructions, bool interleaved = false, const std::optional<Tensor>& input_scale = std::nullopt) {
  check_x(x_any);
  const Tensor x = dense(x_any);
  Weight weight(packed, scale, zero, outer, values, scale_values, group_size, x.size(x.dim() - 1), interleaved);
  Linear& a = weight.a;
  const Product product(x, a.n);
  a.m = product.m;
  check_rows(a.m, limbs);
  if (limbs) check_limbs(limbs, a);
  std::optional<Tensor> bias;
  ArrayView bias_numbers;
  if (bias_any) bias = checked_bias(*bias_any, a.n), bias_numbers = view_of(*bias, "bias");

  if (a.m == 0 || a.n == 0) return product.y;
  if (a.k == 0) return finish_without_columns(a, bias ? &bias_numbers : nullptr, product.y), product.y;
  CallOptions options;
  options.bias = bias ? &bias_numbers : nullptr, options.input_scale = checked_scale(input_scale, limbs), options.instructions = instructions;
  if (limbs)
    multiply_with_plan(a, weight.groups, x, product.y, limbs, options);
  else
    multiply(a, weight.groups, x, product.y, options);
  return product.y;
}

// The checked arguments of a weight as a byte tensor (PreparedCall); empty where part of the weight had to be copied, since
// nobody would own the copy.
Tensor split_int8_gemv_prepare(Tensor x, Tensor packed, Tensor scale, std::optional<Tensor> zero, std::optional<Tensor> outer,
                       std::optional<Tensor> bias, Tensor values, std::optional<Tensor> scale_values, int64_t group_size,
                       int64_t limbs, std::optional<Tensor> input_scale, bool interleaved) {
  check_x(x);
  const Weight weight(packed, scale, zero, outer, values, scale_values, group_size, x.size(x.dim() - 1), interleaved);
  check_limbs(limbs, weight.a);
  const SplitInt8Plan plan(weight.a, static_cast<int>(limbs));
  PreparedCall made = {0, 0, weight.a, weight.outer_ptr,
                   checked_scale(input_scale, plan.count), weight.groups, {}, plan, {}};
  std::copy(weight.halves, weight.halves + 256, made.halves);
  bool is_uncopied = weight.is_uncopied && weight.a.k > 0;
  if (bias) {
    const Tensor checked = checked_bias(*bias, weight.a.n);
    is_uncopied = is_uncopied && checked.get() == bias->get();
    made.bias = view_of(checked, "bias");
  }
  const int64_t of_steps = plan.group_table_size();
  if (is_uncopied) made.bytes = static_cast<int64_t>(sizeof(PreparedCall) + of_steps * sizeof(int32_t));
  const int64_t stride = 1;
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, &made.bytes, &stride, aoti_torch_dtype_uint8(),
                                                         aoti_torch_device_type_cpu(), 0, &handle));
  Tensor bytes(handle);
  if (!is_uncopied) return bytes;
  char* to = static_cast<char*>(bytes.mutable_data_ptr());
  std::memcpy(to, &made, sizeof(PreparedCall));
  plan.fill_groups(weight.a, reinterpret_cast<int32_t*>(to + sizeof(PreparedCall)));
  const uint64_t sign = PreparedCall::checksum(to, made.bytes);
  std::memcpy(to, &sign, sizeof sign);
  return bytes;
}

// x times a weight that split_int8_gemv_prepare has checked.
Tensor prepared_linear(Tensor x_any, Tensor prepared) {
  check_on_cpu(prepared, "prepared");
  const PreparedCall* const p = PreparedCall::of(prepared);
  STD_TORCH_CHECK(p, "prepared must be what split_int8_gemv_prepare returned");
  check_x(x_any);
  const Tensor x = dense(x_any);
  const int64_t k = x.size(x.dim() - 1);
  STD_TORCH_CHECK(k == p->a.k, "x must have the ", p->a.k, " columns that this was prepared for, got ", k);
  const Product product(x, p->a.n);
  check_rows(product.m, p->plan.count);
  Linear a = p->weight();
  a.m = product.m;
  if (a.m == 0 || a.n == 0) return product.y;
  CallOptions options;
  options.bias = p->bias.data ? &p->bias : nullptr, options.input_scale = p->input_scale;
  if (p->plan.kernels == instruction_set().steps) {
    options.plan = &p->plan, options.groups = p->steps();
    multiply(a, p->groups, x, product.y, options);
  } else {  // LOWBIT_CPU has changed since then
    multiply_with_plan(a, p->groups, x, product.y, p->plan.count, options);
  }
  return product.y;
}

Tensor linear(Tensor x, Tensor packed, Tensor scale, std::optional<Tensor> zero_point, std::optional<Tensor> outer,
              std::optional<Tensor> bias, Tensor values, std::optional<Tensor> scale_values, int64_t group_size,
              std::string instructions) {
  return product(0, x, packed, scale, zero_point, outer, bias, values, scale_values, group_size, instructions.c_str());
}

Tensor split_int8_gemv(Tensor x, Tensor packed, Tensor scale, std::optional<Tensor> zero_point, std::optional<Tensor> outer,
                     std::optional<Tensor> bias, Tensor values, std::optional<Tensor> scale_values, int64_t group_size, int64_t limbs,
                     std::optional<Tensor> input_scale, bool interleaved) {
  STD_TORCH_CHECK(limbs >= 1 && limbs <= 3, "limbs must be 1, 2 or 3, got ", limbs);
  return product(static_cast<int>(limbs), x, packed, scale, zero_point, outer, bias, values, scale_values, group_size, "", interleaved,
                 input_scale);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lowbit_cpu, m) {
  m.def(
      "linear(Tensor x, Tensor packed, Tensor scale, Tensor? zero_point, Tensor? outer, Tensor? bias, Tensor values, "
      "Tensor? scale_values, int group_size, str instructions='') -> Tensor");
  m.def(
      "split_int8_gemv(Tensor x, Tensor packed, Tensor scale, Tensor? zero_point, Tensor? outer, Tensor? bias, Tensor values, "
      "Tensor? scale_values, int group_size, int limbs, Tensor? input_scale=None, bool interleaved=False) -> Tensor");
  m.def(
      "split_int8_gemv_prepare(Tensor x, Tensor packed, Tensor scale, Tensor? zero_point, Tensor? outer, Tensor? bias, Tensor values, "
      "Tensor? scale_values, int group_size, int limbs, Tensor? input_scale=None, bool interleaved=False) -> Tensor");
  m.def("prepared_linear(Tensor x, Tensor prepared) -> Tensor");
  m.def("supports_split_int8(Tensor values, bool zero_points) -> bool");
  m.def("instructions() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(lowbit_cpu, CompositeExplicitAutograd, m) {
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("split_int8_gemv", TORCH_BOX(&split_int8_gemv));
  m.impl("split_int8_gemv_prepare", TORCH_BOX(&split_int8_gemv_prepare));
  m.impl("prepared_linear", TORCH_BOX(&prepared_linear));
  m.impl("supports_split_int8", TORCH_BOX(&supports_split_int8));
  m.impl("instructions", TORCH_BOX(&best_instructions));
}
