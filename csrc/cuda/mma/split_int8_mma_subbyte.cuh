// Products of a unit of integers and the limbs of one row of x on the integer tensor cores, with codes left where they are in
// their bytes. Only codes that are composed of leftover bits of other bytes are assembled (mma_fragment_layout.cuh).
//
// Widths that fill a byte: operand A is the byte with all but one field masked, or with the fields above it too. For a byte of
// two fields, `low` times the limbs of both steps and the whole byte times those of the higher step give both products, since 16
// high = byte - low. Other widths are masked in place; codes of a group at the same bit offset share an accumulator. Products,
// the sums of a group and their combination by powers of two are exact integers, and so is the zero point's share, z times the
// sum of the limbs. A signed code is an unsigned one with zero point 2^(bits - 1). Scales and sums of groups are fp32.
#pragma once

#include "split_int8_mma.cuh"
#include "f16x2_math.cuh"

namespace lowbit::cuda {

// Two steps of 32 columns share an operand B: column 2 d has limb d of the even step, column 2 d + 1 that of the odd one, so that
// lane % 4 = d has the sums of limb d for both (columns 6 and 7 repeat 0 and 1 and are ignored). Four steps are stored together:
// 64 bytes for each limb and parity, of which 16 are a lane's registers for two pairs of steps.
struct LimbsByPair {
  static constexpr int size_of_quad = 384, size_of_pair = size_of_quad / 2, size_of_part = 2 * size_of_quad;
  static constexpr bool splits_columns = false, has_limb_per_lane = true;
  __device__ static __forceinline__ int place_to(int lane) {
    return lane / 16 * size_of_quad + lane / 4 % 2 * 64 + lane % 4 * 16 + lane / 8 % 2 * 8;
  }
  __device__ static __forceinline__ int limb_of(int column) { return column < 6 ? column / 2 : 0; }
  __device__ static __forceinline__ void write(const uint32_t (&biased)[8], int, uint8_t* to) {
    uint2 limb[3];
    extract_limbs(biased, limb);
#pragma unroll
    for (int d = 0; d < 3; d++) *reinterpret_cast<uint2*>(to + d * 128) = limb[d];
  }
  // Offset of a lane's registers of operand B.
  __device__ static __forceinline__ int place_of(int lane) { return (lane / 4 - (lane < 24 ? 0 : 6)) * 64 + lane % 4 * 16; }
};

// The same for steps four apart, of eight that are stored together.
struct LimbsByHalf : LimbsByPair {
  __device__ static __forceinline__ int place_to(int lane) {
    return lane / 8 % 2 * size_of_quad + lane / 16 * 64 + lane % 4 * 16 + lane / 4 % 2 * 8;
  }
};

// a b + c in one instruction, which the compiler would otherwise split.
__device__ __forceinline__ int product_on(int a, int b, int c) {
  int sum;
  asm("mad.lo.s32 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}

// A lane's four words with all bits but those of `mask` cleared.
__device__ __forceinline__ void masked(const uint4& words, uint32_t mask, uint32_t (&a)[4]) {
  a[0] = words.x & mask, a[1] = words.y & mask, a[2] = words.z & mask, a[3] = words.w & mask;
}

// Adds the products of four steps to the integers of their groups, [group][row of W], in units of 2^-log. flips: codes are
// signed.
template <int width, int log, int grain, bool flips>
__device__ __forceinline__ void add_fields(const uint8_t* lane_codes, int quad, const uint4& b, int (&v)[4 / grain][2]) {
  constexpr int fields = 8 / width;
  const auto word = [&](int i) {
    constexpr uint32_t signs = flips ? (0xffu / ((1u << width) - 1) << width - 1) * 0x01010101u : 0;
    const uint4 four = *reinterpret_cast<const uint4*>(lane_codes + (quad * 4 / fields + i) * 512);
    return uint4{four.x ^ signs, four.y ^ signs, four.z ^ signs, four.w ^ signs};
  };
  if constexpr (width == 4) {  // separate accumulators for two steps; the second pair of a group continues those of the first
    constexpr int length = grain == 4 ? 2 : 1, up = log - 4;
#pragma unroll
    for (int first = 0; first < 2; first += length) {
      int lows[4] = {}, bytes[4] = {};
#pragma unroll
      for (int p = first; p < first + length; p++) {
        const uint4 both = word(p);
        uint32_t a[4], a1[4];
        masked(both, 0x0f0f0f0fu, a);
        masked(both, 0xffffffffu, a1);
        mma_m16n8k32<false>(lows, a, p ? b.z : b.x, p ? b.w : b.y);
        mma_m16n8k32<false>(bytes, a1, p ? b.z : b.x, p ? b.w : b.y);
      }
#pragma unroll
      for (int row = 0; row < 2; row++) {
        v[2 * first / grain][row] += lows[2 * row] << 4 + up;
        v[(2 * first + 1) / grain][row] += bytes[2 * row + 1] - lows[2 * row + 1] << up;
      }
    }
  } else {
    const uint4 all = word(0);
#pragma unroll
    for (int step = 0; step < 4; step++) {
      const int at = step % fields * width;
      uint32_t a[4];
      int c[4] = {};
      masked(all, ((1u << width) - 1 << at) * 0x01010101u, a);
      mma_m16n8k32<false>(c, a, step / 2 ? b.z : b.x, step / 2 ? b.w : b.y);
#pragma unroll
      for (int row = 0; row < 2; row++) v[step / grain][row] += c[2 * row + step % 2] << log - at;
    }
  }
}

// The same for widths that do not divide eight, and four of eight steps, the first or second `half`; b: registers of all eight.
template <int bits, int log, int grain, bool flips>
__device__ __forceinline__ void add_places(const uint8_t* lane_codes, int half, const uint4 (&b)[2], int (&v)[4 / grain][2]) {
  const int whole_at = bit_of_code(bits, half * 4 % steps_per_run(bits)), rest_at = 8 - bits;
  uint32_t whole_sign = 0x01010101u << whole_at + bits - 1, rest_sign = 0x80808080u;
  if constexpr (flips) opaque(whole_sign), opaque(rest_sign);
#pragma unroll
  for (int g = 0; g < 4 / grain; g++) {
    int whole[4] = {}, rest[4] = {};
#pragma unroll
    for (int step = g * grain; step < (g + 1) * grain; step++) {
      const bool is_there = is_whole(bits, (half * 4 + step) % steps_per_run(bits));
      const int at = is_there ? whole_at : rest_at;
      uint32_t a[4];
      words_of<bits>(lane_codes, half * 4 + step, a);
      const uint32_t mask = ((1u << bits) - 1 << at) * 0x01010101u;
#pragma unroll
      for (int i = 0; i < 4; i++) a[i] = flips ? and_xor(a[i], mask, is_there ? whole_sign : rest_sign) : a[i] & mask;
      const uint4& two = b[step / 2];
      mma_m16n8k32<false>(is_there ? whole : rest, a, step % 2 ? two.z : two.x, step % 2 ? two.w : two.y);
    }
#pragma unroll
    for (int row = 0; row < 2; row++)
      v[g][row] += (whole[2 * row + half] << log - whole_at) + (rest[2 * row + half] << log - rest_at);
  }
}

// Integer weights of fewer than eight bits for split_int8_gemv and one row of x.
template <int code_bits, int grain, bool zero>
struct FieldWeights : IntegerWeights<code_bits, grain, zero> {
  using Base = IntegerWeights<code_bits, grain, zero>;
  using Base::columns, Base::steps, Base::code_bytes, Base::zero_at;
  static constexpr int bits = code_bits, integer_log2 = 8 - bits;  // no field starts below bit 1
  static constexpr int unit_log2 = integer_log2 - sum_log2;
  static constexpr bool has_zero = zero, has_shares = true, has_outer = false;
  static constexpr bool fills_bytes = 8 % bits == 0;
  static constexpr int quads = columns / 128;
  template <int M>
  using Order = std::conditional_t<fills_bytes, LimbsByPair, LimbsByHalf>;

  // Registers of operand B of a slice, and its zero-point shares where there are few groups. A warp with a single slice keeps
  // them for all tiles.
  struct HeldCodes {
    static constexpr bool has_shares = grain == 4, makes_shares = has_shares && bits <= 4;  // wider codes leave no registers
    uint4 b[quads];
    int of_group[has_shares ? quads : 1];
    const int* lane_shares;
    __device__ __forceinline__ void load_codes(const uint8_t* limbs, const int* shares, int lane, bool is_only) {
      const uint8_t* lane_limbs = limbs + LimbsByPair::place_of(lane);
#pragma unroll
      for (int i = 0; i < quads; i++) b[i] = *reinterpret_cast<const uint4*>(lane_limbs + i * LimbsByPair::size_of_quad);
      lane_shares = shares + lane % 4;
      if (makes_shares && is_only) {
        make_shares();
      } else {
#pragma unroll
        for (int i = 0; i < quads && has_shares; i++) of_group[i] = lane_shares[i * 8];
      }
    }
    __device__ __forceinline__ int share(int g) const { return has_shares ? of_group[g] : lane_shares[g * 8]; }

   private:
    __device__ __forceinline__ void make_shares() {
      constexpr int together = fills_bytes ? 1 : 2;  // groups of four steps whose zero-point shares are made together
      const uint32_t ones[4] = {0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u};
#pragma unroll
      for (int from = 0; from < quads; from += together) {
        int c[4] = {};
#pragma unroll
        for (int i = from; i < from + together; i++) {
          mma_m16n8k32<true>(c, ones, b[i].x, b[i].y);
          mma_m16n8k32<true>(c, ones, b[i].z, b[i].w);
        }
        of_group[from] = share_of(fills_bytes ? c[0] + c[1] : c[0]);
        if (!fills_bytes) of_group[from + together - 1] = share_of(c[1]);
      }
    }
  };

  // Minus the share in each limb's sum of a zero point of 1 (signed codes: 2^(bits - 1)), for each group: from lane % 4, of eight
  // values. Without zero points the accumulators start with it.
  __device__ static __forceinline__ int share_of(int limb_sum) {
    return has_zero ? -limb_sum << integer_log2 : (-limb_sum << integer_log2 + bits - 1) + sum_bias;
  }
  template <int M>
  __device__ static __forceinline__ void write_shares(const uint8_t* limbs, int* shares) {
    const int lane = threadIdx.x % 32;
    const uint32_t ones[4] = {0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u};
    const uint8_t* lane_limbs = limbs + LimbsByPair::place_of(lane);
#pragma unroll
    for (int from = 0; from < columns / 128; from += 2) {
      int of_step[8];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const uint4 b = *reinterpret_cast<const uint4*>(lane_limbs + (from + i) * LimbsByPair::size_of_quad);
        int first[4] = {}, second[4] = {};
        mma_m16n8k32<true>(first, ones, b.x, b.y);
        mma_m16n8k32<true>(second, ones, b.z, b.w);
        of_step[fills_bytes ? 4 * i : 2 * i] = first[0], of_step[fills_bytes ? 4 * i + 1 : 2 * i + 4] = first[1];
        of_step[fills_bytes ? 4 * i + 2 : 2 * i + 1] = second[0], of_step[fills_bytes ? 4 * i + 3 : 2 * i + 5] = second[1];
      }
      if (lane < 4) {
#pragma unroll
        for (int g = 0; g < 8 / grain; g++) {
          int sum = 0;
#pragma unroll
          for (int i = 0; i < grain; i++) sum += of_step[g * grain + i];
          shares[(from * 4 / grain + g) * 8 + lane] = share_of(sum);
        }
      }
    }
  }

  template <int M>
  __device__ static __forceinline__ void add_products(const uint8_t* unit, const HeldCodes& x, const Groups& groups, int lane,
                                                      float (&sum)[4]) {
    if (groups.are_usual) {  // one code path without further branches
      add_products_of<true>(unit, x, groups, lane, sum);
    } else {
      add_products_of<false>(unit, x, groups, lane, sum);
    }
  }

 private:
  template <bool is_usual>
  __device__ static __forceinline__ void add_products_of(const uint8_t* unit, const HeldCodes& x, const Groups& groups, int lane,
                                                         float (&sum)[4]) {
    constexpr int groups_of_quad = 4 / grain;
    constexpr int together = fills_bytes ? 1 : 2;  // groups of four steps whose scales are loaded together
    const uint8_t* lane_codes = unit + lane * 16;
    const uint8_t* lane_zeros = unit + zero_at(is_usual ? 2 : groups.scale_size) + lane / 4 * 2;
#pragma unroll
    for (int from = 0; from < quads; from += together) {
      constexpr int count = together * groups_of_quad;
      const int first = from * groups_of_quad;
      float2 scale[count];
      int2 points[count];
      if constexpr (is_usual) {
        const uint8_t* lane_scales = unit + code_bytes + lane / 4 * 4;
#pragma unroll
        for (int g = 0; g < count; g++)
          scale[g] = unpack_f16x2(*reinterpret_cast<const uint32_t*>(lane_scales + (first + g) * tile_rows * 2), false);
      } else {
        scales_of<false>(unit + code_bytes + first * tile_rows * groups.scale_size, groups, scale);
      }
      if constexpr (has_zero) {
#pragma unroll
        for (int g = 0; g < count; g++) points[g] = groups.zero_of_row;
        if (is_usual || groups.are_inside) {
#pragma unroll
          for (int g = 0; g < count; g++) {
            const uint32_t two = *reinterpret_cast<const uint16_t*>(lane_zeros + (first + g) * tile_rows);
            points[g] = {static_cast<int>(two & 0xff), static_cast<int>(two >> 8)};
          }
        }
      }
#pragma unroll
      for (int inner = 0; inner < together; inner++) {
        const int quad = from + inner;
        int v[groups_of_quad][2];
#pragma unroll
        for (int i = 0; i < groups_of_quad; i++) {
          const int share = x.share(quad * groups_of_quad + i);
          const int2 z = has_zero ? points[inner * groups_of_quad + i] : int2{1, 1};
          v[i][0] = has_zero ? product_on(z.x, share, sum_bias) : share;
          v[i][1] = has_zero ? product_on(z.y, share, sum_bias) : share;
        }
        if constexpr (fills_bytes)
          add_fields<bits, integer_log2, grain, !has_zero>(lane_codes, quad, x.b[quad], v);
        else
          add_places<bits, integer_log2, grain, !has_zero>(lane_codes + from / 2 * bits * 512, inner,
                                                              {x.b[from], x.b[from + 1]}, v);
#pragma unroll
        for (int i = 0; i < groups_of_quad; i++) {
          const float2 f = scale[inner * groups_of_quad + i];
          sum[0] = fmaf(sum_to_float(v[i][0]), f.x, sum[0]);
          sum[2] = fmaf(sum_to_float(v[i][1]), f.y, sum[2]);
        }
      }
    }
  }
};

}  // namespace lowbit::cuda
