// Table of the kernels of each instruction set, and the choice among them.
#pragma once

#include <torch/headeronly/util/Exception.h>

#include <cstdlib>
#include <cstring>

#include "../kernels/split_int8_gemv.h"
#include "../kernels/epilogue.h"
#include "../kernels/f32_gemv.h"
#include "../decode/interleaved.h"
#include "../kernels/linear.h"
#include "../kernels/dequantize.h"
#include "../pack/quantize.h"

namespace lowbit::cpu {

// Kernels over steps of canonical rows or over interleaved blocks; entries are null where the generic kernel is better.
struct GemvKernels {
  int lanes;
  void (*pack_limbs)(const Linear&, const ByteDecoding&, const ArrayView&, const PackedLimbs&, int64_t, int64_t);
  bool (*limbs[9])(const Linear&, const ByteDecoding&, const PackedLimbs&, const RowRange&);  // by bits, 2 to 8
  void (*pack_limbs_interleaved)(const Linear&, const ByteDecoding&, const ArrayView&, const InterleavedLimbs&, int64_t, int64_t);
  void (*interleaved[9])(const Linear&, const ByteDecoding&, const InterleavedLimbs&, const RowRange&);
  void (*pack_floats)(const Linear&, const ArrayView&, const PackedFloats&);
  void (*floats)(const Linear&, const PackedFloats&, int64_t, int64_t);
};

struct InstructionSet {
  const char* name;
  bool available;
  const GemvKernels* steps;  // of this processor, or null
  void (*arrange)(const Linear&, const ArrayView&, float*);
  void (*linear)(const Linear&, int64_t, int64_t);
  void (*dequantize_rows)(const Linear&, Dtype, void*, int64_t, int64_t, int64_t);
  void (*write_output)(const Linear&, const Epilogue&, int64_t, int64_t);
  bool (*quantize)(const Quantize&, int64_t, int64_t);
};

// The instruction set `asked`; where it is empty LOWBIT_CPU, else the widest that the processor has.
inline const InstructionSet& instruction_set(const char* asked = "") {
#if defined(__x86_64__)
#define OF_EACH_WIDTH(kernel) {nullptr, nullptr, kernel<2>, kernel<3>, kernel<4>, kernel<5>, kernel<6>, kernel<7>, kernel<8>}
  static const GemvKernels wide = {
      wide_lanes, avx512::pack_limbs, OF_EACH_WIDTH(avx512vnni::split_int8_gemv), avx512::pack_limbs_interleaved,
      OF_EACH_WIDTH(avx512vnni::interleaved_linear), avx512::pack_floats, avx512vnni::f32_gemv};
  static const GemvKernels narrow = {
      narrow_lanes, avx2::pack_limbs, OF_EACH_WIDTH(avx2::split_int8_gemv), avx2::pack_limbs_interleaved,
      OF_EACH_WIDTH(avx2::interleaved_linear), avx2::pack_floats, avx2::f32_gemv};
  // AVX-512 without VNNI uses the split-int8 kernels of AVX2.
  static const GemvKernels narrow_split = {
      narrow_lanes, avx2::pack_limbs, OF_EACH_WIDTH(avx2::split_int8_gemv), avx2::pack_limbs_interleaved,
      OF_EACH_WIDTH(avx2::interleaved_linear), nullptr, nullptr};
#undef OF_EACH_WIDTH
#endif
  // Widest first.
  static const InstructionSet sets[] = {
#if defined(__x86_64__)
      {"avx512",
       __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma"),
       __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni") ? &wide : &narrow_split,
       avx512::arrange, avx512::linear, avx512::dequantize_rows, avx512::write_output, avx512::quantize},
      {"avx2", __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"), &narrow,
       avx2::arrange, avx2::linear, avx2::dequantize_rows, avx2::write_output, avx2::quantize},
#endif
      {"portable", true, nullptr, portable::arrange, portable::linear, portable::dequantize_rows, portable::write_output, portable::quantize},
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
