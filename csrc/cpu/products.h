// Products of rows of x and a weight that has been checked: by digits, in floats a step at a time, or in floats.
#pragma once

#include <optional>
#include <vector>

#include "canonical.h"
#include "digits_plan.h"
#include "raised.h"
#include "tasks.h"
#include "weight.h"

namespace lowbit::cpu {
namespace {

// `take(begin, end)` makes digits of rows of x, and `multiply(turn)` multiplies rows of the weight with them, false where their sums
// might not hold; false where one of them did not work.
template <typename Take, typename Multiply, typename Finish>
bool multiply_taken(const Linear& a, const Take& take, const Multiply& multiply_rows, const Finish& finish) {
  constexpr int64_t line = 64;
  std::atomic<bool> good{true};
  // To wake other threads takes as long as some thousand numbers of x: few of them become digits while the others wake, and what
  // each thread multiplies first is on its way.
  constexpr int64_t numbers = 1 << 13, weights = 1 << 16, last = 16, early = 16 << 10;
  const bool is_much = a.m * a.k >= 2 * numbers;
  if (is_much) torch::stable::parallel_for(0, a.m, numbers / a.k + 1, take);
  Once once;
  const auto begin_with = [&](const Turn& turn) {
    const uint8_t* const first = a.packed + turn.begin * a.packed_stride;
    const int64_t bytes = std::min(early, (turn.end - turn.begin) * a.packed_stride);
    for (int64_t at = 0; at < bytes; at += line) __builtin_prefetch(first + at, 0, 2);
    if (!is_much) once([&] { take(0, a.m); });
  };
  const auto multiply = [&](const Turn& turn) {
    if (!good) return;
    if (!multiply_rows(turn)) good = false;
    finish(turn.begin, turn.end);
  };
  if (a.interleaved) in_turns(a, 2 * rows_together, weights, 0, multiply, begin_with);  // two blocks take turns
  else in_turns(a, rows_together, weights, last, multiply, begin_with);
  return good;
}

// Bytes in whole lines.
inline int64_t in_lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// The product by digits of x, save of rows that are marked as `without` them; false where it cannot be had. `groups`: of the plan's
// steps.
template <typename Finish>
bool multiply_digits(const Linear& a, const DigitsPlan& plan, const int32_t* groups, const Numbers& x, const float* given,
                     bool* without, const Finish& finish) {
  const int64_t digits = in_lines(plan.steps * a.m * plan.size * plan.columns);
  const int64_t sums = in_lines(plan.steps * a.m * plan.kernels->lanes * 4);
  const auto room = lines_of<int8_t>(digits + sums + a.m * plan.slices * 4);
  const Bytewise how = plan.bytewise();
  const DigitsOfX of_x = {plan.count, given, plan.steps, groups, plan.uniform ? nullptr : groups + plan.steps, plan.in_quarters,
                          room.get(), reinterpret_cast<int32_t*>(room.get() + digits),
                          reinterpret_cast<float*>(room.get() + digits + sums), without};
  return multiply_taken(
      a, [&](int64_t begin, int64_t end) { plan.kernels->take_digits(a, how, x, of_x, begin, end); },
      [&](const Turn& turn) { return plan.kernels->digits[a.bits](a, how, of_x, turn); }, finish);
}

// The runs of a row of an interleaved weight.
inline std::vector<Run> runs_of(const Linear& a) {
  std::vector<Run> runs;
  const int64_t most = most_columns_of_run(a.bits), columns = columns_of_unit(a.bits);
  for (int64_t at = 0, begin = 0; at < a.k;) {
    const int64_t group = at / a.group, slice_end = std::min((at / slice + 1) * slice, a.k);
    const int64_t past = std::min({(group + 1) * a.group, slice_end, at + most});
    const bool ends = past == slice_end || (past - begin) * a.bits * rows_together / 8 >= least_of_stretch;
    runs.push_back({static_cast<int32_t>((past - at) / columns), static_cast<int32_t>(group), ends, past == slice_end});
    at = past;
    if (ends) begin = at;
  }
  return runs;
}

// The same of an interleaved weight.
template <typename Finish>
bool multiply_interleaved(const Linear& a, const DigitsPlan& plan, const Numbers& x, const float* given, bool* without,
                          const Finish& finish) {
  const std::vector<Run> runs = runs_of(a);
  const int64_t count = static_cast<int64_t>(runs.size()), digits = in_lines(a.m * a.k * plan.size);
  const int64_t sums = in_lines(a.m * count * plan.count * 4);
  const auto room = lines_of<int8_t>(digits + sums + a.m * plan.slices * 4);
  const Bytewise how = plan.bytewise();
  const DigitsOfUnits of_x = {plan.count, given, count, runs.data(), room.get(), reinterpret_cast<int32_t*>(room.get() + digits),
                              reinterpret_cast<float*>(room.get() + digits + sums), without};
  return multiply_taken(
      a, [&](int64_t begin, int64_t end) { plan.kernels->take_units(a, how, x, of_x, begin, end); },
      [&](const Turn& turn) {
        plan.kernels->interleaved[a.bits](a, how, of_x, turn);
        return true;
      },
      finish);
}

// The product in floats, a step at a time; false where it cannot be had.
template <typename Finish>
bool multiply_steps(const Linear& a, const Numbers& x, const Finish& finish) {
  const StepKernels* const kernels = instruction_set().steps;
  if (!kernels || !kernels->floats || !takes_floats(a)) return false;
  const int64_t columns = columns_of(a.bits, kernels->lanes), steps = (a.k + columns - 1) / columns;
  const std::unique_ptr<int32_t[]> groups(new int32_t[steps * 4]);
  for (int64_t i = 0; i < steps * 4; i++) {
    const int64_t column = i * (columns / 4);
    groups[i] = static_cast<int32_t>((column < a.k ? column : a.k - 1) / a.group);
  }
  const auto numbers = lines_of<float>(steps * a.m * columns);
  const FloatsOfX of_x = {steps, groups.get(), numbers.get()};
  Once once;
  const auto begin_with = [&](const Turn&) { once([&] { kernels->take_floats(a, x, of_x); }); };
  const auto multiply = [&](const Turn& turn) {
    kernels->floats(a, of_x, turn.begin, turn.end);
    finish(turn.begin, turn.end);
  };
  in_turns(a, 32, 1 << 18, 0, multiply, begin_with);
  return true;
}

// The product in floats.
template <typename Finish>
void multiply_floats(Linear& a, const Numbers& x, int64_t groups, const InstructionSet& set, const Finish& finish) {
  int64_t blocks = 0;
  for (int64_t g = 0; g < groups; g++) blocks += span_of(a, g).blocks;
  const auto arranged = lines_of<float>(blocks * block * a.m);
  set.arrange(a, x, arranged.get());
  a.arranged = arranged.get();
  in_tasks(a, [&](int64_t begin, int64_t end) {
    set.linear(a, begin, end);
    finish(begin, end);
  });
}

// What a product adds and how it goes: by digits where there is a plan of them.
struct How {
  const Numbers* bias = nullptr;
  const DigitsPlan* plan = nullptr;
  const int32_t* groups = nullptr;  // of the plan's steps
  const float* given = nullptr;     // the scale of x
  const char* instructions = "";
};

// The rows of x times a weight of `groups` a row, into y. No row's product depends on what stands in another: those that have no
// digits are multiplied in floats, each by itself.
inline void multiply(Linear& a, int64_t groups, const Tensor& x, const Tensor& y, const How& how) {
  Numbers x_numbers = numbers_of(x, "x");
  x_numbers.stride = a.k;
  const std::unique_ptr<float[]> sums(new float[std::min(a.m, most_rows_at_once) * a.n]);
  a.y = sums.get();
  Ends ends = {how.bias, nullptr, y.mutable_data_ptr(), x_numbers.stored};
  const int64_t bytes = ends.type == Stored::float32 ? 4 : 2, rows = a.m;
  char* const first = static_cast<char*>(ends.y);
  const InstructionSet& set = instruction_set(how.instructions);
  const auto finish = [&](int64_t begin, int64_t end) { set.finish(a, ends, begin, end); };
  // `count` rows of x from `from` on.
  const auto take_rows = [&](int64_t from, int64_t count) {
    a.m = count, ends.y = first + from * a.n * bytes;
    Numbers some = x_numbers;
    some.data = static_cast<const char*>(x_numbers.data) + from * a.k * bytes;
    return some;
  };
  std::optional<CanonicalRows> canonical;
  const auto in_floats = [&](int64_t from, int64_t count) {
    if (a.interleaved) {
      canonical.emplace(a, a.n / rows_together);
      torch::stable::parallel_for(0, a.n / rows_together, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) canonical->restore(i * rows_together, i);
      });
      a = canonical->from(0);
    }
    Numbers some = take_rows(from, count);
    const Raised raised(some, a.m, a.k);
    if (raised.numbers) some.data = raised.numbers.get(), some.stored = Stored::float32;
    ends.back = raised.back;
    if (&set != &instruction_set() || !multiply_steps(a, some, finish)) multiply_floats(a, some, groups, set, finish);
  };
  bool good = how.plan;
  const std::unique_ptr<bool[]> without(good ? new bool[rows]() : nullptr);
  for (int64_t m = 0; m < rows && good; m += most_rows_at_once) {
    const Numbers some = take_rows(m, std::min(rows - m, most_rows_at_once));
    good = a.interleaved ? multiply_interleaved(a, *how.plan, some, how.given, without.get() + m, finish)
                         : multiply_digits(a, *how.plan, how.groups, some, how.given, without.get() + m, finish);
  }
  if (good) {
    for (int64_t m = 0; m < rows; m++)
      if (without[m]) in_floats(m, 1);
    return;
  }
  STD_TORCH_CHECK(!how.plan || how.plan->count != 1, "zero points must be codes, 0..", (1 << a.bits) - 1);
  for (int64_t m = 0; m < rows; m += most_rows) in_floats(m, std::min<int64_t>(rows - m, most_rows));
}

// By digits of x with a plan made for this call.
inline void multiply_planned(Linear& a, int64_t groups, const Tensor& x, const Tensor& y, int digits, How how) {
  const DigitsPlan plan(a, digits);
  const std::unique_ptr<int32_t[]> of_steps(new int32_t[plan.numbers_of_groups()]);
  plan.take_groups(a, of_steps.get());
  how.plan = &plan, how.groups = of_steps.get();
  multiply(a, groups, x, y, how);
}

}  // namespace
}  // namespace lowbit::cpu
