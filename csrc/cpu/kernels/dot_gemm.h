// GEMM for many rows of x on dot products of four bytes, two bfloat16 or four int8: what bf16_dot_gemm.cpp and int8_dot_gemm.cpp
// share. For AVX-512, in the namespace of the file that includes it (LOWBIT_SET).
//
//    weight rows --pack_words--> panel [panel_n / 16][words][16 rows], in the L2 cache --+
//    x [12, 512 words], in the L1 cache --broadcast a word------------------------------+--dot product--> 12 x 2 registers
//    y [M, N] <--store(row of x, register, sums)--
//
// Lanes are rows of the weight, so lanes are never summed. Results do not depend on the number of threads.
// Contract: of the two kernels.
// Limit: M N K multiply-adds, 32 (bfloat16) or 64 (int8) in an instruction.
// Reached (evals/results/prompts_cpu.json, 8960 x 1536, 2 threads with AVX-512, M = 512): int4 weights 1.04 times as fast as
// bfloat16's F.linear, int8 weights with int8 activations 2.03 times.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "linear.h"

namespace lowbit::cpu::LOWBIT_SET {
namespace {

// rows of x and of the weight in a tile: its sums stay in registers
constexpr int64_t dot_lanes = 16, tile_m = 12, tile_n = 2 * dot_lanes;
constexpr int64_t block_m = 384, block_words = 512;

// A buffer element aligned like a register; vector types lose their alignment as template arguments.
struct alignas(64) Line {
  char bytes[64];
};
inline std::unique_ptr<Line[]> registers_of(int64_t count) { return std::unique_ptr<Line[]>(new Line[count]()); }
template <typename Register>
Register* as(const std::unique_ptr<Line[]>& lines) {
  return reinterpret_cast<Register*>(lines.get());
}

// Transposes 16 rows, `stride` bytes apart, by words: words[i] holds the i-th four bytes of each row.
inline void pack_words(const uint8_t* rows, int64_t stride, __m512i* words) {
  __m512i a[dot_lanes], b[dot_lanes];
#pragma GCC unroll 16
  for (int i = 0; i < dot_lanes; i++) a[i] = _mm512_loadu_si512(rows + i * stride);
#pragma GCC unroll 8
  for (int i = 0; i < dot_lanes; i += 2) b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]), b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
#pragma GCC unroll 4
  for (int i = 0; i < dot_lanes; i += 4)
    for (int j = 0; j < 2; j++) {
      a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + 2 + j]);
      a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + 2 + j]);
    }
  // a[4 g + c]: column 4 q + c of rows 4 g .. 4 g + 3 in quarter q
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    const __m512i low01 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x44), high01 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xee);
    const __m512i low23 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x44), high23 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xee);
    words[c] = _mm512_shuffle_i32x4(low01, low23, 0x88), words[4 + c] = _mm512_shuffle_i32x4(low01, low23, 0xdd);
    words[8 + c] = _mm512_shuffle_i32x4(high01, high23, 0x88), words[12 + c] = _mm512_shuffle_i32x4(high01, high23, 0xdd);
  }
}

