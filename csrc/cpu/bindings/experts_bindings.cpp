// lowbit_cpu::experts_linear: rows of x times the interleaved weights of the experts that they chose, by limbs, in one parallel region.
//
//    x [T, K] --pack_limbs_interleaved, each row by itself--> limbs
//    experts [S] -> (row of y, rows of W) claimed in decreasing ranges --split-int8 GEMV (interleaved_gemv.h)--> y [S, N]
//
// Contract: that of the GEMV; rows with infinity, NaN or tiny values are multiplied in fp32 afterwards, each by itself.
// Limit: the bytes of the chosen experts.
// Figures: evals/results/experts_cpu.json.
#include <torch/csrc/stable/library.h>

#include <memory>
#include <vector>

#include "../kernels/gemv_dispatch.h"

namespace {

using namespace lowbit::cpu;

int64_t size_of(Dtype type) { return type == Dtype::float32 ? 4 : type == Dtype::bytes ? 1 : 2; }

ArrayView from_row(ArrayView view, int64_t numbers) {
  if (view.data) view.data = static_cast<const char*>(view.data) + numbers * size_of(view.dtype);
  return view;
}

// The experts of a weight of E N rows.
struct Experts {
  const Weight& weight;
  int64_t n;                // rows of one
  const float* outer;       // [E], or null
  ArrayView bias;           // [E N], or null

  Linear at(int64_t expert) const {
    Linear a = weight.a;
    const int64_t row = expert * n;
    a.packed += row * a.packed_stride;
    a.scale = from_row(a.scale, row * weight.groups);
    a.zero_point = from_row(a.zero_point, row * weight.groups);
    if (outer) a.outer = outer[expert], a.has_outer = true;
    a.n = n, a.m = 1;
    return a;
  }
};

// Limbs of rows of x, each packed by itself, as for M = 1.
struct PackedRows {
  std::vector<Run> runs;
  int64_t limbs, sums, bytes;
  std::unique_ptr<int8_t[], FreeDeleter> buffer;
  std::unique_ptr<bool[]> no_limbs;

