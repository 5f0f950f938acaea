// Quantizes whole rows of 16-bit x in a warp's registers: x is read once, and no warp waits for another.
#pragma once

#include "quantize_activations.cuh"

namespace lowbit::cuda {

// `rows` rows, `apart` rows from each other, of up to 256 * chunks columns, a multiple of 8.
template <class X, bool is_float, int rows, int chunks>
struct WarpRows {
  const X* first;  // this thread's part of the first row
  int64_t apart;
  int columns, count;  // count: rows that exist
  Chunk<X> held[rows][chunks];

  __device__ static int column_of(int chunk) { return (chunk * 32 + static_cast<int>(threadIdx.x % 32)) * chunk_columns; }

  __device__ WarpRows(const X* x, int64_t apart, int columns, int count)
      : first(x + column_of(0)), apart(apart), columns(columns), count(count) {
#pragma unroll
    for (int r = 0; r < rows; r++)
#pragma unroll
      for (int c = 0; c < chunks; c++) held[r][c].load_if(address(r, c), is_there(r, c));
  }

  __device__ bool is_there(int row, int chunk) const { return row < count && column_of(chunk) < columns; }
  __device__ const X* address(int row, int chunk) const { return first + row * apart + chunk * 32 * chunk_columns; }

  // Calls put(row, chunk, codes) for each chunk that begins before column `filled`, padded with zeros behind the last column, and
  // put_scale(row, scale) in one thread.
  template <class Put, class PutScale>
  __device__ void round(const float* fixed_scale, int filled, const Put& put, const PutScale& put_scale) const {
#pragma unroll
    for (int r = 0; r < rows; r++) {
      if (r >= count) break;
      uint32_t maximum = 0;
#pragma unroll
      for (int c = 0; c < chunks; c++) maximum = Chunk<X>::larger(maximum, held[r][c].maximum());
      maximum = __reduce_max_sync(~0u, Chunk<X>::found(maximum));
      const float largest = __uint_as_float(maximum);
      const RowScale scale = fixed_scale ? given_scale(*fixed_scale, largest) : row_scale<X, is_float>(largest);
      if (threadIdx.x % 32 == 0) put_scale(r, scale.scale);
      if (scale.is_usual()) {
#pragma unroll
        for (int c = 0; c < chunks; c++) {
          const uint2 eight = quantize_chunk<is_float, true>(held[r][c], scale);
          if (column_of(c) < filled) put(r, c, eight);
        }
      } else {
#pragma unroll 1
        for (int c = 0; c < chunks && column_of(c) < filled; c++) {
          Chunk<X> chunk;
          chunk.load_if(address(r, c), is_there(r, c));
          put(r, c, quantize_chunk<is_float, false>(chunk, scale));
        }
      }
    }
  }
};

}  // namespace lowbit::cuda
