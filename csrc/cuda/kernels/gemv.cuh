// GEMV over the canonical packing for up to eight rows of x: int4, uint4, int8, uint8 with group scales. The fallback for weights
// that are not in the layout mma_fragment.
//
//    x [M, K] ----------------------------------------------------+
//    packed [R rows] --16 bytes a lane--> q - zero_point, exact --+--fma--> f32 sums of a group --* scale--> f32 sums of a lane
//                                                     y [M, R rows] <--bias, round-- warp shuffles, shared memory <----+
//
// A block computes block_rows rows; its warps split K. Sums are added in a fixed order.
// Contract: exact: fp32 sums of the exact quantized weights, rounded once.
// Limit: the bytes of the weight at M = 1, fp32 multiply-adds for more rows (no tensor cores).
// Figures: none in evals/results, which measure the layout's kernels.
#pragma once

#include "../../decode.h"
#include "../decode/scalar_types.cuh"

namespace lowbit::cuda {

constexpr int max_rows = 8;
constexpr int warps = 4;

struct Gemv {
  const uint8_t* packed;  // [n, packed_stride] bytes
  int64_t packed_stride;
  const void* scale;  // [n, groups]
  int64_t scale_stride;
  Dtype scale_dtype;
  const uint8_t* zero_point;  // [n, groups], or null
  int64_t zero_stride;
  const void* x;     // [m, k]
  const void* bias;  // [n] of x's type, or null
  void* y;           // [m, n]
  int64_t n, k, group;
  int m;
  bool is_signed;
};

// The two elements of x in a register.
template <typename T>
__device__ __forceinline__ float2 pair(uint32_t word);
template <>
__device__ __forceinline__ float2 pair<__half>(uint32_t word) {
  return __half22float2(*reinterpret_cast<const __half2*>(&word));
}
template <>
__device__ __forceinline__ float2 pair<__nv_bfloat16>(uint32_t word) {
  return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
}

__device__ __forceinline__ float scale_at(const Gemv& a, int64_t row, int64_t g) {
  return load_float(a.scale, a.scale_dtype, row * a.scale_stride + g);
}

// Signed codes with the top bit flipped are unsigned codes with zero point 2^(bits - 1). The float with bits 0x4b000000 | code
// has the value 2^23 + code; subtracting 2^23 + zero_point gives code - zero_point exactly.
template <int bits>
struct Code {
  static constexpr uint32_t half = 1u << (bits - 1), mask = (1u << bits) - 1, magic = 0x4b000000u;
  static constexpr uint32_t flip = bits == 4 ? 0x88888888u : 0x80808080u;
  __device__ static float offset(const Gemv& a, int64_t row, int64_t g) {
    return 8388608.0f + (a.is_signed ? half : a.zero_point ? a.zero_point[row * a.zero_stride + g] : 0);
  }
  __device__ static float number(uint32_t word, int i, float offset) {
    return __uint_as_float(magic | ((word >> (i * bits)) & mask)) - offset;
  }
};

// Adds the sums of the block's warps in a fixed order, then bias, then rounds once.
template <typename T, int R, int M>
__device__ __forceinline__ void finish(const Gemv& a, int64_t row, float (&sums)[R][M]) {
  __shared__ float shared[warps][R * M];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int r = 0; r < R; r++)
#pragma unroll
    for (int m = 0; m < M; m++) {
      float sum = sums[r][m];
#pragma unroll
      for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
      if (lane == 0) shared[warp][r * M + m] = sum;
    }
  __syncthreads();
  if (threadIdx.x < R * M) {
    const int r = threadIdx.x / M, m = threadIdx.x % M;
    if (row + r < a.n && m < a.m) {
      float sum = 0;
#pragma unroll
      for (int w = 0; w < warps; w++) sum += shared[w][threadIdx.x];
      if (a.bias) sum += to_float(static_cast<const T*>(a.bias)[row + r]);
      static_cast<T*>(a.y)[m * a.n + row + r] = from_float<T>(sum);
    }
  }
}

