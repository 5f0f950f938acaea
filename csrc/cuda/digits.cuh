// y = x W^T for up to eight rows of x on the integer tensor cores, from the tiles layout: int4, uint4, int8, uint8.
//
// x becomes integers: in each slice of a unit's columns, X = round(x 2^(21 - e)) where 2^e <= max|x| < 2^(e + 1), an error
// of at most 2^-22 of the slice's largest element. X is written in three balanced digits to the base 256 (each -128..127),
// and the digits are columns of operand B of mma.m16n8k32, which multiplies 8-bit integers: two rows of x fill six of its
// eight columns, which 16-bit rows would leave empty. Products and the sums of a group are exact integers, and so
// is the zero point's share, z times the sum of X, in digits too. From there on fp32: the group's scale, the slice's power of
// two, the sums of slices, of digits and of warps in a fixed order, then bias and the one rounding.
//
// A four-bit code is used where it lies, in the upper half of a byte (16 q), so two codes cost three logic operations.
//
// A block has a run of tiles; its warps take their units in turn, each through a ring of its own in shared memory, and all
// share the digits of x. Weights never change, so their copies start before the kernel that writes x has ended.
#pragma once

#include "asynchrony.cuh"
#include "numbers.cuh"
#include "tiles.cuh"

namespace lowbit::cuda {

constexpr int most_rows_of_digits = 8;
constexpr int most_warps_of_digits = 12;

struct Digits {
  const uint8_t* units;  // [tiles][units_of_row] of unit_size bytes
  int unit_size;
  const void* scale;  // [n] where a row is one group, else in the units
  Stored scale_stored;
  int scale_size;
  const uint8_t* zero_point;  // [n] where a row is one group and has one, else null
  const void* x;              // [m, k]
  const void* bias;           // [n] of x's type, or null
  void* y;                    // [m, n]
  int64_t n, tiles;
  int m, k, units_of_row, units_of_pass;  // x is held for that many units at a time
  int stages, early_stages;            // of each warp's ring; copies that start before x is waited for
  int fewest_tiles, blocks_with_more;  // the first blocks have a tile more than the others
  bool has_zero, x_is_half, x_on_4_bytes;
};

// Shared memory, in this order and each on 16 bytes.
struct DigitsMemory {
  int ring, digits, sums, exponents, partial, barriers, total;
  __host__ __device__ static constexpr int on16(int size) { return (size + 15) / 16 * 16; }
  __host__ __device__ DigitsMemory(int m, int warps, int stages, int unit_size, int steps, int groups, int units, int tiles) {
    ring = 0;
    digits = ring + on16(warps * stages * unit_size);
    sums = digits + units * steps * 3 * m * 32;
    exponents = sums + units * groups * ((m + 1) / 2) * 32;
    partial = exponents + on16(units * m * 4);
    barriers = partial + tiles * warps * m * rows_of_tile * 4;
    total = barriers + on16(warps * stages * 8);
  }
};

// A place among the units of a block's tiles, one tile behind the other.
struct Place {
  int tile, unit;
  __device__ void advance(int by, int units) {
    for (unit += by; unit >= units; unit -= units) tile++;
  }
};

// Two rows share the eight columns of a product. The even one has columns 0, 1, 2 for digits 0, 1, 2 and the odd one 4, 5, 3:
// a lane's two columns are two digits of one row, or the third digits of both.
__device__ __forceinline__ constexpr int column_of(int row, int digit) {
  return row % 2 == 0 ? digit : digit == 2 ? 3 : 4 + digit;
}
template <int M>
constexpr int pairs_of = (M + 1) / 2;
template <int M>
constexpr int columns_of_pair = M == 1 ? 3 : 6;

template <bool is_signed>
__device__ __forceinline__ void multiply(int (&c)[4], const uint32_t (&a)[4], uint2 b) {
  if constexpr (is_signed)
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
  else
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}

__device__ __forceinline__ float power_of_two(int e) { return __uint_as_float(static_cast<uint32_t>(e + 127) << 23); }

// The elements of x that meet the eight codes of a lane in a step: four pairs, eight columns apart; zeros beyond the row.
__device__ __forceinline__ uint4 eight_of(const Digits& a, int row, int column) {
  const uint16_t* x = static_cast<const uint16_t*>(a.x) + static_cast<int64_t>(row) * a.k + column;
  uint32_t words[4];
  if (a.x_on_4_bytes && column + 26 <= a.k) {
#pragma unroll
    for (int i = 0; i < 4; i++) words[i] = *reinterpret_cast<const uint32_t*>(x + 8 * i);
    return {words[0], words[1], words[2], words[3]};
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    words[i] = column + 8 * i < a.k ? x[8 * i] : 0;
    if (column + 8 * i + 1 < a.k) words[i] |= static_cast<uint32_t>(x[8 * i + 1]) << 16;
  }
  return {words[0], words[1], words[2], words[3]};
}

__device__ __forceinline__ float2 two_of(uint32_t word, bool is_half) {
  if (is_half) return __half22float2(*reinterpret_cast<const __half2*>(&word));
  return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
}

// The digits of one slice of a row of x, by one warp: four lanes have a step of 32 columns in each 256. Returns its exponent.
template <class U, int M>
__device__ int digits_of_slice(uint4 (&raw)[U::columns / 256], bool is_half, int row, uint8_t* digits, int* sums, bool wants_sums) {
  constexpr int parts = U::columns / 256;
  const int lane = threadIdx.x % 32;
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < parts; i++) {
    const uint32_t words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
    for (int j = 0; j < 4; j++) most = __vmaxu2(most, words[j] & 0x7fff7fffu);
  }
  most = __reduce_max_sync(0xffffffffu, max(most & 0xffffu, most >> 16));
  const bool is_finite = most < (is_half ? 0x7c00u : 0x7f80u);
  float largest = two_of(most, is_half).x;
  const bool is_tiny = largest < 0x1p-100f;
  const float lift = is_tiny ? 0x1p100f : 1.0f;
  largest *= lift;
  const int e = most && is_finite ? static_cast<int>(__float_as_uint(largest) >> 23) - 127 : 0;
  const float factor = power_of_two(21 - e);
  constexpr int lanes_of_group = U::groups ? U::columns / U::groups / 8 : 32;
  int total = 0;
#pragma unroll
  for (int i = 0; i < parts; i++) {
    const uint32_t words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
    uint32_t biased[8];  // X + 128 (1 + 256 + 65536): its bytes are the digits, each plus 128
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float2 two = two_of(is_finite ? words[j] : 0, is_half);
      // 1.5 2^23 + X is a float whose low bits are X.
      biased[2 * j] = __float_as_uint(fmaf(two.x * lift, factor, 12582912.0f)) + (0x808080u - 0x4b400000u);
      biased[2 * j + 1] = __float_as_uint(fmaf(two.y * lift, factor, 12582912.0f)) + (0x808080u - 0x4b400000u);
    }
    uint2 digit[3];
#pragma unroll
    for (int half = 0; half < 2; half++) {  // bytes in the order of a lane's elements 0, 2, 1, 3
      const uint32_t* b = biased + 4 * half;
      const uint32_t even = __byte_perm(b[0], b[2], 0x5140), odd = __byte_perm(b[1], b[3], 0x5140);
      const uint32_t top = __byte_perm(__byte_perm(b[0], b[2], 0x62), __byte_perm(b[1], b[3], 0x62), 0x5410);
      (half ? digit[0].y : digit[0].x) = __byte_perm(even, odd, 0x5410) ^ 0x80808080u;
      (half ? digit[1].y : digit[1].x) = __byte_perm(even, odd, 0x7632) ^ 0x80808080u;
      (half ? digit[2].y : digit[2].x) = top ^ 0x80808080u;
    }
    uint8_t* step = digits + (i * 8 + lane / 4) * (3 * M * 32) + row / 2 * (columns_of_pair<M> * 32) + lane % 4 * 8;
#pragma unroll
    for (int d = 0; d < 3; d++) *reinterpret_cast<uint2*>(step + column_of(row, d) * 32) = digit[d];
    if (wants_sums) {
#pragma unroll
      for (int j = 0; j < 8; j++) total += static_cast<int>(biased[j]) & 0xffffff;
      total -= 8 * 0x808080;
      if (U::groups || i + 1 == parts) {
#pragma unroll
        for (int apart = 1; apart < lanes_of_group; apart *= 2) total += __shfl_xor_sync(0xffffffffu, total, apart);
        if (lane % lanes_of_group == 0) {
          const int g = U::groups ? i * (32 / lanes_of_group) + lane / lanes_of_group : 0;
          int* of_group = sums + (g * pairs_of<M> + row / 2) * 8;
          const int low = static_cast<int8_t>(total), rest = (total - low) >> 8, middle = static_cast<int8_t>(rest);
          of_group[column_of(row, 0)] = low;
          of_group[column_of(row, 1)] = middle;
          of_group[column_of(row, 2)] = (rest - middle) >> 8;
#pragma unroll
          for (int column = M == 1 ? 3 : 6; column < 8; column++) of_group[column] = 0;
        }
        total = 0;
      }
    }
  }
  return is_finite ? (is_tiny ? e - 100 : e) : 1 << 20;
}

