// GEMM for many rows of x rounded to int8 and an int8 weight with a scale a row: what the binding hands to int8_dot_gemm.cpp.
#pragma once

#include "linear.h"

namespace lowbit::cpu {

constexpr int64_t int8_columns = 64;  // bytes in a register

struct Int8DotArgs {
  ArrayView x;              // [m, k]
  const float* input_scale;  // one scale for all rows of x (static), or null: one for each row
  uint8_t* codes;           // [m, stride]: x rounded to int8, plus 128
  int64_t stride;           // whole registers
  float* scale;             // [m]; NaN for a row with infinity or NaN
  const ArrayView* bias;    // [n], or null
  void* y;                  // [m, n]
  Dtype type;               // of y
  int64_t panel_n;          // rows of the weight in a panel, a multiple of 32
};

#if defined(__x86_64__)
namespace avx512vnni {
void quantize_tokens(const Linear&, const Int8DotArgs&, int64_t begin, int64_t end);  // rows begin .. end - 1 of x
void int8_dot_gemm(const Linear&, const Int8DotArgs&, int64_t begin, int64_t end);    // rows of the weight
}  // namespace avx512vnni
#endif

}  // namespace lowbit::cpu
