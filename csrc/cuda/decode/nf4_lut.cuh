// Decoder of NF4 by a table in shared memory (see weight_decoders.cuh).
#pragma once

#include "../ptx/bulk_copy.cuh"
#include "unpack_codes.cuh"
#include "scalar_types.cuh"
#include "../mma/f16x2_math.cuh"

namespace lowbit::cuda {

// The numbers of NF4 (lowbit/formats.py, which a test compares): a constant operand of each comparison below.
constexpr float nf4_numbers[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
    0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f,
};

// NF4 as the sum of two 16-bit operands. With float16 values are multiplied by 1024, so that the second operand does not
// underflow. With bfloat16, whose two operands have 16 bits together, they are multiplied by the factor in [1, 2) that brings all
// 15 values within 2^-20.7.
template <class T>
struct Nf4Decoder {
  static constexpr int bits = 4, parts = 2;
  static constexpr bool supports_zero = false;
  static constexpr float multiplied_by = F16Traits<T>::mantissa == 7 ? 0x1.58a2f6p0f : 0x1p10f;
  static constexpr float factor = 1 / multiplied_by;  // value = product of the operands times this
  static constexpr int pitch = 256, size = 16 * pitch;  // bytes of a code's row, in which each lane has its own bank
  static constexpr int table_size = 2 * size / sizeof(uint2);  // each part is aligned to `size` bytes
  struct Constants {
    uint32_t places, of_lane;  // places: table offset in the second byte of an address; of_lane: the other bytes
  };
  struct Row {};

  static __device__ __forceinline__ uint32_t beginning_of(const uint2* table) {
    return (shared_address(table) + size - 1) / size * size;
  }

  // Fills table_size entries of shared memory; called by all threads of a block.
  static __device__ __forceinline__ void fill(uint2* table, int thread = threadIdx.x, int threads = blockDim.x) {
    const uint32_t local = parts_of(thread % 16);
    for (int i = thread; i < 16 * 32; i += threads) {
      const uint32_t both = __shfl_sync(~0u, local, i / 32);
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(beginning_of(table) + i / 32 * pitch + i % 32 * 4), "r"(both) : "memory");
    }
  }

  // The two parts of a code's value, the first in the low half.
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

  // The code is the second byte of the table's address, so a byte permutation makes the whole address.
  static __device__ __forceinline__ void fragment(const Constants& constants, const HeldCodes<bits>& held, int step, int half,
                                                  const Row&, const Row&, uint32_t (&a)[parts][4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t shifted = gather_codes<bits>(held, step, i % 2 + 2 * half) >> 4 * (step % 2);
      const uint32_t codes = and_or(shifted, 0x0f0f0f0fu, constants.places);
      const uint32_t one = load(__byte_perm(codes, constants.of_lane, i < 2 ? 0x7604 : 0x7614));
      const uint32_t other = load(__byte_perm(codes, constants.of_lane, i < 2 ? 0x7624 : 0x7634));
      a[0][i] = __byte_perm(one, other, 0x5410);
      a[1][i] = __byte_perm(one, other, 0x7632);
    }
  }

  // Operands with both parts of a value side by side, for x with every element twice: first columns 2t and 2t + 1, then those
  // eight further.
  static __device__ __forceinline__ void duplicated_fragment(const Constants& constants, const HeldCodes<bits>& held, int step, int half,
                                               uint32_t (&a)[2][4]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint32_t shifted = gather_codes<bits>(held, step, i + 2 * half) >> 4 * (step % 2);
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
    constexpr float number = nf4_numbers[first];
    if constexpr (first < 15) return code == first ? number : number_of<first + 1>(code);
    return number;
  }
};

}  // namespace lowbit::cuda