// The digits of units [first, first + units) of x, by the whole block. The exponent of a slice with Inf or NaN is 2^20.
// `after_loads` is called once, when the first loads of x are on their way.
template <class U, int M, bool has_zero, class F>
__device__ __forceinline__ void digits_of(const Digits& a, int first, int units, uint8_t* digits, int* sums, int* exponents,
                                          F after_loads) {
  constexpr int parts = U::columns / 256, groups = U::groups ? U::groups : 1;
  constexpr int together = 2, ahead = 2 * together;  // slices whose steps interleave, and whose loads are under way
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, slices = units * M;
  uint4 raw[ahead][parts];
  const auto load = [&](int s, uint4(&to)[parts]) {
#pragma unroll
    for (int i = 0; i < parts; i++)
      to[i] = s < slices && s % M < a.m ? eight_of(a, s % M, (first + s / M) * U::columns + i * 256 + lane / 4 * 32 + lane % 4 * 2) : uint4{0, 0, 0, 0};
  };
#pragma unroll
  for (int j = 0; j < ahead; j++) load(warp + j * warps, raw[j]);
  after_loads();
#pragma unroll 1
  for (int s0 = warp; s0 < slices; s0 += together * warps) {
#pragma unroll
    for (int j = 0; j < together; j++) {
      const int s = s0 + j * warps, u = s / M;
      if (s >= slices) break;
      const int e = digits_of_slice<U, M>(raw[j], a.x_is_half, s % M, digits + u * (U::steps * 3 * M * 32),
                                          sums + u * (groups * pairs_of<M> * 8), has_zero);
      if (lane == 0) exponents[s] = e;
    }
#pragma unroll
    for (int j = 0; j < together; j++) {
#pragma unroll
      for (int i = 0; i < parts; i++) raw[j][i] = raw[j + together][i];
      load(s0 + (j + ahead) * warps, raw[j + together]);
    }
  }
}

