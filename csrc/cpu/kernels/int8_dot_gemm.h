// y = x W^T for many rows of x rounded to int8 and a weight of int8 with a scale a row: what the binding hands to the kernel. See
// int8_dot_gemm.cpp.
#pragma once

#include "linear.h"

namespace lowbit::cpu {

constexpr int64_t int8_columns = 64;  // that a register holds

struct Int8DotArgs {
  ArrayView x;              // [m, k]
  const float* input_scale;  // of all rows of x, or none: that of each row
  uint8_t* codes;           // [m, stride]: x rounded to int8, plus 128
  int64_t stride;           // whole registers
  float* scale;             // [m], NaN of a row that holds infinity or NaN
  const ArrayView* bias;    // [n], or none
  void* y;                  // [m, n]
  Dtype type;               // of y
  int64_t panel_n;          // rows of the weight at a time, a multiple of 32
};

#if defined(__x86_64__)
namespace avx512vnni {
void quantize_tokens(const Linear&, const Int8DotArgs&, int64_t begin, int64_t end);  // rows begin .. end - 1 of x
void int8_dot_gemm(const Linear&, const Int8DotArgs&, int64_t begin, int64_t end);    // rows of the weight
}  // namespace avx512vnni
#endif

}  // namespace lowbit::cpu
