// Linear for many rows of x in bfloat16, on dot products of bfloat16. Compiled for AVX-512 with BF16.
//
//   codes --dequantize_rows--> [panel_n, K] bfloat16 --pack--> [panel_n / 16][K / 2][16] pairs, in the second-level cache
//   x [12, 1024 columns], in the first-level cache --broadcast a pair--> 12 x 2 registers of sums in fp32 --bias, round--> y
//
// Lanes are rows of the weight, so that no register is summed across. No sum depends on the threads.
#include "bf16_dot_gemm.h"

#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "../decode/deinterleave.h"
#include "dequantize.h"

namespace lowbit::cpu::avx512bf16 {
namespace {

constexpr int64_t lanes = 16, tile_m = 12, tile_n = 2 * lanes;  // rows of x and of the weight whose sums stay in registers
constexpr int64_t block_m = 384, block_k = 1024;

// words[i] (the i-th pair of columns of each of 16 rows), of 16 rows that lie `stride` numbers apart.
inline void pack_pairs(const uint16_t* rows, int64_t stride, __m512i* words) {
  __m512i a[lanes], b[lanes];
#pragma GCC unroll 16
  for (int i = 0; i < lanes; i++) a[i] = _mm512_loadu_si512(rows + i * stride);
#pragma GCC unroll 8
  for (int i = 0; i < lanes; i += 2) b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]), b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
#pragma GCC unroll 4
  for (int i = 0; i < lanes; i += 4)
    for (int j = 0; j < 2; j++) {
      a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + 2 + j]);
      a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + 2 + j]);
    }
  // a[4 g + c]: column 4 q + c of rows 4 g .. 4 g + 3 in its q-th quarter.
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    const __m512i low01 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x44), high01 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xee);
    const __m512i low23 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x44), high23 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xee);
    words[c] = _mm512_shuffle_i32x4(low01, low23, 0x88), words[4 + c] = _mm512_shuffle_i32x4(low01, low23, 0xdd);
    words[8 + c] = _mm512_shuffle_i32x4(high01, high23, 0x88), words[12 + c] = _mm512_shuffle_i32x4(high01, high23, 0xdd);
  }
}

// sums [M, 32] += x [M, 2 words] times the packed w [2][words][16], whose second half lies `w_stride` registers behind.
template <int M>
void tile(const uint16_t* x, int64_t x_stride, const __m512i* w, int64_t w_stride, int64_t words, float* sums, int64_t stride) {
  __m512 sum[M][2];
#pragma GCC unroll 12
  for (int m = 0; m < M; m++) sum[m][0] = sum[m][1] = _mm512_setzero_ps();
  for (int64_t i = 0; i < words; i++) {
    const __m512bh w0 = reinterpret_cast<__m512bh>(_mm512_load_si512(w + i));
    const __m512bh w1 = reinterpret_cast<__m512bh>(_mm512_load_si512(w + w_stride + i));
#pragma GCC unroll 12
    for (int m = 0; m < M; m++) {
      int pair;
      std::memcpy(&pair, x + m * x_stride + 2 * i, sizeof pair);
      const __m512bh of_x = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
      sum[m][0] = _mm512_dpbf16_ps(sum[m][0], w0, of_x);
      sum[m][1] = _mm512_dpbf16_ps(sum[m][1], w1, of_x);
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; m++)
    for (int half = 0; half < 2; half++) {
      float* to = sums + m * stride + half * lanes;
      _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), sum[m][half]));
    }
}

constexpr decltype(&tile<1>) tiles[] = {tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>,
                                        tile<7>, tile<8>, tile<9>, tile<10>, tile<11>, tile<12>};

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
  const int64_t whole = (a.k + dot_columns - 1) / dot_columns * dot_columns, words = whole / 2, stride = padded_stride(a.k);
  const int64_t panel_n = of.panel_n, rows_of_x = std::min(a.m, block_m), blocks = (whole + block_k - 1) / block_k;
  const std::unique_ptr<__m512i[]> panel(new __m512i[panel_n / lanes * words]), registers(new __m512i[lanes * stride / dot_columns]());
  const std::unique_ptr<float[]> sums(new float[rows_of_x * panel_n]);
  uint16_t* const numbers = reinterpret_cast<uint16_t*>(registers.get());
  for (int64_t row = begin; row < end; row += panel_n) {
    const int64_t stop = std::min(row + panel_n, end), count = stop - row, padded = (count + tile_n - 1) / tile_n * tile_n;
    for_canonical_rows(a, row, stop, [&](const Linear& rows, int64_t first, int64_t end_of_some) {
      for (int64_t at = first; at < end_of_some; at += lanes) {
        dequantize_rows(rows, Dtype::bfloat16, numbers, stride, at, std::min(at + lanes, end_of_some));
        __m512i* to = panel.get() + (at - row) / lanes * words;
        for (int64_t i = 0; i < words; i += lanes) pack_pairs(numbers + 2 * i, stride, to + i);
      }
    });
    CodePrefetcher prefetcher(a, stop, std::min(stop + panel_n, end), (a.m + tile_m - 1) / tile_m * blocks * (padded / tile_n));
    for (int64_t m0 = 0; m0 < a.m; m0 += rows_of_x) {
      const int64_t m1 = std::min(m0 + rows_of_x, a.m), parts = (m1 - m0 + tile_m - 1) / tile_m;
      std::fill_n(sums.get(), (m1 - m0) * panel_n, 0.0f);
      for (int64_t k = 0; k < whole; k += block_k) {
        const int64_t some = std::min(block_k, whole - k) / 2;
        for (int64_t p = 0; p < parts; p++) {
          const int64_t first = (m1 - m0) * p / parts, rows = (m1 - m0) * (p + 1) / parts - first;
          const uint16_t* x = of.x + (m0 + first) * of.x_stride + k;
          for (int64_t n = 0; n < padded; n += tile_n, prefetcher.prefetch_l2())
            tiles[rows - 1](x, of.x_stride, panel.get() + n / lanes * words + k / 2, words, some, sums.get() + first * panel_n + n, panel_n);
        }
      }
      for (int64_t m = m0; m < m1; m++)
        for (int64_t n = 0; n < count; n += lanes) {
          const __mmask16 mask = static_cast<__mmask16>(count - n < lanes ? (1u << (count - n)) - 1 : ~0u);
          __m512 temp = _mm512_maskz_loadu_ps(mask, sums.get() + (m - m0) * panel_n + n);
          if (of.bias) temp = _mm512_add_ps(temp, bias_at(*of.bias, row + n, mask));
          store_rounded(of.y + m * a.n + row + n, mask, temp);
        }
    }
  }
}

}  // namespace lowbit::cpu::avx512bf16