// Sixteen bytes of codes as the registers of operand A, once for each step of 32 columns that they hold.
template <int bits>
__device__ __forceinline__ void operands(uint4 w, uint32_t (&a)[8 / bits][4]) {
  const uint32_t words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if constexpr (bits == 8) {
      a[0][i] = words[i];
    } else {
      a[0][i] = words[i] << 4 & 0xf0f0f0f0u;
      a[1][i] = words[i] & 0xf0f0f0f0u;
    }
  }
}

__device__ __forceinline__ float2 two_scales(const uint8_t* scales, Stored stored, int place) {
  if (stored == Stored::float32) return *reinterpret_cast<const float2*>(scales + place * 4);
  return two_of(*reinterpret_cast<const uint32_t*>(scales + place * 2), stored == Stored::float16);
}

// The products of a unit: rows lane / 4 and that + 8, columns 2 (lane % 4) and that + 1 of the digits of each pair of rows.
// One product waits for the one before it in its sum, so four sums are under way at a time.
template <int bits, int group, bool has_zero, int M>
__device__ __forceinline__ void products_of_unit(const uint8_t* unit, const uint8_t* digits, const int* sums, const Digits& a,
                                                 int2 row_zero, float (&sum)[pairs_of<M>][4]) {
  using U = Unit<bits, group, has_zero>;
  constexpr int fields = 8 / bits, shift = bits == 4 ? 4 : 0, pairs = pairs_of<M>;
  constexpr int chains = 4 / pairs, length = U::steps / chains, chains_of_group = (U::steps_of_group + length - 1) / length;
  // Sums of 128 products and fewer stay within 2^22, so they come as floats 1.5 2^23 + sum; but for 8 bits with a zero point.
  constexpr bool is_short = U::steps_of_group <= 4 && !(bits == 8 && has_zero);
  constexpr int start = is_short ? 0x4b400000 : 0;
  const int lane = threadIdx.x % 32;
  const uint8_t* lane_codes = unit + lane * 16;
  const uint8_t* lane_digits = digits + (lane / 4) * 32 + lane % 4 * 8;
  const bool has_column = lane / 4 < columns_of_pair<M>;
  int c[chains][pairs][4];
  float2 scale[chains];
  const auto begin = [&](int j, int g) {  // the sums of a group in chain j, from less the zero point's share on
    int2 zero = row_zero;
    if constexpr (group > 0) {
      scale[j] = two_scales(unit + U::code_bytes, a.scale_stored, U::place(g, lane / 4));
      if constexpr (has_zero) {
        const uint32_t two = *reinterpret_cast<const uint16_t*>(unit + U::zero_at(a.scale_size) + U::place(g, lane / 4));
        zero = {static_cast<int>(two & 0xff), static_cast<int>(two >> 8)};
      }
    }
#pragma unroll
    for (int p = 0; p < pairs; p++) {
      c[j][p][0] = c[j][p][1] = c[j][p][2] = c[j][p][3] = start;
      if constexpr (has_zero) {
        const int2 of_digits = *reinterpret_cast<const int2*>(sums + (g * pairs + p) * 8 + lane % 4 * 2);
        c[j][p][0] -= (zero.x << shift) * of_digits.x;
        c[j][p][1] -= (zero.x << shift) * of_digits.y;
        c[j][p][2] -= (zero.y << shift) * of_digits.x;
        c[j][p][3] -= (zero.y << shift) * of_digits.y;
      }
    }
  };
#pragma unroll
  for (int at = 0; at < length; at += fields) {
    uint32_t codes[chains][fields][4];
#pragma unroll
    for (int j = 0; j < chains; j++)
      operands<bits>(*reinterpret_cast<const uint4*>(lane_codes + (j * length + at) / fields * 512), codes[j]);
#pragma unroll
    for (int f = 0; f < fields; f++) {
      const int step = at + f;
#pragma unroll
      for (int j = 0; j < chains; j++) {
        if (step % U::steps_of_group == 0) {
          if (j % chains_of_group == 0) {
            begin(j, (j * length + step) / U::steps_of_group);
          } else {
#pragma unroll
            for (int p = 0; p < pairs; p++) c[j][p][0] = c[j][p][1] = c[j][p][2] = c[j][p][3] = 0;
          }
        }
#pragma unroll
        for (int p = 0; p < pairs; p++) {
          uint2 b = {0, 0};
          if (has_column)
            b = *reinterpret_cast<const uint2*>(lane_digits + (j * length + step) * (3 * M * 32) + p * (columns_of_pair<M> * 32));
          multiply<!has_zero>(c[j][p], codes[j][f], b);
        }
      }
      if ((step + 1) % U::steps_of_group && step + 1 < length) continue;
#pragma unroll
      for (int j = 0; j < chains; j += chains_of_group)
#pragma unroll
        for (int p = 0; p < pairs; p++)
#pragma unroll
          for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int other = 1; other < chains_of_group; other++) c[j][p][i] += c[j + other][p][i];
            const float whole = is_short ? __int_as_float(c[j][p][i]) - 12582912.0f : static_cast<float>(c[j][p][i]);
            sum[p][i] = group > 0 ? fmaf(whole, i < 2 ? scale[j].x : scale[j].y, sum[p][i]) : whole;
          }
    }
  }
}

