// Loads a lane's part of a unit's codes (mma_fragment_layout.cuh) and puts the codes of a step into bytes.
#pragma once

#include "mma_fragment_layout.cuh"

namespace lowbit::cuda {

// A lane's part of a run of steps: four words of each block.
template <int bits>
struct HeldCodes {
  uint32_t word[blocks_per_run(bits)][4];
};

// Loads the block that `step` needs: each of the first steps of a run brings one.
template <int bits>
__device__ __forceinline__ void load_codes(const uint8_t* unit, int lane, int step, HeldCodes<bits>& held) {
  constexpr int steps = steps_per_run(bits), blocks = blocks_per_run(bits);
  const int block = step % steps;
  if (block >= blocks) return;
  const uint4 w = *reinterpret_cast<const uint4*>(unit + (step / steps * blocks + block) * 512 + lane * 16);
  held.word[block][0] = w.x;
  held.word[block][1] = w.y;
  held.word[block][2] = w.z;
  held.word[block][3] = w.w;
}

// Three-operand bit operations, one instruction (LOP3) each; compilers split them to share subexpressions when they are written
// plainly.
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

// bits of `a` where the mask is set, else of `b`
__device__ __forceinline__ uint32_t bit_select(uint32_t a, uint32_t mask, uint32_t b) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xe2;" : "=r"(d) : "r"(a), "r"(mask), "r"(b));
  return d;
}

__device__ __forceinline__ uint32_t shift_signed(uint32_t word, int by) { return by >= 0 ? word << by : word >> -by; }

// The codes of a step as the bytes of a word, each from bit place_of_code on; other bits are undefined.
template <int bits>
__device__ __forceinline__ uint32_t gather_codes(const HeldCodes<bits>& held, int step, int word) {
  constexpr int steps = steps_per_run(bits);
  const int in_run = step % steps;
  uint32_t codes = held.word[code_piece(bits, in_run, 0).block][word];
  int above = 8;  // next bit of a composed byte
#pragma unroll
  for (int i = 1; i < max_code_pieces(bits); i++) {
    const CodePiece last = code_piece(bits, in_run, i - 1), part = code_piece(bits, in_run, i);
    above -= last.width;
    if (part.width) codes = bit_select(codes, 0x01010101u * (0xffu << above & 0xff), held.word[part.block][word] >> part.shift);
  }
  return codes;
}

}  // namespace lowbit::cuda
