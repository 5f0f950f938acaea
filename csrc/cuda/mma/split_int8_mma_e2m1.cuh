// Products of a unit of e2m1 codes and the limbs of one row of x (split_activations.cuh) on the integer tensor cores.
//
// Four times an e2m1 value is an even integer of -24 .. 24. PRMT looks up four codes at once in a table of eight bytes: three
// bits of a code index, and a set fourth bit replicates the sign of that byte, which is 0 in these tables. So one lookup gives
// the positive values and 0 for negative codes; a second one, with the codes' signs flipped, gives half of each negative value
// without its sign bit and 0 for positive codes; twice the second plus the first are the values.
//
// The four codes of a lookup belong alternately to two steps of 32 columns. Their sums stay apart because each step's limbs are
// paired with zeros in place of the other's: three columns of operand B hold the limbs of the even step and three those of the
// odd one, so a lane sees the sums, and needs the scales, of one of them. There is no room for a second row of x.
#pragma once

#include "../ptx/bulk_copy.cuh"
#include "split_int8_mma.cuh"

namespace lowbit::cuda {

// Limbs of two steps: for both parities three limbs of 64 bytes each; a lane's 16 bytes are contiguous: two registers of operand
// B for the first 16 columns of the steps and two for the second.
struct LimbsByParity {
  static constexpr int size_of_parity = 3 * 64, size_of_pair = 2 * size_of_parity, size_of_part = 4 * size_of_pair;
  static constexpr bool splits_columns = true, has_limb_per_lane = false;
  __device__ static __forceinline__ int limb_of(int column) { return LimbsByStep<1>::limb_of(column); }

  __device__ static __forceinline__ int place_to(int lane) {
    return lane / 8 * size_of_pair + lane / 4 % 2 * size_of_parity + lane % 4 * 16;
  }
  __device__ static __forceinline__ void write(const uint32_t (&biased)[8], int row, uint8_t* to) {
    const int parity = threadIdx.x / 4 % 2;
    const uint32_t flipped = 0x00800080u << 8 * parity;
#pragma unroll
    for (int d = 0; d < 3; d++) {
      const uint32_t take = parity ? 0x0303u | d << 4 | (4 + d) << 12 : 0x3030u | d | (4 + d) << 8;  // selects zero
      uint4 limb;
      limb.x = __byte_perm(biased[0], biased[2], take) ^ flipped;
      limb.y = __byte_perm(biased[1], biased[3], take) ^ flipped;
      limb.z = __byte_perm(biased[4], biased[6], take) ^ flipped;
      limb.w = __byte_perm(biased[5], biased[7], take) ^ flipped;
      *reinterpret_cast<uint4*>(to + column_of(row, d) * 64) = limb;
    }
  }

  // Offset of a lane's registers of operand B: columns 0, 1, 2 and 4, 5, 6. The other lanes read values that are ignored, from
  // banks that do not conflict with their neighbours.
  __device__ static __forceinline__ int place_of_lane() {
    const int lane = threadIdx.x % 32, column = lane / 4;
    return (column - (column > 3) - (column > 6) * 2) * 64 + lane % 4 * 16;
  }
};

// d = a b + c
__device__ __forceinline__ void mma_m16n8k32_from(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const int (&c)[4]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

// Looks up the low four codes in a table of eight bytes; the high bit of a code asks for the sign of the byte instead,
// replicated. (__byte_perm ignores that bit.)
__device__ __forceinline__ uint32_t look_up(uint32_t low, uint32_t high, uint32_t codes) {
  uint32_t four;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(four) : "r"(low), "r"(high), "r"(codes));
  return four;
}

struct TablesOfE2m1 {
  // The low words stay in registers: an instruction has room for one immediate only. threadIdx.y is 0; adding it keeps the
  // compiler from rematerializing the constants at every lookup.
  uint32_t positive = 0x06040200u + threadIdx.y, negative = 0x7d7e7f00u + threadIdx.y;

