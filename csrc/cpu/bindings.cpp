// lowbit_cpu::linear: checks what it is given, chooses the instruction set, and spreads the rows over torch's threads.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>

#include "../decode.h"
#include "../formats.h"
#include "digits_plan.h"
#include "dots.h"
#include "instruction_sets.h"
#include "prepared.h"
#include "tensors.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using namespace lowbit::cpu;

std::string best_instructions() { return instruction_set().name; }

Numbers numbers_of(const Tensor& t, const char* name) {
  Numbers numbers;
  numbers.data = t.const_data_ptr();
  numbers.stride = t.dim() > 1 ? t.stride(t.dim() - 2) : 0;
  switch (t.scalar_type()) {
    case ScalarType::Float: numbers.stored = Stored::float32; break;
    case ScalarType::BFloat16: numbers.stored = Stored::bfloat16; break;
    case ScalarType::Half: numbers.stored = Stored::float16; break;
    case ScalarType::Byte: numbers.stored = Stored::bytes; break;
    default:
      STD_TORCH_CHECK(false, name, " must be float32, bfloat16, float16 or uint8, got ",
                      torch::headeronly::toString(t.scalar_type()));
  }
  return numbers;
}

bool is_float(const Tensor& t) {
  return t.scalar_type() == ScalarType::Float || t.scalar_type() == ScalarType::BFloat16 || t.scalar_type() == ScalarType::Half;
}

// Rows may lie apart (a slice of a weight), the elements of a row may not.
Tensor with_dense_rows(const Tensor& t) {
  const int64_t last = t.dim() - 1;
  return last < 0 || t.numel() == 0 || t.stride(last) == 1 || t.size(last) == 1 ? t : torch::stable::contiguous(t);
}

void check_weight_matrix(const Tensor& t, const char* name, int64_t rows, int64_t columns) {
  STD_TORCH_CHECK(t.is_cpu() && t.dim() == 2 && t.size(0) == rows && t.size(1) == columns, name, " must be a CPU tensor [", rows,
                  ", ", columns, "]");
}

// Fills `halves` with the numbers; false where one of them is no 16-bit float.
bool are_halves(const float* values, int bits, uint16_t* halves) {
  for (int code = 0; code < 1 << bits; code++) {
    const c10::Half half = static_cast<c10::Half>(values[code]);
    if (!std::isnan(values[code]) && static_cast<float>(half) != values[code]) return false;
    halves[code] = half.x;
  }
  return true;
}

// Whether codes are 16-bit floats without some bits.
bool are_shifted(const Linear& a, Shifted& how) {
  struct Known {
    int bits;
    Shifted how;
  };
  constexpr Known known[] = {{8, {7, 0xbfff, 256, true}}, {8, {8, 0xffff, 1, false}}, {6, {8, 0x9fff, 4096, false}}};
  for (const Known& one : known) {
    if (one.bits != a.bits) continue;
    bool same = true;
    const int sign = 1 << (a.bits - 1);
    for (int code = 0; code < 1 << a.bits && same; code++) {
      const uint16_t half = static_cast<uint16_t>(static_cast<uint32_t>((code ^ sign) - sign) << one.how.up) & one.how.mask;
      const float number = lowbit::half_to_float(half) * one.how.unit;
      const bool nan = (one.how.has_nan && (code & 127) == 127) || std::isnan(number);
      same = nan ? std::isnan(a.values[code]) : number == a.values[code];
    }
    if (same) {
      how = one.how;
      return true;
    }
  }
  return false;
}

// How codes become numbers; fills `halves` where it takes them.
Codes codes_of(Linear& a, uint16_t* halves) {
  bool finite = true;
  for (int code = 0; code < 1 << a.bits; code++) finite = finite && std::isfinite(a.values[code]);
  if (a.bits == 4 && finite) return Codes::nibbles;
  a.is_signed = are_integers(a.values, a.bits, true);
  if (a.is_signed || are_integers(a.values, a.bits, false))
    return a.bits < 8 ? Codes::integers : a.is_signed ? Codes::signed_bytes : Codes::unsigned_bytes;
  a.halves = halves;
  return are_halves(a.values, a.bits, halves) ? Codes::halves : Codes::table;
}

