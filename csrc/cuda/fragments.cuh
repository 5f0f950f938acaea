// From the codes of a unit (tiles.cuh) to operand A of the tensor cores on 16-bit floats, mma.m16n8k16 or wgmma.m64nNk16.
//
// A lane holds sixteen bytes of each block, and of each step of 32 columns makes two operands of four registers: rows g and
// g + 8 (g = lane / 4) of columns 2t, 2t + 1 (t = lane % 4), then of those eight further. Every code becomes its number
// exactly; a step and a place are constants once the loops around them are unrolled.
//
// A family of formats is a class with
//   bits, parts        width of a code, and how many operands add up to the weights (one, where 16 bits hold a number)
//   factor             what a sum of products is still multiplied by
//   takes_zero         whether its numbers may have a zero point
//   Constants, Row     what a kernel prepares once, and what it prepares for each of a lane's rows once a group
//   constants(...)     from whether codes are two's complement, and from a table in shared memory
//   row(z)             for the zero point z
//   fragment(...)      the operands of one half of a step
// A class with two parts also has a table in shared memory, which fill(...) writes, and twins(...), operands with both parts of
// a number side by side.
#pragma once

#include "../formats.h"
#include "asynchrony.cuh"
#include "numbers.cuh"
#include "tiles.cuh"

namespace lowbit::cuda {

// ---- codes in words ------------------------------------------------------------------------------------------------

// What a lane holds of a run of steps: four words of each of its blocks.
template <int bits>
struct Held {
  uint32_t word[blocks_of_run(bits)][4];
};

// What a lane holds from `step` on: the first steps of a run bring a block each.
template <int bits>
__device__ __forceinline__ void hold(const uint8_t* unit, int lane, int step, Held<bits>& held) {
  constexpr int steps = steps_of_run(bits), blocks = blocks_of_run(bits);
  const int block = step % steps;
  if (block >= blocks) return;
  const uint4 w = *reinterpret_cast<const uint4*>(unit + (step / steps * blocks + block) * 512 + lane * 16);
  held.word[block][0] = w.x;
  held.word[block][1] = w.y;
  held.word[block][2] = w.z;
  held.word[block][3] = w.w;
}

// Operations on three numbers that are one instruction each; written out, compilers take them apart to share their halves.
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t mask, uint32_t b) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(b));
  return d;
}

__device__ __forceinline__ uint32_t and_xor(uint32_t a, uint32_t mask, uint32_t b) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(d) : "r"(a), "r"(mask), "r"(b));
  return d;
}

// `a` where the mask has ones, else `b`.
__device__ __forceinline__ uint32_t selected(uint32_t a, uint32_t mask, uint32_t b) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xe2;" : "=r"(d) : "r"(a), "r"(mask), "r"(b));
  return d;
}

__device__ __forceinline__ uint32_t shifted_left(uint32_t word, int by) { return by >= 0 ? word << by : word >> -by; }

// The codes of a step in the four bytes of a word, each from bit place_of_code on; the other bits are anything.
template <int bits>
__device__ __forceinline__ uint32_t codes_of(const Held<bits>& held, int step, int word) {
  constexpr int steps = steps_of_run(bits);
  const int in_run = step % steps;
  uint32_t codes = held.word[part_of_code(bits, in_run, 0).block][word];
  int above = 8;  // the lowest bit of a byte that has been put together
#pragma unroll
  for (int i = 1; i < most_parts_of_code(bits); i++) {
    const PartOfCode last = part_of_code(bits, in_run, i - 1), part = part_of_code(bits, in_run, i);
    above -= last.width;
    if (part.width) codes = selected(codes, 0x01010101u * (0xffu << above & 0xff), held.word[part.block][word] >> part.shift);
  }
  return codes;
}

// ---- 16-bit floats, two in a register ------------------------------------------------------------------------------

template <class T>
struct Sixteen;
template <>
struct Sixteen<__nv_bfloat16> {
  static constexpr int mantissa = 7, bias = 127;
};
template <>
struct Sixteen<__half> {
  static constexpr int mantissa = 10, bias = 15;
};

__host__ __device__ constexpr uint32_t twice(uint32_t a) { return a * 0x00010001u; }

template <class T>
__host__ __device__ constexpr uint32_t two_powers(int e) {
  return twice(static_cast<uint32_t>(e + Sixteen<T>::bias) << Sixteen<T>::mantissa);
}

