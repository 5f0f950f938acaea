// Decoders: codes of a unit (mma_fragment_layout.cuh) to operand A of mma.m16n8k16 or wgmma.m64nNk16 with 16-bit floats.
//
// A lane holds 16 bytes of each block and makes of each step of 32 columns two operands of four registers: rows g and g + 8 (g =
// lane / 4) of columns 2t, 2t + 1 (t = lane % 4), then of those eight further. Every code becomes its value exactly; step and
// place are compile-time constants once the loops around them are unrolled.
//
// A decoder is a class with
//   bits, parts        width of a code, and how many operands add up to the weights (1 where 16 bits hold a value)
//   factor             what sums of products still have to be multiplied by
//   supports_zero      whether the format may have zero points
//   Constants, Row     what a kernel prepares once, and for each of a lane's rows once a group
//   constants(...)     from whether codes are two's complement, and from a table in shared memory
//   row(z)             for the zero point z
//   fragment(...)      the operands of half a step
// A class with two parts also has a table in shared memory, written by fill(...), and duplicated_fragment(...), operands with
// both parts of a value side by side.
#pragma once

#include "unpack_codes.cuh"
#include "../mma/f16x2_math.cuh"

namespace lowbit::cuda {

// ---- integers ------------------------------------------------------------------------------------------------------

// Codes q of 2 to 8 bits as q - z. A code placed in the mantissa of a power of two is that power plus q times its place, and one
// FMA subtracts the power and the zero point. Two's complement: q with its high bit flipped, minus that bit. 8 bits are one more
// than bfloat16's mantissa has, so there the high bit is a value of its own.
template <class T, int code_bits>
struct ExactIntegerDecoder {
  static constexpr int bits = code_bits, parts = 1;
  static constexpr bool supports_zero = true;
  static constexpr float factor = 1;
  static constexpr int mantissa = F16Traits<T>::mantissa;
  static constexpr bool is_split = bits > mantissa;
  struct Constants {
    uint32_t magic[8];  // for each place; for split codes, of the low bits and of the high bit
  };
  struct Row {
    uint32_t offset[8];
  };

  static __device__ __forceinline__ Constants constants(bool is_signed, const uint2*) {
    Constants made;
    const uint32_t flipped = is_signed ? dup_u16(1u << (bits - 1)) : 0;
#pragma unroll
    for (int i = 0; i < 8; i++) made.magic[i] = dup_power_of_two<T>(mantissa) ^ (is_split ? 0 : flipped << i);
    if constexpr (is_split) made.magic[1] = 0xc380c380u ^ flipped;
    opaque(made.magic[0]);
    return made;
  }

  // The zero point of two's complement is 2^(bits - 1) here.
  static __device__ __forceinline__ Row row(uint32_t zero) {
    Row made;
    if constexpr (is_split) {
      made.offset[0] = dup_u16(__float_as_uint(128.0f - static_cast<float>(zero)) >> 16);
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++) made.offset[i] = (0x80008000u | dup_power_of_two<T>(mantissa - i)) + (dup_u16(zero) << i);
    }
    return made;
  }

  static __device__ __forceinline__ void fragment(const Constants& constants, const HeldCodes<bits>& held, int step, int half,
                                                  const Row& row, const Row& row8, uint32_t (&a)[parts][4]) {
    const int at = bit_of_code(bits, step % steps_per_run(bits)), place = at + bits <= mantissa ? at : 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t codes = gather_codes<bits>(held, step, i % 2 + 2 * half) >> at - place + (i < 2 ? 0 : 8);
      const Row& of = i % 2 ? row8 : row;
      if constexpr (is_split) {
        const uint32_t low = and_or(codes, 0x007f007fu, constants.magic[0]);
        const uint32_t high = and_xor(codes, 0x00800080u, constants.magic[1]);
        a[0][i] = fma_f16x2<T>(fma_f16x2<T>(low, dup_power_of_two<T>(0), high), dup_power_of_two<T>(0), of.offset[0]);
      } else {
        const uint32_t number = and_xor(codes, dup_u16(((1u << bits) - 1) << place), constants.magic[place]);
        a[0][i] = fma_f16x2<T>(number, dup_power_of_two<T>(-place), of.offset[place]);
      }
    }
  }
};

// The same with fewer operations: (q - z) / factor. A 16-bit float with at most the lowest exponent bit set is its bits, as an
// integer, times a small power of two. So a code is only masked out, anywhere in the mantissa and that bit, and one FMA scales it
// and subtracts the zero point.
template <class T, int code_bits>
struct ScaledIntegerDecoder {
  static constexpr int bits = code_bits, parts = 1;
  static constexpr bool supports_zero = true;
  static constexpr int mantissa = F16Traits<T>::mantissa, power = mantissa == 7 ? 6 : 9;
  static constexpr float factor = 1 << power;
  struct Constants {
    uint32_t flipped;  // the high bit of two's complement
  };
  struct Row {
    uint32_t offset;
  };

