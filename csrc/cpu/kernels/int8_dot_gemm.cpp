// GEMM for many rows of x rounded to int8 (picture in dot_gemm.h). Compiled for AVX-512 with VNNI.
//
// dpbusd multiplies unsigned by signed bytes: 128 is added to the codes of x, and 128 times the sum of a row of the weight is
// subtracted from its sums. Sums wrap, so they are right wherever the product itself fits in 32 bits.
// Contract: exact: integer sums, scaled in fp32, one rounding.
#include "int8_dot_gemm.h"

#include "../pack/split_activations.h"
#include "dot_gemm.h"

namespace lowbit::cpu::avx512vnni {
namespace {

struct Int8Dot {
  using Sum = __m512i;
  using Operand = __m512i;
  static Operand operand(__m512i words) { return words; }
  static Sum add(Sum a, Sum b) { return _mm512_add_epi32(a, b); }
  static Sum multiply_add(Sum sum, Operand w, Operand x) { return _mm512_dpbusd_epi32(sum, x, w); }
};

}  // namespace

void quantize_tokens(const Linear& a, const Int8DotArgs& of, int64_t begin, int64_t end) {
  alignas(64) float numbers[slice];
  alignas(64) int32_t integers[slice];
  for (int64_t m = begin; m < end; m++) {
    uint8_t* const to = of.codes + m * of.stride;
    const float scale = of.scale[m] = scale_of_row(of.x, m, a.k, of.input_scale);
    for (int64_t first = 0; first < a.k; first += slice) {
      const int64_t count = std::min<int64_t>(slice, a.k - first);
      load_row(of.x, m * of.x.stride + first, count, numbers);
      to_int8(numbers, count, scale, integers);
      for (int64_t i = 0; i < count; i++) to[first + i] = static_cast<uint8_t>(integers[i] + 128);
    }
    std::fill(to + a.k, to + of.stride, 0);
  }
}

void int8_dot_gemm(const Linear& a, const Int8DotArgs& of, int64_t begin, int64_t end) {
  const int64_t registers = of.panel_n / dot_lanes;
  const WordsOfX x = {of.codes, of.stride, a.m, of.stride / 4};
  const auto panel = registers_of(registers * x.words), rows_of_weight = registers_of(dot_lanes * of.stride / int8_columns);
  const auto sums = registers_of(std::min(a.m, block_m) * registers);
  const __m512i ones = _mm512_set1_epi8(1);
  for (int64_t row = begin; row < end; row += of.panel_n) {
    const int64_t stop = std::min(row + of.panel_n, end), used = registers_for(stop - row);
    __m512i offset[8];
    __m512 scale[8];
    for (int64_t r = 0; r < used; r++) {
      const int64_t first = row + r * dot_lanes, count = std::clamp<int64_t>(stop - first, 0, dot_lanes);
      for (int64_t i = 0; i < count; i++) std::copy_n(a.packed + (first + i) * a.packed_stride, a.k, as<uint8_t>(rows_of_weight) + i * of.stride);
      __m512i total = _mm512_setzero_si512();
      __m512i* const to = as<__m512i>(panel) + r * x.words;
      for (int64_t i = 0; i < x.words; i += dot_lanes) {
        pack_words(as<uint8_t>(rows_of_weight) + 4 * i, of.stride, to + i);
        for (int64_t j = i; j < i + dot_lanes; j++) total = _mm512_dpbusd_epi32(total, ones, to[j]);
      }
      offset[r] = _mm512_slli_epi32(total, 7);
      scale[r] = load_as(a.scale, first, lanes_of(first, stop));
    }
    CodePrefetcher prefetcher(a, stop, std::min(stop + of.panel_n, end), tiles_of(x, used));
    multiply_panel<Int8Dot>(x, as<__m512i>(panel), used, as<__m512i>(sums), [&] { prefetcher.prefetch_l2(); }, [&](int64_t m, int64_t r, __m512i sum) {
      const int64_t n = row + r * dot_lanes;
      const __mmask16 mask = lanes_of(n, stop);
      if (!mask) return;
      __m512 y = _mm512_cvtepi32_ps(_mm512_sub_epi32(sum, offset[r]));
      y = _mm512_mul_ps(_mm512_mul_ps(y, _mm512_set1_ps(of.scale[m])), scale[r]);
      store_as(of.type, of.y, m * a.n + n, mask, of.bias ? _mm512_add_ps(y, load_as(*of.bias, n, mask)) : y);
    });
  }
}

}  // namespace lowbit::cpu::avx512vnni
