// Round-to-nearest quantization and packing of a weight: what the binding hands to quantize.cpp.
#pragma once

#include "../kernels/linear.h"
#include "../sets.h"

namespace lowbit::cpu {

struct Quantize {
  ArrayView w;              // [n, k]
  int64_t n, k, group;
  int bits;
  float low, high;        // range of the integers of the codes
  float largest;          // the largest integer whose negative is a code too
  float reach;            // integer that the value of largest magnitude maps to: `low`, or `largest`
  Dtype dtype;          // dtype of the scales
  void* scale;            // [n, groups]
  uint8_t* zero;          // [n, groups]; null: symmetric, signed codes
  uint8_t* packed;        // [n, packed_size(bits, k)]
};

// Quantizes rows [begin, end). False: a weight is not finite, or a scale is infinite, or 0 for a group with normal values. One
// for each instruction set, chosen at run time.
#define LOWBIT_DECLARE(set)                                              \
  namespace set {                                                        \
  bool quantize(const Quantize&, int64_t begin, int64_t end);            \
  }
LOWBIT_FOR_EACH_SET(LOWBIT_DECLARE)
#undef LOWBIT_DECLARE

}  // namespace lowbit::cpu
