// Splits one or two rows of x into int8 limbs, as operand B of the integer tensor cores.
//
// In each slice of a unit's columns X = round(x 2^(21 - e)) where 2^e <= max |x| < 2^(e + 1): an error of at most 2^-22 of the
// slice's largest element. X is written as three balanced limbs to the base 256 (each -128 .. 127), which are columns of operand
// B of mma.m16n8k32: two rows of x fill six of its eight columns.
//
// The warp that multiplies a slice also makes its limbs, so that no warp waits for another.
#pragma once

#include "../decode/scalar_types.cuh"

namespace lowbit::cuda {

// Columns of operand B: row 0 has 0, 1, 2 for limbs 0, 1, 2, row 1 has 4, 5, 3, so a lane's two columns of the product are two
// limbs of one row, or the third limbs of both.
template <int M>
constexpr int limb_columns = M == 1 ? 3 : 6;
__device__ __forceinline__ constexpr int column_of(int row, int limb) {
  return row == 0 ? limb : limb == 2 ? 3 : 4 + limb;
}

// Column that the lanes of a column of the product read. Lanes beyond the limbs reread some of them, from banks without
// conflicts; their products are ignored.
template <int M>
__device__ __forceinline__ int column_read(int column) {
  return column < limb_columns<M> ? column : column % 2;
}

// Two steps of 32 columns of x: a lane's registers for both are contiguous, 16 bytes.
template <int M>
constexpr int pair_size = limb_columns<M> * 64;

// Limbs of a lane's eight elements of a step, from X + 128 (1 + 256 + 65536), whose bytes are the limbs plus 128. Order of
// elements: 0, 2, 1, 3, as in a word of codes.
__device__ __forceinline__ void extract_limbs(const uint32_t (&biased)[8], uint2 (&limb)[3]) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const uint32_t* b = biased + 4 * half;
    const uint32_t even = __byte_perm(b[0], b[2], 0x5140), odd = __byte_perm(b[1], b[3], 0x5140);
    const uint32_t top = __byte_perm(__byte_perm(b[0], b[2], 0x62), __byte_perm(b[1], b[3], 0x62), 0x5410);
    (half ? limb[0].y : limb[0].x) = __byte_perm(even, odd, 0x5410) ^ 0x80808080u;
    (half ? limb[1].y : limb[1].x) = __byte_perm(even, odd, 0x7632) ^ 0x80808080u;
    (half ? limb[2].y : limb[2].x) = top ^ 0x80808080u;
  }
}

// Where a lane's limbs go, here one step at a time. place_to: offset in those of a slice; size_of_part: bytes for each 256
// columns.
template <int M>
struct LimbsByStep {
  static constexpr int size_of_pair = pair_size<M>, size_of_part = 4 * size_of_pair;
  static constexpr bool splits_columns = false, has_limb_per_lane = false;
  __device__ static __forceinline__ int place_to(int lane) { return lane / 8 * size_of_pair + lane / 4 % 2 * 8 + lane % 4 * 16; }
  __device__ static __forceinline__ int limb_of(int column) {
    return M == 1 ? (column % 4 == 2 ? 2 : column % 2) : column / 2 == 1 ? 2 : column % 2;
  }
  __device__ static __forceinline__ void write(const uint32_t (&biased)[8], int row, uint8_t* to) {
    uint2 limb[3];
    extract_limbs(biased, limb);
#pragma unroll
    for (int d = 0; d < 3; d++) *reinterpret_cast<uint2*>(to + column_of(row, d) * 64) = limb[d];
  }
};

__device__ __forceinline__ float power_of_two(int e) { return __uint_as_float(static_cast<uint32_t>(e + 127) << 23); }

__device__ __forceinline__ float2 unpack_f16x2(uint32_t word, bool is_half) {
  if (is_half) return __half22float2(*reinterpret_cast<const __half2*>(&word));
  return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
}

// Where a slice of x is loaded 16 bytes at a time, a lane has four consecutive pairs of columns.
__device__ __forceinline__ bool is_fully_loaded(int first, int columns, int k, bool on_16_bytes) {
  return on_16_bytes && first + columns <= k;
}

