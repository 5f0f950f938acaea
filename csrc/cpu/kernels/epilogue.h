// What a product does with its sums, row by row of the weight: what the bindings hand to the kernels. See epilogue.cpp.
#pragma once

#include "linear.h"
#include "../sets.h"

namespace lowbit::cpu {

struct Epilogue {
  const ArrayView* bias;  // [n], or none
  const float* row_scale;    // [m] what the sums of a row of x are multiplied by, or none
  void* y;              // [m, n]
  Dtype type;          // of y
};

// Sums a.y [m, n] of rows begin .. end - 1 of the weight into y. Rounded to nearest even; what y's type cannot hold becomes
// infinity, NaN stays NaN.
#define LOWBIT_DECLARE(set)                                             \
  namespace set {                                                       \
  void write_output(const Linear&, const Epilogue&, int64_t begin, int64_t end);  \
  }
LOWBIT_FOR_EACH_SET(LOWBIT_DECLARE)
#undef LOWBIT_DECLARE

}  // namespace lowbit::cpu