  static __device__ __forceinline__ Constants constants(bool is_signed, const uint2*) {
    Constants made = {is_signed ? dup_u16(1u << (bits - 1)) : 0};
    opaque(made.flipped);
    return made;
  }

  // The zero point of two's complement is 2^(bits - 1) here.
  static __device__ __forceinline__ Row row(uint32_t zero) {
    return {fma_f16x2<T>(dup_u16(zero), 0x80008000u | dup_power_of_two<T>(F16Traits<T>::bias), 0x80008000u)};
  }

  static __device__ __forceinline__ void fragment(const Constants& constants, const HeldCodes<bits>& held, int step, int half,
                                                  const Row& row, const Row& row8, uint32_t (&a)[parts][4]) {
    const int place = bit_of_code(bits, step % steps_per_run(bits));
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t codes = gather_codes<bits>(held, step, i % 2 + 2 * half) >> (i < 2 ? 0 : 8);
      const uint32_t number = and_xor(codes, dup_u16(((1u << bits) - 1) << place), constants.flipped << place);
      a[0][i] = fma_f16x2<T>(number, dup_power_of_two<T>(F16Traits<T>::bias - place), i % 2 ? row8.offset : row.offset);
    }
  }
};

// ---- floats --------------------------------------------------------------------------------------------------------

// Meaning of a format's largest exponent.
enum class TopExponent { number, nan_where_all_ones, infinity };

// Sign, `exponent` bits, mantissa, with subnormals. The bits behind the sign, moved to the place of the wider format's exponent
// and mantissa, are the value times a power of two (a small one, so that subnormals are right), which one multiplication removes.
// A group's scale may be included in it where all products of values and scales of a unit are exact in 16 bits.
template <class T, int code_bits, int exponent, TopExponent top>
struct FloatDecoder {
  static constexpr int bits = code_bits, parts = 1;
  static constexpr bool supports_zero = false;
  static constexpr float factor = 1;
  static constexpr int mantissa = F16Traits<T>::mantissa;
  static constexpr int bias = exponent == 1 ? 1 : (1 << (exponent - 1)) - 1, power = F16Traits<T>::bias - bias;
  static constexpr bool is_in_place = F16Traits<T>::mantissa == 10 && exponent == 5;
  struct Constants {};
  struct Row {
    uint32_t factor;
  };

  static __device__ __forceinline__ Constants constants(bool, const uint2*) { return {}; }
  static __device__ __forceinline__ Row row(uint32_t) { return {dup_power_of_two<T>(power)}; }

  // From 2^min_e8m0 (biased exponent) to 1, scales times values are exact.
  static constexpr int lowest_bit = 1 - bias - (bits - 1 - exponent);
  static constexpr int min_e8m0 = mantissa == 7 ? (lowest_bit < -6 ? -6 - lowest_bit : 0) : 127 - 24 - lowest_bit;
  static __device__ __forceinline__ Row row_with_e8m0(uint32_t scale) {
    return {scale * dup_u16(1u << mantissa) + dup_u16(static_cast<uint32_t>(F16Traits<T>::bias - 127 + power) << mantissa)};
  }
  // Products with values divided by 2^left_of_e8m0 are as exact, and up to max_e8m0 the factor is finite.
  static constexpr int left_of_e8m0 = lowest_bit < -6 ? 0 : 6 + lowest_bit, max_e8m0 = 254 - power + left_of_e8m0;
  // So are e4m3 scales that are normal numbers, here with 2^-8 left to multiply, which keeps the factor from overflowing.
  static __device__ __forceinline__ Row row_with_e4m3(uint32_t scale) {
    return {scale * dup_u16(1u << (mantissa - 3)) + dup_u16(static_cast<uint32_t>(F16Traits<T>::bias - 7 - 8 + power) << mantissa)};
  }

  static __device__ __forceinline__ void fragment(const Constants&, const HeldCodes<bits>& held, int step, int half, const Row& row,
                                                  const Row& row8, uint32_t (&a)[parts][4]) {
    if constexpr (bits == 6)
      make_of_words(held, step, half, row, row8, a);
    else
      make<top != TopExponent::number>(held, step, half, row, row8, a, [](int, uint32_t) {});
  }

