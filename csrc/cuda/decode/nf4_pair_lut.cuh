// NF4 as operand A of wgmma, two codes at a time.
//
// The numbers of Quantiles (nf4_lut.cuh), first and second part, of two neighbours of a row lie in a table of 256 pairs, where
// a lane finds both operands in one load of eight bytes. Each of sixteen lanes has a column of its own, so that no two lanes of
// a half warp meet in a bank. Where a pair has 256 bytes, of which half is left empty, two codes are a byte of its address, and one
// permutation of bytes makes that; where it has 128, a shift and a mask do, and there is room for more of x.
#pragma once

#include "nf4_lut.cuh"

namespace lowbit::cuda {

template <class T, int pitch_ = 256>
struct Nf4PairDecoder {
  static constexpr int bits = 4, parts = 2;
  static constexpr bool supports_zero = false;
  static constexpr float factor = Nf4Decoder<T>::factor;
  static constexpr int pitch = pitch_, table_bytes = 256 * pitch;
  using Smaller = Nf4PairDecoder<T, 128>;
  struct Constants {
    uint32_t table, column;  // where it lies, and in it that of this lane
  };
  struct Row {};

  // By the first 256 threads of a block.
  static __device__ __forceinline__ void fill(uint8_t* table) {
    const uint32_t both = Nf4Decoder<T>::parts_of(threadIdx.x % 16), first = threadIdx.x / 16 % 16;
    const uint32_t self = __shfl_sync(~0u, both, first);
    uint8_t* to = table + first * pitch + threadIdx.x % 16 * 8;
#pragma unroll
    for (int second = 0; second < 16; second++) {
      const uint32_t other = __shfl_sync(~0u, both, second);
      *reinterpret_cast<uint2*>(to + second * 16 * pitch) = {__byte_perm(self, other, 0x5410), __byte_perm(self, other, 0x7632)};
    }
  }

  static __device__ __forceinline__ Constants constants(bool, const uint8_t* table) {
    return {shared_address(table), threadIdx.x % 16 * 8};
  }
  static __device__ __forceinline__ Row row(uint32_t) { return {}; }

  // Byte for byte a word holds a code of a step and the one of the step behind it; two of its bytes are neighbours.
  static __device__ __forceinline__ uint32_t pairs_of(uint32_t word) {
    const uint32_t flipped = (word >> 12 ^ word) & 0x0000f0f0u;
    return word ^ flipped ^ flipped << 12;
  }

  static __device__ __forceinline__ void fragment(const Constants& constants, const HeldCodes<bits>& held, int step, int half,
                                                  const Row&, const Row&, uint32_t (&a)[parts][4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int byte = step % 2 * 2 + i / 2;
      const uint32_t pairs = pairs_of(held.word[0][i % 2 + 2 * half]);
      const uint32_t place = pitch == 256 ? __byte_perm(pairs, constants.column, 0x5504 | byte << 4)
                                          : and_or(shift_signed(pairs, 7 - 8 * byte), 0x7f80u, constants.column);
      const uint32_t address = constants.table + place;
      asm("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(a[0][i]), "=r"(a[1][i]) : "r"(address));
    }
  }
};

}  // namespace lowbit::cuda
