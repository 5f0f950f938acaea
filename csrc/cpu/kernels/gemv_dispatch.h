// Products of rows of x and a weight that has been checked: by limbs, in floats a step at a time, or in floats.
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

// `pack(begin, end)` makes limbs of rows of x, and `multiply(range)` multiplies rows of the weight with them, false where their sums
// might not hold; false where one of them did not work.
template <typename Pack, typename Multiply, typename Finish>
bool pack_and_multiply(const Linear& a, const Pack& pack, const Multiply& multiply_rows, const Finish& write_output) {
  constexpr int64_t line = 64;
  std::atomic<bool> ok{true};
  // To wake other threads takes as long as some thousand numbers of x: few of them become limbs while the others wake, and what
  // each thread multiplies first is on its way.
  constexpr int64_t numbers = 1 << 13, weights = 1 << 16, last = 16, early = 16 << 10;
  const bool is_large = a.m * a.k >= 2 * numbers;
  if (is_large) torch::stable::parallel_for(0, a.m, numbers / a.k + 1, pack);
  Once once;
  const auto on_first = [&](const RowRange& range) {
    const uint8_t* const first = a.packed + range.begin * a.packed_stride;
    const int64_t bytes = std::min(early, (range.end - range.begin) * a.packed_stride);
    for (int64_t at = 0; at < bytes; at += line) __builtin_prefetch(first + at, 0, 2);
    if (!is_large) once([&] { pack(0, a.m); });
  };
  const auto multiply = [&](const RowRange& range) {
    if (!ok) return;
    if (!multiply_rows(range)) ok = false;
    write_output(range.begin, range.end);
  };
  if (a.interleaved) parallel_dynamic(a, 2 * rows_per_block, weights, 0, multiply, on_first);  // two blocks take turns
  else parallel_dynamic(a, rows_per_block, weights, last, multiply, on_first);
  return ok;
}

// Bytes in whole lines.
inline int64_t round_up_to_line(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// The product by limbs of x, save of rows that are marked as `no_limbs` them; false where it cannot be had. `groups`: of the plan's
// steps.
template <typename Finish>
bool multiply_split_int8(const Linear& a, const SplitInt8Plan& plan, const int32_t* groups, const ArrayView& x, const float* input_scale,
                     bool* no_limbs, const Finish& write_output) {
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

// The runs of a row of an interleaved weight.
inline std::vector<Run> runs_of(const Linear& a) {
  std::vector<Run> runs;
  const int64_t maximum = max_run_columns(a.bits), columns = columns_per_unit(a.bits);
  for (int64_t at = 0, begin = 0; at < a.k;) {
    const int64_t group = at / a.group, slice_end = std::min((at / slice + 1) * slice, a.k);
    const int64_t stop = std::min({(group + 1) * a.group, slice_end, at + maximum});
    const bool epilogue = stop == slice_end || (stop - begin) * a.bits * rows_per_block / 8 >= min_stretch_bytes;
    runs.push_back({static_cast<int32_t>((stop - at) / columns), static_cast<int32_t>(group), epilogue, stop == slice_end});
    at = stop;
    if (epilogue) begin = at;
  }
  return runs;
}

// The same of an interleaved weight.
template <typename Finish>
bool multiply_interleaved(const Linear& a, const SplitInt8Plan& plan, const ArrayView& x, const float* input_scale, bool* no_limbs,
                          const Finish& write_output) {
  const std::vector<Run> runs = runs_of(a);
  const int64_t count = static_cast<int64_t>(runs.size()), limbs = round_up_to_line(a.m * a.k * plan.size);
  const int64_t sums = round_up_to_line(a.m * count * plan.count * 4);
  const auto buffer = aligned_buffer<int8_t>(limbs + sums + a.m * plan.slices * 4);
  const ByteDecoding decoding = plan.byte_decoding();
  const InterleavedLimbs of_x = {plan.count, input_scale, count, runs.data(), buffer.get(), reinterpret_cast<int32_t*>(buffer.get() + limbs),
                              reinterpret_cast<float*>(buffer.get() + limbs + sums), no_limbs};
  return pack_and_multiply(
      a, [&](int64_t begin, int64_t end) { plan.kernels->pack_limbs_interleaved(a, decoding, x, of_x, begin, end); },
      [&](const RowRange& range) {
        plan.kernels->interleaved[a.bits](a, decoding, of_x, range);
        return true;
      },
      write_output);
}

// The product in floats, a step at a time; false where it cannot be had.
template <typename Finish>
bool multiply_f32_tiles(const Linear& a, const ArrayView& x, const Finish& write_output) {
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

// The product in floats.
template <typename Finish>
void multiply_float(Linear& a, const ArrayView& x, int64_t groups, const InstructionSet& set, const Finish& write_output) {
  int64_t blocks = 0;
  for (int64_t g = 0; g < groups; g++) blocks += span_of(a, g).blocks;
  const auto arranged = aligned_buffer<float>(blocks * block * a.m);
  set.arrange(a, x, arranged.get());
  a.arranged = arranged.get();
  parallel_rows(a, [&](int64_t begin, int64_t end) {
    set.linear(a, begin, end);
    write_output(begin, end);
  });
}

// What a product adds and how it goes: by limbs where there is a plan of them.
struct CallOptions {
  const ArrayView* bias = nullptr;
  const SplitInt8Plan* plan = nullptr;
  const int32_t* groups = nullptr;  // of the plan's steps
  const float* input_scale = nullptr;     // the scale of x
  const char* instructions = "";
};

// The rows of x times a weight of `groups` a row, into y. No row's product depends on what stands in another: those that have no
// limbs are multiplied in floats, each by itself.
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
  // `count` rows of x from `from` on.
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

// By limbs of x with a plan made for this call.
inline void multiply_with_plan(Linear& a, int64_t groups, const Tensor& x, const Tensor& y, int limbs, CallOptions options) {
  const SplitInt8Plan plan(a, limbs);
  const std::unique_ptr<int32_t[]> of_steps(new int32_t[plan.group_table_size()]);
  plan.fill_groups(a, of_steps.get());
  options.plan = &plan, options.groups = of_steps.get();
  multiply(a, groups, x, y, options);
}

}  // namespace
}  // namespace lowbit::cpu