template <class T>
__device__ __forceinline__ uint32_t fused(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  if constexpr (Sixteen<T>::mantissa == 7)
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  else
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// A constant that stays in a register: an operation on three numbers takes one that is written in it, not two.
__device__ __forceinline__ void hide(uint32_t& constant) { asm("" : "+r"(constant)); }

template <class T>
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (Sixteen<T>::mantissa == 7)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- integers ------------------------------------------------------------------------------------------------------

// Codes q of 2 to 8 bits as q - z. A code in the mantissa of a power of two is that power plus q times its place, and one
// fused multiplication takes off the power and the zero point. Two's complement is q with its highest bit turned, less that
// bit. Eight bits are one more than the mantissa of bfloat16 has, so there the highest bit is a number of its own.
template <class T, int code_bits>
struct Integers {
  static constexpr int bits = code_bits, parts = 1;
  static constexpr bool takes_zero = true;
  static constexpr float factor = 1;
  static constexpr int mantissa = Sixteen<T>::mantissa;
  static constexpr bool is_split = bits > mantissa;
  struct Constants {
    uint32_t magic[8];  // for each place; where codes are split, for the low bits and the highest
  };
  struct Row {
    uint32_t offset[8];
  };

  static __device__ __forceinline__ Constants constants(bool is_signed, const uint2*) {
    Constants made;
    const uint32_t turned = is_signed ? twice(1u << (bits - 1)) : 0;
#pragma unroll
    for (int i = 0; i < 8; i++) made.magic[i] = two_powers<T>(mantissa) ^ (is_split ? 0 : turned << i);
    if constexpr (is_split) made.magic[1] = 0xc380c380u ^ turned;
    hide(made.magic[0]);
    return made;
  }

  // The zero point of two's complement is 2^(bits - 1) here.
  static __device__ __forceinline__ Row row(uint32_t zero) {
    Row made;
    if constexpr (is_split) {
      made.offset[0] = twice(__float_as_uint(128.0f - static_cast<float>(zero)) >> 16);
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++) made.offset[i] = (0x80008000u | two_powers<T>(mantissa - i)) + (twice(zero) << i);
    }
    return made;
  }

  static __device__ __forceinline__ void fragment(const Constants& constants, const Held<bits>& held, int step, int half,
                                                  const Row& row, const Row& row8, uint32_t (&a)[parts][4]) {
    const int at = place_of_code(bits, step % steps_of_run(bits)), place = at + bits <= mantissa ? at : 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t codes = codes_of<bits>(held, step, i % 2 + 2 * half) >> at - place + (i < 2 ? 0 : 8);
      const Row& of = i % 2 ? row8 : row;
      if constexpr (is_split) {
        const uint32_t low = and_or(codes, 0x007f007fu, constants.magic[0]);
        const uint32_t high = and_xor(codes, 0x00800080u, constants.magic[1]);
        a[0][i] = fused<T>(fused<T>(low, two_powers<T>(0), high), two_powers<T>(0), of.offset[0]);
      } else {
        const uint32_t number = and_xor(codes, twice(((1u << bits) - 1) << place), constants.magic[place]);
        a[0][i] = fused<T>(number, two_powers<T>(-place), of.offset[place]);
      }
    }
  }
};

// The same with fewer operations: (q - z) / factor. Where a number of 16 bits has no more than the lowest bit of its exponent
// it is its bits, as an integer, times a small power of two; so a code needs only to be cut out, wherever it lies in the
// mantissa and that bit, and one fused multiplication takes the power and the zero point off.
template <class T, int code_bits>
struct ScaledIntegers {
  static constexpr int bits = code_bits, parts = 1;
  static constexpr bool takes_zero = true;
  static constexpr int mantissa = Sixteen<T>::mantissa, power = mantissa == 7 ? 6 : 9;
  static constexpr float factor = 1 << power;
  struct Constants {
    uint32_t turned;  // the highest bit of two's complement
  };
  struct Row {
    uint32_t offset;
  };

  static __device__ __forceinline__ Constants constants(bool is_signed, const uint2*) {
    Constants made = {is_signed ? twice(1u << (bits - 1)) : 0};
    hide(made.turned);
    return made;
  }

  // The zero point of two's complement is 2^(bits - 1) here.
  static __device__ __forceinline__ Row row(uint32_t zero) {
    return {fused<T>(twice(zero), 0x80008000u | two_powers<T>(Sixteen<T>::bias), 0x80008000u)};
  }