// sums [M, 32] += x [M, words] times the packed w [2][words][16], whose halves are `w_stride` registers apart.
template <typename Dot, int M>
void tile(const uint8_t* x, int64_t x_stride, const __m512i* w, int64_t w_stride, int64_t words, typename Dot::Sum* sums,
          int64_t stride) {
  typename Dot::Sum sum[M][2];
#pragma GCC unroll 12
  for (int m = 0; m < M; m++) sum[m][0] = sum[m][1] = typename Dot::Sum{};
  for (int64_t i = 0; i < words; i++) {
    const typename Dot::Operand w0 = Dot::operand(w[i]), w1 = Dot::operand(w[w_stride + i]);
#pragma GCC unroll 12
    for (int m = 0; m < M; m++) {
      int word;
      std::memcpy(&word, x + m * x_stride + 4 * i, sizeof word);
      const typename Dot::Operand of_x = Dot::operand(_mm512_set1_epi32(word));
      sum[m][0] = Dot::multiply_add(sum[m][0], w0, of_x);
      sum[m][1] = Dot::multiply_add(sum[m][1], w1, of_x);
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; m++)
    for (int half = 0; half < 2; half++) {
      // keeps GCC from copying each sum in every step, because it is added as another type
      asm("" : "+v"(sum[m][half]));
      sums[m * stride + half] = Dot::add(sums[m * stride + half], sum[m][half]);
    }
}

template <typename Dot>
constexpr decltype(&tile<Dot, 1>) tiles[] = {tile<Dot, 1>, tile<Dot, 2>, tile<Dot, 3>, tile<Dot, 4>,  tile<Dot, 5>,  tile<Dot, 6>,
                                             tile<Dot, 7>, tile<Dot, 8>, tile<Dot, 9>, tile<Dot, 10>, tile<Dot, 11>, tile<Dot, 12>};

// x [m, 4 words] bytes, rows `stride` bytes apart.
struct WordsOfX {
  const uint8_t* data;
  int64_t stride, m, words;
};

// x times a panel of 16 * registers rows; calls store(row of x, register, sums). sums: room for block_m rows. `prefetch()` is
// called once for each tile.
template <typename Dot, typename Prefetch, typename Store>
void multiply_panel(const WordsOfX& x, const __m512i* panel, int64_t registers, typename Dot::Sum* sums, const Prefetch& prefetch,
                    const Store& store) {
  for (int64_t m0 = 0; m0 < x.m; m0 += block_m) {
    const int64_t count = std::min(block_m, x.m - m0), parts = (count + tile_m - 1) / tile_m;
    std::fill_n(sums, count * registers, typename Dot::Sum{});
    for (int64_t k = 0; k < x.words; k += block_words) {
      const int64_t words = std::min(block_words, x.words - k);
      for (int64_t p = 0; p < parts; p++) {
        const int64_t first = count * p / parts, rows = count * (p + 1) / parts - first;
        for (int64_t r = 0; r < registers; r += 2, prefetch())
          tiles<Dot>[rows - 1](x.data + (m0 + first) * x.stride + 4 * k, x.stride, panel + r * x.words + k, x.words, words,
                               sums + first * registers + r, registers);
      }
    }
    for (int64_t m = 0; m < count; m++)
      for (int64_t r = 0; r < registers; r++) store(m0 + m, r, sums[m * registers + r]);
  }
}

// Number of calls of `prefetch` in multiply_panel.
inline int64_t tiles_of(const WordsOfX& x, int64_t registers) {
  return (x.m + tile_m - 1) / tile_m * ((x.words + block_words - 1) / block_words) * (registers / 2);
}

// Registers for `rows` rows of the weight, in pairs.
inline int64_t registers_for(int64_t rows) { return (rows + tile_n - 1) / tile_n * 2; }

// Mask of the lanes of a register at row `at` that are below `count`.
inline __mmask16 lanes_of(int64_t at, int64_t count) { return static_cast<__mmask16>(count - at < dot_lanes ? (1u << std::max<int64_t>(count - at, 0)) - 1 : ~0u); }

// Rounds the lanes of `mask` to bfloat16, to nearest even, and stores them.
inline void store_bfloat16(uint16_t* to, __mmask16 mask, __m512 numbers) {
  const __m512i bits = _mm512_castps_si512(numbers), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  up = _mm512_mask_or_epi32(up, _mm512_cmp_ps_mask(numbers, numbers, _CMP_UNORD_Q), bits, _mm512_set1_epi32(0x400000));
  _mm256_mask_storeu_epi16(to, mask, _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16)));
}

// Loads the lanes of `mask` from any float type; 0 elsewhere.
inline __m512 load_as(const ArrayView& from, int64_t i, __mmask16 mask) {
  if (from.dtype == Dtype::float32) return _mm512_maskz_loadu_ps(mask, static_cast<const float*>(from.data) + i);
  const __m256i temp = _mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(from.data) + i);
  if (from.dtype == Dtype::float16) return _mm512_cvtph_ps(temp);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(temp), 16));
}

// Stores the lanes of `mask` in y from `at` on, as `type`.
inline void store_as(Dtype type, void* y, int64_t at, __mmask16 mask, __m512 numbers) {
  if (type == Dtype::bfloat16) return store_bfloat16(static_cast<uint16_t*>(y) + at, mask, numbers);
  if (type == Dtype::float32) return _mm512_mask_storeu_ps(static_cast<float*>(y) + at, mask, numbers);
  _mm256_mask_storeu_epi16(static_cast<uint16_t*>(y) + at, mask, _mm512_cvtps_ph(numbers, _MM_FROUND_TO_NEAREST_INT));
}

// Prefetches the next panel's codes for the L2 cache, some with each tile: all at once would saturate memory and stall the loads
// of the products.
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
}  // namespace lowbit::cpu::LOWBIT_SET
