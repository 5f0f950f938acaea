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

// One code of a plane of `bits`, which divides 8.
template <int bits>
__device__ __forceinline__ uint32_t code_of_tile(const uint8_t* plane, int row, int column) {
  constexpr int fields = 8 / bits;
  const int step = column / 32, lane = row % 8 * 4 + column % 8 / 2, word = row / 8 + column % 32 / 16 * 2;
  const int byte = column % 16 / 8 + column % 2 * 2;
  return plane[step / fields * 512 + lane * 16 + word * 4 + byte] >> (bits * (step % fields)) & ((1u << bits) - 1);
}

}  // namespace lowbit::cuda
