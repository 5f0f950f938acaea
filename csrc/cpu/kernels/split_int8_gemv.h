// y = x W^T with x in limbs and weights that are integers, on integer products of a processor (AVX-512 with VBMI and VNNI, or
// AVX2): what the binding hands to the kernels. See pack_activations.cpp for the limbs, and split_int8_gemv_avx512.cpp and split_int8_gemv_avx2.cpp.
#pragma once

#include "linear.h"

namespace lowbit::cpu {

constexpr int wide_lanes = 16, narrow_lanes = 8;  // sums that a register of AVX-512 holds, and one of AVX2
constexpr int64_t slice = 512;                    // columns of x that share a scale
constexpr int64_t chunk = 4 * slice;              // columns whose scales of weights are taken at a time

// A weight is (byte - offset - zero point) * unit * scale, where the byte is the code with `flipped` bits turned over (the sign's,
// or none), and what the table says of it where there is one.
struct ByteDecoding {
  int flipped, offset;
  const uint8_t* table;  // [64], the numbers of a narrower code over and over, 127 at most; or none
  float unit;            // what an integer counts
};

// A step is as many columns as make the widest plane of the codes four bytes for each lane. Field f of its bytes holds columns f,
// fields + f, 2 fields + f and so on, so that a lane is of 4 * fields columns in a row.
static inline int fields_of(int bits) { return bits >= 8 ? 1 : bits >= 4 ? 2 : 4; }  // of 2 to 8 bits
static inline int64_t columns_per_step(int bits, int lanes) { return 4 * lanes * fields_of(bits); }

// Whether limbs are words, to the base 65536, and two fields of a step's columns; otherwise bytes, to the base 256. AVX2 adds
// products of unsigned and signed bytes in 16 bits, which those of eight bits exceed.
constexpr bool uses_words(int bits, int lanes) { return bits == 8 && lanes == narrow_lanes; }
constexpr int words_for(int limbs) { return (limbs + 1) / 2; }

struct PackedLimbs {
  int count;                    // limbs of a number: 2 or 3; 1: x is rounded to eight bits
  const float* input_scale;           // with one limb: the scale of all rows of x; none: of each row its own
  int64_t steps;
  const int32_t* first_group;   // [steps]
  const int32_t* group_of_lane; // [steps, lanes] counted from the step's first; none where each step is of one group
  bool quad_sums;             // sums and groups are those of four lanes; group_of_lane: times 4, and the place in the four
  int8_t* limbs;               // [steps, m, count, fields, 4 lanes], the highest limb first; words: [steps, m, words, 2, 2 lanes]
  int32_t* sums;                // [steps, m, lanes]: of each lane's numbers; times -offset where there are no zero points, as
                                // floats where there are, two limbs and no quarters
  float* scale;                 // [m, slices]: what the lowest limb counts
  bool* no_limbs;                // [m]: whether a row has no limbs, whose products mean nothing
};

// Whether the kernels take groups of this size: no lane is of two.
static inline bool supports_group(int bits, int64_t group, int64_t k) { return group >= k || group % (4 * fields_of(bits)) == 0; }

// Whether the sums of four lanes may come together: no four are of two groups, and so many hold in 32 bits.
static inline bool supports_quad_sums(int bits, int limbs, int64_t group, int64_t k) {
  return limbs < 3 && (group >= k || group % (16 * fields_of(bits)) == 0);
}

// Whether such codes have zero points: numbers of a table, and those of more bits without a sign, are none that limbs take.
template <int bits, bool has_table>
constexpr bool takes_zeros = bits <= 6 && !has_table;

#if defined(__x86_64__)
// take_digits: of rows begin .. end - 1 of x. Infinity and NaN have no limbs.
// split_int8_gemv, a unit for each width of codes: false where a zero point is no code, so that sums may not fit.
namespace avx512 {
void pack_limbs(const Linear&, const ByteDecoding&, const ArrayView& x, const PackedLimbs&, int64_t begin, int64_t end);
}  // namespace avx512
namespace avx512vnni {
template <int bits>
bool split_int8_gemv(const Linear&, const ByteDecoding&, const PackedLimbs&, const RowRange&);
}  // namespace avx512vnni
namespace avx2 {
void pack_limbs(const Linear&, const ByteDecoding&, const ArrayView& x, const PackedLimbs&, int64_t begin, int64_t end);
template <int bits>
bool split_int8_gemv(const Linear&, const ByteDecoding&, const PackedLimbs&, const RowRange&);
}  // namespace avx2
#endif

}  // namespace lowbit::cpu
