// Quantizes x [M, K] to int8 or e4m3 with a scale for each row (dynamic) or one for all (static).
//
//    x row (global) --registers--> max |x| --warp, block reduction--> scale --> x / scale, round --> codes [M, pitch], scale [M]
//
// A block handles a row, or a warp a short one.
// Contract: the bits of IEEE division by the scale, rounded to nearest, ties to even.
// Limit: the bytes of x, read once.
#pragma once

#include <cuda_fp8.h>

#include <type_traits>

#include "../ptx/bulk_copy.cuh"
#include "../decode/scalar_types.cuh"

namespace lowbit::cuda {

struct QuantizeActivations {
  const void* x;
  uint8_t* codes;               // [m] rows of `pitch` bytes, a multiple of 16
  float* scale;                 // [m]; NaN for a row without a finite scale
  const float* fixed_scale;     // the scale of all rows, or null: one for each row
  int64_t m, pitch;
  int k;
  bool is_float, has_full_chunks;  // is_float: e4m3, else int8; has_full_chunks: rows are aligned to 16 bytes and end with a full
                                   // chunk
  bool is_early;                    // the next product may start before this kernel's predecessors have ended (PDL)
  bool even_first;                  // of each 32 columns the even ones first, padded with zeros to 32 (for w4a8_gemm.cuh)
};

constexpr int chunk_columns = 8, chunks_per_thread = 4, max_threads_per_row = 512;

// Eight neighbouring elements of x.
template <class T>
struct Chunk16 {
  static constexpr uint32_t magnitudes = 0x7fff7fff;
  uint4 words;

  __device__ void load(const T* x) { words = *reinterpret_cast<const uint4*>(x); }
  // Zeros where it is absent; branch-free.
  __device__ void load_if(const T* x, bool is_there) {
    words = {};
    asm volatile("{\n\t.reg .pred there;\n\tsetp.ne.s32 there, %5, 0;\n\t@there ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
                 : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w)
                 : "l"(x), "r"(static_cast<int>(is_there))
                 : "memory");
  }
  __device__ void clear() { words = {}; }
  __device__ void set(int i, T value) {
    const uint32_t bits = reinterpret_cast<const uint16_t&>(value);
    (&words.x)[i / 2] |= bits << (i % 2 * 16);
  }
  // The larger magnitude in each half, NaN if either is; sign bits are undefined.
  __device__ static uint32_t larger(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
    uint32_t maximum;
    if constexpr (std::is_same_v<T, __half>)
      asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(maximum) : "r"(a), "r"(b));
    else
      asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(maximum) : "r"(a), "r"(b));
    return maximum;
#else
    return __vmaxu2(a & magnitudes, b & magnitudes);  // magnitudes are ordered like their bits, NaN above infinity
#endif
  }
  __device__ uint32_t maximum() const { return larger(larger(words.x, words.y), larger(words.z, words.w)); }
  // The maximum as a float.
  __device__ static uint32_t found(uint32_t maximum) {
    maximum &= magnitudes;
    return __float_as_uint(value(max(maximum & 0xffff, maximum >> 16)));
  }
  __device__ float get(int i) const {
    const uint32_t word = i < 2 ? words.x : i < 4 ? words.y : i < 6 ? words.z : words.w;
    if constexpr (std::is_same_v<T, __nv_bfloat16>) return __uint_as_float(i % 2 ? word & 0xffff0000 : word << 16);
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
  __device__ uint32_t maximum() const {
    uint32_t maximum = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) maximum = max(maximum, __float_as_uint(values[i]) & 0x7fffffff);
    return maximum;
  }
  __device__ static uint32_t larger(uint32_t a, uint32_t b) { return max(a, b); }
  __device__ static uint32_t found(uint32_t maximum) { return maximum; }
  __device__ float get(int i) const { return values[i]; }
};

// x / scale as IEEE rounds it; 0 for a scale of 0. Two Newton corrections of x times the reciprocal are exact as long as every
// intermediate is a normal number, so both operands are first scaled by a power of two away from the ends of the range. A
// quotient so small that its remainder leaves the range has code 0 anyway.
struct ExactDivision {
  float factor, scale, reciprocal;

