// Rounds x [M, K] to 8-bit codes with a scale a row, or one for all: a row a block, held in registers between the largest
// magnitude and the codes. The bits are those of IEEE division by the scale and rounding to nearest, ties to even.
#pragma once

#include <cuda_fp8.h>

#include "asynchrony.cuh"
#include "numbers.cuh"

namespace lowbit::cuda {

struct Activations {
  const void* x;
  uint8_t* codes;               // [m] rows of `pitch` bytes, a multiple of 16
  float* scale;                 // [m]: NaN for a row that has no finite scale
  const float* fixed_scale;     // or null: each row its own
  int64_t m, pitch;
  int k;
  bool is_float, has_whole_chunks;  // e4m3 and not int8; rows lie on 16 bytes and end with a chunk
  bool is_early;                    // the product behind may start before what is ahead of this has ended
  bool even_first;                  // of each 32 columns the even ones before the odd ones, and whole 32 with zeros
};

constexpr int chunk_of_activations = 8, chunks_of_thread = 4, most_threads_of_row = 512;

// Eight neighbouring numbers of x.
template <class T>
struct Chunk16 {
  uint4 words;

  __device__ void load(const T* x) { words = *reinterpret_cast<const uint4*>(x); }
  __device__ void clear() { words = {}; }
  __device__ void set(int i, T value) {
    const uint32_t bits = reinterpret_cast<const uint16_t&>(value);
    (&words.x)[i / 2] |= bits << (i % 2 * 16);
  }
  // Magnitudes order as their bits do, with infinity and then NaN above all numbers.
  __device__ uint32_t most() const {
    constexpr uint32_t magnitude = 0x7fff7fff;
    const uint32_t pair = __vmaxu2(__vmaxu2(words.x & magnitude, words.y & magnitude), __vmaxu2(words.z & magnitude, words.w & magnitude));
    return __float_as_uint(value(max(pair & 0xffff, pair >> 16)));
  }
  __device__ float get(int i) const {
    const uint32_t word = i < 2 ? words.x : i < 4 ? words.y : i < 6 ? words.z : words.w;
    return value(i % 2 ? word >> 16 : word & 0xffff);
  }
  __device__ static float value(uint32_t bits) {
    const uint16_t low = static_cast<uint16_t>(bits);
    return to_float(reinterpret_cast<const T&>(low));
  }
};

template <class T>
struct Chunk : Chunk16<T> {};

template <>
struct Chunk<float> {
  float values[8];

  __device__ void load(const float* x) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float4 four = reinterpret_cast<const float4*>(x)[i];
      values[4 * i] = four.x, values[4 * i + 1] = four.y, values[4 * i + 2] = four.z, values[4 * i + 3] = four.w;
    }
  }
  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < 8; i++) values[i] = 0.0f;
  }
  __device__ void set(int i, float value) { values[i] = value; }
  __device__ uint32_t most() const {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) most = max(most, __float_as_uint(values[i]) & 0x7fffffff);
    return most;
  }
  __device__ float get(int i) const { return values[i]; }
};

// x / scale, rounded as IEEE says; 0 for a scale of 0. Two corrections of x times the reciprocal are exact as long as nothing
// on the way leaves the normal range, so that both are first moved away from its ends by a power of two. A quotient so small
// that its remainder leaves the range has the code 0 in any case.
struct Divisor {
  float factor, scale, reciprocal;

  __device__ explicit Divisor(float by) {
    factor = fabsf(by) < 0x1p-80f ? 0x1p100f : fabsf(by) > 0x1p80f ? 0x1p-100f : 1.0f;
    scale = by * factor;
    reciprocal = by == 0.0f ? 0.0f : __frcp_rn(scale);
  }
  __device__ float divide(float x) const {
    x *= factor;
    float q = __fmul_rn(x, reciprocal);
    q = __fmaf_rn(__fmaf_rn(-q, scale, x), reciprocal, q);
    return __fmaf_rn(__fmaf_rn(-q, scale, x), reciprocal, q);
  }
  // Near enough to round it to an integer, where the scale is 1/127 of the largest magnitude of a row, a number of at most 11 bits
  // like x, and rounded: with one correction a quotient is wrong in its last bit where it lies within 2^-22 of that bit of the
  // middle between two floats. It matters where one of these is in turn the middle between two integers; then the scale's 24 bits
  // are within 4 of a multiple of 2^17, which those of a 127th, that repeat after seven, are only where they are zeros.
  __device__ float divide_for_integer(float x) const {
    const float q = __fmul_rn(x, reciprocal);
    return __fmaf_rn(__fmaf_rn(-q, scale, x), reciprocal, q);
  }
  // Of any x: what overflows and what is not finite has no remainder.
  __device__ float divide_any(float x) const {
    const float q = __fmul_rn(x * factor, reciprocal);
    return fabsf(q) < 0x1p30f ? divide(x) : q;
  }
};

