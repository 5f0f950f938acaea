// Epilogue of a product: what bindings hand to epilogue.cpp.
#pragma once

#include "linear.h"
#include "../sets.h"

namespace lowbit::cpu {

struct Epilogue {
  const ArrayView* bias;  // [n], or null
  const float* row_scale;    // [m]: factor of each row's sums, or null
  void* y;              // [m, n]
  Dtype type;          // of y
};

// Sums a.y [m, n] of rows [begin, end) of the weight into y, rounded to nearest even; overflow gives infinity, NaN stays NaN.
#define LOWBIT_DECLARE(set)                                             \
  namespace set {                                                       \
  void write_output(const Linear&, const Epilogue&, int64_t begin, int64_t end);  \
  }
LOWBIT_FOR_EACH_SET(LOWBIT_DECLARE)
#undef LOWBIT_DECLARE

}  // namespace lowbit::cpu