// What the slices of x that hold Inf or NaN add to y: plain fp32 products.
template <int bits, int group, bool has_zero>
__device__ __noinline__ float products_beyond(const Digits& a, int64_t tile, int row, int m, int unit) {
  using U = Unit<bits, group, has_zero>;
  const uint8_t* bytes = a.units + (tile * a.units_of_row + unit) * a.unit_size;
  const int64_t n = tile * rows_of_tile + row;
  float sum = 0;
#pragma unroll 1
  for (int k = 0; k < U::columns && unit * U::columns + k < a.k; k++) {
    uint32_t code = code_of_tile<bits>(bytes, row, k);
    float scale, zero = 0;
    if constexpr (!has_zero) code ^= 1u << (bits - 1);
    if constexpr (group > 0) {
      scale = number_at(bytes + U::code_bytes, a.scale_stored, U::place(k / group, row));
      if constexpr (has_zero) zero = bytes[U::zero_at(a.scale_size) + U::place(k / group, row)];
    } else {
      scale = number_at(a.scale, a.scale_stored, n);
      if constexpr (has_zero) zero = a.zero_point[n];
    }
    if constexpr (!has_zero) zero = 1u << (bits - 1);
    const float x = number_at(a.x, a.x_is_half ? Stored::float16 : Stored::bfloat16, int64_t{m} * a.k + unit * U::columns + k);
    sum = fmaf((static_cast<float>(code) - zero) * scale, x, sum);
  }
  return sum;
}