  static __device__ __forceinline__ void fragment(const Constants& constants, const Held<bits>& held, int step, int half,
                                                  const Row& row, const Row& row8, uint32_t (&a)[parts][4]) {
    const int place = place_of_code(bits, step % steps_of_run(bits));
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t codes = codes_of<bits>(held, step, i % 2 + 2 * half) >> (i < 2 ? 0 : 8);
      const uint32_t number = and_xor(codes, twice(((1u << bits) - 1) << place), constants.turned << place);
      a[0][i] = fused<T>(number, two_powers<T>(Sixteen<T>::bias - place), i % 2 ? row8.offset : row.offset);
    }
  }
};

// ---- floats --------------------------------------------------------------------------------------------------------

// What the largest exponent of a format means.
enum class Top { number, nan_where_all_ones, infinity };

// A sign, `exponent` bits and the rest mantissa, with subnormals. The bits behind the sign, moved to where the wider format
// has its own, are the number times a power of two (a small one, so that subnormals are right), which is multiplied away. The
// scale of a group may be multiplied in with it, where all products of numbers and scales of a unit are exact in 16 bits.
template <class T, int code_bits, int exponent, Top top>
struct Floats {
  static constexpr int bits = code_bits, parts = 1;
  static constexpr bool takes_zero = false;
  static constexpr float factor = 1;
  static constexpr int mantissa = Sixteen<T>::mantissa;
  static constexpr int bias = exponent == 1 ? 1 : (1 << (exponent - 1)) - 1, power = Sixteen<T>::bias - bias;
  static constexpr bool is_in_place = Sixteen<T>::mantissa == 10 && exponent == 5;
  struct Constants {};
  struct Row {
    uint32_t factor;
  };

  static __device__ __forceinline__ Constants constants(bool, const uint2*) { return {}; }
  static __device__ __forceinline__ Row row(uint32_t) { return {two_powers<T>(power)}; }

  // From 2^lowest_e8m0 (of the biased exponent) to 1, scales times numbers are exact.
  static constexpr int lowest_bit = 1 - bias - (bits - 1 - exponent);
  static constexpr int lowest_e8m0 = mantissa == 7 ? (lowest_bit < -6 ? -6 - lowest_bit : 0) : 127 - 24 - lowest_bit;
  static __device__ __forceinline__ Row row_with_e8m0(uint32_t scale) {
    return {scale * twice(1u << mantissa) + twice(static_cast<uint32_t>(Sixteen<T>::bias - 127 + power) << mantissa)};
  }
  // Their products with numbers divided by 2^left_of_e8m0 are as exact as without, and up to most_e8m0 the factor is finite.
  static constexpr int left_of_e8m0 = lowest_bit < -6 ? 0 : 6 + lowest_bit, most_e8m0 = 254 - power + left_of_e8m0;
  // So are those that are normal numbers of e4m3, here with 2^-8 left to multiply, which keeps the factor from overflowing.
  static __device__ __forceinline__ Row row_with_e4m3(uint32_t scale) {
    return {scale * twice(1u << (mantissa - 3)) + twice(static_cast<uint32_t>(Sixteen<T>::bias - 7 - 8 + power) << mantissa)};
  }

  static __device__ __forceinline__ void fragment(const Constants&, const Held<bits>& held, int step, int half, const Row& row,
                                                  const Row& row8, uint32_t (&a)[parts][4]) {
    if constexpr (bits == 6)
      make_of_words(held, step, half, row, row8, a);
    else
      make<top != Top::number>(held, step, half, row, row8, a, [](int, uint32_t) {});
  }

  // The same where a kernel looks for NaN by itself: `see` is given what is behind the signs of each pair, which for NaN is all
  // ones of `magnitude`.
  template <class See>
  static __device__ __forceinline__ void fragment(const Constants&, const Held<bits>& held, int step, int half, const Row& row,
                                                  const Row& row8, uint32_t (&a)[parts][4], See see) {
    static_assert(has_nan);
    make<false>(held, step, half, row, row8, a, see);
  }
  static constexpr int highest = mantissa - 1 + exponent, lowest = highest + 2 - bits;  // where the bits behind the sign go
  static constexpr uint32_t magnitude = twice(((1u << (bits - 1)) - 1) << lowest);
  // Whether a code, with the bits behind its sign in place, and another one with its sign in place share no bit.
  static constexpr bool is_short = top == Top::number && lowest + bits <= 16 - bits;
  static constexpr bool has_nan = top == Top::nan_where_all_ones;

