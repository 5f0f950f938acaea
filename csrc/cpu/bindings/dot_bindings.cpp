// lowbit_cpu::bf16_dot_gemm and int8_dot_gemm, on processors with dot products of bfloat16 and of int8.
#include <torch/csrc/stable/library.h>

#include <string>

#include "../kernels/bf16_dot_gemm.h"
#include "../kernels/int8_dot_gemm.h"
#include "../schedule/parallel.h"
#include "weight.h"

namespace {

using namespace lowbit::cpu;

// Whether bf16_dot_gemm runs on this processor.
bool has_bf16_dot() {
#if defined(__x86_64__)
  return std::string(instruction_set().name) == "avx512" && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

bool has_int8_dot() {
#if defined(__x86_64__)
  return std::string(instruction_set().name) == "avx512" && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

// Rows of the weight in a panel: x is read once for each panel, so larger ones where there are enough for all threads.
int64_t panel_rows(const Linear& a) { return a.n >= 64 * 4 * static_cast<int64_t>(torch::stable::get_num_threads()) ? 64 : 32; }

// x [M, K] in bfloat16 times a weight that is rounded to bfloat16, for any M.
Tensor bf16_dot_gemm(Tensor x_any, Tensor packed, Tensor scale, std::optional<Tensor> zero, std::optional<Tensor> outer,
                   std::optional<Tensor> bias_any, Tensor values, std::optional<Tensor> scale_values, int64_t group_size,
                   bool interleaved) {
  STD_TORCH_CHECK(has_bf16_dot(), "this processor has no dot products of bfloat16");
  check_on_cpu(x_any, "x");
  STD_TORCH_CHECK(x_any.dim() >= 1 && x_any.scalar_type() == ScalarType::BFloat16, "x must be bfloat16 [..., K] on the CPU");
  const Tensor x = dense(x_any);
  Weight weight(packed, scale, zero, outer, values, scale_values, group_size, x.size(x.dim() - 1), interleaved);
  Linear& a = weight.a;
  Product product(x, a.n);
  a.m = product.m;
  std::optional<Tensor> bias;
  ArrayView bias_numbers;
  if (bias_any) bias = checked_bias(*bias_any, a.n), bias_numbers = view_of(*bias, "bias");
  Tensor& y = product.y;
  if (a.m == 0 || a.n == 0) return y;
  if (a.k == 0) return finish_without_columns(a, bias ? &bias_numbers : nullptr, y), y;
  const uint16_t* x_data = static_cast<const uint16_t*>(x.const_data_ptr());
  // rows that are whole registers are read in place
  const bool in_place = a.k % dot_columns == 0 && reinterpret_cast<uintptr_t>(x_data) % (dot_columns * sizeof(uint16_t)) == 0;
  const int64_t stride = in_place ? a.k : padded_stride(a.k);
  const auto padded = aligned_buffer<uint16_t>(in_place ? 0 : a.m * stride);
  if (!in_place)
    torch::stable::parallel_for(0, a.m, 16, [&](int64_t begin, int64_t end) {
      for (int64_t m = begin; m < end; m++)
        std::fill(std::copy_n(x_data + m * a.k, a.k, padded.get() + m * stride), padded.get() + (m + 1) * stride, 0);
    });
#if defined(__x86_64__)
  const int64_t panel_n = panel_rows(a);
  const Bf16DotArgs dots = {in_place ? x_data : padded.get(), stride, bias ? &bias_numbers : nullptr, static_cast<uint16_t*>(y.mutable_data_ptr()), panel_n};
  parallel_dynamic(a, panel_n, 1, 0, [&](const RowRange& range) { avx512bf16::bf16_dot_gemm(a, dots, range.begin, range.end); }, [](const RowRange&) {});
#endif
  return y;
}

// x [M, K] rounded to int8, with a scale a row or `input_scale`, times int8 weights with a scale a row, for any M.
Tensor int8_dot_gemm(Tensor x_any, Tensor packed, Tensor scale, std::optional<Tensor> bias_any, Tensor values,
                     std::optional<Tensor> input_scale) {
  STD_TORCH_CHECK(has_int8_dot(), "this processor has no dot products of int8");
  check_on_cpu(x_any, "x");
  STD_TORCH_CHECK(x_any.dim() >= 1 && is_float(x_any), "x must be float32, bfloat16 or float16 [..., K] on the CPU");
  const Tensor x = dense(x_any);
  const int64_t k = x.size(x.dim() - 1);
  Weight weight(packed, scale, std::nullopt, std::nullopt, values, std::nullopt, -1, k, false);
  Linear& a = weight.a;
  STD_TORCH_CHECK(a.bits == 8 && a.is_signed && a.unit == 1, "the weight must be of int8");
  Product product(x, a.n);
  a.m = product.m;
  std::optional<Tensor> bias;
  ArrayView bias_numbers;
  if (bias_any) bias = checked_bias(*bias_any, a.n), bias_numbers = view_of(*bias, "bias");
  Tensor& y = product.y;
  if (a.m == 0 || a.n == 0) return y;
  if (a.k == 0) return finish_without_columns(a, bias ? &bias_numbers : nullptr, y), y;
  const float* given = nullptr;
  if (input_scale) {
    check_on_cpu(*input_scale, "input_scale");
    STD_TORCH_CHECK(input_scale->numel() == 1 && input_scale->scalar_type() == ScalarType::Float, "input_scale must be one float32");
    given = input_scale->const_data_ptr<float>();
  }
  const int64_t stride = (a.k + int8_columns - 1) / int8_columns * int8_columns;
  const auto codes = aligned_buffer<uint8_t>(a.m * stride);
  const auto scales = aligned_buffer<float>(a.m);
  ArrayView rows = view_of(x, "x");
  rows.stride = a.k;
  const Int8DotArgs dots = {rows,  given, codes.get(), stride, scales.get(), bias ? &bias_numbers : nullptr, y.mutable_data_ptr(),
                            view_of(y, "y").dtype, panel_rows(a)};
#if defined(__x86_64__)
  torch::stable::parallel_for(0, a.m, 16, [&](int64_t begin, int64_t end) { avx512vnni::quantize_tokens(a, dots, begin, end); });
  parallel_dynamic(a, dots.panel_n, 1, 0, [&](const RowRange& range) { avx512vnni::int8_dot_gemm(a, dots, range.begin, range.end); }, [](const RowRange&) {});
#endif
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lowbit_cpu, m) {
  m.def(
      "bf16_dot_gemm(Tensor x, Tensor packed, Tensor scale, Tensor? zero_point, Tensor? outer, Tensor? bias, Tensor values, "
      "Tensor? scale_values, int group_size, bool interleaved=False) -> Tensor");
  m.def("has_bf16_dot() -> bool");
  m.def(
      "int8_dot_gemm(Tensor x, Tensor packed, Tensor scale, Tensor? bias, Tensor values, Tensor? input_scale) -> Tensor");
  m.def("has_int8_dot() -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(lowbit_cpu, CompositeExplicitAutograd, m) {
  m.impl("bf16_dot_gemm", TORCH_BOX(&bf16_dot_gemm));
  m.impl("has_bf16_dot", TORCH_BOX(&has_bf16_dot));
  m.impl("int8_dot_gemm", TORCH_BOX(&int8_dot_gemm));
  m.impl("has_int8_dot", TORCH_BOX(&has_int8_dot));
}
