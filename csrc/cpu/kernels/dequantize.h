// Rows of a weight as numbers of a 16-bit or 32-bit type: what the binding hands to the kernel. See dequantize.cpp.
#pragma once

#include "linear.h"
#include "../sets.h"

namespace lowbit::cpu {

// Rows begin .. end - 1 of the weight into `out` of `type`, `stride` numbers apart. One for each instruction set, chosen by the
// processor at run time; that of avx512bf16 is bf16_dot_gemm.cpp's own, whose products take subnormal numbers for 0, as it does.
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