  __device__ explicit ExactDivision(float by) {
    factor = fabsf(by) < 0x1p-80f ? 0x1p100f : fabsf(by) > 0x1p80f ? 0x1p-100f : 1.0f;
    scale = by * factor;
    reciprocal = by == 0.0f ? 0.0f : __frcp_rn(scale);
  }
  __device__ ExactDivision(float by, float its_reciprocal) : factor(1.0f), scale(by), reciprocal(its_reciprocal) {}
  __device__ float divide(float x) const {
    x *= factor;
    float q = __fmul_rn(x, reciprocal);
    q = __fmaf_rn(__fmaf_rn(-q, scale, x), reciprocal, q);
    return __fmaf_rn(__fmaf_rn(-q, scale, x), reciprocal, q);
  }
  // For any x: overflow and non-finite values have no remainder.
  __device__ float divide_any(float x) const {
    const float q = __fmul_rn(x * factor, reciprocal);
    return fabsf(q) < 0x1p30f ? divide(x) : q;
  }
};

// Scale of a row, and the reciprocal that its codes use; reciprocal 0: divide any x.
struct RowScale {
  float scale, reciprocal;

  __device__ bool is_usual() const { return reciprocal != 0.0f; }
};

// A static scale, for a row with largest magnitude `maximum`.
__device__ __forceinline__ RowScale given_scale(float scale, float maximum) {
  return {isfinite(scale) && isfinite(maximum) ? scale : __int_as_float(0x7fffffff), 0.0f};  // codes of such rows stand for NaN
}

// The dynamic scale of a row with largest magnitude `maximum`.
//
// For int8 and 16-bit x, codes are x times the reciprocal, rounded once, and equal those of division. Let X and Y be the
// significands of x and `maximum`, of 8 or 11 bits: x / scale is 127 X / Y times a power of two. Unless it is the midpoint of two
// integers, it is further from it than 2^-19 of itself, more than all roundings. It can be a midpoint only for x = maximum / 2,
// unless 127 divides Y. So the reciprocal is moved by 2^-21 of itself towards the side on which the rounding of the division
// leaves maximum / 2. Where 127 divides Y the scale is exact: a power of two has an exact reciprocal, and others, possible with
// 11 bits, use division.
template <class T, bool is_float>
__device__ __forceinline__ RowScale row_scale(float maximum) {
  const float scale = __fdiv_rn(maximum, is_float ? 448.0f : 127.0f);
  if (!isfinite(scale)) return {__int_as_float(0x7fffffff), __int_as_float(0x7fffffff)};
  if (scale < 0x1p-80f || scale > 0x1p80f) return {scale, 0.0f};
  float reciprocal = __frcp_rn(scale);
  if (!is_float && sizeof(T) == 2 && (__float_as_uint(scale) & 0x7fffff) != 0) {
    if (std::is_same_v<T, __half> && __fmaf_rn(scale, 127.0f, -maximum) == 0.0f) return {scale, 0.0f};
    const float move = __fdiv_rn(0.5f * maximum, scale) < 63.5f ? -0x1p-21f : 0x1p-21f;
    reciprocal = __fmaf_rn(reciprocal, move, reciprocal);
  }
  return {scale, reciprocal};
}

template <bool is_float, bool is_usual, class T>
__device__ __forceinline__ uint2 quantize_chunk(const Chunk<T>& chunk, const RowScale& row) {
  constexpr float middle = 12582912.0f;  // 1.5 * 2^23: the low bits of a sum with it are the rounded integer
  const ExactDivision by = is_usual ? ExactDivision(row.scale, row.reciprocal) : ExactDivision(row.scale);
  const auto quotient = [&](float x) { return is_usual ? by.divide(x) : by.divide_any(x); };
  uint32_t words[2];
#pragma unroll
  for (int w = 0; w < 2; w++) {
    if constexpr (is_float) {
      float q[4];
#pragma unroll
      for (int i = 0; i < 4; i++) q[i] = quotient(chunk.get(4 * w + i));
      const uint32_t low = __nv_cvt_float2_to_fp8x2({q[0], q[1]}, __NV_SATFINITE, __NV_E4M3);
      const uint32_t high = __nv_cvt_float2_to_fp8x2({q[2], q[3]}, __NV_SATFINITE, __NV_E4M3);
      words[w] = low | high << 16;
    } else {
      uint32_t whole[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float x = chunk.get(4 * w + i);
        if constexpr (is_usual && sizeof(T) == 2) {
          whole[i] = __float_as_uint(__fmaf_rn(x, row.reciprocal, middle));
        } else {
          float q = quotient(x);
          if (!is_usual) q = q == q ? fminf(fmaxf(q, -128.0f), 127.0f) : 0.0f;
          whole[i] = __float_as_uint(q + middle);
        }
      }
      words[w] = __byte_perm(__byte_perm(whole[0], whole[1], 0x0040), __byte_perm(whole[2], whole[3], 0x0040), 0x5410);
    }
  }
  return {words[0], words[1]};
}