 private:
  template <bool checks, class See>
  static __device__ __forceinline__ void make(const Held<bits>& held, int step, int half, const Row& row, const Row& row8,
                                              uint32_t (&a)[parts][4], See see) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int left = 8 - bits - place_of_code(bits, step % steps_of_run(bits));  // bits of its byte above the sign
      const uint32_t codes = codes_of<bits>(held, step, i % 2 + 2 * half);
      const uint32_t signs = codes << left + (i < 2 ? 8 : 0);
      if constexpr (is_short) {  // a code twice, once with its sign and once with the rest in place
        const int low = 8 - bits - left;
        const uint32_t code = (i < 2 ? codes : codes >> 8) & twice((1u << bits) - 1) << low;
        const uint32_t number = code * ((1u << lowest - low) + (1u << 16 - bits - low)) & (0x80008000u | magnitude);
        a[0][i] = fused<T>(number, i % 2 ? row8.factor : row.factor, 0x80008000u);
      } else if constexpr (is_in_place) {
        a[0][i] = fused<T>(signs & 0xff00ff00u, i % 2 ? row8.factor : row.factor, 0x80008000u);
      } else {
        const uint32_t moved = shifted_left(codes, left + highest - (i < 2 ? 6 : 14)) & magnitude;
        uint32_t number = and_or(signs, 0x80008000u, moved);
        see(i, moved);
        if constexpr (checks) number = and_or(beyond(moved), ones, number);
        a[0][i] = fused<T>(number, i % 2 ? row8.factor : row.factor, 0x80008000u);
      }
    }
  }

  // Six bits lie in words as bfloat16 has them (tiles.py): the codes of even bytes in place, those of odd ones to be rotated,
  // or, with three bits of mantissa, sign and the rest each by itself.
  static __device__ __forceinline__ void make_of_words(const Held<bits>& held, int step, int half, const Row& row,
                                                       const Row& row8, uint32_t (&a)[parts][4]) {
    static_assert((exponent == 2 || exponent == 3) && top == Top::number);
    constexpr bool rotates = exponent == 3;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int at = i % 2 + 2 * half;
      uint32_t word = held.word[step % 4 < 3 ? step % 4 : 0][at];
      if (step % 4 == 3) {
        word = selected(held.word[1][at] << 8, 0x0f000f00u, word << 4);
        word = selected(held.word[2][at] << 12, 0xf000f000u, word);
      }
      const uint32_t signs = i < 2 ? word : rotates ? __funnelshift_r(word, word, 5) : word << 6;
      const uint32_t moved = shifted_left(word, highest - (i < 2 ? 6 + exponent : 14));
      const uint32_t number = mantissa == 7 && (i < 2 || rotates) ? signs & (0x80008000u | magnitude)
                                                                  : and_or(signs, 0x80008000u, moved & magnitude);
      a[0][i] = fused<T>(number, i % 2 ? row8.factor : row.factor, 0x80008000u);
    }
  }

  // Which of two numbers, before the multiplication, have a code for infinity or NaN; and the bits that make them one.
  static constexpr uint32_t ones = top == Top::infinity ? twice(((1u << (15 - mantissa)) - 1) << mantissa) : 0x7fff7fffu;
  static __device__ __forceinline__ uint32_t beyond(uint32_t moved) {
    constexpr int below = bits - 1 - exponent;  // bits of the mantissa
    constexpr uint32_t last = (1u << (bits - 1)) - 1, least_code = top == Top::infinity ? last >> below << below : last;
    const uint32_t least = twice(least_code << (mantissa + 1 + exponent - bits));
    if constexpr (mantissa == 7) {
      return __hge2_mask(reinterpret_cast<const __nv_bfloat162&>(moved), reinterpret_cast<const __nv_bfloat162&>(least));
    } else {
      return __hge2_mask(reinterpret_cast<const __half2&>(moved), reinterpret_cast<const __half2&>(least));
    }
  }
};

// ---- tables --------------------------------------------------------------------------------------------------------