// Exchanges word i of lane j with word j of lane i among four lanes, in each 256 columns, through `room` in shared memory (512
// bytes for each).
template <int parts>
__device__ __forceinline__ void exchange_words(uint32_t (&words)[parts][4], uint8_t* room) {
  const int lane = threadIdx.x % 32;
  // 16 bytes are a quarter of a step of 32 columns and a row of one of four matrices with the same quarter of eight steps, in an
  // order without bank conflicts for either access.
  const uint32_t begins = shared_address(room);
  const uint32_t to = begins + (lane / 4 * 4 + (lane % 4 ^ lane / 8)) * 16;
  const uint32_t from = begins + (lane % 8 * 4 + (lane / 8 ^ lane % 8 / 2)) * 16;
#pragma unroll
  for (int i = 0; i < parts; i++)
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to + i * 512), "r"(words[i][0]), "r"(words[i][1]), "r"(words[i][2]),
                 "r"(words[i][3])
                 : "memory");
  __syncwarp();
#pragma unroll
  for (int i = 0; i < parts; i++)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[i][0]), "=r"(words[i][1]), "=r"(words[i][2]), "=r"(words[i][3])
                 : "r"(from + i * 512)
                 : "memory");
  __syncwarp();
}

// Loads the elements of a slice of x that a lane's codes are multiplied with: in each step of 32 columns four pairs, eight
// columns apart; four lanes cover a step of each 256. Zeros beyond the row. Where the slice is loaded 16 bytes at a time, words
// still have to be exchanged.
template <int parts>
__device__ __forceinline__ void load_slice(const uint16_t* x, int first, int k, bool on_16_bytes, uint32_t (&words)[parts][4]) {
  const int lane = threadIdx.x % 32, column = first + lane / 4 * 32 + lane % 4 * 2;
  if (is_fully_loaded(first, parts * 256, k, on_16_bytes)) {
#pragma unroll
    for (int i = 0; i < parts; i++) {
      const uint4 four = *reinterpret_cast<const uint4*>(x + first + i * 256 + lane * 8);
      words[i][0] = four.x, words[i][1] = four.y, words[i][2] = four.z, words[i][3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < parts * 4; i++) {
      const int at = column + i / 4 * 256 + i % 4 * 8;
      words[i / 4][i % 4] = (at < k ? x[at] : 0) | (at + 1 < k ? static_cast<uint32_t>(x[at + 1]) << 16 : 0);
    }
  }
}

// Makes the limbs of one slice of a row of x, by one warp. Limb d has the value 2^(e - 21 + 8 d - shift); `factors` are those
// values for a lane's two columns, in two factors, since one may be no fp32 number for subnormal x. Returns whether the slice is
// finite; otherwise its limbs are 0.
template <int parts, int M, class Order, bool is_half>
__device__ __forceinline__ bool split_slice(const uint32_t (&words)[parts][4], int row, int shift, uint8_t* limbs,
                                                float2* factors) {
  const int lane = threadIdx.x % 32;
  uint32_t maximum = 0;
#pragma unroll
  for (int i = 0; i < parts; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) maximum = __vmaxu2(maximum, words[i][j] & 0x7fff7fffu);
  maximum = __reduce_max_sync(0xffffffffu, max(maximum & 0xffffu, maximum >> 16));
  const bool is_finite = maximum < (is_half ? 0x7c00u : 0x7f80u);
  float largest = unpack_f16x2(maximum, is_half).x;
  const bool is_tiny = largest < 0x1p-100f;
  if (is_tiny) largest *= 0x1p100f;
  const int e = maximum && is_finite ? static_cast<int>(__float_as_uint(largest) >> 23) - 127 : 0;
  const float factor = power_of_two(21 - e);
#pragma unroll
  for (int i = 0; i < parts; i++) {
    float x[8];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float2 two = unpack_f16x2(words[i][j], is_half);
      x[2 * j] = two.x, x[2 * j + 1] = two.y;
    }
    if (is_tiny || !is_finite) {
#pragma unroll
      for (int j = 0; j < 8; j++) x[j] = is_finite ? x[j] * 0x1p100f : 0.0f;
    }
    uint32_t biased[8];  // X + 128 (1 + 256 + 65536): its bytes are the limbs plus 128
#pragma unroll
    for (int j = 0; j < 8; j++)  // 1.5 * 2^23 + X as a float has X in its low bits
      biased[j] = __float_as_uint(fmaf(x[j], factor, 12582912.0f)) + (0x808080u - 0x4b400000u);
    Order::write(biased, row, limbs + i * Order::size_of_part + Order::place_to(lane));
  }
  if (lane < 8) {  // factors of column `lane`, the second of lane / 2
    const int of_row = M == 1 ? 0 : lane == 3 || lane / 2 == 2;
    const int power = (is_tiny ? e - 100 : e) - 21 + 8 * Order::limb_of(lane) - shift, one = power >> 1;
    if (of_row == row) factors[lane] = {power_of_two(one), power_of_two(power - one)};
  }
  return is_finite;
}

}  // namespace lowbit::cuda
