// lowbit_cpu::linear and the products by digits: check what they are given and choose the instruction set.
#include <torch/csrc/stable/library.h>

#include <string>

#include "prepared.h"
#include "products.h"

namespace {

using namespace lowbit::cpu;

std::string best_instructions() { return instruction_set().name; }

// Whether `digits_linear` takes a format with these numbers on this processor.
bool takes_digits(Tensor values, bool zero_points) {
  if (!instruction_set().steps) return false;
  Linear a = {};
  a.bits = bits_of(values);
  a.values = values.const_data_ptr<float>();
  Bytewise how;
  uint8_t table[64];
  return a.bits > 1 && are_bytes(a, how, table) && fits(a, how, zero_points);
}

// The scale of all rows of x that a product of one digit may be given.
const float* checked_scale(const std::optional<Tensor>& given, int digits) {
  if (!given) return nullptr;
  check_held(*given, "input_scale");
  STD_TORCH_CHECK(digits == 1 && given->is_cpu() && given->numel() == 1 && given->scalar_type() == ScalarType::Float,
                  "input_scale must be one float32 on the CPU, and goes with one digit");
  return given->const_data_ptr<float>();
}

void check_digits(int64_t digits, const Linear& a) {
  STD_TORCH_CHECK(digits >= 1 && digits <= 3, "digits must be 1, 2 or 3, got ", digits);
  STD_TORCH_CHECK(!a.zero_point.data || a.zero_point.stored == Stored::bytes, "digits take zero points that are integers");
}

void check_x(const Tensor& x) {
  check_on_cpu(x, "x");
  STD_TORCH_CHECK(x.dim() >= 1 && is_float(x), "x must be float32, bfloat16 or float16 [..., K] on the CPU");
}

// Rows of x that a product takes: any number with one digit.
void check_rows(int64_t m, int digits) {
  STD_TORCH_CHECK(m <= most_rows_at_once || digits == 1, "x must have at most ", most_rows_at_once, " rows, got ", m);
}

Tensor product(int digits, Tensor x_any, Tensor packed, Tensor scale, std::optional<Tensor> zero, std::optional<Tensor> outer,
               std::optional<Tensor> bias_any, Tensor values, std::optional<Tensor> scale_values, int64_t group_size,
               const char* instructions, bool interleaved = false, const std::optional<Tensor>& given = std::nullopt) {
  check_x(x_any);
  const Tensor x = dense(x_any);
  Weight weight(packed, scale, zero, outer, values, scale_values, group_size, x.size(x.dim() - 1), interleaved);
  Linear& a = weight.a;
  const Product product(x, a.n);
  a.m = product.m;
  check_rows(a.m, digits);
  if (digits) check_digits(digits, a);
  std::optional<Tensor> bias;
  Numbers bias_numbers;
  if (bias_any) bias = checked_bias(*bias_any, a.n), bias_numbers = numbers_of(*bias, "bias");

  if (a.m == 0 || a.n == 0) return product.y;
  if (a.k == 0) return finish_without_columns(a, bias ? &bias_numbers : nullptr, product.y), product.y;
  How how;
  how.bias = bias ? &bias_numbers : nullptr, how.given = checked_scale(given, digits), how.instructions = instructions;
  if (digits)
    multiply_planned(a, weight.groups, x, product.y, digits, how);
  else
    multiply(a, weight.groups, x, product.y, how);
  return product.y;
}

// The bytes of what a weight is multiplied with; none where part of it had to be copied, which somebody would have to keep.
Tensor digits_prepared(Tensor x, Tensor packed, Tensor scale, std::optional<Tensor> zero, std::optional<Tensor> outer,
                       std::optional<Tensor> bias, Tensor values, std::optional<Tensor> scale_values, int64_t group_size,
                       int64_t digits, std::optional<Tensor> input_scale, bool interleaved) {
  check_x(x);
  const Weight weight(packed, scale, zero, outer, values, scale_values, group_size, x.size(x.dim() - 1), interleaved);
  check_digits(digits, weight.a);
  const DigitsPlan plan(weight.a, static_cast<int>(digits));
  Prepared made = {0, 0, weight.a, weight.outer_number,
                   checked_scale(input_scale, plan.count), weight.groups, {}, plan, {}};
  std::copy(weight.halves, weight.halves + 256, made.halves);
  bool is_as_given = weight.is_as_given && weight.a.k > 0;
  if (bias) {
    const Tensor checked = checked_bias(*bias, weight.a.n);
    is_as_given = is_as_given && checked.get() == bias->get();
    made.bias = numbers_of(checked, "bias");
  }
  const int64_t of_steps = plan.numbers_of_groups();
  if (is_as_given) made.bytes = static_cast<int64_t>(sizeof(Prepared) + of_steps * sizeof(int32_t));
  const int64_t stride = 1;
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, &made.bytes, &stride, aoti_torch_dtype_uint8(),
                                                         aoti_torch_device_type_cpu(), 0, &handle));
  Tensor bytes(handle);
  if (!is_as_given) return bytes;
  char* to = static_cast<char*>(bytes.mutable_data_ptr());
  std::memcpy(to, &made, sizeof(Prepared));
  plan.take_groups(weight.a, reinterpret_cast<int32_t*>(to + sizeof(Prepared)));
  const uint64_t sign = Prepared::sign_of(to, made.bytes);
  std::memcpy(to, &sign, sizeof sign);
  return bytes;
}