// The rows of the weight over torch's threads, in tasks of eight, so that no thread's share cuts a tile of rows; a thread takes
// at least so many weights.
template <typename Multiply>
void in_tasks(const Linear& a, const Multiply& multiply) {
  constexpr int64_t rows = 8, weights = 1 << 16;
  const int64_t grain = weights / (rows * (a.k > 0 ? a.k : 1)) + 1;
  torch::stable::parallel_for(0, (a.n + rows - 1) / rows, grain, [&](int64_t begin, int64_t end) {
    multiply(begin * rows, end * rows < a.n ? end * rows : a.n);
  });
}

// The same in turns: a thread takes part of what is left, less each time, so that one which is held up by others holds up none.
template <typename Multiply>
void in_turns(const Linear& a, const Multiply& multiply) {
  constexpr int64_t rows = 32, weights = 1 << 18;
  const int64_t tasks = (a.n + rows - 1) / rows, least = weights / (rows * (a.k > 0 ? a.k : 1)) + 1;
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, tasks, (least + 1) / 2, [&](int64_t begin, int64_t end) {
    for (int64_t at = next.load();;) {
      if (at >= tasks) return;
      const int64_t half_share = (tasks - at) * (end - begin) / (2 * tasks);
      const int64_t past = std::min(at + std::max(half_share, least), tasks);
      if (!next.compare_exchange_weak(at, past)) continue;
      multiply(at * rows, std::min(past * rows, a.n));
      at = next.load();
    }
  });
}

// Room that kernels read a register at a time: it begins with a line, since a register from two of them takes twice as long.
struct Freed {
  void operator()(void* room) const { std::free(room); }
};
template <typename T>
std::unique_ptr<T[], Freed> lines_of(int64_t count) {
  constexpr size_t line = 64;
  void* const room = std::aligned_alloc(line, (count * sizeof(T) + line - 1) / line * line);
  STD_TORCH_CHECK(room || !count, "no memory for ", count, " numbers");
  return std::unique_ptr<T[], Freed>(static_cast<T*>(room));
}

// Whether `digits_linear` takes a format with these numbers on this processor.
bool takes_digits(Tensor values, bool zero_points) {
  if (!instruction_set().steps) return false;
  Linear a = {};
  while (a.bits < 8 && (1 << a.bits) < values.numel()) a.bits++;
  a.values = values.const_data_ptr<float>();
  Bytewise how;
  uint8_t table[64];
  return a.bits > 1 && are_bytes(a, how, table) && fits(a, how, zero_points);
}

