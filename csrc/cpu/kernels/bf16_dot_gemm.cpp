// GEMM for many rows of x in bfloat16 (picture in dot_gemm.h). Compiled for AVX-512 with BF16.
//
//    codes --dequantize_rows--> bf16 [16, K] --pack_words--> panel
//
// Contract: weights rounded once, to bfloat16; sums in fp32.
#include "bf16_dot_gemm.h"

#include "../decode/deinterleave.h"
#include "dequantize.h"
#include "dot_gemm.h"

namespace lowbit::cpu::avx512bf16 {
namespace {

struct Bf16Dot {
  using Sum = __m512;
  using Operand = __m512bh;
  static Operand operand(__m512i words) { return reinterpret_cast<__m512bh>(words); }
  static Sum add(Sum a, Sum b) { return _mm512_add_ps(a, b); }
  static Sum multiply_add(Sum sum, Operand w, Operand x) { return _mm512_dpbf16_ps(sum, w, x); }
};

}  // namespace

void bf16_dot_gemm(const Linear& a, const Bf16DotArgs& of, int64_t begin, int64_t end) {
  const int64_t stride = padded_stride(a.k), registers = of.panel_n / dot_lanes;
  const WordsOfX x = {reinterpret_cast<const uint8_t*>(of.x), of.x_stride * 2, a.m, (a.k + dot_columns - 1) / dot_columns * dot_lanes};
  const auto panel = registers_of(registers * x.words), numbers = registers_of(dot_lanes * stride / dot_columns);
  const auto sums = registers_of(std::min(a.m, block_m) * registers);
  for (int64_t row = begin; row < end; row += of.panel_n) {
    const int64_t stop = std::min(row + of.panel_n, end), used = registers_for(stop - row);
    for_canonical_rows(a, row, stop, [&](const Linear& rows, int64_t first, int64_t end_of_some) {
      for (int64_t at = first; at < end_of_some; at += dot_lanes) {
        dequantize_rows(rows, Dtype::bfloat16, numbers.get(), stride, at, std::min(at + dot_lanes, end_of_some));
        for (int64_t i = 0; i < x.words; i += dot_lanes)
          pack_words(as<uint8_t>(numbers) + 4 * i, 2 * stride, as<__m512i>(panel) + (at - row) / dot_lanes * x.words + i);
      }
    });
    CodePrefetcher prefetcher(a, stop, std::min(stop + of.panel_n, end), tiles_of(x, used));
    multiply_panel<Bf16Dot>(x, as<__m512i>(panel), used, as<__m512>(sums), [&] { prefetcher.prefetch_l2(); }, [&](int64_t m, int64_t r, __m512 sum) {
      const int64_t n = row + r * dot_lanes;
      const __mmask16 mask = lanes_of(n, stop);
      if (mask) store_bfloat16(of.y + m * a.n + n, mask, of.bias ? _mm512_add_ps(sum, load_as(*of.bias, n, mask)) : sum);
    });
  }
}

}  // namespace lowbit::cpu::avx512bf16
