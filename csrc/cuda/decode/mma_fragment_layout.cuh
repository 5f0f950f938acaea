// The layout mma_fragment (described in lowbit_kernels/mma_fragment.py): where a unit of 16 rows keeps codes, scales and zero
// points.
#pragma once

#include <cstdint>

namespace lowbit::cuda {

constexpr int tile_rows = 16;

// group 0: the whole row is one group, whose scale and zero point are not in the unit.
template <int bits, int group, bool has_zero>
struct Unit {
  static constexpr int columns = bits <= 4 ? 512 : 256;
  static constexpr int steps = columns / 32;
  static constexpr int groups = group ? columns / group : 0;
  static constexpr int steps_per_group = group ? group / 32 : steps;
  static constexpr int code_bytes = tile_rows * columns * bits / 8;
  __host__ __device__ static constexpr int zero_at(int scale_size) { return code_bytes + tile_rows * groups * scale_size; }
  __host__ __device__ static constexpr int size(int scale_size) {
    return (zero_at(scale_size) + (has_zero ? tile_rows * groups : 0) + 15) / 16 * 16;
  }
  // Scales and zero points of a group are in the order of rows 0, 8, 1, 9, ...
  __device__ static constexpr int place(int g, int row) { return g * tile_rows + row % 8 * 2 + row / 8; }
};

// Codes are stored in runs of steps of 32 columns, the fewest whose bits fill whole blocks of 512 bytes.
__host__ __device__ constexpr int steps_per_run(int bits) { return bits % 2 ? 8 : bits % 4 ? 4 : bits == 4 ? 2 : 1; }
__host__ __device__ constexpr int blocks_per_run(int bits) { return steps_per_run(bits) * bits / 8; }

// Widths that do not divide eight: each block's bytes hold whole codes, and the leftover bits of several bytes form further
// codes, highest bits first. A piece: bits of a block's byte, and their shift. (Without loops and tables, which the compiler
// folds too late.)
struct CodePiece {
  int block, width, shift;
};
__host__ __device__ constexpr bool is_whole(int bits, int step) {
  return bits == 3 ? step % 4 < 3 : bits == 5 ? step % 4 < 3 - step / 4 : bits == 6 ? step < 3 : bits == 7 ? step < 7 : true;
}
__host__ __device__ constexpr int max_code_pieces(int bits) {
  return bits == 3 ? 2 : bits == 5 || bits == 6 ? 3 : bits == 7 ? 7 : 1;
}
__host__ __device__ constexpr CodePiece code_piece(int bits, int step, int i) {
  if (is_whole(bits, step))
    return {bits == 3 ? step % 4 : bits == 5 ? step - step / 4 : 8 % bits ? step : 0, i ? 0 : bits, 0};
  switch (bits) {
    case 3: return i == 0 ? CodePiece{step / 4, 2, 0} : i == 1 ? CodePiece{2, 1, 1 + step / 4} : CodePiece{0, 0, 0};
    case 5:
      return i == 0        ? CodePiece{step == 3 ? 0 : step - 5, 3, 0}
             : step < 7    ? (i == 1 ? CodePiece{step == 3 ? 3 : 4, 2, 3} : CodePiece{0, 0, 0})
             : i == 1      ? CodePiece{3, 1, 1}
                           : CodePiece{4, 1, 2};
    case 6: return {i, 2, 2 * i};
    default: return {i, 1, i};
  }
}

// Lowest bit in its byte of the code of a step of a run, stored whole or composed.
__host__ __device__ constexpr int bit_of_code(int bits, int step) {
  return 8 % bits == 0 ? bits * step : !is_whole(bits, step) ? 8 - bits : bits == 3 && step >= 4 ? 3 : 0;
}

// One code of a unit.
template <int bits>
__device__ __forceinline__ uint32_t code_of_unit(const uint8_t* unit, int row, int column) {
  const int step = column / 32 % steps_per_run(bits), run = column / 32 / steps_per_run(bits), lane = row % 8 * 4 + column % 8 / 2;
  const int word = row / 8 + column % 32 / 16 * 2, byte = column % 16 / 8 + column % 2 * 2;
  const uint8_t* bytes = unit + run * blocks_per_run(bits) * 512 + lane * 16 + word * 4 + byte;
  const int place = bit_of_code(bits, step);
  if (is_whole(bits, step)) return bytes[code_piece(bits, step, 0).block * 512] >> place & ((1u << bits) - 1);
  uint32_t code = 0;
#pragma unroll 1
  for (int i = 0, low = 8; low > place; i++) {
    const CodePiece part = code_piece(bits, step, i);
    low -= part.width;
    code |= (bytes[part.block * 512] >> part.shift & ((1u << part.width) - 1) << low);
  }
  return code >> place;
}

}  // namespace lowbit::cuda