// The product by digits of x; false where it cannot be had. `groups`: of the plan's steps.
template <typename Finish>
bool multiply_digits(const Linear& a, const DigitsPlan& plan, const int32_t* groups, const Numbers& x, const float* given,
                     const Finish& finish) {
  constexpr int64_t line = 64;
  const auto lines = [](int64_t bytes) { return (bytes + line - 1) / line * line; };
  const int64_t digits = lines(plan.steps * a.m * plan.size * plan.columns);
  const int64_t sums = lines(plan.steps * a.m * plan.kernels->lanes * 4);
  const auto room = lines_of<int8_t>(digits + sums + a.m * plan.slices * 4);
  const Bytewise how = plan.bytewise();
  const DigitsOfX of_x = {plan.count, given, plan.steps, groups, plan.uniform ? nullptr : groups + plan.steps, plan.in_quarters,
                          room.get(), reinterpret_cast<int32_t*>(room.get() + digits),
                          reinterpret_cast<float*>(room.get() + digits + sums)};
  if (!plan.kernels->take_digits(a, how, x, of_x)) return false;
  std::atomic<bool> good{true};
  in_turns(a, [&](int64_t begin, int64_t end) {
    if (!plan.kernels->digits(a, how, of_x, begin, end)) good = false;
    finish(begin, end);
  });
  return good;
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
  kernels->take_floats(a, x, of_x);
  in_turns(a, [&](int64_t begin, int64_t end) {
    kernels->floats(a, of_x, begin, end);
    finish(begin, end);
  });
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

// The bits of a row's largest magnitude below those of infinity and NaN; the numbers of 16 bits as they are stored.
template <typename Bits>
Bits largest_of(const void* row, int64_t k) {
  constexpr Bits magnitude = static_cast<Bits>(-1) >> 1;
  const Bits* numbers = static_cast<const Bits*>(row);
  std::make_signed_t<Bits> largest = 0;
  for (int64_t i = 0; i < k; i++) {
    const auto bits = static_cast<std::make_signed_t<Bits>>(numbers[i] & magnitude);
    largest = bits > largest ? bits : largest;
  }
  return static_cast<Bits>(largest);
}

// Rows of x whose products would sink into subnormal numbers, times powers of two: `most` of a row is 2^-64 at least, or 0.
struct Raised {
  static constexpr int least = -64;
  std::unique_ptr<float[]> numbers;       // [m, k], where a row is raised
  float back[most_rows];                  // what the sums of a row are multiplied by
  Raised(const Numbers& x, int64_t m, int64_t k) {
    std::fill(back, back + most_rows, 1.0f);
    if (x.stored == Stored::float16) return;  // of which none is so small
    int up[most_rows] = {};
    bool any = false;
    for (int64_t row = 0; row < m; row++) {
      const float most = of_row(x, row);
      if (most > 0 && most < std::ldexp(1.0f, least)) up[row] = least - std::ilogb(most), any = true;
    }
    if (!any) return;
    numbers.reset(new float[m * k]);
    for (int64_t row = 0; row < m; row++) {
      const float times = std::ldexp(1.0f, up[row]);
      back[row] = std::ldexp(1.0f, -up[row]);
      for (int64_t i = 0; i < k; i++) numbers[row * k + i] = times * at(x, row * x.stride + i);
    }
  }

 private:
  static float at(const Numbers& x, int64_t i) {
    return x.stored == Stored::float32 ? static_cast<const float*>(x.data)[i]
                                       : lowbit::bfloat16_to_float(static_cast<const uint16_t*>(x.data)[i]);
  }
  static float of_row(const Numbers& x, int64_t row) {
    float most;
    if (x.stored == Stored::float32) {
      const uint32_t bits = largest_of<uint32_t>(static_cast<const float*>(x.data) + row * x.stride, x.stride);
      std::memcpy(&most, &bits, sizeof most);
      return most;
    }
    return lowbit::bfloat16_to_float(largest_of<uint16_t>(static_cast<const uint16_t*>(x.data) + row * x.stride, x.stride));
  }
};

// Rounded to nearest even; what a float cannot be rounded to becomes infinity, NaN stays NaN.
template <typename T>
void finish_rows(const Linear& a, const Numbers* bias, const float* back, T* out, int64_t begin, int64_t end) {
  const float* sums = a.y;
  for (int64_t m = 0; m < a.m; m++)
    for (int64_t n = begin; n < end; n++) {
      float sum = sums[m * a.n + n] * (back ? back[m] : 1.0f);
      if (bias) {
        const uint16_t* halves = static_cast<const uint16_t*>(bias->data);
        sum += bias->stored == Stored::float32    ? static_cast<const float*>(bias->data)[n]
               : bias->stored == Stored::bfloat16 ? lowbit::bfloat16_to_float(halves[n])
                                                  : lowbit::half_to_float(halves[n]);
      }
      out[m * a.n + n] = static_cast<T>(sum);
    }
}

// A weight as it was given, checked: what its numbers point into stays alive with it.
struct Weight {
  Linear a = {};
  int64_t groups = 0;
  uint16_t halves[256] = {};
  Tensor packed, scale, zero;
  const float* outer_number = nullptr;
  bool is_as_given;  // nothing was copied

  Weight(const Tensor& packed_any, const Tensor& scale_any, const std::optional<Tensor>& zero_any, const std::optional<Tensor>& outer,
         const Tensor& values, const std::optional<Tensor>& scale_values, int64_t group_size, int64_t k)
      : packed(with_dense_rows(packed_any)), scale(with_dense_rows(scale_any)), zero(scale) {
    is_as_given = packed.get() == packed_any.get() && scale.get() == scale_any.get();
    STD_TORCH_CHECK(packed_any.dim() == 2 && packed_any.scalar_type() == ScalarType::Byte, "packed must be uint8 [N, bytes]");
    STD_TORCH_CHECK(values.is_cpu() && values.scalar_type() == ScalarType::Float && values.dim() == 1 && values.is_contiguous(),
                    "values must be contiguous float32 [2^bits] on the CPU");
    while (a.bits < 8 && (1 << a.bits) < values.numel()) a.bits++;
    STD_TORCH_CHECK(a.bits >= 1 && 1 << a.bits == values.numel(), "values must hold 2^bits numbers for 1..8 bits, got ",
                    values.numel());
    a.values = values.const_data_ptr<float>();
    a.codes = codes_of(a, halves);
    a.n = packed.size(0);
    a.k = k;
    if (a.codes == Codes::halves && (group_size == -1 || group_size % block == 0) && are_shifted(a, a.shifted)) a.codes = Codes::shifted;
    STD_TORCH_CHECK(group_size == -1 || group_size >= 1, "group_size must be -1 or at least 1, got ", group_size);
    a.group = group_size == -1 ? (a.k > 0 ? a.k : 1) : group_size;
    groups = (a.k + a.group - 1) / a.group;

    check_weight_matrix(packed, "packed", a.n, lowbit::packed_size(a.bits, a.k));
    check_weight_matrix(scale, "scale", a.n, groups);
    a.packed = static_cast<const uint8_t*>(packed.const_data_ptr());
    a.packed_stride = packed.stride(0);
    a.scale = numbers_of(scale, "scale");
    STD_TORCH_CHECK((a.scale.stored == Stored::bytes) == scale_values.has_value(),
                    "scale_values go with scales of uint8, and only with them");
    if (scale_values) {
      STD_TORCH_CHECK(scale_values->is_cpu() && scale_values->scalar_type() == ScalarType::Float && scale_values->numel() == 256 &&
                          scale_values->is_contiguous(),
                      "scale_values must be contiguous float32 [256] on the CPU, got ", scale_values->numel(), " numbers");
      a.scale.table = scale_values->const_data_ptr<float>();
    }
    if (zero_any) {
      zero = with_dense_rows(*zero_any);
      is_as_given = is_as_given && zero.get() == zero_any->get();
      check_weight_matrix(zero, "zero_point", a.n, groups);
      STD_TORCH_CHECK(!a.is_signed, "codes with a sign have no zero point");
      a.zero_point = numbers_of(zero, "zero_point");
    }
    if (outer) {
      STD_TORCH_CHECK(outer->is_cpu() && outer->numel() == 1 && outer->scalar_type() == ScalarType::Float,
                      "outer must be one float32 on the CPU");
      outer_number = outer->const_data_ptr<float>();
      a.outer = *outer_number;
      a.has_outer = true;
    }
  }
  Weight(const Weight&) = delete;
};

Tensor checked_bias(const Tensor& bias, int64_t n) {
  STD_TORCH_CHECK(bias.is_cpu() && bias.dim() == 1 && bias.numel() == n && is_float(bias), "bias must be float32, bfloat16 or float16 [", n,
                  "] on the CPU");
  return dense(bias);
}

// The scale of all rows of x that a product of one digit may be given.
const float* checked_scale(const std::optional<Tensor>& given, int digits) {
  if (!given) return nullptr;
  STD_TORCH_CHECK(digits == 1 && given->is_cpu() && given->numel() == 1 && given->scalar_type() == ScalarType::Float,
                  "input_scale must be one float32 on the CPU, and goes with one digit");
  return given->const_data_ptr<float>();
}

void check_digits(int64_t digits, const Linear& a) {
  STD_TORCH_CHECK(digits >= 1 && digits <= 3, "digits must be 1, 2 or 3, got ", digits);
  STD_TORCH_CHECK(!a.zero_point.data || a.zero_point.stored == Stored::bytes, "digits take zero points that are integers");
}

void check_x(const Tensor& x) {
  STD_TORCH_CHECK(x.is_cpu() && x.dim() >= 1 && is_float(x), "x must be float32, bfloat16 or float16 [..., K] on the CPU");
}

// What a product adds and how it goes: by digits where there is a plan of them.
struct How {
  const Numbers* bias = nullptr;
  const DigitsPlan* plan = nullptr;
  const int32_t* groups = nullptr;  // of the plan's steps
  const float* given = nullptr;     // the scale of x
  const char* instructions = "";
};

// The rows of x times a weight of `groups` a row, into y.
void multiply(Linear& a, int64_t groups, const Tensor& x, const Tensor& y, const How& how) {
  Numbers x_numbers = numbers_of(x, "x");
  x_numbers.stride = a.k;
  const std::unique_ptr<float[]> sums(new float[std::min(a.m, most_rows_at_once) * a.n]);
  a.y = sums.get();
  char* out = static_cast<char*>(y.mutable_data_ptr());
  const Stored type = x_numbers.stored;
  const int64_t bytes = type == Stored::float32 ? 4 : 2;
  const float* back = nullptr;
  const auto finish = [&](int64_t begin, int64_t end) {
    if (type == Stored::bfloat16) return finish_rows(a, how.bias, back, reinterpret_cast<c10::BFloat16*>(out), begin, end);
    if (type == Stored::float16) return finish_rows(a, how.bias, back, reinterpret_cast<c10::Half*>(out), begin, end);
    return finish_rows(a, how.bias, back, reinterpret_cast<float*>(out), begin, end);
  };
  // Some rows of x at a time.
  const auto in_parts = [&](int64_t most, const auto& multiply) {
    const int64_t rows = a.m;
    char* const first = out;
    bool good = true;
    for (int64_t m = 0; m < rows && good; m += most) {
      a.m = std::min(rows - m, most);
      out = first + m * a.n * bytes;
      Numbers some = x_numbers;
      some.data = static_cast<const char*>(x_numbers.data) + m * a.k * bytes;
      good = multiply(some);
    }
    a.m = rows, out = first;
    return good;
  };
  const auto by_digits = [&](const Numbers& some) { return multiply_digits(a, *how.plan, how.groups, some, how.given, finish); };
  if (how.plan && in_parts(most_rows_at_once, by_digits)) return;
  STD_TORCH_CHECK(!how.plan || how.plan->count != 1, "zero points must be codes, 0..", (1 << a.bits) - 1);
  in_parts(most_rows, [&](Numbers some) {
    const Raised raised(some, a.m, a.k);
    if (raised.numbers) some.data = raised.numbers.get(), some.stored = Stored::float32;
    back = raised.back;
    const InstructionSet& set = instruction_set(how.instructions);
    if (&set != &instruction_set() || !multiply_steps(a, some, finish)) multiply_floats(a, some, groups, set, finish);
    return true;
  });
}

// By digits of x with a plan made for this call.
void multiply_planned(Linear& a, int64_t groups, const Tensor& x, const Tensor& y, int digits, How how) {
  const DigitsPlan plan(a, digits);
  const std::unique_ptr<int32_t[]> of_steps(new int32_t[plan.numbers_of_groups()]);
  plan.take_groups(a, of_steps.get());
  how.plan = &plan, how.groups = of_steps.get();
  multiply(a, groups, x, y, how);
}

// Rows of x that a product takes: any number with one digit.
void check_rows(int64_t m, int digits) {
  STD_TORCH_CHECK(m <= most_rows_at_once || digits == 1, "x must have at most ", most_rows_at_once, " rows, got ", m);
}

Tensor product(int digits, Tensor x_any, Tensor packed, Tensor scale, std::optional<Tensor> zero, std::optional<Tensor> outer,
               std::optional<Tensor> bias_any, Tensor values, std::optional<Tensor> scale_values, int64_t group_size,
               const char* instructions, const std::optional<Tensor>& given = std::nullopt) {
  check_x(x_any);
  const Tensor x = dense(x_any);
  Weight weight(packed, scale, zero, outer, values, scale_values, group_size, x.size(x.dim() - 1));
  Linear& a = weight.a;
  const Product product(x, a.n);
  a.m = product.m;
  check_rows(a.m, digits);
  if (digits) check_digits(digits, a);
  std::optional<Tensor> bias;
  Numbers bias_numbers;
  if (bias_any) bias = checked_bias(*bias_any, a.n), bias_numbers = numbers_of(*bias, "bias");

  if (a.m == 0 || a.n == 0) return product.y;
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
                       int64_t digits, std::optional<Tensor> input_scale) {
  check_x(x);
  const Weight weight(packed, scale, zero, outer, values, scale_values, group_size, x.size(x.dim() - 1));
  check_digits(digits, weight.a);
  const DigitsPlan plan(weight.a, static_cast<int>(digits));
  Prepared made = {Prepared::own_sign(), 0, weight.a, weight.outer_number,
                   checked_scale(input_scale, plan.count), weight.groups, {}, plan, {}};
  std::copy(weight.halves, weight.halves + 256, made.halves);
  bool is_as_given = weight.is_as_given;
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
  return bytes;
}

// A product whose weight digits_prepared has checked.
Tensor prepared_linear(Tensor x_any, Tensor prepared) {
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
                     std::optional<Tensor> input_scale) {
  STD_TORCH_CHECK(digits >= 1 && digits <= 3, "digits must be 1, 2 or 3, got ", digits);
  return product(static_cast<int>(digits), x, packed, scale, zero_point, outer, bias, values, scale_values, group_size, "", input_scale);
}

// Rows of the weight as numbers of the type of `out` [N, K].
void panel(Tensor out, Tensor packed, Tensor scale, std::optional<Tensor> zero, std::optional<Tensor> outer, Tensor values,
           std::optional<Tensor> scale_values, int64_t group_size, std::string instructions) {
  STD_TORCH_CHECK(out.is_cpu() && out.dim() == 2 && is_float(out) && out.is_contiguous() && out.size(0) == packed.size(0),
                  "out must be contiguous float32, bfloat16 or float16 [N, K] on the CPU");
  const Weight weight(packed, scale, zero, outer, values, scale_values, group_size, out.size(1));
  const InstructionSet& set = instruction_set(instructions.c_str());
  const Stored type = numbers_of(out, "out").stored;
  char* to = static_cast<char*>(out.mutable_data_ptr());
  const int64_t k = out.size(1), row = k * (type == Stored::float32 ? 4 : 2);
  in_tasks(weight.a, [&](int64_t begin, int64_t end) { set.panel(weight.a, type, to + begin * row, k, begin, end); });
}

// Whether `dots_linear` runs on this processor.
bool has_dots() {
#if defined(__x86_64__)
  return std::string(instruction_set().name) == "avx512" && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

// The product of bfloat16 with a weight that is rounded to it, for any number of rows of x.
Tensor dots_linear(Tensor x_any, Tensor packed, Tensor scale, std::optional<Tensor> zero, std::optional<Tensor> outer,
                   std::optional<Tensor> bias_any, Tensor values, std::optional<Tensor> scale_values, int64_t group_size) {
  STD_TORCH_CHECK(has_dots(), "this processor has no dot products of bfloat16");
  STD_TORCH_CHECK(x_any.is_cpu() && x_any.dim() >= 1 && x_any.scalar_type() == ScalarType::BFloat16, "x must be bfloat16 [..., K] on the CPU");
  const Tensor x = dense(x_any);
  Weight weight(packed, scale, zero, outer, values, scale_values, group_size, x.size(x.dim() - 1));
  Linear& a = weight.a;
  Product product(x, a.n);
  a.m = product.m;
  std::optional<Tensor> bias;
  Numbers bias_numbers;
  if (bias_any) bias = checked_bias(*bias_any, a.n), bias_numbers = numbers_of(*bias, "bias");
  Tensor& y = product.y;
  if (a.m == 0 || a.n == 0) return y;
  const uint16_t* given = static_cast<const uint16_t*>(x.const_data_ptr());
  const int64_t stride = stride_of_dots(a.k);
  const auto of_x = lines_of<uint16_t>(a.m * stride);
  torch::stable::parallel_for(0, a.m, 16, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; m++) std::fill(std::copy_n(given + m * a.k, a.k, of_x.get() + m * stride), of_x.get() + (m + 1) * stride, 0);
  });
#if defined(__x86_64__)
  const Dots dots = {of_x.get(), bias ? &bias_numbers : nullptr, static_cast<uint16_t*>(y.mutable_data_ptr())};
  in_tasks(a, [&](int64_t begin, int64_t end) { avx512bf16::dots_linear(a, dots, begin, end); });
#endif
  return y;
}

