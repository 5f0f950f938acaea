// The tiles layout (lowbit_kernels/tiles.py describes it): where a unit of 16 rows keeps its codes, scales and zero points.
#pragma once

#include <cstdint>

namespace lowbit::cuda {

constexpr int rows_of_tile = 16;

// `group` 0: the whole row is one group, and its scale and zero point are not in the unit.
template <int bits, int group, bool has_zero>
struct Unit {
  static constexpr int columns = bits <= 4 ? 512 : 256;
  static constexpr int steps = columns / 32;
  static constexpr int groups = group ? columns / group : 0;
  static constexpr int steps_of_group = group ? group / 32 : steps;
  static constexpr int code_bytes = rows_of_tile * columns * bits / 8;
  __host__ __device__ static constexpr int zero_at(int scale_size) { return code_bytes + rows_of_tile * groups * scale_size; }
  __host__ __device__ static constexpr int size(int scale_size) {
    return (zero_at(scale_size) + (has_zero ? rows_of_tile * groups : 0) + 15) / 16 * 16;
  }
  // Scales and zero points of a group lie in the order of rows 0, 8, 1, 9, ...
  __device__ static constexpr int place(int g, int row) { return g * rows_of_tile + row % 8 * 2 + row / 8; }
};

// Codes lie in runs of steps of 32 columns, the fewest whose bits fill whole blocks of 512 bytes.
__host__ __device__ constexpr int steps_of_run(int bits) { return bits % 2 ? 8 : bits % 4 ? 4 : bits == 4 ? 2 : 1; }
__host__ __device__ constexpr int blocks_of_run(int bits) { return steps_of_run(bits) * bits / 8; }

// Of widths that do not divide eight a byte of each block holds whole codes, and what is left over in the bytes of several
// makes up the others, the highest bits first: bits of a byte of a block, so many from where they have to be shifted.
// (No loops and no tables: the compiler folds them too late.)
struct PartOfCode {
  int block, width, shift;
};
__host__ __device__ constexpr bool is_whole(int bits, int step) {
  return bits == 3 ? step % 4 < 3 : bits == 5 ? step % 4 < 3 - step / 4 : bits == 6 ? step < 3 : bits == 7 ? step < 7 : true;
}
__host__ __device__ constexpr int most_parts_of_code(int bits) {
  return bits == 3 ? 2 : bits == 5 || bits == 6 ? 3 : bits == 7 ? 7 : 1;
}
__host__ __device__ constexpr PartOfCode part_of_code(int bits, int step, int i) {
  if (is_whole(bits, step))
    return {bits == 3 ? step % 4 : bits == 5 ? step - step / 4 : 8 % bits ? step : 0, i ? 0 : bits, 0};
  switch (bits) {
    case 3: return i == 0 ? PartOfCode{step / 4, 2, 0} : i == 1 ? PartOfCode{2, 1, 1 + step / 4} : PartOfCode{0, 0, 0};
    case 5:
      return i == 0        ? PartOfCode{step == 3 ? 0 : step - 5, 3, 0}
             : step < 7    ? (i == 1 ? PartOfCode{step == 3 ? 3 : 4, 2, 3} : PartOfCode{0, 0, 0})
             : i == 1      ? PartOfCode{3, 1, 1}
                           : PartOfCode{4, 1, 2};
    case 6: return {i, 2, 2 * i};
    default: return {i, 1, i};
  }
}

// The lowest bit in its byte of the code of a step of a run, whole or put together.
__host__ __device__ constexpr int place_of_code(int bits, int step) {
  return 8 % bits == 0 ? bits * step : !is_whole(bits, step) ? 8 - bits : bits == 3 && step >= 4 ? 3 : 0;
}

// One code of a unit.
template <int bits>
__device__ __forceinline__ uint32_t code_of_unit(const uint8_t* unit, int row, int column) {
  const int step = column / 32 % steps_of_run(bits), run = column / 32 / steps_of_run(bits), lane = row % 8 * 4 + column % 8 / 2;
  const int word = row / 8 + column % 32 / 16 * 2, byte = column % 16 / 8 + column % 2 * 2;
  const uint8_t* bytes = unit + run * blocks_of_run(bits) * 512 + lane * 16 + word * 4 + byte;
  const int place = place_of_code(bits, step);
  if (is_whole(bits, step)) return bytes[part_of_code(bits, step, 0).block * 512] >> place & ((1u << bits) - 1);
  uint32_t code = 0;
#pragma unroll 1
  for (int i = 0, low = 8; low > place; i++) {
    const PartOfCode part = part_of_code(bits, step, i);
    low -= part.width;
    code |= (bytes[part.block * 512] >> part.shift & ((1u << part.width) - 1) << low);
  }
  return code >> place;
}

}  // namespace lowbit::cuda