// A product whose weight digits_prepared has checked.
Tensor prepared_linear(Tensor x_any, Tensor prepared) {
  check_on_cpu(prepared, "prepared");
  const Prepared* const p = Prepared::of(prepared);
  STD_TORCH_CHECK(p, "prepared must be what digits_prepared returned");
  check_x(x_any);
  const Tensor x = dense(x_any);
  const int64_t k = x.size(x.dim() - 1);
  STD_TORCH_CHECK(k == p->a.k, "x must have the ", p->a.k, " columns that this was prepared for, got ", k);
  const Product product(x, p->a.n);
  check_rows(product.m, p->plan.count);
  Linear a = p->weight();
  a.m = product.m;
  if (a.m == 0 || a.n == 0) return product.y;
  How how;
  how.bias = p->bias.data ? &p->bias : nullptr, how.given = p->given;
  if (p->plan.kernels == instruction_set().steps) {
    how.plan = &p->plan, how.groups = p->steps();
    multiply(a, p->groups, x, product.y, how);
  } else {  // LOWBIT_CPU has changed since
    multiply_planned(a, p->groups, x, product.y, p->plan.count, how);
  }
  return product.y;
}

Tensor linear(Tensor x, Tensor packed, Tensor scale, std::optional<Tensor> zero_point, std::optional<Tensor> outer,
              std::optional<Tensor> bias, Tensor values, std::optional<Tensor> scale_values, int64_t group_size,
              std::string instructions) {
  return product(0, x, packed, scale, zero_point, outer, bias, values, scale_values, group_size, instructions.c_str());
}

Tensor digits_linear(Tensor x, Tensor packed, Tensor scale, std::optional<Tensor> zero_point, std::optional<Tensor> outer,
                     std::optional<Tensor> bias, Tensor values, std::optional<Tensor> scale_values, int64_t group_size, int64_t digits,
                     std::optional<Tensor> input_scale, bool interleaved) {
  STD_TORCH_CHECK(digits >= 1 && digits <= 3, "digits must be 1, 2 or 3, got ", digits);
  return product(static_cast<int>(digits), x, packed, scale, zero_point, outer, bias, values, scale_values, group_size, "", interleaved,
                 input_scale);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lowbit_cpu, m) {
  m.def(
      "linear(Tensor x, Tensor packed, Tensor scale, Tensor? zero_point, Tensor? outer, Tensor? bias, Tensor values, "
      "Tensor? scale_values, int group_size, str instructions='') -> Tensor");
  m.def(
      "digits_linear(Tensor x, Tensor packed, Tensor scale, Tensor? zero_point, Tensor? outer, Tensor? bias, Tensor values, "
      "Tensor? scale_values, int group_size, int digits, Tensor? input_scale=None, bool interleaved=False) -> Tensor");
  m.def(
      "digits_prepared(Tensor x, Tensor packed, Tensor scale, Tensor? zero_point, Tensor? outer, Tensor? bias, Tensor values, "
      "Tensor? scale_values, int group_size, int digits, Tensor? input_scale=None, bool interleaved=False) -> Tensor");
  m.def("prepared_linear(Tensor x, Tensor prepared) -> Tensor");
  m.def("takes_digits(Tensor values, bool zero_points) -> bool");
  m.def("instructions() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(lowbit_cpu, CompositeExplicitAutograd, m) {
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("digits_linear", TORCH_BOX(&digits_linear));
  m.impl("digits_prepared", TORCH_BOX(&digits_prepared));
  m.impl("prepared_linear", TORCH_BOX(&prepared_linear));
  m.impl("takes_digits", TORCH_BOX(&takes_digits));
  m.impl("instructions", TORCH_BOX(&best_instructions));
}