// Codes and scales of w [N, K] into tensors that are there; false where the weight or a scale is no number to be stored.
bool quantize(Tensor w_any, Tensor packed, Tensor scale, std::optional<Tensor> zero, int64_t bits, int64_t group_size, double low,
              double high, double largest, std::string instructions) {
  STD_TORCH_CHECK(w_any.is_cpu() && w_any.dim() == 2 && is_float(w_any), "w must be float32, bfloat16 or float16 [N, K] on the CPU");
  STD_TORCH_CHECK(bits >= 1 && bits <= 8 && group_size >= 1, "bits must be 1..8 and group_size at least 1, got ", bits, " and ",
                  group_size);
  const Tensor w = with_dense_rows(w_any);
  Quantize a = {};
  a.n = w.size(0), a.k = w.size(1), a.group = group_size, a.bits = static_cast<int>(bits);
  const int64_t groups = (a.k + a.group - 1) / a.group;
  check_weight_matrix(packed, "packed", a.n, lowbit::packed_size(a.bits, a.k));
  check_weight_matrix(scale, "scale", a.n, groups);
  STD_TORCH_CHECK(packed.is_contiguous() && scale.is_contiguous() && is_float(scale) && packed.scalar_type() == ScalarType::Byte,
                  "packed must be contiguous uint8 and scale contiguous float32, bfloat16 or float16");
  a.w = numbers_of(w, "w");
  a.low = static_cast<float>(low), a.high = static_cast<float>(high), a.largest = static_cast<float>(largest);
  a.stored = numbers_of(scale, "scale").stored;
  a.scale = scale.mutable_data_ptr();
  a.packed = static_cast<uint8_t*>(packed.mutable_data_ptr());
  if (zero) {
    check_weight_matrix(*zero, "zero_point", a.n, groups);
    STD_TORCH_CHECK(zero->is_contiguous() && zero->scalar_type() == ScalarType::Byte, "zero_point must be contiguous uint8");
    a.zero = static_cast<uint8_t*>(zero->mutable_data_ptr());
  }
  const InstructionSet& set = instruction_set(instructions.c_str());
  std::atomic<bool> good{true};
  Linear size = {};
  size.n = a.n, size.k = a.k;
  in_tasks(size, [&](int64_t begin, int64_t end) {
    if (!set.quantize(a, begin, end)) good = false;
  });
  return good;
}

}  // namespace

