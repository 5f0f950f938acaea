// Products of one unit of W and a slice of x for skinny_gemm.cuh, with the scales of its groups.
#pragma once

#include "../decode/weight_decoders.cuh"
#include "../schedule/skinny_gemm_launch.h"
#include "../decode/unit_scales.cuh"

namespace lowbit::cuda {

// Type of the scales: known at compile time, or `plain` (read by a switch).
enum class Scales { bfloat16, plain, e8m0, e4m3 };

// Scales of a lane's two rows in a group; 1 where they are not in the unit. Branch-free where the type is known, so that the
// loads of a unit may be issued before its products.
template <Scales scales>
__device__ __forceinline__ float2 scales_of_group(const uint8_t* of_unit, const SkinnyGemm& a, int group, int lane) {
  if constexpr (scales == Scales::e8m0) return two_scales_of(of_unit, ScaleType::e8m0, group, lane);
  if constexpr (scales == Scales::e4m3) return two_scales_of(of_unit, ScaleType::e4m3, group, lane);
  if constexpr (scales == Scales::plain) return a.unit.groups ? two_scales_of(of_unit, a.scale_type, group, lane) : float2{1, 1};
  const int place = (group * tile_rows + lane / 4 * 2) * 2;
  uint32_t two = *reinterpret_cast<const uint32_t*>(of_unit + (a.unit.groups ? place : -a.unit.scale_at));
  if (a.unit.groups == 0) two = 0x3f803f80u;
  return {__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u)};
}

// Whether value * scale is exact in 16 bits for the whole unit: all scales are of moderate size.
template <class F, Scales scales, int run>
__device__ __forceinline__ bool may_fold(const uint8_t* of_unit, int lane) {
  uint32_t unusual = 0;  // high bit of each byte
#pragma unroll
  for (int i = 0; i < Unit<F::bits, 0, false>::columns / run / 8; i++) {
    const uint32_t four = *reinterpret_cast<const uint32_t*>(of_unit + (i * 32 + lane) * 4);
    if constexpr (scales == Scales::e8m0) {
      unusual |= four;
      if constexpr (F::min_e8m0 > 0) unusual |= ~(four + (0x80u - F::min_e8m0) * 0x01010101u);
    } else {
      unusual |= four | (four + 0x01010101u) | ~(four + 0x78787878u);
    }
  }
  return __all_sync(0xffffffffu, (unusual & 0x80808080u) == 0);
}

// Adds the products of a unit to `sum`: rows g and g + 8 of the tile times rows 2t and 2t + 1 of each eight rows of x. Columns of
// x from step `first` of the slice on, available after prepare(step). run: columns whose sum is scaled at once, a divisor of the
// group. is_folded: scales are multiplied into the weights instead.
template <class F, class T, Scales scales, int run, bool is_folded, int octets, class Prepare>
__device__ __forceinline__ void products_of_unit(const uint8_t* unit, const SkinnyGemm& a, const typename F::Constants& constants,
                                                 uint32_t row_zeros, const uint32_t (&x)[octets][4 * steps_per_slice],
                                                 int first, float (&sum)[octets][4], Prepare prepare) {
  constexpr int steps = Unit<F::bits, 0, false>::columns / 32;
  const int lane = threadIdx.x;
  HeldCodes<F::bits> held;
  typename F::Row row = F::row(row_zeros & 0xff), row8 = F::row(row_zeros >> 8);
  float c[octets][2][4] = {};  // separate accumulators for the halves of steps: consecutive mma on one accumulator would wait for
                               // each other
  float2 scale = {1, 1};
#pragma unroll
  for (int step = 0; step < steps; step++) {
    prepare(first + step);
    load_codes<F::bits>(unit, lane, step, held);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int column = step * 32 + half * 16;
      const int group = scales == Scales::e8m0 || scales == Scales::e4m3 ? column / run : column >> a.group_shift;
      if constexpr (is_folded) {
        if (column % run == 0) {
          const uint8_t* two = unit + a.unit.scale_at + group * tile_rows + lane / 4 * 2;
          row = scales == Scales::e8m0 ? F::row_with_e8m0(two[0]) : F::row_with_e4m3(two[0]);
          row8 = scales == Scales::e8m0 ? F::row_with_e8m0(two[1]) : F::row_with_e4m3(two[1]);
        }
      } else if (column % run == 0) {
#pragma unroll
        for (int e = 0; e < octets; e++)
#pragma unroll
          for (int i = 0; i < 4; i++) c[e][0][i] = c[e][1][i] = 0;
        scale = scales_of_group<scales>(unit + a.unit.scale_at, a, group, lane);
        if constexpr (F::supports_zero) {
          const bool has_zeros = a.has_zero && a.unit.groups;
          uint32_t zeros = *reinterpret_cast<const uint16_t*>(
              has_zeros ? unit + a.unit.zero_at + group * tile_rows + lane / 4 * 2 : unit);
          if (!has_zeros) zeros = row_zeros;
          row = F::row(zeros & 0xff);
          row8 = F::row(zeros >> 8);
        }
      }
      uint32_t operand[F::parts][4];
      const int at = 4 * (first + step) + 2 * half;
      if constexpr (F::parts == 2 && octets == 1) {
        F::duplicated_fragment(constants, held, step, half, operand);
#pragma unroll
        for (int p = 0; p < 2; p++)
          mma_m16n8k16<T>(c[0][half], operand[p], __byte_perm(x[0][at + p], 0, 0x1010), __byte_perm(x[0][at + p], 0, 0x3232));
      } else {
        F::fragment(constants, held, step, half, row, row8, operand);
#pragma unroll
        for (int p = 0; p < F::parts; p++)
#pragma unroll
          for (int e = 0; e < octets; e++) mma_m16n8k16<T>(c[e][half], operand[p], x[e][at], x[e][at + 1]);
      }
      if (!is_folded && (column + 16) % run == 0) {
#pragma unroll
        for (int e = 0; e < octets; e++)
#pragma unroll
          for (int i = 0; i < 4; i++)
            sum[e][i] = fmaf(run > 16 ? c[e][0][i] + c[e][1][i] : c[e][half][i], i < 2 ? scale.x : scale.y, sum[e][i]);
      }
    }
  }
  if constexpr (is_folded) {
#pragma unroll
    for (int e = 0; e < octets; e++)
#pragma unroll
      for (int i = 0; i < 4; i++) sum[e][i] = fmaf(c[e][0][i] + c[e][1][i], scales == Scales::e4m3 ? 256.0f : 1.0f, sum[e][i]);
  }
}

}  // namespace lowbit::cuda
