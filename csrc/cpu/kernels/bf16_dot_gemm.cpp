// Linear for many rows of x in bfloat16, on dot products of bfloat16. Compiled for AVX-512 with BF16.
//
// Some rows of the weight at a time become numbers of 16 bits, as many as stay in the second-level cache, in the order in which
// they lie: lanes are columns, so that neither they nor x have to be arranged. Six rows of x stay in the first-level cache beside
// them, for a block of columns, and each dot product adds pairs of columns to sixteen sums in fp32. No sum depends on the threads.
#include "bf16_dot_gemm.h"

#include <immintrin.h>

#include <algorithm>
#include <memory>

#include "../decode/deinterleave.h"
#include "dequantize.h"

namespace lowbit::cpu::avx512bf16 {
namespace {

constexpr int64_t tile_m = 6, tile_n = 4;  // rows of x and of the weight whose sums stay in registers
constexpr int64_t block_m = 384, panel_bytes = 512 << 10;

inline __m512bh halves(const uint16_t* p) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p)); }

// The sums of the lanes of four registers.
inline __m128 sums_of(__m512 a, __m512 b, __m512 c, __m512 d) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// y [M, 4] += x [M, 32 steps] times w [4, 32 steps].
template <int M>
void tile(const uint16_t* x, int64_t x_stride, const uint16_t* w, int64_t w_stride, int64_t steps, float* y, int64_t y_stride) {
  __m512 sum[M][tile_n];
#pragma GCC unroll 6
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int n = 0; n < tile_n; n++) sum[m][n] = _mm512_setzero_ps();
  for (int64_t s = 0; s < steps; s++) {
    __m512bh of_w[tile_n];
#pragma GCC unroll 4
    for (int n = 0; n < tile_n; n++) of_w[n] = halves(w + n * w_stride + s * dot_columns);
#pragma GCC unroll 6
    for (int m = 0; m < M; m++) {
      const __m512bh of_x = halves(x + m * x_stride + s * dot_columns);
#pragma GCC unroll 4
      for (int n = 0; n < tile_n; n++) sum[m][n] = _mm512_dpbf16_ps(sum[m][n], of_w[n], of_x);
    }
  }
#pragma GCC unroll 6
  for (int m = 0; m < M; m++)
    _mm_storeu_ps(y + m * y_stride, _mm_add_ps(_mm_loadu_ps(y + m * y_stride), sums_of(sum[m][0], sum[m][1], sum[m][2], sum[m][3])));
}

constexpr decltype(&tile<1>) tiles[] = {tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>};

// Rounded to nearest even, sixteen of which `mask` are stored.
inline void store_rounded(uint16_t* to, __mmask16 mask, __m512 numbers) {
  const __m512i bits = _mm512_castps_si512(numbers), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  up = _mm512_mask_or_epi32(up, _mm512_cmp_ps_mask(numbers, numbers, _CMP_UNORD_Q), bits, _mm512_set1_epi32(0x400000));
  _mm256_mask_storeu_epi16(to, mask, _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16)));
}

inline __m512 bias_at(const ArrayView& bias, int64_t i, __mmask16 mask) {
  if (bias.dtype == Dtype::float32) return _mm512_maskz_loadu_ps(mask, static_cast<const float*>(bias.data) + i);
  const __m256i temp = _mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(bias.data) + i);
  if (bias.dtype == Dtype::float16) return _mm512_cvtph_ps(temp);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(temp), 16));
}

// The codes of the next rows, for the second-level cache, some of them beside each of so many products: all at once they would
// keep the memory so busy that the products wait for theirs.
struct CodePrefetcher {
  uintptr_t at = 0, end = 0;
  int64_t step;
  CodePrefetcher(const Linear& a, int64_t begin, int64_t stop, int64_t products)
      : at(reinterpret_cast<uintptr_t>(a.packed + begin * a.packed_stride)),
        end(begin < stop ? at + (stop - begin) * a.packed_stride : at), step(((end - at) / line + products - 1) / products) {}
  void prefetch_l2() {
    for (int64_t i = 0; i < step && at < end; i++, at += line) _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T1);
  }

 private:
  static constexpr uintptr_t line = 64;
};

}  // namespace

void bf16_dot_gemm(const Linear& a, const Bf16DotArgs& of, int64_t begin, int64_t end) {
  const int64_t stride = padded_stride(a.k), whole = (a.k + dot_columns - 1) / dot_columns * dot_columns;
  const int64_t fit = panel_bytes / (2 * stride) / tile_n * tile_n;
  const int64_t maximum = a.interleaved ? rows_per_block : std::clamp<int64_t>(fit, tile_n, 32), rows_of_x = std::min(a.m, block_m);
  const std::unique_ptr<uint16_t[]> numbers(new uint16_t[maximum * stride]());
  const std::unique_ptr<float[]> sums(new float[rows_of_x * maximum]);
  for (int64_t row = begin; row < end; row += maximum) {
    const int64_t stop = std::min(row + maximum, end), count = stop - row;
    for_canonical_rows(a, row, stop, [&](const Linear& rows, int64_t first, int64_t end_of_some) {
      dequantize_rows(rows, Dtype::bfloat16, numbers.get() + (first - row) * stride, stride, first, end_of_some);
    });
    const int64_t blocks = (whole + columns_per_block - 1) / columns_per_block;
    CodePrefetcher prefetcher(a, stop, std::min(stop + maximum, end), (a.m + tile_m - 1) / tile_m * blocks * ((count + tile_n - 1) / tile_n));
    for (int64_t m0 = 0; m0 < a.m; m0 += rows_of_x) {
      const int64_t m1 = std::min(m0 + rows_of_x, a.m), parts = (m1 - m0 + tile_m - 1) / tile_m;
      std::fill_n(sums.get(), (m1 - m0) * maximum, 0.0f);
      for (int64_t k = 0; k < whole; k += columns_per_block) {
        const int64_t steps = std::min(columns_per_block, whole - k) / dot_columns;
        for (int64_t p = 0; p < parts; p++) {
          const int64_t first = (m1 - m0) * p / parts, rows = (m1 - m0) * (p + 1) / parts - first;
          const uint16_t* x = of.x + (m0 + first) * stride + k;
          for (int64_t n = 0; n < count; n += tile_n, prefetcher.prefetch_l2())
            tiles[rows - 1](x, stride, numbers.get() + n * stride + k, stride, steps, sums.get() + first * maximum + n, maximum);
        }
      }
      for (int64_t m = m0; m < m1; m++)
        for (int64_t n = 0; n < count; n += 16) {
          const __mmask16 mask = static_cast<__mmask16>(count - n < 16 ? (1u << (count - n)) - 1 : ~0u);
          __m512 temp = _mm512_maskz_loadu_ps(mask, sums.get() + (m - m0) * maximum + n);
          if (of.bias) temp = _mm512_add_ps(temp, bias_at(*of.bias, row + n, mask));
          store_rounded(of.y + m * a.n + row + n, mask, temp);
        }
    }
  }
}

}  // namespace lowbit::cpu::avx512bf16
