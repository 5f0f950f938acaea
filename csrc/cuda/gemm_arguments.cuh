// What gemm.cuh is launched with.
#pragma once

#include <cuda.h>

#include "fragments.cuh"

namespace lowbit::cuda {

// Integers as the operands have them: in float16 weights divided by the factor of the scaled ones would be too small.
template <class T, int bits>
using Whole = std::conditional_t<std::is_same_v<T, __half>, Integers<T, bits>, ScaledIntegers<T, bits>>;

struct Gemm {
  CUtensorMap x;         // [m, k] in boxes of `columns` rows of 64
  const uint8_t* units;  // [tiles][units_of_row]
  UnitPlan unit;
  ScaleType scale_type;
  const void* scale;          // [n] where a row is one group, else in the units
  const uint8_t* zero_point;  // [n] where a row is one group and has one, else null
  const float* outer;         // one number, or null
  float factor;               // of the format: what a code of one step stands for
  const void* bias;           // [n] of x's type, or null
  void* y;                    // [m, n]
  int64_t n, tiles;
  int m, units_of_row, group_shift, weight_stages, x_stages;
  bool has_zero, is_signed;
};

}  // namespace lowbit::cuda