// NF4 in two operands of 16 bits, the second what the first leaves of a number. Numbers of float16 are multiplied by 1024,
// which keeps the second ones from underflowing. Those of bfloat16, which together have 16 bits or more, are multiplied by a
// factor (of all in [1, 2) of fp32) under which they are nearest to the 15 numbers: within 2^-20.7 of each.
template <class T>
struct Quantiles {
  static constexpr int bits = 4, parts = 2;
  static constexpr bool takes_zero = false;
  static constexpr float multiplied_by = Sixteen<T>::mantissa == 7 ? 0x1.58a2f6p0f : 0x1p10f;
  static constexpr float factor = 1 / multiplied_by;  // a product of the operands times this is one of the weights
  static constexpr int pitch = 256, size = 16 * pitch;  // of the rows of a code, in which every lane has its own bank
  static constexpr int table_size = 2 * size / sizeof(uint2);  // of which a part begins on `size` bytes
  struct Constants {
    uint32_t places, of_lane;  // of the table in the second byte of an address, and what the others are
  };
  struct Row {};

  static __device__ __forceinline__ uint32_t beginning_of(const uint2* table) {
    return (shared_address(table) + size - 1) / size * size;
  }

  // By a whole block of whole warps, into table_size entries of shared memory.
  static __device__ __forceinline__ void fill(uint2* table, int thread = threadIdx.x, int threads = blockDim.x) {
    const uint32_t own = parts_of(thread % 16);
    for (int i = thread; i < 16 * 32; i += threads) {
      const uint32_t both = __shfl_sync(~0u, own, i / 32);
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(beginning_of(table) + i / 32 * pitch + i % 32 * 4), "r"(both) : "memory");
    }
  }

  // The two parts of a code's number, the first one low.
  static __device__ __forceinline__ uint32_t parts_of(int code) {
    const float number = number_of(code), high = number * multiplied_by, low = fmaf(number, multiplied_by, -high);
    const T first = from_float<T>(high), second = from_float<T>(high - to_float(first) + low);
    return reinterpret_cast<const uint16_t&>(first) | reinterpret_cast<const uint16_t&>(second) << 16;
  }

  static __device__ __forceinline__ Constants constants(bool, const uint2* table) {
    const uint32_t begins = beginning_of(table);
    return {(begins >> 8 & 0xff) * 0x01010101u, begins >> 16 << 16 | threadIdx.x % 32 * 4};
  }
  static __device__ __forceinline__ Row row(uint32_t) { return {}; }

  static __device__ __forceinline__ uint32_t load(uint32_t address) {
    uint32_t both;
    asm("ld.shared.b32 %0, [%1];" : "=r"(both) : "r"(address));
    return both;
  }

  // The second byte of an address is a code, so that a permutation of bytes makes all of it.
  static __device__ __forceinline__ void fragment(const Constants& constants, const Held<bits>& held, int step, int half,
                                                  const Row&, const Row&, uint32_t (&a)[parts][4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t shifted = codes_of<bits>(held, step, i % 2 + 2 * half) >> 4 * (step % 2);
      const uint32_t codes = and_or(shifted, 0x0f0f0f0fu, constants.places);
      const uint32_t one = load(__byte_perm(codes, constants.of_lane, i < 2 ? 0x7604 : 0x7614));
      const uint32_t other = load(__byte_perm(codes, constants.of_lane, i < 2 ? 0x7624 : 0x7634));
      a[0][i] = __byte_perm(one, other, 0x5410);
      a[1][i] = __byte_perm(one, other, 0x7632);
    }
  }

  // Operands as the table has them, the parts of a number side by side, for x in which every number lies twice: the first one
  // of columns 2t and 2t + 1, the second one of those eight further.
  static __device__ __forceinline__ void twins(const Constants& constants, const Held<bits>& held, int step, int half,
                                               uint32_t (&a)[2][4]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint32_t shifted = codes_of<bits>(held, step, i + 2 * half) >> 4 * (step % 2);
      const uint32_t codes = and_or(shifted, 0x0f0f0f0fu, constants.places);
      a[0][i] = load(__byte_perm(codes, constants.of_lane, 0x7604));
      a[0][i + 2] = load(__byte_perm(codes, constants.of_lane, 0x7624));
      a[1][i] = load(__byte_perm(codes, constants.of_lane, 0x7614));
      a[1][i + 2] = load(__byte_perm(codes, constants.of_lane, 0x7634));
    }
  }

 private:
  template <int first = 0>
  static __device__ __forceinline__ float number_of(int code) {
    constexpr float number = formats::nf4::values[first];
    if constexpr (first < 15) return code == first ? number : number_of<first + 1>(code);
    return number;
  }
};

