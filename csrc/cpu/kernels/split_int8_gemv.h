// Split-int8 GEMV over canonical rows: y = x W^T with x as int8 limbs, for weights whose values are small integers times a scale.
//
//    x [M, K] --pack_limbs--> limbs int8 [steps, M, D, fields, 4 lanes], sums int32 [steps, M, lanes], scale f32 [M, K / 512]
//                                 |
//    row: planes of bits --load, shift, mask--> codes u8 [fields][4 lanes] --dpbusd / maddubs--> int32 [lanes], exact in a step
//                                                                                |
//    zero points u8, group scales --------- - zero * sum of x, * group scale --->+--> f32 part [rows or quads]
//    scale of a slice of 512 columns of x ---------------------- * ------------->+--> f32 total --sum of lanes--> y [M, R rows]
//
// Contract: split-int8 (2 or 3 limbs): x to 1/65278 or 2^-22 of the largest of its 512 columns, then exact integers and fp32
// sums; with 8-bit activations (1 limb) exact. Results do not depend on the number of threads.
// Limit: at M = 1 the bytes of the weight; from M = 4 on the int8 multiply-adds, M N K D of them.
// Reached (evals/results/gemv_cpu.json, 11008 x 4096, AMD EPYC with AVX-512, 2 threads, cold weights, 2 limbs): fp6 792 us at M =
// 1, 0.92 of the time to read its bytes and 7.4 times as fast as bfloat16's F.linear; nvfp4 826 us, 0.94 and 5.4 times. With AVX2
// alone (gemv_cpu_avx2.json) fp6 1454 us, 0.83 and 3.3 times.
//
// This header is what bindings hand to the kernels; limbs are made in pack/pack_activations.cpp.
#pragma once

#include "linear.h"

namespace lowbit::cpu {

constexpr int wide_lanes = 16, narrow_lanes = 8;  // int32 lanes of a register of AVX-512, and of AVX2
constexpr int64_t slice = 512;                    // columns of x that share one scale
constexpr int64_t chunk = 4 * slice;              // columns whose group scales are loaded at a time

// The value of a weight is (byte - offset - zero_point) * unit * scale; the byte is table[code] where there is a table, else code
// ^ flipped (flipped: the sign bit, which makes two's complement codes unsigned).
struct ByteDecoding {
  int flipped, offset;
  const uint8_t* table;  // [64]: a table of fewer codes repeated, values up to 127; or null
  float unit;            // value of 1, a power of two
};

// A step is the columns whose widest plane fills one register: four bytes for each lane. Field f of byte b holds column b *
// fields + f of the step, so the columns of a lane are 4 * fields neighbours.
static inline int fields_of(int bits) { return bits >= 8 ? 1 : bits >= 4 ? 2 : 4; }  // bits 2 to 8
static inline int64_t columns_per_step(int bits, int lanes) { return 4 * lanes * fields_of(bits); }

// Whether limbs are int16 (base 65536, two fields in a step) instead of int8 (base 256). maddubs of AVX2 adds pairs of products
// in int16, which products of 8-bit codes overflow.
constexpr bool uses_words(int bits, int lanes) { return bits == 8 && lanes == narrow_lanes; }
constexpr int words_for(int limbs) { return (limbs + 1) / 2; }

struct PackedLimbs {
  int count;                    // limbs of a value of x: 2 or 3; 1: x is rounded to 8 bits
  const float* input_scale;           // with one limb: one scale for all of x (static); null: a scale for each row
  int64_t steps;
  const int32_t* first_group;   // [steps]: group of the step's first column
  const int32_t* group_of_lane; // [steps, lanes], relative to first_group; null where every step lies in one group
  bool quad_sums;             // lanes are summed by fours, one row of the weight in each quarter; group_of_lane is then 4 * group
                              // + lane % 4
  int8_t* limbs;               // int8: [steps, M, count, fields, 4 lanes], highest limb first; int16: [steps, M,
                               // words_for(count), 2, 2 lanes]
  int32_t* sums;                // [steps, M, lanes]: sum of each lane's integers of x. Without zero points times -offset; with
                                // them, two limbs and no quad sums as floats
  float* scale;                 // [M, slices]: value of 1 in the lowest limb
  bool* no_limbs;                // [M]: rows of x without limbs, whose results are undefined
};

// Whether the kernels support this group size: the columns of a lane must not straddle two groups.
static inline bool supports_group(int bits, int64_t group, int64_t k) { return group >= k || group % (4 * fields_of(bits)) == 0; }

// Whether four lanes may be summed before scaling: they lie in one group and the sum fits in int32.
static inline bool supports_quad_sums(int bits, int limbs, int64_t group, int64_t k) {
  return limbs < 3 && (group >= k || group % (16 * fields_of(bits)) == 0);
}

// Whether a format with these codes may have zero points: tables may not, nor 7 and 8 bits, whose sums would overflow.
template <int bits, bool has_table>
constexpr bool supports_zeros = bits <= 6 && !has_table;

#if defined(__x86_64__)
// pack_limbs: rows begin .. end - 1 of x; rows with infinity or NaN are marked in no_limbs. split_int8_gemv<bits>, a translation
// unit for each width: false where a zero point exceeds 2^bits - 1, so that sums might overflow.
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
