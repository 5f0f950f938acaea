// What the bindings of 8-bit products see of their launchers.
#pragma once

#include <cuda_runtime_api.h>

#include "activations.cuh"
#include "eights.cuh"

namespace lowbit::cuda {

cudaError_t launch_activations(const Activations& a, Stored stored, cudaStream_t stream);

namespace eights {

// A matrix whose rows have `bytes` bytes and lie `stride` apart, a multiple of 16.
struct Operand {
  const void* data;
  int64_t bytes, stride;
};

// Those of W; x has int8, or e4m3 where W has.
enum class Codes { int8, e4m3, int4 };

// How many rows x has room for: all that the last tile copies, since copies are slow where they leave a tensor. What lies in
// the rows beyond M counts for nothing.
constexpr int64_t rows_with_room(int64_t m) { return m <= 16 ? 16 : m <= 64 ? 64 : (m + 255) / 256 * 256; }

// `forced`: rows of x a block, blocks of a cluster, and whether they split the columns; zeros: chosen from the shape.
cudaError_t launch(Product8 a, Codes codes, const Operand& w, const Operand& x, const int (&forced)[3], cudaStream_t stream);

}  // namespace eights
}  // namespace lowbit::cuda
