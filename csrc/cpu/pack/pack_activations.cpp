// Packs x for the kernels over canonical rows, as int8 limbs or as floats, in the order in which codes leave their bit planes.
// Compiled once for each instruction set with such kernels (LOWBIT_SET is its namespace), since its register width decides the
// order.
#include "split_activations.h"
#include "../kernels/f32_gemv.h"

// Instruction sets: avx2 avx512
namespace lowbit::cpu::LOWBIT_SET {
namespace {

// Limb int8 or int16; F: fields of a step; C: columns of a lane; D: limbs.
template <int F, int C, int D, typename Limb>
void pack(const Linear& a, const ByteDecoding& decoding, const ArrayView& x, const PackedLimbs& to, int64_t begin, int64_t end) {
  constexpr int64_t columns = C * lanes, limb_count = sizeof(Limb) == 1 ? D : words_for(D);
  const int64_t slices = (a.k + slice - 1) / slice;
  Limb* const limbs = reinterpret_cast<Limb*>(to.limbs);
  alignas(64) float numbers[slice];
  alignas(64) int32_t integers[slice];
  alignas(64) Limb limb_buffer[slice];
  for (int64_t m = begin; m < end; m++) {
    const float of_row = D == 1 ? scale_of_row(x, m, a.k, to.input_scale) : 0;
    for (int64_t n = 0; n < slices; n++) {
      const int64_t first = n * slice, count = a.k - first < slice ? a.k - first : slice;
      const int64_t steps = (count + columns - 1) / columns;
      load_row(x, m * x.stride + first, count, numbers);
      for (int64_t i = count; i < steps * columns; i++) numbers[i] = 0;
      if (!quantize_slice<D>(numbers, steps * columns, of_row, integers, to.scale[m * slices + n])) to.no_limbs[m] = true;
      for (int64_t s = 0; s < steps; s++) {
        int32_t* sums = to.sums + ((first / columns + s) * a.m + m) * lanes;
        for (int lane = 0; lane < lanes; lane++) {
          int32_t sum = 0;
          for (int c = 0; c < C; c++) sum += integers[s * columns + lane * C + c];
          sums[lane] = sum;
        }
        if (to.quad_sums)
          for (int lane = 0; lane < lanes; lane += 4) {
            const int32_t sum = sums[lane] + sums[lane + 1] + sums[lane + 2] + sums[lane + 3];
            for (int i = 0; i < 4; i++) sums[lane + i] = sum;
          }
        for (int lane = 0; lane < lanes; lane++) {
          // Without zero points only the offset of the codes has to be taken off, the same for every row of the weight.
          if (!a.zero_point.data) sums[lane] *= -decoding.offset;
          else if (D < 3 && !to.quad_sums) sums[lane] = bits_of(static_cast<float>(sums[lane]));
        }
      }
      for (int64_t d = limb_count - 1; d >= 0; d--) {
        extract_low_limb(integers, steps * columns, limb_buffer);
        for (int64_t s = 0; s < steps; s++) {
          Limb* all = limbs + (((first / columns + s) * a.m + m) * limb_count + d) * columns;
          for (int f = 0; f < F; f++)
            for (int64_t i = 0; i < columns / F; i++) all[f * (columns / F) + i] = limb_buffer[s * columns + i * F + f];
        }
      }
    }
  }
}

template <int F, int C, typename Limb>
void pack_any(const Linear& a, const ByteDecoding& decoding, const ArrayView& x, const PackedLimbs& to, int64_t begin, int64_t end) {
  if (to.count == 1) return pack<F, C, 1, Limb>(a, decoding, x, to, begin, end);
  return to.count == 3 ? pack<F, C, 3, Limb>(a, decoding, x, to, begin, end) : pack<F, C, 2, Limb>(a, decoding, x, to, begin, end);
}

}  // namespace

void pack_limbs(const Linear& a, const ByteDecoding& decoding, const ArrayView& x, const PackedLimbs& to, int64_t begin, int64_t end) {
  if (uses_words(a.bits, lanes)) return pack_any<2, 4, int16_t>(a, decoding, x, to, begin, end);
  switch (fields_of(a.bits)) {
    case 1: return pack_any<1, 4, int8_t>(a, decoding, x, to, begin, end);
    case 2: return pack_any<2, 8, int8_t>(a, decoding, x, to, begin, end);
    default: return pack_any<4, 16, int8_t>(a, decoding, x, to, begin, end);
  }
}

void pack_floats(const Linear& a, const ArrayView& x, const PackedFloats& to) {
  const int64_t fields = fields_of(a.bits), columns = columns_per_step(a.bits, lanes), in_field = 4 * lanes;
  // The AVX2 kernel decodes 4-bit codes to floats with unpack instructions, which work within the 128-bit halves of a register.
  const bool by_quads = a.bits == 4 && lanes == narrow_lanes;
  float columns_of_x[8 * wide_lanes];
  for (int64_t s = 0; s < to.steps; s++)
    for (int64_t m = 0; m < a.m; m++) {
      float* numbers = to.numbers + (s * a.m + m) * columns;
      const int64_t left = a.k - s * columns, count = left < columns ? left : columns;
      load_row(x, m * x.stride + s * columns, count, columns_of_x);
      for (int64_t i = count; i < columns; i++) columns_of_x[i] = 0;
      for (int64_t f = 0; f < fields; f++)
        for (int64_t i = 0; i < in_field; i++) {
          const int64_t at = by_quads ? i % 16 / 4 * 8 + i / 16 * 4 + i % 4 : i;
          numbers[f * in_field + at] = columns_of_x[i * fields + f];
        }
    }
}

}  // namespace lowbit::cpu::LOWBIT_SET
