// y = x W^T with x in three digits to the base 256 and weights that are integers, on the integer dot products of a processor
// (AVX-512 with VBMI and VNNI): what the binding hands to the kernel. See digits.cpp.
#pragma once

#include "linear.h"

namespace lowbit::cpu {

constexpr int lane_codes = 4, lanes = 16, step = lane_codes * lanes;  // columns taken at a time
constexpr int64_t slice = 512;                                        // columns of x that share a scale
constexpr int digits_of_number = 3;
constexpr int most_rows_of_digits = 2;

// A weight is (byte - offset - zero point) * scale, where the byte is the code with `flipped` bits turned over, and what the
// table says of it where there is one.
struct Bytewise {
  int flipped, offset;
  const uint8_t* table;  // [64], or none
  float unit;            // what an integer counts
};

// A run of steps that have the same scales of w and of x; where groups are smaller than a step, one step.
struct Run {
  int64_t step, steps, group, slice;
};

struct DigitsOfX {
  int64_t runs, padded;   // columns up to the next step
  const Run* run;         // [runs]
  int8_t* digits;         // [m, 3, padded], the highest first
  float* scale;           // [m, slices, 2]: two numbers whose product is what the lowest digit counts
  int32_t* sums;          // [m, runs, 3, lanes]: of each lane's digits; times -offset where there are no zero points
};

// How many columns share the scales of a run at most; 0 where the kernel does not take such groups.
static inline int64_t run_of(int64_t group, int64_t k) {
  if (group >= k || group % step == 0) return slice;
  return group % lane_codes == 0 && step % group == 0 ? step : 0;
}

#if defined(__x86_64__)
namespace avx512vnni {
// False: x holds infinity or NaN, which have no digits.
bool take_digits(const Linear&, const Bytewise&, const Numbers& x, const DigitsOfX&);
void digits_linear(const Linear&, const Bytewise&, const DigitsOfX&, int64_t begin, int64_t end);
}  // namespace avx512vnni
#endif

}  // namespace lowbit::cpu