// ---- scales --------------------------------------------------------------------------------------------------------

enum class ScaleType { float32, bfloat16, float16, e8m0, e4m3 };

__host__ __device__ constexpr int size_of(ScaleType type) {
  return type == ScaleType::float32 ? 4 : type == ScaleType::bfloat16 || type == ScaleType::float16 ? 2 : 1;
}

// A power of two by its exponent, the least of them a subnormal of fp32; 255 is NaN.
__device__ __forceinline__ float e8m0_to_float(uint32_t code) {
  return __uint_as_float(code - 1 < 254 ? code << 23 : code << 23 | 0x00400000u);
}

__device__ __forceinline__ float e4m3_to_float(uint32_t code) {
  const uint32_t size = code & 0x7f;
  const float number = __uint_as_float(size << 20) * 0x1p120f;
  return __uint_as_float((size == 0x7f ? 0x7fc00000u : __float_as_uint(number)) | (code & 0x80) << 24);
}

// Number `i` of an array of scales.
__device__ __forceinline__ float scale_at(const void* scales, ScaleType type, int64_t i) {
  switch (type) {
    case ScaleType::float32: return static_cast<const float*>(scales)[i];
    case ScaleType::bfloat16: return to_float(static_cast<const __nv_bfloat16*>(scales)[i]);
    case ScaleType::float16: return to_float(static_cast<const __half*>(scales)[i]);
    case ScaleType::e8m0: return e8m0_to_float(static_cast<const uint8_t*>(scales)[i]);
    default: return e4m3_to_float(static_cast<const uint8_t*>(scales)[i]);
  }
}

// The scales of rows g and g + 8 of a lane in one group of a unit; `scales`: where those of the unit begin.
__device__ __forceinline__ float2 two_scales_of(const uint8_t* scales, ScaleType type, int group, int lane) {
  const int place = group * rows_of_tile + lane / 4 * 2;
  if (type == ScaleType::bfloat16) {
    const uint32_t two = *reinterpret_cast<const uint32_t*>(scales + place * 2);
    return {__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u)};
  }
  if (type == ScaleType::float32) return *reinterpret_cast<const float2*>(scales + place * 4);
  if (type == ScaleType::float16) return __half22float2(*reinterpret_cast<const __half2*>(scales + place * 2));
  const uint32_t two = *reinterpret_cast<const uint16_t*>(scales + place);
  if (type == ScaleType::e8m0) return {e8m0_to_float(two & 0xff), e8m0_to_float(two >> 8)};
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(two)));
  return __half22float2(reinterpret_cast<const __half2&>(halves));
#else
  return {e4m3_to_float(two & 0xff), e4m3_to_float(two >> 8)};
#endif
}

// The zero points of those rows; `zeros`: where those of the unit begin.
__device__ __forceinline__ uint2 two_zeros_of(const uint8_t* zeros, int group, int lane) {
  const uint32_t two = *reinterpret_cast<const uint16_t*>(zeros + group * rows_of_tile + lane / 4 * 2);
  return {two & 0xff, two >> 8};
}

// Where a unit keeps what, for a scheme that is known only when the kernel runs.
struct UnitPlan {
  int columns, group, groups;  // group: columns of one; groups: of a row in the unit, 0 where scales are outside
  int scale_at, zero_at, size;

  __host__ __device__ static UnitPlan of(int bits, int group_size, int scale_size, bool has_zero) {
    UnitPlan p = {};
    p.columns = bits <= 4 ? 512 : 256;
    const bool is_inside = group_size > 0 && p.columns % group_size == 0;
    p.group = is_inside ? group_size : p.columns;
    p.groups = is_inside ? p.columns / group_size : 0;
    p.scale_at = rows_of_tile * p.columns * bits / 8;
    p.zero_at = p.scale_at + rows_of_tile * p.groups * scale_size;
    p.size = (p.zero_at + (has_zero ? rows_of_tile * p.groups : 0) + 15) / 16 * 16;
    if (!has_zero) p.zero_at = p.scale_at;  // what is read there without need lies in the unit, where nobody writes
    return p;
  }
  // Bytes from unit to unit where copies of them lie in shared memory: copies to whole lines of 128 bytes are quicker.
  __host__ __device__ int pitch() const { return (size + 127) / 128 * 128; }
};

}  // namespace lowbit::cuda