template <int bits, int group, bool has_zero, int M>
__global__ void __launch_bounds__(most_warps_of_digits * 32, 1) digits_linear(const __grid_constant__ Digits a) {
  using U = Unit<bits, group, has_zero>;
  constexpr int groups = U::groups ? U::groups : 1, pairs = pairs_of<M>;
  extern __shared__ __align__(128) uint8_t memory[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const DigitsMemory at(M, warps, a.stages, a.unit_size, U::steps, has_zero ? groups : 0, a.units_of_pass,
                        a.fewest_tiles + (a.blocks_with_more > 0));
  uint8_t* digits = memory + at.digits;
  int *sums = reinterpret_cast<int*>(memory + at.sums), *exponents = reinterpret_cast<int*>(memory + at.exponents);
  float* partial = reinterpret_cast<float*>(memory + at.partial);
  const int block = blockIdx.x, tiles = a.fewest_tiles + (block < a.blocks_with_more);
  const int64_t first_tile = static_cast<int64_t>(block) * a.fewest_tiles + min(block, a.blocks_with_more);
  const uint8_t* weights = a.units + first_tile * a.units_of_row * a.unit_size;

  let_dependents_start();
#if LOWBIT_BULK_COPIES
  uint8_t* ring = memory + at.ring + warp * a.stages * a.unit_size;
  uint64_t* barriers = reinterpret_cast<uint64_t*>(memory + at.barriers) + warp * a.stages;
  const uint64_t policy = read_once();
  if (lane == 0) {
    for (int s = 0; s < a.stages; s++) start_barrier(barriers + s);
    show_barriers_to_copies();
  }
  __syncwarp();
  int stage = 0, parity = 0;
#endif
  for (int i = threadIdx.x; i < tiles * warps * M * rows_of_tile; i += blockDim.x) partial[i] = 0;
  bool is_finite = true;

  for (int first = 0; first < a.units_of_row; first += a.units_of_pass) {
    const int units = min(a.units_of_pass, a.units_of_row - first);
    const auto bytes_of = [&](Place p) {
      return weights + (static_cast<int64_t>(p.tile) * a.units_of_row + first + p.unit) * a.unit_size;
    };
    Place now = {0, 0};
    now.advance(warp, units);
    if (first) __syncthreads();  // the digits of the pass before are still being read
#if LOWBIT_BULK_COPIES
    Place next = now;  // what is copied next
    int slot = stage;
    const auto start_copies = [&](int count) {
      for (; count > 0 && next.tile < tiles; count--, next.advance(warps, units)) {
        if (lane == 0) copy(ring + slot * a.unit_size, bytes_of(next), a.unit_size, barriers + slot, policy);
        if (++slot == a.stages) slot = 0;
      }
    };
    start_copies(a.early_stages);
#endif
    if (first == 0) wait_for_predecessors();
    digits_of<U, M, has_zero>(a, first, units, digits, sums, exponents, [&] {
#if LOWBIT_BULK_COPIES
      __syncthreads();  // behind the loads of x of all warps, which would else wait behind these
      start_copies(a.stages - a.early_stages);
#endif
    });
    __syncthreads();

    float total[pairs][4] = {};
    while (now.tile < tiles) {
      const int tile = now.tile, u = now.unit;
      int2 row_zero = {0, 0};
      if constexpr (has_zero && group == 0) {
        const int64_t n = (first_tile + tile) * rows_of_tile + lane / 4;
        row_zero = {n < a.n ? a.zero_point[n] : 0, n + 8 < a.n ? a.zero_point[n + 8] : 0};
      }
      float sum[pairs][4] = {};
#if LOWBIT_BULK_COPIES
      wait(barriers + stage, parity);
      const uint8_t* unit = ring + stage * a.unit_size;
#else
      const uint8_t* unit = bytes_of(now);
#endif
      products_of_unit<bits, group, has_zero, M>(unit, digits + u * (U::steps * 3 * M * 32), sums + u * (groups * pairs * 8), a,
                                                 row_zero, sum);
#if LOWBIT_BULK_COPIES
      __syncwarp();
      start_copies(1);
      if (++stage == a.stages) stage = 0, parity ^= 1;
#endif
      // Digit d of the slice counts 2^(e - 21 + 8 d), times 1/16 where codes were used as 16 q. In two factors, since one
      // may be no fp32 number where x is subnormal.
      const int t = lane % 4;
#pragma unroll
      for (int p = 0; p < pairs; p++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const int row = M == 1 ? 0 : 2 * p + (t == 2 || (t == 1 && j)), digit = t == 1 ? 2 : j;
          int e = exponents[u * M + row];
          if (e == 1 << 20) e = 0, is_finite = false;
          const int power = e - 21 + 8 * digit - (bits == 4 ? 4 : 0), one = power >> 1;
          const float f = power_of_two(one), g = power_of_two(power - one);
          total[p][j] += sum[p][j] * f * g;
          total[p][2 + j] += sum[p][2 + j] * f * g;
        }
      now.advance(warps, units);
      if (now.tile != tile) {
        float* rows = partial + (tile * warps + warp) * (M * rows_of_tile) + lane / 4;
#pragma unroll
        for (int p = 0; p < pairs; p++)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const float both = total[p][2 * half] + total[p][2 * half + 1];
            const float third = __shfl_down_sync(0xffffffffu, total[p][2 * half], 1);
            if (t == 0) rows[2 * p * rows_of_tile + half * 8] += both + third;
            if constexpr (M > 1) {
              const float other = __shfl_up_sync(0xffffffffu, total[p][2 * half + 1], 1);
              if (t == 2) rows[(2 * p + 1) * rows_of_tile + half * 8] += both + other;
            }
            total[p][2 * half] = total[p][2 * half + 1] = 0;
          }
      }
    }
  }

  is_finite = __syncthreads_and(is_finite);
  for (int i = threadIdx.x; i < tiles * M * rows_of_tile; i += blockDim.x) {
    const int tile = i / (M * rows_of_tile), m = i / rows_of_tile % M, row = i % rows_of_tile;
    const int64_t n = (first_tile + tile) * rows_of_tile + row;
    if (n >= a.n || m >= a.m) continue;
    float sum = 0;
    for (int w = 0; w < warps; w++) sum += partial[(tile * warps + w) * (M * rows_of_tile) + m * rows_of_tile + row];
    if constexpr (group == 0) sum *= number_at(a.scale, a.scale_stored, n);
    if (!is_finite) {
#pragma unroll 1
      for (int u = 0; u < a.units_of_row; u++) {
        bool has_all = true;
#pragma unroll 1
        for (int k = 0; k < U::columns && u * U::columns + k < a.k; k++) {
          const uint16_t x = static_cast<const uint16_t*>(a.x)[int64_t{m} * a.k + u * U::columns + k];
          has_all &= (x & 0x7fff) < (a.x_is_half ? 0x7c00 : 0x7f80);
        }
        if (!has_all) sum += products_beyond<bits, group, has_zero>(a, first_tile + tile, row, m, u);
      }
    }
    if (a.bias) sum += number_at(a.bias, a.x_is_half ? Stored::float16 : Stored::bfloat16, n);
    const int64_t to = m * a.n + n;
    if (a.x_is_half) {
      static_cast<__half*>(a.y)[to] = from_float<__half>(sum);
    } else {
      static_cast<__nv_bfloat16*>(a.y)[to] = from_float<__nv_bfloat16>(sum);
    }
  }
}

}  // namespace lowbit::cuda
