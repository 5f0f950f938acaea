// Products of a unit of weights (mma_fragment_layout.cuh) and the limbs of x (split_activations.cuh) on the integer tensor cores.
//
// A code of fewer than eight bits is used in the upper bits of a byte, as 2^(8 - bits) q, which costs one shift and one AND for
// four codes that lie whole in their bytes. Products and sums of a group are exact integers, and so is the zero point's share, z
// times the sum of the limbs. Scales and sums of groups are fp32.
#pragma once

#include "../decode/unpack_codes.cuh"
#include "../pipeline/split_activations.cuh"
#include "../decode/unit_scales.cuh"

namespace lowbit::cuda {

// grain: steps of 32 columns with one integer sum; a group has as many, or the whole row is one group.
template <int bits, int grain>
struct GroupedUnit {
  static constexpr int columns = bits <= 4 ? 512 : 256, steps = columns / 32, grains = steps / grain;
  static constexpr int code_bytes = tile_rows * columns * bits / 8;
  __device__ static constexpr int zero_at(int scale_size) { return code_bytes + tile_rows * grains * scale_size; }
};

// Integer sums start at the bits of 3.0f, so that the result, read as a float, is 3 + 2^-22 * sum for |sum| < 2^22: a conversion
// for free. That small a number neither overflows with large scales nor underflows with small ones.
constexpr int sum_bias = 0x40400000, sum_log2 = 22;
__device__ __forceinline__ float sum_to_float(int c) { return __int_as_float(c) - 3.0f; }

// How the scales and zero points of a unit's groups are stored.
struct Groups {
  Dtype dtype;
  int scale_size;
  bool are_inside;   // else the whole row is a group, whose scale is applied at the end
  bool are_usual;    // in the unit, as bfloat16
  int2 zero_of_row;  // of a lane's two rows
};

// Where the limbs of a slice of x are, in shared memory.
struct SharedLimbs {
  const uint8_t* limbs;
  const int* shares;
  static constexpr bool makes_shares = false;
  __device__ __forceinline__ void load_codes(const uint8_t* d, const int* s, int, bool) { limbs = d, shares = s; }
};

template <bool is_signed>
__device__ __forceinline__ void mma_m16n8k32(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (is_signed)
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The codes of a step as bytes of four words, each from bit place_of_code on; other bits are undefined.
template <int bits>
__device__ __forceinline__ void words_of(const uint8_t* lane_codes, int step, uint32_t (&a)[4]) {
  constexpr int steps = steps_per_run(bits), blocks = blocks_per_run(bits);
  const int in_run = step % steps;
  HeldCodes<bits> held;
#pragma unroll
  for (int i = 0; i < max_code_pieces(bits); i++) {
    const CodePiece part = code_piece(bits, in_run, i);
    if (part.width == 0) continue;
    const uint4 four = *reinterpret_cast<const uint4*>(lane_codes + (step / steps * blocks + part.block) * 512);
    held.word[part.block][0] = four.x, held.word[part.block][1] = four.y;
    held.word[part.block][2] = four.z, held.word[part.block][3] = four.w;
  }
#pragma unroll
  for (int i = 0; i < 4; i++) a[i] = gather_codes<bits>(held, step, i);
}

// The same times 2^(8 - bits), as registers of operand A.
template <int bits>
__device__ __forceinline__ void operand(const uint8_t* lane_codes, int step, uint32_t (&a)[4]) {
  const int up = 8 - bits - bit_of_code(bits, step % steps_per_run(bits));
  words_of<bits>(lane_codes, step, a);
#pragma unroll
  for (int i = 0; i < 4; i++) a[i] = shift_signed(a[i], up) & 0x01010101u * ((1u << bits) - 1 << 8 - bits);
}

// Minus the share of a zero point of 1 in each group's sum: eight columns for a group, by one warp. With one row of x, columns 4,
// 5, 6 serve a second group.
template <int bits, int grain, int M>
__device__ __forceinline__ void zero_point_shares(const uint8_t* limbs, int* shares) {
  using U = GroupedUnit<bits, grain>;
  constexpr int at_a_time = M == 1 ? 2 : 1;
  const int lane = threadIdx.x % 32, second = M == 1 && lane >= 16;
  const uint32_t ones[4] = {0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u};
  const uint8_t* lane_limbs = limbs + (M == 1 ? min(lane / 4 % 4, 2) : column_read<M>(lane / 4)) * 64 + lane % 4 * 16;
#pragma unroll
  for (int g = 0; g < U::grains; g += at_a_time) {
    int c[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < grain; i++) {
      const int step = (g + second) * grain + i;
      const uint2 b = *reinterpret_cast<const uint2*>(lane_limbs + step / 2 * pair_size<M> + step % 2 * 8);
      mma_m16n8k32<true>(c, ones, b.x, b.y);
    }
    if (lane < 4) {
      const int t = M == 1 ? lane % 2 : lane, of = M == 1 ? g + lane / 2 : g;
      *reinterpret_cast<int2*>(shares + of * 8 + t * 2) = {-c[0] << (8 - bits), -c[1] << (8 - bits)};
    }
  }
}

// Scales of a lane's two rows in `count` groups, `stride` apart.
template <bool are_e8m0, int count, int stride = 1>
__device__ __forceinline__ void scales_of(const uint8_t* scales, const Groups& groups, float2 (&scale)[count]) {
  const int row = threadIdx.x % 32 / 4 * 2;
  if constexpr (are_e8m0) {
#pragma unroll
    for (int g = 0; g < count; g++) {
      const uint32_t two = *reinterpret_cast<const uint16_t*>(scales + g * stride * tile_rows + row);
      scale[g] = {e8m0_to_float(two & 0xff), e8m0_to_float(two >> 8)};
    }
  } else if (!groups.are_inside) {
#pragma unroll
    for (int g = 0; g < count; g++) scale[g] = {1.0f, 1.0f};
  } else if (groups.dtype == Dtype::float32) {
#pragma unroll
    for (int g = 0; g < count; g++) scale[g] = *reinterpret_cast<const float2*>(scales + (g * stride * tile_rows + row) * 4);
  } else if (groups.dtype == Dtype::bfloat16) {
#pragma unroll
    for (int g = 0; g < count; g++)
      scale[g] = unpack_f16x2(*reinterpret_cast<const uint32_t*>(scales + (g * stride * tile_rows + row) * 2), false);
  } else {
#pragma unroll
    for (int g = 0; g < count; g++)
      scale[g] = unpack_f16x2(*reinterpret_cast<const uint32_t*>(scales + (g * stride * tile_rows + row) * 2), true);
  }
}

// Products of a lane: rows lane / 4 and lane / 4 + 8, columns 2 (lane % 4) and one more. Consecutive mma on one accumulator wait
// for each other, so two sums of four steps are interleaved. Columns without limbs are ignored.
template <int bits, int grain, bool has_zero, bool are_e8m0, int M>
__device__ __forceinline__ void products_of_unit(const uint8_t* unit, const uint8_t* limbs, const int* shares, const Groups& groups,
                                                 float (&sum)[4]) {
  using U = GroupedUnit<bits, grain>;
  constexpr int length = 4, span = 2 * length, groups_per_span = span / grain, groups_per_chain = length / grain;
  const int lane = threadIdx.x % 32;
  const uint8_t* lane_codes = unit + lane * 16;
  const uint8_t* lane_limbs = limbs + column_read<M>(lane / 4) * 64 + lane % 4 * 16;
  const uint8_t* zeros = unit + U::zero_at(groups.scale_size) + lane / 4 * 2;
#pragma unroll
  for (int from = 0; from < U::steps; from += span) {
    float2 scale[groups_per_span];
    scales_of<are_e8m0>(unit + U::code_bytes + from / grain * tile_rows * groups.scale_size, groups, scale);
    int c[2][4];
#pragma unroll
    for (int at = 0; at < length; at += 2) {
      uint4 b[2];
#pragma unroll
      for (int j = 0; j < 2; j++) b[j] = *reinterpret_cast<const uint4*>(lane_limbs + (from + j * length + at) / 2 * pair_size<M>);
#pragma unroll
      for (int step = at; step < at + 2; step++) {
#pragma unroll
        for (int j = 0; j < 2 && step % grain == 0; j++) {
          c[j][0] = c[j][1] = c[j][2] = c[j][3] = sum_bias;
          if (has_zero) {
            const int g = (from + j * length + step) / grain;
            int2 zero = groups.zero_of_row;
            if (groups.are_inside) {
              const uint32_t two = *reinterpret_cast<const uint16_t*>(zeros + g * tile_rows);
              zero = {static_cast<int>(two & 0xff), static_cast<int>(two >> 8)};
            }
            const int2 share = *reinterpret_cast<const int2*>(shares + g * 8 + lane % 4 * 2);
            c[j][0] += zero.x * share.x;
            c[j][1] += zero.x * share.y;
            c[j][2] += zero.y * share.x;
            c[j][3] += zero.y * share.y;
          }
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
          uint32_t codes[4];
          operand<bits>(lane_codes, from + j * length + step, codes);
          mma_m16n8k32<!has_zero>(c[j], codes, step % 2 ? b[j].z : b[j].x, step % 2 ? b[j].w : b[j].y);
        }
        if ((step + 1) % grain) continue;
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const float2 f = scale[j * groups_per_chain + step / grain];
#pragma unroll
          for (int i = 0; i < 4; i++) sum[i] = fmaf(sum_to_float(c[j][i]), i < 2 ? f.x : f.y, sum[i]);
        }
      }
    }
  }
}

// Integer weights of `bits` for split_int8_gemv: `grain` steps share a scale, and a zero point if `zero`.
template <int code_bits, int grain, bool zero, bool are_e8m0 = false>
struct IntegerWeights : GroupedUnit<code_bits, grain> {
  using GroupedUnit<code_bits, grain>::columns, GroupedUnit<code_bits, grain>::grains, GroupedUnit<code_bits, grain>::code_bytes;
  static constexpr int bits = code_bits, unit_log2 = 8 - bits - sum_log2;  // the accumulators count in units of 2^-unit_log2
  static constexpr bool has_zero = zero, has_shares = zero, has_outer = false;
  using HeldCodes = SharedLimbs;
  template <int M>
  using Order = LimbsByStep<M>;

