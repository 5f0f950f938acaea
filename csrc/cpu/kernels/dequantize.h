// Dequantization of rows to a 16-bit or 32-bit float type: what bindings hand to dequantize.cpp.
#pragma once

#include "linear.h"
#include "../sets.h"

namespace lowbit::cpu {

// Rows [begin, end) of the weight into `out` of `type`, `stride` elements apart. One for each instruction set, chosen at run
// time; avx512bf16 is for bf16_dot_gemm.cpp alone, whose products flush subnormals to 0, as this does.
#define LOWBIT_DECLARE(set) \
  namespace set {           \
  void dequantize_rows(const Linear&, Dtype type, void* out, int64_t stride, int64_t begin, int64_t end); \
  }
LOWBIT_FOR_EACH_SET(LOWBIT_DECLARE)
#if defined(__x86_64__)
LOWBIT_DECLARE(avx512bf16)
#endif
#undef LOWBIT_DECLARE

}  // namespace lowbit::cpu
