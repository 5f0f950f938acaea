// y = x W^T with x in digits to the base 256 and weights that are integers, on the integer dot products of a processor
// (AVX-512 with VBMI and VNNI): what the binding hands to the kernel. See digits.cpp.
#pragma once

#include "linear.h"

namespace lowbit::cpu {

constexpr int lanes = 16;             // sums that a register holds
constexpr int64_t slice = 512;        // columns of x that share a scale
constexpr int64_t most_rows_of_digits = 64;

// A weight is (byte - offset - zero point) * unit * scale, where the byte is the code with `flipped` bits turned over, and what
// the table says of it where there is one.
struct Bytewise {
  int flipped, offset;
  const uint8_t* table;  // [64], the numbers of a narrower code over and over; or none
  float unit;            // what an integer counts
};

// A step is as many columns as make the widest plane of the codes 64 bytes. Field f of its bytes holds columns f, fields + f,
// 2 fields + f and so on, so that a lane is of 4 * fields columns in a row.
static inline int fields_of(int bits) { return bits >= 8 ? 1 : bits >= 4 ? 2 : 4; }  // of 2 to 8 bits
static inline int64_t columns_of(int bits) { return 64 * fields_of(bits); }

struct DigitsOfX {
  int count;                    // digits of a number: 2 or 3; 1: x is rounded to eight bits
  const float* given;           // with one digit: the scale of all rows of x; none: of each row its own
  int64_t steps;
  const int32_t* first_group;   // [steps]
  const int32_t* group_of_lane; // [steps, lanes] counted from the step's first; none where each step is of one group
  int8_t* digits;               // [steps, m, count, fields, 64], the highest digit first
  int32_t* sums;                // [steps, m, lanes]: of each lane's numbers; times -offset where there are no zero points, as
                                // floats where there are and two digits
  float* scale;                 // [m, slices]: what the lowest digit counts
};

// Whether the kernel takes groups of this size: no lane is of two.
static inline bool takes_group(int bits, int64_t group, int64_t k) { return group >= k || group % (4 * fields_of(bits)) == 0; }

#if defined(__x86_64__)
namespace avx512vnni {
// False: x holds infinity or NaN, which have no digits.
bool take_digits(const Linear&, const Bytewise&, const Numbers& x, const DigitsOfX&);
// False: a zero point is no code, so that sums may not fit.
bool digits_linear(const Linear&, const Bytewise&, const DigitsOfX&, int64_t begin, int64_t end);
}  // namespace avx512vnni
#endif

}  // namespace lowbit::cpu