  __device__ __forceinline__ uint32_t numbers_of(uint32_t codes, uint32_t flipped) const {
    return look_up(negative, 0x74787a7cu, flipped) * 2 + look_up(positive, 0x18100c08u, codes);
  }
  // Operand A: four times the values of the codes in a word of each of the lane's two rows.
  __device__ __forceinline__ void operand(uint32_t word, uint32_t word8, uint32_t (&a)[4]) const {
    const uint32_t flipped = word ^ 0x88888888u, turned8 = word8 ^ 0x88888888u;
    a[0] = numbers_of(word, flipped);
    a[1] = numbers_of(word8, turned8);
    a[2] = numbers_of(word >> 16, flipped >> 16);
    a[3] = numbers_of(word8 >> 16, turned8 >> 16);
  }
};

// e2m1 weights for split_int8_gemv: groups of 32 with e8m0 scales or of 16 with e4m3; otherwise (`none`) of 32, 64 or 128.
enum class NarrowScale { none, e8m0, e4m3 };

template <NarrowScale narrow, int group>
struct E2m1Weights {
  static constexpr int bits = 4, columns = 512, grains = columns / group, code_bytes = tile_rows * columns * bits / 8;
  static constexpr int unit_log2 = 2 - sum_log2;  // the accumulators count in units of 2^-unit_log2
  static constexpr bool has_zero = false, has_shares = false, has_outer = narrow == NarrowScale::e4m3;
  using HeldCodes = SharedLimbs;
  template <int M>
  using Order = LimbsByParity;

  // Value of a code, with its scale where the unit has one.
  __device__ static float number(const uint8_t* unit, const Groups& of, int row, int k, uint32_t) {
    const uint32_t code = code_of_unit<bits>(unit, row, k), size = code & 7;
    const float number = size < 2 ? 0.5f * size : static_cast<float>(2 + size % 2 << size / 2) * 0.25f;
    const int place = k / group * tile_rows + row % 8 * 2 + row / 8;
    const uint8_t* scales = unit + code_bytes;
    const float scale = narrow == NarrowScale::e8m0   ? e8m0_to_float(scales[place])
                        : narrow == NarrowScale::e4m3 ? e4m3_to_float(scales[place])
                        : of.are_inside          ? load_float(scales, of.dtype, place)
                                                 : 1.0f;
    return scale * (code & 8 ? -number : number);
  }

  template <int M>
  __device__ static __forceinline__ void add_products(const uint8_t* unit, const SharedLimbs& x, const Groups& of, int,
                                                      float (&sum)[4]) {
    const float4 before = {sum[0], sum[1], sum[2], sum[3]};
    products<true>(unit, x.limbs, of, sum);
    if (narrow == NarrowScale::e8m0 && !are_usual(unit + code_bytes)) {  // tested last, so that nothing waits for the load
      const float4 found = products_slow_path(unit, x.limbs, of);
      sum[0] = before.x + found.x, sum[1] = before.y + found.y, sum[2] = before.z + found.z, sum[3] = before.w + found.w;
    }
  }

 private:
  // 8-bit scales of 128 columns, four in a register: of a lane's two rows in two groups of its parity.
  static constexpr int registers = group == 16 ? 2 : 1;
  __device__ static __forceinline__ int group_of(int i, int parity, int second) {
    return group == 16 ? 4 * i + 2 * parity + second : 2 * second + parity;
  }
  __device__ static __forceinline__ void load_narrow(const uint8_t* scales, uint32_t (&four)[registers]) {
    const int lane = threadIdx.x % 32;
#if LOWBIT_BULK_COPIES
    // ldmatrix.trans: the rows of W are the columns of the transposed matrix; the lane's address is that of a group, eight rows
    // of matrix lane / 8.
    const uint32_t at = shared_address(scales + group_of(lane / 8 % registers, lane % 8 / 4, lane % 2) * tile_rows);
    if constexpr (registers == 1)
      asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(four[0]) : "r"(at) : "memory");
    else
      asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                   : "=r"(four[0]), "=r"(four[1])
                   : "r"(at)
                   : "memory");
#else
    const auto two = [&](int i, int second) {
      const uint8_t* at = scales + group_of(i, lane % 4 / 2, second) * tile_rows + lane / 4 * 2;
      return static_cast<uint32_t>(*reinterpret_cast<const uint16_t*>(at));
    };
#pragma unroll
    for (int i = 0; i < registers; i++) four[i] = two(i, 0) | two(i, 1) << 16;
#endif
  }

  // Whether all e8m0 scales are normal fp32 numbers by exponent alone: none is 0 or 255.
  __device__ static __forceinline__ bool are_usual(const uint8_t* scales) {
    const uint2 eight = *reinterpret_cast<const uint2*>(scales + threadIdx.x % 32 * 8);
    const auto unusual = [](uint32_t w) { return ((w - 0x01010101u) & ~w) | ((~w - 0x01010101u) & w); };
    return __all_sync(0xffffffffu, ((unusual(eight.x) | unusual(eight.y)) & 0x80808080u) == 0);
  }

  // Scales of both rows from half a register.
  template <bool is_usual>
  __device__ static __forceinline__ float2 two_scales(uint32_t four, int second) {
    const uint32_t two = four >> 16 * second;
    if constexpr (narrow == NarrowScale::e8m0 && is_usual) {
      const uint32_t low = four << (second ? 7 : 23), high = second ? four >> 1 : four << 15;
      return {__uint_as_float(low & 0x7f800000u), __uint_as_float(high & 0x7f800000u)};
    } else if constexpr (narrow == NarrowScale::e8m0) {
      return {e8m0_to_float(two & 0xff), e8m0_to_float(two >> 8 & 0xff)};
    } else {
#if LOWBIT_BULK_COPIES
      uint32_t halves;
      asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(two)));
      return __half22float2(reinterpret_cast<const __half2&>(halves));