template <int M>
constexpr int block_rows = M <= 2 ? 4 : 2;

// For rows aligned to 16 bytes, and K and groups of whole 16-byte chunks. M is a.m rounded up to 1, 2, 4 or 8.
template <int bits, typename T, int M>
__global__ void __launch_bounds__(warps * 32) gemv_aligned(const Gemv a) {
  constexpr int R = block_rows<M>, chunk = 128 / bits, word = 32 / bits;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * R;
  const uint32_t flip = a.is_signed ? Code<bits>::flip : 0;
  const int chunks = a.k / chunk, chunks_per_group = a.group / chunk;
  float sums[R][M] = {};
#pragma unroll 2
  for (int c = threadIdx.x; c < chunks; c += warps * 32) {
    const int g = c / chunks_per_group;
    uint4 codes[R];
    float offset[R], part[R][M] = {};
#pragma unroll
    for (int r = 0; r < R; r++) {
      const int64_t at = min(row + r, a.n - 1);  // rows beyond the last repeat it and are not written
      codes[r] = __ldcs(reinterpret_cast<const uint4*>(a.packed + at * a.packed_stride) + c);
      offset[r] = Code<bits>::offset(a, at, g);
    }
#pragma unroll
    for (int i = 0; i < chunk / 8; i++) {  // eight codes and sixteen bytes of each row of x
      float w[R][8];
#pragma unroll
      for (int r = 0; r < R; r++)
#pragma unroll
        for (int j = 0; j < 8; j++) {
          const uint32_t* words = reinterpret_cast<const uint32_t*>(&codes[r]);
          w[r][j] = Code<bits>::number(words[(i * 8 + j) / word] ^ flip, (i * 8 + j) % word, offset[r]);
        }
#pragma unroll
      for (int m = 0; m < M; m++) {
        const int64_t x_row = M == 1 ? 0 : min(m, a.m - 1);
        const uint4 x = __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(a.x) + x_row * a.k + c * chunk) + i);
        const uint32_t x_words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float2 two = pair<T>(x_words[j]);
#pragma unroll
          for (int r = 0; r < R; r++) part[r][m] = fmaf(w[r][2 * j + 1], two.y, fmaf(w[r][2 * j], two.x, part[r][m]));
        }
      }
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
      const float scale = scale_at(a, min(row + r, a.n - 1), g);
#pragma unroll
      for (int m = 0; m < M; m++) sums[r][m] = fmaf(part[r][m], scale, sums[r][m]);
    }
  }
  finish<T>(a, row, sums);
}

// For any K, group size and alignment: one row in a block, a range of K for each warp, one code in a lane at a time.
template <int bits, typename T>
__global__ void __launch_bounds__(warps * 32) gemv_any(const Gemv a) {
  const int64_t row = blockIdx.x;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint8_t* packed = a.packed + row * a.packed_stride;
  const T* x = static_cast<const T*>(a.x);
  const int64_t run = (a.k + warps - 1) / warps, end = min(a.k, (warp + 1) * run);
  float sums[1][max_rows] = {};
  for (int64_t k0 = warp * run; k0 < end;) {
    const int64_t g = k0 / a.group, group_end = min(end, (g + 1) * a.group);
    const float offset = Code<bits>::offset(a, row, g), scale = scale_at(a, row, g);
    float part[max_rows] = {};
    for (int64_t k = k0 + lane; k < group_end; k += 32) {
      const uint32_t code = code_at<bits>(packed, a.k, k) ^ (a.is_signed ? Code<bits>::half : 0);
      const float w = Code<bits>::number(code, 0, offset);
#pragma unroll
      for (int m = 0; m < max_rows; m++)
        if (m < a.m) part[m] = fmaf(w, to_float(x[m * a.k + k]), part[m]);
    }
#pragma unroll
    for (int m = 0; m < max_rows; m++) sums[0][m] = fmaf(part[m], scale, sums[0][m]);
    k0 = group_end;
  }
  finish<T>(a, row, sums);
}

}  // namespace lowbit::cuda
