// y = x W^T on the CPU for a weight that the bindings have checked: chooses among three kernels and falls back, row by row.
//
//    x [M, K] --- plan? ---> pack limbs --> split-int8 GEMV (interleaved_gemv.h, split_int8_gemv.h) --> y
//                |                |
//                |                +-- rows with infinity, NaN or tiny values: no_limbs --+
//                v                                                                       v
//               none ---> fp8, fp6, nf4: f32 tiles (f32_gemv.h); else generic fp32 (linear.cpp) --> y
//
// Contract: of the kernel that a row of x took; no row's result depends on the other rows.
// Limit: at M = 1 the bytes of the weight.
// Figures: see the kernels' files.
#pragma once

#include <optional>
#include <vector>

#include "../decode/deinterleave.h"
#include "../pack/split_int8_plan.h"
#include "../pack/rescale_tiny_rows.h"
#include "../schedule/parallel.h"
#include "../bindings/weight.h"

namespace lowbit::cpu {
namespace {

// Packs rows of x as limbs with `pack(begin, end)` and multiplies ranges of the weight's rows with `multiply_rows(range)`, all in
// one parallel region. False where `multiply_rows` returned false: a sum might not fit in int32.
template <typename Pack, typename Multiply, typename WriteOutput>
bool pack_and_multiply(const Linear& a, const Pack& pack, const Multiply& multiply_rows, const WriteOutput& write_output) {
  constexpr int64_t line = 64;
  std::atomic<bool> ok{true};
  // Waking the other threads takes as long as packing some 8000 values of x. A smaller x is therefore packed by the first thread
  // that arrives, while the others wake and prefetch the first bytes of their weights.
  constexpr int64_t pack_grain = 1 << 13, min_weights_per_claim = 1 << 16, last_rows = 16, prefetch_bytes = 16 << 10;
  const bool is_large = a.m * a.k >= 2 * pack_grain;
  if (is_large) torch::stable::parallel_for(0, a.m, pack_grain / a.k + 1, pack);
  Once once;
  const auto on_first = [&](const RowRange& range) {
    const uint8_t* const first = a.packed + range.begin * a.packed_stride;
    const int64_t bytes = std::min(prefetch_bytes, (range.end - range.begin) * a.packed_stride);
    for (int64_t at = 0; at < bytes; at += line) __builtin_prefetch(first + at, 0, 2);
    if (!is_large) once([&] { pack(0, a.m); });
  };
  const auto multiply = [&](const RowRange& range) {
    if (!ok) return;
    if (!multiply_rows(range)) ok = false;
    write_output(range.begin, range.end);
  };
  // gemv_rows streams two blocks of 32 rows at once
  if (a.interleaved) parallel_dynamic(a, 2 * rows_per_block, min_weights_per_claim, 0, multiply, on_first);
  else parallel_dynamic(a, rows_per_block, min_weights_per_claim, last_rows, multiply, on_first);
  return ok;
}

// `bytes` rounded up to whole cache lines.
inline int64_t round_up_to_line(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// The product with a weight in canonical rows by limbs of x. Marks in no_limbs [M] the rows of x that have no limbs; false where
// a sum might not fit in int32. `groups`: see SplitInt8Plan::fill_groups.
template <typename WriteOutput>
bool multiply_split_int8(const Linear& a, const SplitInt8Plan& plan, const int32_t* groups, const ArrayView& x, const float* input_scale,
                     bool* no_limbs, const WriteOutput& write_output) {
  const int64_t limbs = round_up_to_line(plan.steps * a.m * plan.size * plan.columns);
  const int64_t sums = round_up_to_line(plan.steps * a.m * plan.kernels->lanes * 4);
  const auto buffer = aligned_buffer<int8_t>(limbs + sums + a.m * plan.slices * 4);
  const ByteDecoding decoding = plan.byte_decoding();
  const PackedLimbs of_x = {plan.count, input_scale, plan.steps, groups, plan.uniform ? nullptr : groups + plan.steps, plan.quad_sums,
                          buffer.get(), reinterpret_cast<int32_t*>(buffer.get() + limbs),
                          reinterpret_cast<float*>(buffer.get() + limbs + sums), no_limbs};
  return pack_and_multiply(
      a, [&](int64_t begin, int64_t end) { plan.kernels->pack_limbs(a, decoding, x, of_x, begin, end); },
      [&](const RowRange& range) { return plan.kernels->limbs[a.bits](a, decoding, of_x, range); }, write_output);
}

// Splits a row of K columns of an interleaved weight into runs: each within one group, one slice of x and the int32 bound.
inline std::vector<Run> runs_of(const Linear& a) {
  std::vector<Run> runs;
  const int64_t max_columns = max_run_columns(a.bits), columns = columns_per_unit(a.bits);
  for (int64_t column = 0, stretch_begin = 0; column < a.k;) {
    const int64_t group = column / a.group, slice_end = std::min((column / slice + 1) * slice, a.k);
    const int64_t run_end = std::min({(group + 1) * a.group, slice_end, column + max_columns});
    const bool stretch_ends = run_end == slice_end || (run_end - stretch_begin) * a.bits * rows_per_block / 8 >= min_stretch_bytes;
    runs.push_back({static_cast<int32_t>((run_end - column) / columns), static_cast<int32_t>(group), stretch_ends, run_end == slice_end});
    column = run_end;
    if (stretch_ends) stretch_begin = column;
  }
  return runs;
}

// The same with an interleaved weight, whose sums always fit.
template <typename WriteOutput>
bool multiply_interleaved(const Linear& a, const SplitInt8Plan& plan, const ArrayView& x, const float* input_scale, bool* no_limbs,
                          const WriteOutput& write_output) {
  const std::vector<Run> runs = runs_of(a);
  const int64_t run_count = static_cast<int64_t>(runs.size()), limbs = round_up_to_line(a.m * a.k * plan.size);
  const int64_t sums = round_up_to_line(a.m * run_count * plan.count * 4);
  const auto buffer = aligned_buffer<int8_t>(limbs + sums + a.m * plan.slices * 4);
  const ByteDecoding decoding = plan.byte_decoding();
  const InterleavedLimbs of_x = {plan.count, input_scale, run_count, runs.data(), buffer.get(), reinterpret_cast<int32_t*>(buffer.get() + limbs),
                              reinterpret_cast<float*>(buffer.get() + limbs + sums), no_limbs};
  return pack_and_multiply(
      a, [&](int64_t begin, int64_t end) { plan.kernels->pack_limbs_interleaved(a, decoding, x, of_x, begin, end); },
      [&](const RowRange& range) {
        plan.kernels->interleaved[a.bits](a, decoding, of_x, range);
        return true;
      },
      write_output);
}

// fp32 GEMV with codes decoded in registers (f32_gemv.h); false where this format or processor has no such kernel.
template <typename WriteOutput>
bool multiply_f32_tiles(const Linear& a, const ArrayView& x, const WriteOutput& write_output) {
  const GemvKernels* const kernels = instruction_set().steps;
  if (!kernels || !kernels->floats || !supports_f32_gemv(a)) return false;
  const int64_t columns = columns_per_step(a.bits, kernels->lanes), steps = (a.k + columns - 1) / columns;
  const std::unique_ptr<int32_t[]> groups(new int32_t[steps * 4]);
  for (int64_t i = 0; i < steps * 4; i++) {
    const int64_t column = i * (columns / 4);
    groups[i] = static_cast<int32_t>((column < a.k ? column : a.k - 1) / a.group);
  }
  const auto numbers = aligned_buffer<float>(steps * a.m * columns);
  const PackedFloats of_x = {steps, groups.get(), numbers.get()};
  Once once;
  const auto on_first = [&](const RowRange&) { once([&] { kernels->pack_floats(a, x, of_x); }); };
  const auto multiply = [&](const RowRange& range) {
    kernels->floats(a, of_x, range.begin, range.end);
    write_output(range.begin, range.end);
  };
  parallel_dynamic(a, 32, 1 << 18, 0, multiply, on_first);
  return true;
}

// Generic fp32 GEMV (linear.cpp), for every format and instruction set.
template <typename WriteOutput>
void multiply_float(Linear& a, const ArrayView& x, int64_t groups, const InstructionSet& set, const WriteOutput& write_output) {
  int64_t blocks = 0;
  for (int64_t g = 0; g < groups; g++) blocks += span_of(a, g).blocks;
  const auto arranged = aligned_buffer<float>(blocks * block * arranged_rows(a.m));
  set.arrange(a, x, arranged.get());
  a.arranged = arranged.get();
  parallel_rows(a, [&](int64_t begin, int64_t end) {
    set.linear(a, begin, end);
    write_output(begin, end);
  });
}

// Bias, scale of x and kernel of one call; `plan`: by limbs, none: in fp32.
struct CallOptions {
  const ArrayView* bias = nullptr;
  const SplitInt8Plan* plan = nullptr;
  const int32_t* groups = nullptr;  // [plan->group_table_size()]
  const float* input_scale = nullptr;     // one scale for all of x (static activations)
  const char* instructions = "";
};

// x [M, K] times the weight a [N, K] with `groups` groups in a row, into y [M, N]. Rows of x without limbs are multiplied in fp32
// afterwards, each by itself, so that no row's result depends on the others.
inline void multiply(Linear& a, int64_t groups, const Tensor& x, const Tensor& y, const CallOptions& options) {
  ArrayView x_numbers = view_of(x, "x");
  x_numbers.stride = a.k;
  const std::unique_ptr<float[]> sums(new float[std::min(a.m, max_rows) * a.n]);
  a.y = sums.get();
  Epilogue epilogue = {options.bias, nullptr, y.mutable_data_ptr(), x_numbers.dtype};
  const int64_t bytes = epilogue.type == Dtype::float32 ? 4 : 2, rows = a.m;
  char* const first = static_cast<char*>(epilogue.y);
  const InstructionSet& set = instruction_set(options.instructions);
  const auto write_output = [&](int64_t begin, int64_t end) { set.write_output(a, epilogue, begin, end); };
  // Restricts `a` and the epilogue to `count` rows of x from `from` on.
  const auto select_rows = [&](int64_t from, int64_t count) {
    a.m = count, epilogue.y = first + from * a.n * bytes;
    ArrayView x_part = x_numbers;
    x_part.data = static_cast<const char*>(x_numbers.data) + from * a.k * bytes;
    return x_part;
  };
  std::optional<CanonicalRows> canonical;
  const auto run_in_float = [&](int64_t from, int64_t count) {
    if (a.interleaved) {
      canonical.emplace(a, a.n / rows_per_block);
      torch::stable::parallel_for(0, a.n / rows_per_block, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) canonical->restore(i * rows_per_block, i);
      });
      a = canonical->from(0);
    }
    ArrayView x_part = select_rows(from, count);
    const RescaledRows rescaled(x_part, a.m, a.k);
    if (rescaled.numbers) x_part.data = rescaled.numbers.get(), x_part.dtype = Dtype::float32;
    epilogue.row_scale = rescaled.row_scale;
    if (&set != &instruction_set() || !multiply_f32_tiles(a, x_part, write_output)) multiply_float(a, x_part, groups, set, write_output);
  };
  bool ok = options.plan;
  const std::unique_ptr<bool[]> no_limbs(ok ? new bool[rows]() : nullptr);
  for (int64_t m = 0; m < rows && ok; m += max_rows) {
    const ArrayView x_part = select_rows(m, std::min(rows - m, max_rows));
    ok = a.interleaved ? multiply_interleaved(a, *options.plan, x_part, options.input_scale, no_limbs.get() + m, write_output)
                         : multiply_split_int8(a, *options.plan, options.groups, x_part, options.input_scale, no_limbs.get() + m, write_output);
  }
  if (ok) {
    for (int64_t m = 0; m < rows; m++)
      if (no_limbs[m]) run_in_float(m, 1);
    return;
  }
  STD_TORCH_CHECK(!options.plan || options.plan->count != 1, "zero points must be codes, 0..", (1 << a.bits) - 1);
  for (int64_t m = 0; m < rows; m += max_float_rows) run_in_float(m, std::min<int64_t>(rows - m, max_float_rows));
}

// The product by limbs with a plan made for this call.
inline void multiply_with_plan(Linear& a, int64_t groups, const Tensor& x, const Tensor& y, int limbs, CallOptions options) {
  const SplitInt8Plan plan(a, limbs);
  const std::unique_ptr<int32_t[]> of_steps(new int32_t[plan.group_table_size()]);
  plan.fill_groups(a, of_steps.get());
  options.plan = &plan, options.groups = of_steps.get();
  multiply(a, groups, x, y, options);
}

}  // namespace
}  // namespace lowbit::cpu