#else
      return {e4m3_to_float(two & 0xff), e4m3_to_float(two >> 8 & 0xff)};
#endif
    }
  }

  // Products of a lane: rows lane / 4 and lane / 4 + 8, two limbs of the columns of its parity. Two spans are interleaved, each
  // of two steps or of one group.
  template <bool is_usual>
  __device__ static __forceinline__ void products(const uint8_t* unit, const uint8_t* limbs, const Groups& of, float (&sum)[4]) {
    constexpr int pairs = columns / 64, pairs_of_span = group > 64 ? group / 64 : 1;
    constexpr int sums = group == 16 ? 2 : 1;  // sums in a span
    const int lane = threadIdx.x % 32, parity = lane % 4 / 2;
    const uint8_t *lane_codes = unit + lane * 16, *lane_limbs = limbs + LimbsByParity::place_of_lane();
    const int start[4] = {sum_bias, sum_bias, sum_bias, sum_bias};
    const TablesOfE2m1 tables;
#pragma unroll
    for (int from = 0; from < pairs; from += 2 * pairs_of_span) {
      const uint8_t* scales = unit + code_bytes + from * 64 / group * tile_rows * (narrow == NarrowScale::none ? of.scale_size : 1);
      uint32_t four[registers];
      float2 scale[2 * sums];
      if constexpr (narrow != NarrowScale::none)
        load_narrow(scales, four);
      else if constexpr (group == 32)
        scales_of<false, 2, 2>(scales + parity * tile_rows * of.scale_size, of, scale);
      else
        scales_of<false, 2>(scales, of, scale);

      int c[2][sums][4];
#pragma unroll
      for (int at = 0; at < pairs_of_span; at++) {
        uint4 codes[2], b[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const int pair = from + j * pairs_of_span + at;
          codes[j] = *reinterpret_cast<const uint4*>(lane_codes + pair * 512);
          b[j] = *reinterpret_cast<const uint4*>(lane_limbs + pair * LimbsByParity::size_of_pair);
        }
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
          for (int j = 0; j < 2; j++) {
            uint32_t a[4];
            tables.operand(half ? codes[j].z : codes[j].x, half ? codes[j].w : codes[j].y, a);
            int(&to)[4] = c[j][half % sums];
            mma_m16n8k32_from(to, a, half ? b[j].z : b[j].x, half ? b[j].w : b[j].y, *(at == 0 && half < sums ? &start : &to));
          }
      }
#pragma unroll
      for (int j = 0; j < 2; j++)
#pragma unroll
        for (int s = 0; s < sums; s++) {
          const int i = j * sums + s;
          if constexpr (narrow != NarrowScale::none) scale[i] = two_scales<is_usual>(four[i / 2], i % 2);
#pragma unroll
          for (int e = 0; e < 4; e++) sum[e] = fmaf(sum_to_float(c[j][s][e]), e < 2 ? scale[i].x : scale[i].y, sum[e]);
        }
    }
  }

  static __device__ __noinline__ float4 products_slow_path(const uint8_t* unit, const uint8_t* limbs, const Groups& of) {
    float sum[4] = {};
    products<false>(unit, limbs, of, sum);
    return {sum[0], sum[1], sum[2], sum[3]};
  }
};

}  // namespace lowbit::cuda