// `is_any`: the scale does not come from x, or was rounded in the subnormal range, and quotients may be any number.
template <bool is_float, bool is_any, class T>
__device__ __forceinline__ uint2 codes_of(const Chunk<T>& chunk, const Divisor& by) {
  constexpr bool is_short = !is_float && sizeof(T) == 2;
  const auto quotient = [&](float x) { return is_any ? by.divide_any(x) : is_short ? by.divide_for_integer(x) : by.divide(x); };
  uint32_t words[2];
#pragma unroll
  for (int w = 0; w < 2; w++) {
    float q[4];
#pragma unroll
    for (int i = 0; i < 4; i++) q[i] = quotient(chunk.get(4 * w + i));
    if constexpr (is_float) {
      const uint32_t low = __nv_cvt_float2_to_fp8x2({q[0], q[1]}, __NV_SATFINITE, __NV_E4M3);
      const uint32_t high = __nv_cvt_float2_to_fp8x2({q[2], q[3]}, __NV_SATFINITE, __NV_E4M3);
      words[w] = low | high << 16;
    } else {
      uint32_t whole[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (is_any) q[i] = q[i] == q[i] ? fminf(fmaxf(q[i], -128.0f), 127.0f) : 0.0f;
        whole[i] = __float_as_uint(q[i] + 12582912.0f);  // 1.5 x 2^23: the sum's last bits are the rounded integer
      }
      words[w] = __byte_perm(__byte_perm(whole[0], whole[1], 0x0040), __byte_perm(whole[2], whole[3], 0x0040), 0x5410);
    }
  }
  return {words[0], words[1]};
}

template <class T, bool is_float>
__global__ void __launch_bounds__(most_threads_of_row) round_activations(const Activations a) {
  __shared__ uint32_t most_of_warp[32];
  // The product behind may read its weights before this one has ended, in a graph before all ahead of it has.
  if (a.is_early) let_dependents_start();
  wait_for_predecessors();
  if (!a.is_early) let_dependents_start();
  const int chunks = (a.k + chunk_of_activations - 1) / chunk_of_activations, step = blockDim.x * chunks_of_thread;
  const int written = a.even_first ? (chunks + 3) / 4 * 4 : chunks;
  for (int64_t m = blockIdx.x; m < a.m; m += gridDim.x) {
    const T* row = static_cast<const T*>(a.x) + m * a.k;
    Chunk<T> held[chunks_of_thread];
    const auto load = [&](int first) {
#pragma unroll
      for (int c = 0; c < chunks_of_thread; c++) held[c].clear();
      const int chunk = first + threadIdx.x;
      if (a.has_whole_chunks) {
#pragma unroll
        for (int c = 0; c < chunks_of_thread; c++)
          if (chunk + c * static_cast<int>(blockDim.x) < chunks)
            held[c].load(row + (chunk + c * static_cast<int>(blockDim.x)) * chunk_of_activations);
      } else {
#pragma unroll
        for (int c = 0; c < chunks_of_thread; c++) {
          const int at = (chunk + c * static_cast<int>(blockDim.x)) * chunk_of_activations;
#pragma unroll
          for (int i = 0; i < chunk_of_activations; i++)
            if (at + i < a.k) held[c].set(i, row[at + i]);
        }
      }
    };
    load(0);
    float scale;
    if (a.fixed_scale) {
      scale = *a.fixed_scale;
    } else {
      uint32_t most = 0;
      for (int first = 0; first < chunks; first += step) {
        if (first > 0) load(first);
#pragma unroll
        for (int c = 0; c < chunks_of_thread; c++) most = max(most, held[c].most());
      }
      if (chunks > step) load(0);
      most = __reduce_max_sync(~0u, most);
      __syncthreads();
      if (threadIdx.x % 32 == 0) most_of_warp[threadIdx.x / 32] = most;
      __syncthreads();
      most = __reduce_max_sync(~0u, threadIdx.x % 32 < blockDim.x / 32 ? most_of_warp[threadIdx.x % 32] : 0);
      scale = __fdiv_rn(__uint_as_float(most), is_float ? 448.0f : 127.0f);
    }
    if (!isfinite(scale)) scale = __int_as_float(0x7fffffff);  // the codes of such a row stand for NaN
    if (threadIdx.x == 0) a.scale[m] = scale;
    const Divisor by(scale);
    const bool is_any = a.fixed_scale || by.factor != 1.0f;
    uint8_t* codes = a.codes + m * a.pitch;
    for (int first = 0; first < written; first += step) {
      if (first > 0) load(first);
#pragma unroll
      for (int c = 0; c < chunks_of_thread; c++) {
        const int chunk = first + c * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
        if (chunk >= written) break;
        const uint2 eight = is_any ? codes_of<is_float, true>(held[c], by) : codes_of<is_float, false>(held[c], by);
        if (a.even_first) {
          uint32_t* const to = reinterpret_cast<uint32_t*>(codes + chunk / 4 * 32) + chunk % 4;
          to[0] = __byte_perm(eight.x, eight.y, 0x6420);
          to[4] = __byte_perm(eight.x, eight.y, 0x7531);
        } else {
          *reinterpret_cast<uint2*>(codes + chunk * chunk_of_activations) = eight;
        }
      }
    }
  }
}

}  // namespace lowbit::cuda
