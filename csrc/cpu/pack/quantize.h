// Rows of a weight rounded to nearest and packed: what the binding hands to the kernel. See quantize.cpp.
#pragma once

#include "../kernels/linear.h"
#include "../sets.h"

namespace lowbit::cpu {

struct Quantize {
  ArrayView w;              // [n, k]
  int64_t n, k, group;
  int bits;
  float low, high;        // the integers that codes stand for
  float largest;          // the largest that has an opposite
  float reach;            // what the value of largest magnitude of a group becomes: `low`, or `largest`
  Dtype dtype;          // how scales are stored
  void* scale;            // [n, groups]
  uint8_t* zero;          // [n, groups]; none: codes have a sign
  uint8_t* packed;        // [n, packed_size(bits, k)]
};

// Rows begin .. end - 1. False: a weight is not finite, or a scale became infinite or 0 as it was stored and is none of subnormal
// numbers. One for each instruction set, chosen by the processor at run time.
#define LOWBIT_DECLARE(set)                                              \
  namespace set {                                                        \
  bool quantize(const Quantize&, int64_t begin, int64_t end);            \
  }
LOWBIT_FOR_EACH_SET(LOWBIT_DECLARE)
#undef LOWBIT_DECLARE

}  // namespace lowbit::cpu
