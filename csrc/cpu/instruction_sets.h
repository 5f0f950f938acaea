// The kernels of each instruction set, and which of them a call takes.
#pragma once

#include <torch/headeronly/util/Exception.h>

#include <cstdlib>
#include <cstring>

#include "digits.h"
#include "ends.h"
#include "floats.h"
#include "interleaved.h"
#include "linear.h"
#include "panels.h"
#include "quantize.h"

namespace lowbit::cpu {

// Kernels that take a weight a step at a time: digits, and floats where they are better than what the instruction set has.
struct StepKernels {
  int lanes;
  void (*take_digits)(const Linear&, const Bytewise&, const Numbers&, const DigitsOfX&, int64_t, int64_t);
  bool (*digits[9])(const Linear&, const Bytewise&, const DigitsOfX&, const Turn&);  // by the bits of codes, 2 to 8
  void (*take_units)(const Linear&, const Bytewise&, const Numbers&, const DigitsOfUnits&, int64_t, int64_t);
  void (*interleaved[9])(const Linear&, const Bytewise&, const DigitsOfUnits&, const Turn&);
  void (*take_floats)(const Linear&, const Numbers&, const FloatsOfX&);
  void (*floats)(const Linear&, const FloatsOfX&, int64_t, int64_t);
};

struct InstructionSet {
  const char* name;
  bool available;
  const StepKernels* steps;  // of this processor, or none
  void (*arrange)(const Linear&, const Numbers&, float*);
  void (*linear)(const Linear&, int64_t, int64_t);
  void (*panel)(const Linear&, Stored, void*, int64_t, int64_t, int64_t);
  void (*finish)(const Linear&, const Ends&, int64_t, int64_t);
  bool (*quantize)(const Quantize&, int64_t, int64_t);
};

// Empty: what LOWBIT_CPU names, else the widest that the processor has.
inline const InstructionSet& instruction_set(const char* asked = "") {
#if defined(__x86_64__)
#define OF_EACH_WIDTH(kernel) {nullptr, nullptr, kernel<2>, kernel<3>, kernel<4>, kernel<5>, kernel<6>, kernel<7>, kernel<8>}
  static const StepKernels wide = {
      wide_lanes, avx512::take_digits, OF_EACH_WIDTH(avx512vnni::digits_linear), avx512::take_units,
      OF_EACH_WIDTH(avx512vnni::interleaved_linear), avx512::take_floats, avx512vnni::floats_linear};
  static const StepKernels narrow = {
      narrow_lanes, avx2::take_digits, OF_EACH_WIDTH(avx2::digits_linear), avx2::take_units,
      OF_EACH_WIDTH(avx2::interleaved_linear), avx2::take_floats, avx2::floats_linear};
  // An AVX-512 without integer dot products takes AVX2's digits.
  static const StepKernels narrow_digits = {
      narrow_lanes, avx2::take_digits, OF_EACH_WIDTH(avx2::digits_linear), avx2::take_units,
      OF_EACH_WIDTH(avx2::interleaved_linear), nullptr, nullptr};
#undef OF_EACH_WIDTH
#endif
  // The widest first.
  static const InstructionSet sets[] = {
#if defined(__x86_64__)
      {"avx512",
       __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma"),
       __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni") ? &wide : &narrow_digits,
       avx512::arrange, avx512::linear, avx512::panel, avx512::finish, avx512::quantize},
      {"avx2", __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"), &narrow,
       avx2::arrange, avx2::linear, avx2::panel, avx2::finish, avx2::quantize},
#endif
      {"portable", true, nullptr, portable::arrange, portable::linear, portable::panel, portable::finish, portable::quantize},
  };
  const char* variable = *asked ? nullptr : std::getenv("LOWBIT_CPU");
  const bool forced = variable && *variable;
  const char* name = forced ? variable : asked;
  const char* what = forced ? "LOWBIT_CPU" : "instructions";
  for (const InstructionSet& set : sets)
    if (*name ? !std::strcmp(name, set.name) : set.available) {
      STD_TORCH_CHECK(set.available, "this processor has no ", name, ": leave ", what, " empty to take the best it has");
      return set;
    }
  STD_TORCH_CHECK(false, what, " must be empty, avx512, avx2 or portable, got ", name);
}

}  // namespace lowbit::cpu
