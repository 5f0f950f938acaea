// Interface of the 8-bit GEMMs to their binding.
#pragma once

#include <cuda_runtime_api.h>

#include "../pipeline/quantize_activations.cuh"
#include "../kernels/w8a8_gemm.cuh"
#include "../kernels/w8a8_fused_split_k.cuh"
#include "../kernels/w8a8_fused_full_k.cuh"

namespace lowbit::cuda {

cudaError_t launch_quantize_activations(QuantizeActivations a, Dtype dtype, cudaStream_t stream);

namespace w8a8 {

// A matrix whose rows have `bytes` bytes and are `stride` apart, a multiple of 16.
struct Operand {
  const void* data;
  int64_t bytes, stride;
};

// of W; x is int8, or e4m3 where W is.
enum class Codes { int8, e4m3, int4 };

// Rows of the buffer for x: all that the last tile copies, since TMA is slow beyond the edge of a tensor. Rows beyond M are
// ignored.
constexpr int64_t padded_rows(int64_t m) { return m <= 16 ? 16 : m <= 64 ? 64 : (m + 255) / 256 * 256; }

// Tensor map of boxes of box_rows rows and a stage's bytes; false where the driver makes none.
bool encode_tensormap(CUtensorMap& map, const Operand& from, int64_t rows, int bits, int box_rows);

// Blocks of a cluster where w8a8_fused_split_k.cuh is the fastest way, for x with rows aligned to 16 bytes; else 0.
int split_k_blocks(int64_t m, int64_t n, int64_t k);
// blocks: of a cluster, 1, 2, 4 or 8.
cudaError_t launch_fused_split_k(FusedSplitK a, Codes codes, const Operand& w, bool x_is_half, int blocks, cudaStream_t stream);

// rows of x in a block (16, 32 or 64), and most blocks of a cluster, which divide the tiles of x.
struct FullKPlan {
  int rows, blocks;
};
// The plan of w8a8_fused_full_k.cuh where it is the fastest way, for x with rows aligned to 16 bytes; else no rows.
FullKPlan plan_full_k(int64_t m, int64_t n, int64_t k);
cudaError_t launch_fused_full_k(FusedFullK a, Codes codes, const Operand& w, bool x_is_half, FullKPlan plan, cudaStream_t stream);

// forced: rows of x in a block, blocks of a cluster, whether they split K; zeros: chosen from the shape.
cudaError_t launch(W8A8Args a, Codes codes, const Operand& w, const Operand& x, const int (&forced)[3], cudaStream_t stream);

}  // namespace w8a8
}  // namespace lowbit::cuda
