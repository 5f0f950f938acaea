// Recomputes a tile for e8m0 scales that are too large to be folded into a value's own power of two (mixed_gemm_shape.cuh).
//
// That needs scales above 2^7 for e4m3, 2^6 for e2m1 or 2^4 for e2m3, with weights of 120 to some ten thousand, far from those of
// trained models, so this is short rather than fast: a warp reads its units and x from global memory. It rounds no more than the
// fast path.
#pragma once

#include "../schedule/mixed_gemm_args.cuh"
#include "splitk_reduce.cuh"
#include "../decode/group_scales.cuh"

namespace lowbit::cuda {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Columns [first, last) of a tile of W times the rows of x from first_row on; total: as in mixed_gemm.cuh.
template <class Codes, class T, class S>
__device__ __forceinline__ void multiply_with_overflow(const MixedGemm& a, int first, int last, int64_t tile, int first_row,
                                               const typename Codes::Constants& constants, float (&total)[S::columns / 2]) {
  constexpr int bits = Codes::bits, unit_columns = Unit<bits, 0, false>::columns, steps = steps_per_run(bits);
  constexpr int run = 32 * steps, octets = S::columns >= 32 ? 4 : 2;  // octets: groups of eight rows of x at a time
  static_assert(S::group == 32);
  const int lane = threadIdx.x % 32;
  const auto row = Codes::row(0);
  wait_for_dependencies();  // kernels before this one have written x
#pragma unroll 1
  for (int octet = 0; octet < S::columns / 8; octet += octets) {
    float sum[octets][4] = {};
    const uint16_t* x[octets];
    bool is_row[octets];
#pragma unroll
    for (int o = 0; o < octets; o++) {
      const int m = first_row + (octet + o) * 8 + lane / 4;
      is_row[o] = m < a.m;
      x[o] = static_cast<const uint16_t*>(a.plain_x) + static_cast<int64_t>(is_row[o] ? m : 0) * a.k + lane % 4 * 2;
    }
#pragma unroll 1
    for (int column = first; column < last; column += run) {
      const int in_unit = column % unit_columns;
      const uint8_t* unit = a.units + (tile * a.units_per_row + column / unit_columns) * a.unit.size;
      GroupScales<S::scaling> scales(unit, a.unit, a.scale_type, lane);
      scales.skip(in_unit / S::group);
      unit += in_unit * (bits * tile_rows / 8);
      HeldCodes<bits> held;
#pragma unroll
      for (int s = 0; s < steps; s++) {
        load_codes<bits>(unit, lane, s, held);
        const uint2 scale = scales.template next_exact<T>();
#pragma unroll
        for (int half = 0; half < 2; half++) {
          uint32_t numbers[1][4];
          Codes::fragment(constants, held, s, half, row, row, numbers);
          scale_operand<T, false>(numbers, {scale.x, 0}, {scale.y, 0});
          const int at = column + s * 32 + half * 16;
#pragma unroll
          for (int o = 0; o < octets; o++) {
            const auto two_of_x = [&](int k) {
              return is_row[o] && k < a.k ? *reinterpret_cast<const uint32_t*>(x[o] + k) : 0;
            };
            mma_m16n8k16<T>(sum[o], numbers[0], two_of_x(at), two_of_x(at + 8));
          }
        }
      }
    }
#pragma unroll
    for (int o = 0; o < S::columns / 8; o++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (o / octets * octets == octet) total[4 * o + i] = sum[o % octets][i] * (1.0f / (1 << Codes::left_of_e8m0));
  }
}
#endif

}  // namespace lowbit::cuda