template <class T, bool is_float>
__global__ void __launch_bounds__(max_threads_per_row) quantize_activations(const QuantizeActivations a) {
  __shared__ uint32_t warp_maxima[32];
  // The next product may read its weights before this kernel has ended, in a CUDA graph even before all kernels ahead have.
  if (a.is_early) launch_dependents();
  wait_for_dependencies();
  if (!a.is_early) launch_dependents();
  const int chunks = (a.k + chunk_columns - 1) / chunk_columns, step = blockDim.x * chunks_per_thread;
  const int written = a.even_first ? (chunks + 3) / 4 * 4 : chunks;
  const int64_t rows = blockDim.y;
  for (int64_t m = blockIdx.x * rows + threadIdx.y; m < a.m; m += gridDim.x * rows) {
    const T* row = static_cast<const T*>(a.x) + m * a.k;
    Chunk<T> held[chunks_per_thread];
    const auto load = [&](int first) {
#pragma unroll
      for (int c = 0; c < chunks_per_thread; c++) held[c].clear();
      const int chunk = first + threadIdx.x;
      if (a.has_full_chunks) {
#pragma unroll
        for (int c = 0; c < chunks_per_thread; c++)
          if (chunk + c * static_cast<int>(blockDim.x) < chunks)
            held[c].load(row + (chunk + c * static_cast<int>(blockDim.x)) * chunk_columns);
      } else {
#pragma unroll
        for (int c = 0; c < chunks_per_thread; c++) {
          const int at = (chunk + c * static_cast<int>(blockDim.x)) * chunk_columns;
#pragma unroll
          for (int i = 0; i < chunk_columns; i++)
            if (at + i < a.k) held[c].set(i, row[at + i]);
        }
      }
    };
    load(0);
    uint32_t maximum = 0;
    for (int first = 0; first < chunks; first += step) {
      if (first > 0) load(first);
#pragma unroll
      for (int c = 0; c < chunks_per_thread; c++) maximum = Chunk<T>::larger(maximum, held[c].maximum());
    }
    if (chunks > step) load(0);
    maximum = __reduce_max_sync(~0u, Chunk<T>::found(maximum));
    if (blockDim.x > 32) {
      __syncthreads();
      if (threadIdx.x % 32 == 0) warp_maxima[threadIdx.x / 32] = maximum;
      __syncthreads();
      maximum = __reduce_max_sync(~0u, threadIdx.x % 32 < blockDim.x / 32 ? warp_maxima[threadIdx.x % 32] : 0);
    }
    const float largest = __uint_as_float(maximum);
    const RowScale scale = a.fixed_scale ? given_scale(*a.fixed_scale, largest) : row_scale<T, is_float>(largest);
    if (threadIdx.x == 0) a.scale[m] = scale.scale;
    uint8_t* codes = a.codes + m * a.pitch;
    for (int first = 0; first < written; first += step) {
      if (first > 0) load(first);
#pragma unroll
      for (int c = 0; c < chunks_per_thread; c++) {
        const int chunk = first + c * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
        if (chunk >= written) break;
        const uint2 eight = scale.is_usual() ? quantize_chunk<is_float, true>(held[c], scale) : quantize_chunk<is_float, false>(held[c], scale);
        if (a.even_first) {
          uint32_t* const to = reinterpret_cast<uint32_t*>(codes + chunk / 4 * 32) + chunk % 4;
          to[0] = __byte_perm(eight.x, eight.y, 0x6420);
          to[4] = __byte_perm(eight.x, eight.y, 0x7531);
        } else {
          *reinterpret_cast<uint2*>(codes + chunk * chunk_columns) = eight;
        }
      }
    }
  }
}

}  // namespace lowbit::cuda