  // The same where the kernel detects NaN itself: `see` gets the bits behind the signs of each pair, which for NaN are all ones
  // of `magnitude`.
  template <class See>
  static __device__ __forceinline__ void fragment(const Constants&, const HeldCodes<bits>& held, int step, int half, const Row& row,
                                                  const Row& row8, uint32_t (&a)[parts][4], See see) {
    static_assert(has_nan);
    make<false>(held, step, half, row, row8, a, see);
  }
  static constexpr int highest = mantissa - 1 + exponent, lowest = highest + 2 - bits;  // bit range of what is behind the sign
  static constexpr uint32_t magnitude = dup_u16(((1u << (bits - 1)) - 1) << lowest);
  // Whether a code shifted to its magnitude's place and another shifted to its sign's place share no bit.
  static constexpr bool is_short = top == TopExponent::number && lowest + bits <= 16 - bits;
  static constexpr bool has_nan = top == TopExponent::nan_where_all_ones;

 private:
  template <bool checks, class See>
  static __device__ __forceinline__ void make(const HeldCodes<bits>& held, int step, int half, const Row& row, const Row& row8,
                                              uint32_t (&a)[parts][4], See see) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int left = 8 - bits - bit_of_code(bits, step % steps_per_run(bits));  // bits of its byte above the sign
      const uint32_t codes = gather_codes<bits>(held, step, i % 2 + 2 * half);
      const uint32_t signs = codes << left + (i < 2 ? 8 : 0);
      if constexpr (is_short) {  // multiplies two shifted copies of the code, one for the sign and one for the magnitude
        const int low = 8 - bits - left;
        const uint32_t code = (i < 2 ? codes : codes >> 8) & dup_u16((1u << bits) - 1) << low;
        const uint32_t number = code * ((1u << lowest - low) + (1u << 16 - bits - low)) & (0x80008000u | magnitude);
        a[0][i] = fma_f16x2<T>(number, i % 2 ? row8.factor : row.factor, 0x80008000u);
      } else if constexpr (is_in_place) {
        a[0][i] = fma_f16x2<T>(signs & 0xff00ff00u, i % 2 ? row8.factor : row.factor, 0x80008000u);
      } else {
        const uint32_t moved = shift_signed(codes, left + highest - (i < 2 ? 6 : 14)) & magnitude;
        uint32_t number = and_or(signs, 0x80008000u, moved);
        see(i, moved);
        if constexpr (checks) number = and_or(non_finite_mask(moved), ones, number);
        a[0][i] = fma_f16x2<T>(number, i % 2 ? row8.factor : row.factor, 0x80008000u);
      }
    }
  }

  // 6-bit codes are stored for bfloat16 (lowbit_kernels/mma_fragment.py): codes of even bytes in place, those of odd bytes to be
  // rotated or, with three mantissa bits, sign and magnitude extracted separately.
  static __device__ __forceinline__ void make_of_words(const HeldCodes<bits>& held, int step, int half, const Row& row,
                                                       const Row& row8, uint32_t (&a)[parts][4]) {
    static_assert((exponent == 2 || exponent == 3) && top == TopExponent::number);
    constexpr bool rotates = exponent == 3;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int at = i % 2 + 2 * half;
      uint32_t word = held.word[step % 4 < 3 ? step % 4 : 0][at];
      if (step % 4 == 3) {
        word = bit_select(held.word[1][at] << 8, 0x0f000f00u, word << 4);
        word = bit_select(held.word[2][at] << 12, 0xf000f000u, word);
      }
      const uint32_t signs = i < 2 ? word : rotates ? __funnelshift_r(word, word, 5) : word << 6;
      const uint32_t moved = shift_signed(word, highest - (i < 2 ? 6 + exponent : 14));
      const uint32_t number = mantissa == 7 && (i < 2 || rotates) ? signs & (0x80008000u | magnitude)
                                                                  : and_or(signs, 0x80008000u, moved & magnitude);
      a[0][i] = fma_f16x2<T>(number, i % 2 ? row8.factor : row.factor, 0x80008000u);
    }
  }

  // Mask of the values, before the multiplication, whose code is infinity or NaN; and the bits that represent it.
  static constexpr uint32_t ones = top == TopExponent::infinity ? dup_u16(((1u << (15 - mantissa)) - 1) << mantissa) : 0x7fff7fffu;
  static __device__ __forceinline__ uint32_t non_finite_mask(uint32_t moved) {
    constexpr int below = bits - 1 - exponent;  // mantissa bits
    constexpr uint32_t last = (1u << (bits - 1)) - 1, least_code = top == TopExponent::infinity ? last >> below << below : last;
    const uint32_t minimum = dup_u16(least_code << (mantissa + 1 + exponent - bits));
    if constexpr (mantissa == 7) {
      return __hge2_mask(reinterpret_cast<const __nv_bfloat162&>(moved), reinterpret_cast<const __nv_bfloat162&>(minimum));
    } else {
      return __hge2_mask(reinterpret_cast<const __half2&>(moved), reinterpret_cast<const __half2&>(minimum));
    }
  }
};

}  // namespace lowbit::cuda