  // Value of a code, with its scale where the unit has one.
  __device__ static float number(const uint8_t* unit, const Groups& groups, int row, int k, uint32_t zero_of_row) {
    const uint32_t code = code_of_unit<bits>(unit, row, k);
    const int place = k / (32 * grain) * tile_rows + row % 8 * 2 + row / 8;
    const float scale = are_e8m0            ? e8m0_to_float(unit[code_bytes + place])
                        : groups.are_inside ? load_float(unit + code_bytes, groups.dtype, place)
                                            : 1.0f;
    if (!has_zero) return scale * static_cast<float>(static_cast<int>(code << (32 - bits)) >> (32 - bits));
    const uint32_t of_group = groups.are_inside ? (unit + GroupedUnit<bits, grain>::zero_at(groups.scale_size))[place] : zero_of_row;
    return scale * (static_cast<float>(code) - static_cast<float>(of_group));
  }

  template <int M>
  __device__ static __forceinline__ void write_shares(const uint8_t* limbs, int* shares) {
    zero_point_shares<bits, grain, M>(limbs, shares);
  }
  template <int M>
  __device__ static __forceinline__ void add_products(const uint8_t* unit, const SharedLimbs& x, const Groups& groups, int,
                                                      float (&sum)[4]) {
    products_of_unit<bits, grain, has_zero, are_e8m0, M>(unit, x.limbs, x.shares, groups, sum);
  }
};

}  // namespace lowbit::cuda