  PackedRows(const Linear& a, const SplitInt8Plan& plan, int64_t rows) : runs(runs_of(a)) {
    limbs = round_up_to_line(a.k * plan.size);
    sums = round_up_to_line(static_cast<int64_t>(runs.size()) * plan.count * 4);
    bytes = limbs + sums + round_up_to_line(plan.slices * 4);
    buffer = aligned_buffer<int8_t>(rows * bytes);
    no_limbs.reset(new bool[rows]());
  }
  InterleavedLimbs of(int64_t row, const SplitInt8Plan& plan) const {
    int8_t* const at = buffer.get() + row * bytes;
    return {plan.count, nullptr, static_cast<int64_t>(runs.size()), runs.data(), at, reinterpret_cast<int32_t*>(at + limbs),
            reinterpret_cast<float*>(at + limbs + sums), no_limbs.get() + row};
  }
};

// y [S, N]; rows of no expert (an index outside of 0 .. E - 1) become 0.
Tensor experts_linear(Tensor x_any, Tensor packed, Tensor scale, std::optional<Tensor> zero_point, std::optional<Tensor> outer,
                      std::optional<Tensor> bias_any, Tensor chosen_any, Tensor values, std::optional<Tensor> scale_values,
                      int64_t group_size, int64_t limbs, int64_t num_experts) {
  check_on_cpu(x_any, "x");
  check_on_cpu(chosen_any, "experts");
  STD_TORCH_CHECK(x_any.dim() == 2 && is_float(x_any), "x must be float32, bfloat16 or float16 [rows, K] on the CPU");
  STD_TORCH_CHECK(chosen_any.dim() == 1 && chosen_any.scalar_type() == ScalarType::Long, "experts must be int64 [rows]");
  STD_TORCH_CHECK(limbs == 2 || limbs == 3, "limbs must be 2 or 3, got ", limbs);
  const Tensor x = dense(x_any), chosen = dense(chosen_any);
  const int64_t tokens = x.size(0), k = x.size(1), rows = chosen.size(0);
  const Weight weight(packed, scale, zero_point, std::nullopt, values, scale_values, group_size, k, true);
  STD_TORCH_CHECK(num_experts >= 1 && weight.a.n % num_experts == 0 && weight.a.n / num_experts % rows_per_block == 0,
                  "experts must have a multiple of ", rows_per_block, " rows, got ", weight.a.n, " rows of ", num_experts);
  STD_TORCH_CHECK(tokens ? rows % tokens == 0 : rows == 0, "there must be as many experts for each row of x, got ", rows, " for ", tokens);
  Experts experts = {weight, weight.a.n / num_experts, nullptr, {}};
  std::optional<Tensor> bias;
  if (bias_any) bias = checked_bias(*bias_any, weight.a.n), experts.bias = view_of(*bias, "bias");
  if (outer) {
    check_on_cpu(*outer, "outer");
    STD_TORCH_CHECK(outer->numel() == num_experts && outer->scalar_type() == ScalarType::Float && outer->is_contiguous(),
                    "outer must be float32 [E] on the CPU");
    experts.outer = outer->const_data_ptr<float>();
  }
  Tensor y = torch::stable::new_empty(x, {rows, experts.n});
  if (rows == 0 || experts.n == 0 || k == 0) return torch::stable::zero_(y);

  const int64_t share = rows / tokens, *const expert_of = chosen.const_data_ptr<int64_t>();
  const SplitInt8Plan plan(weight.a, static_cast<int>(limbs));
  const ByteDecoding decoding = plan.byte_decoding();
  ArrayView numbers = view_of(x, "x");
  numbers.stride = k;
  const int64_t bytes = size_of(numbers.dtype);
  const PackedRows of_x(weight.a, plan, tokens);
  Linear one_row = weight.a;
  one_row.m = 1;
  torch::stable::parallel_for(0, tokens, (1 << 14) / k + 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) plan.kernels->pack_limbs_interleaved(one_row, decoding, from_row(numbers, t * k), of_x.of(t, plan), 0, 1);
  });

  // One matrix of all chosen rows, whose ranges are cut where an expert ends.
  const std::unique_ptr<float[]> sums(new float[rows * experts.n]);
  char* const to = static_cast<char*>(y.mutable_data_ptr());
  const InstructionSet& set = instruction_set();
  Linear all = weight.a;
  all.n = rows * experts.n;
  const auto multiply_range = [&](const RowRange& range) {
    for (int64_t row = range.begin; row < range.end;) {
      const int64_t i = row / experts.n, first = row - i * experts.n, last = std::min(experts.n, first + range.end - row);
      row += last - first;
      char* const y_row = to + i * experts.n * bytes;
      if (expert_of[i] < 0 || expert_of[i] >= num_experts) {
        std::memset(y_row + first * bytes, 0, (last - first) * bytes);
        continue;
      }
      if (of_x.no_limbs[i / share]) continue;
      Linear a = experts.at(expert_of[i]);
      a.y = sums.get() + i * experts.n;
      plan.kernels->interleaved[a.bits](a, decoding, of_x.of(i / share, plan), RowRange{first, last, last});
      const ArrayView of_bias = from_row(experts.bias, expert_of[i] * experts.n);
      set.write_output(a, {of_bias.data ? &of_bias : nullptr, nullptr, y_row, numbers.dtype}, first, last);
    }
  };
  const auto prefetch = [](const RowRange&) {};
  parallel_dynamic(all, 2 * rows_per_block, 1 << 16, 0, multiply_range, prefetch);

  for (int64_t i = 0; i < rows; i++) {
    if (!of_x.no_limbs[i / share] || expert_of[i] < 0 || expert_of[i] >= num_experts) continue;
    Linear a = experts.at(expert_of[i]);
    const ArrayView of_bias = from_row(experts.bias, expert_of[i] * experts.n);
    CallOptions options;
    options.bias = of_bias.data ? &of_bias : nullptr;
    const Tensor x_row = torch::stable::narrow(const_cast<Tensor&>(x), 0, i / share, 1);
    const Tensor y_row = torch::stable::narrow(y, 0, i, 1);
    multiply(a, weight.groups, x_row, y_row, options);
  }
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lowbit_cpu, m) {
  m.def(
      "experts_linear(Tensor x, Tensor packed, Tensor scale, Tensor? zero_point, Tensor? outer, Tensor? bias, Tensor experts, "
      "Tensor values, Tensor? scale_values, int group_size, int limbs, int num_experts) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(lowbit_cpu, CompositeExplicitAutograd, m) { m.impl("experts_linear", TORCH_BOX(&experts_linear)); }