STABLE_TORCH_LIBRARY(lowbit_cpu, m) {
  m.def(
      "quantize(Tensor w, Tensor(a!) packed, Tensor(b!) scale, Tensor(c!)? zero_point, int bits, int group_size, float low, "
      "float high, float largest, str instructions='') -> bool");
  m.def(
      "panel(Tensor(a!) out, Tensor packed, Tensor scale, Tensor? zero_point, Tensor? outer, Tensor values, "
      "Tensor? scale_values, int group_size, str instructions='') -> ()");
  m.def(
      "linear(Tensor x, Tensor packed, Tensor scale, Tensor? zero_point, Tensor? outer, Tensor? bias, Tensor values, "
      "Tensor? scale_values, int group_size, str instructions='') -> Tensor");
  m.def(
      "digits_linear(Tensor x, Tensor packed, Tensor scale, Tensor? zero_point, Tensor? outer, Tensor? bias, Tensor values, "
      "Tensor? scale_values, int group_size, int digits, Tensor? input_scale=None) -> Tensor");
  m.def(
      "digits_prepared(Tensor x, Tensor packed, Tensor scale, Tensor? zero_point, Tensor? outer, Tensor? bias, Tensor values, "
      "Tensor? scale_values, int group_size, int digits, Tensor? input_scale=None) -> Tensor");
  m.def("prepared_linear(Tensor x, Tensor prepared) -> Tensor");
  m.def(
      "dots_linear(Tensor x, Tensor packed, Tensor scale, Tensor? zero_point, Tensor? outer, Tensor? bias, Tensor values, "
      "Tensor? scale_values, int group_size) -> Tensor");
  m.def("has_dots() -> bool");
  m.def("takes_digits(Tensor values, bool zero_points) -> bool");
  m.def("instructions() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(lowbit_cpu, CompositeExplicitAutograd, m) {
  m.impl("panel", TORCH_BOX(&panel));
  m.impl("quantize", TORCH_BOX(&quantize));
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("digits_linear", TORCH_BOX(&digits_linear));
  m.impl("digits_prepared", TORCH_BOX(&digits_prepared));
  m.impl("prepared_linear", TORCH_BOX(&prepared_linear));
  m.impl("dots_linear", TORCH_BOX(&dots_linear));
  m.impl("has_dots", TORCH_BOX(&has_dots));
  m.impl("takes_digits", TORCH_BOX(&takes_digits));
  m.impl("instructions", TORCH_BOX(&best_instructions));
}
