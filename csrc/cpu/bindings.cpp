// lowbit_cpu::linear: checks what it is given, chooses the instruction set, and spreads the rows over torch's threads.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../decode.h"
#include "../formats.h"
#include "digits.h"
#include "linear.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using namespace lowbit::cpu;

struct InstructionSet {
  const char* name;
  bool available;
  void (*arrange)(const Linear&, const Numbers&, float*);
  void (*linear)(const Linear&, int64_t, int64_t);
};

// The widest first.
const std::vector<InstructionSet>& instruction_sets() {
  static const std::vector<InstructionSet> sets = {
#if defined(__x86_64__)
      {"avx512",
       __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma"),
       avx512::arrange, avx512::linear},
      {"avx2", __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"), avx2::arrange, avx2::linear},
#endif
      {"portable", true, portable::arrange, portable::linear},
  };
  return sets;
}

const InstructionSet& instruction_set(const std::string& name) {
  for (const InstructionSet& set : instruction_sets())
    if (name.empty() ? set.available : name == set.name) {
      STD_TORCH_CHECK(set.available, "this processor has no ", name, ": leave instructions empty to take the best it has");
      return set;
    }
  STD_TORCH_CHECK(false, "instructions must be empty, avx512, avx2 or portable, got ", name);
}

std::string best_instructions() { return instruction_set("").name; }

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

// Whether the numbers, times `up`, are those of two's complement codes, or of codes without a sign.
bool are_integers(const float* values, int bits, bool is_signed, float up = 1) {
  const int sign = is_signed ? 1 << (bits - 1) : 0;
  for (int code = 0; code < 1 << bits; code++)
    if (values[code] * up != static_cast<float>((code ^ sign) - sign)) return false;
  return true;
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

// Weights as bytes less an offset, times a power of two; false where a format's numbers are not that.
bool are_bytes(const Linear& a, Bytewise& how, uint8_t* table) {
  for (int log = 0; log <= 8; log++) {
    const float up = static_cast<float>(1 << log);
    const bool is_signed = are_integers(a.values, a.bits, true, up);
    if (!is_signed && !are_integers(a.values, a.bits, false, up)) continue;
    const int sign = is_signed ? 1 << (a.bits - 1) : 0;
    how = {sign, sign, nullptr, 1 / up};
    return true;
  }
  if (a.bits > 6) return false;
  const int codes = 1 << a.bits;
  for (int log = 0; log <= 8; log++) {
    const float up = static_cast<float>(1 << log);
    float least = 0, most = 0;
    bool whole = true;
    for (int code = 0; code < codes && whole; code++) {
      const float number = a.values[code] * up;
      whole = std::abs(number) <= 255 && number == std::floor(number);
      least = number < least ? number : least, most = number > most ? number : most;
    }
    if (!whole) continue;
    if (most - least > 255) return false;
    for (int code = 0; code < 64; code++) table[code] = static_cast<uint8_t>(a.values[code % codes] * up - least);
    how = {0, static_cast<int>(-least), table, 1 / up};
    return true;
  }
  return false;
}

// Whether `digits_linear` takes a format with these numbers on this processor.
bool takes_digits(Tensor values) {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx512vbmi") || !__builtin_cpu_supports("avx512vnni") || !instruction_set("avx512").available)
    return false;
  Linear a = {};
  while (a.bits < 8 && (1 << a.bits) < values.numel()) a.bits++;
  a.values = values.const_data_ptr<float>();
  uint16_t halves[256];
  a.codes = codes_of(a, halves);
  Bytewise how;
  uint8_t table[64];
  return are_bytes(a, how, table);
#else
  return false;
#endif
}

// The product by digits of x; false where it cannot be had.
bool multiply_digits(Linear& a, const Numbers& x) {
#if defined(__x86_64__)
  Bytewise how;
  uint8_t table[64];
  const int64_t columns = run_of(a.group, a.k);
  STD_TORCH_CHECK(a.m <= most_rows_of_digits, "digits take at most ", most_rows_of_digits, " rows of x, got ", a.m);
  STD_TORCH_CHECK(columns > 0 && are_bytes(a, how, table),
                  "digits take weights that are integers of a byte, in groups of 16, 32 or a multiple of 64, got groups of ", a.group);
  const int64_t steps = (a.k + step - 1) / step, slices = (a.k + slice - 1) / slice;
  std::vector<Run> runs;
  for (int64_t s = 0; s < steps;) {
    const int64_t column = s * step, group = column / a.group, of_slice = column / slice;
    int64_t end = (of_slice + 1) * slice;
    if (columns == step) end = column + step;
    else if ((group + 1) * a.group < end) end = (group + 1) * a.group;
    const int64_t last = (end + step - 1) / step < steps ? (end + step - 1) / step : steps;
    runs.push_back({s, last - s, group, of_slice});
    s = last;
  }
  const int64_t count = static_cast<int64_t>(runs.size());
  const std::unique_ptr<int8_t[]> digits(new int8_t[a.m * digits_of_number * steps * step]);
  const std::unique_ptr<float[]> scale(new float[a.m * slices * 2]);
  const std::unique_ptr<int32_t[]> sums(new int32_t[a.m * count * digits_of_number * lanes]);
  const DigitsOfX of_x = {count, steps * step, runs.data(), digits.get(), scale.get(), sums.get()};
  if (!avx512vnni::take_digits(a, how, x, of_x)) return false;
  in_tasks(a, [&](int64_t begin, int64_t end) { avx512vnni::digits_linear(a, how, of_x, begin, end); });
  return true;
#else
  return false;
#endif
}

// The product in floats.
void multiply_floats(Linear& a, const Numbers& x, int64_t groups, const InstructionSet& set) {
  int64_t blocks = 0;
  for (int64_t g = 0; g < groups; g++) blocks += span_of(a, g).blocks;
  const std::unique_ptr<float[]> arranged(new float[blocks * block * a.m]);
  set.arrange(a, x, arranged.get());
  a.arranged = arranged.get();
  in_tasks(a, [&](int64_t begin, int64_t end) { set.linear(a, begin, end); });
}

// Rounded to nearest even; what a float cannot be rounded to becomes infinity, NaN stays NaN.
template <typename T>
void finish(const float* sums, const Tensor& y, const Linear& a, const Numbers* bias) {
  T* out = static_cast<T*>(y.mutable_data_ptr());
  for (int64_t m = 0; m < a.m; m++)
    for (int64_t n = 0; n < a.n; n++) {
      float sum = sums[m * a.n + n];
      if (bias) {
        const uint16_t* halves = static_cast<const uint16_t*>(bias->data);
        sum += bias->stored == Stored::float32    ? static_cast<const float*>(bias->data)[n]
               : bias->stored == Stored::bfloat16 ? lowbit::bfloat16_to_float(halves[n])
                                                  : lowbit::half_to_float(halves[n]);
      }
      out[m * a.n + n] = static_cast<T>(sum);
    }
}

Tensor product(bool by_digits, Tensor x_any, Tensor packed_any, Tensor scale_any, std::optional<Tensor> zero_any, std::optional<Tensor> outer,
              std::optional<Tensor> bias_any, Tensor values, std::optional<Tensor> scale_values, int64_t group_size,
              std::string instructions) {
  STD_TORCH_CHECK(x_any.is_cpu() && x_any.dim() >= 1 && is_float(x_any),
                  "x must be float32, bfloat16 or float16 [..., K] on the CPU");
  STD_TORCH_CHECK(packed_any.dim() == 2 && packed_any.scalar_type() == ScalarType::Byte, "packed must be uint8 [N, bytes]");
  STD_TORCH_CHECK(values.is_cpu() && values.scalar_type() == ScalarType::Float && values.dim() == 1 && values.is_contiguous(),
                  "values must be contiguous float32 [2^bits] on the CPU");
  const Tensor x = torch::stable::contiguous(x_any), packed = with_dense_rows(packed_any), scale = with_dense_rows(scale_any);

  Linear a = {};
  while (a.bits < 8 && (1 << a.bits) < values.numel()) a.bits++;
  STD_TORCH_CHECK(a.bits >= 1 && 1 << a.bits == values.numel(),
                  "values must hold 2^bits numbers for 1..8 bits, got ", values.numel());
  a.values = values.const_data_ptr<float>();
  uint16_t halves[256] = {};
  a.codes = codes_of(a, halves);
  a.n = packed.size(0);
  a.k = x.size(x.dim() - 1);
  a.m = 1;
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = a.n;
  for (size_t i = 0; i + 1 < shape.size(); i++) a.m *= shape[i];
  STD_TORCH_CHECK(a.m <= most_rows, "x must have at most ", most_rows, " rows, got ", a.m);
  STD_TORCH_CHECK(group_size == -1 || group_size >= 1, "group_size must be -1 or at least 1, got ", group_size);
  a.group = group_size == -1 ? (a.k > 0 ? a.k : 1) : group_size;
  const int64_t groups = (a.k + a.group - 1) / a.group;

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
  Tensor zero = scale;
  if (zero_any) {
    zero = with_dense_rows(*zero_any);
    check_weight_matrix(zero, "zero_point", a.n, groups);
    STD_TORCH_CHECK(!a.is_signed, "codes with a sign have no zero point");
    a.zero_point = numbers_of(zero, "zero_point");
    STD_TORCH_CHECK(!by_digits || a.zero_point.stored == Stored::bytes, "digits take zero points that are integers");
  }
  if (outer) {
    STD_TORCH_CHECK(outer->is_cpu() && outer->numel() == 1 && outer->scalar_type() == ScalarType::Float,
                    "outer must be one float32 on the CPU");
    a.outer = *outer->const_data_ptr<float>();
    a.has_outer = true;
  }
  std::optional<Tensor> bias;
  Numbers bias_numbers;
  if (bias_any) {
    STD_TORCH_CHECK(bias_any->is_cpu() && bias_any->dim() == 1 && bias_any->numel() == a.n && is_float(*bias_any),
                    "bias must be float32, bfloat16 or float16 [", a.n, "] on the CPU");
    bias = torch::stable::contiguous(*bias_any);
    bias_numbers = numbers_of(*bias, "bias");
  }

  Tensor y = torch::stable::new_empty(x, shape);
  if (a.m == 0 || a.n == 0) return y;
  Numbers x_numbers = numbers_of(x, "x");
  x_numbers.stride = a.k;
  const std::unique_ptr<float[]> sums(new float[a.m * a.n]);
  a.y = sums.get();
  if (!by_digits || !multiply_digits(a, x_numbers)) multiply_floats(a, x_numbers, groups, instruction_set(instructions));
  const Numbers* add = bias ? &bias_numbers : nullptr;
  switch (y.scalar_type()) {
    case ScalarType::BFloat16: finish<c10::BFloat16>(a.y, y, a, add); break;
    case ScalarType::Half: finish<c10::Half>(a.y, y, a, add); break;
    default: finish<float>(a.y, y, a, add); break;
  }
  return y;
}

Tensor linear(Tensor x, Tensor packed, Tensor scale, std::optional<Tensor> zero_point, std::optional<Tensor> outer,
              std::optional<Tensor> bias, Tensor values, std::optional<Tensor> scale_values, int64_t group_size,
              std::string instructions) {
  return product(false, x, packed, scale, zero_point, outer, bias, values, scale_values, group_size, instructions);
}

Tensor digits_linear(Tensor x, Tensor packed, Tensor scale, std::optional<Tensor> zero_point, std::optional<Tensor> outer,
                     std::optional<Tensor> bias, Tensor values, std::optional<Tensor> scale_values, int64_t group_size) {
  return product(true, x, packed, scale, zero_point, outer, bias, values, scale_values, group_size, "");
}

}  // namespace

STABLE_TORCH_LIBRARY(lowbit_cpu, m) {
  m.def(
      "linear(Tensor x, Tensor packed, Tensor scale, Tensor? zero_point, Tensor? outer, Tensor? bias, Tensor values, "
      "Tensor? scale_values, int group_size, str instructions='') -> Tensor");
  m.def(
      "digits_linear(Tensor x, Tensor packed, Tensor scale, Tensor? zero_point, Tensor? outer, Tensor? bias, Tensor values, "
      "Tensor? scale_values, int group_size) -> Tensor");
  m.def("takes_digits(Tensor values) -> bool");
  m.def("instructions() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(lowbit_cpu, CompositeExplicitAutograd, m) {
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("digits_linear", TORCH_BOX(&digits_linear));
  m.impl("takes_digits", TORCH_BOX(&takes_digits));
  m.impl("instructions", TORCH_BOX(&best_instructions));
}
