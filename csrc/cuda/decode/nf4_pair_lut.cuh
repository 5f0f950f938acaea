// Decoder of NF4 for wgmma, two codes at a time.
//
// The two parts (nf4_lut.cuh) of two neighbouring values are entries of a table of 256 pairs, so that a load of eight bytes gives
// both operands. Each of sixteen lanes has its own column, so a half warp has no bank conflicts. Where a pair takes 256 bytes,
// half of them unused, two codes are a byte of the address, made by one permutation; where it takes 128, by a shift and a mask,
// which leaves room for more of x.
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
    uint32_t table, column;  // address of the table, and this lane's column in it
  };
  struct Row {};

  // Fills the table; called by the first 256 threads of a block.
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

  // Puts the codes of two neighbouring columns into one byte; a word holds codes of two steps in each byte.
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
