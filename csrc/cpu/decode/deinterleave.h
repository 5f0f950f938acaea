// Converts interleaved rows back to canonical ones, a block of 32 rows at a time, for kernels that only read canonical rows.
#pragma once

#include <algorithm>
#include <memory>

#if defined(__AVX512BW__)
#include <immintrin.h>
#endif

#include "interleaved.h"

namespace lowbit::cpu {
namespace {

// Spreads the four bytes of a word to the even bytes of eight.
inline uint64_t spread_bytes(uint32_t word) {
  uint64_t bytes = word;
  bytes = (bytes | bytes << 16) & 0x0000ffff0000ffff;
  return (bytes | bytes << 8) & 0x00ff00ff00ff00ff;
}

// Interleaves the bytes of `count` words (1, 2 or 4): byte 0 of each, then byte 1 of each ...
template <int count>
inline void store_words(const uint32_t* words, uint8_t* to) {
  if constexpr (count == 1) {
    memcpy(to, words, 4);
  } else {
    const uint64_t first = spread_bytes(words[0]) | spread_bytes(words[1]) << 8;
    if constexpr (count == 2) {
      memcpy(to, &first, 8);
    } else {
      const uint64_t second = spread_bytes(words[2]) | spread_bytes(words[3]) << 8;
      const auto pairs = [](uint64_t two) { return (two | two << 16) & 0x0000ffff0000ffff; };
      const uint64_t both[] = {pairs(first & 0xffffffff) | pairs(second & 0xffffffff) << 16, pairs(first >> 32) | pairs(second >> 32) << 16};
      memcpy(to, both, 16);
    }
  }
}

constexpr int64_t units_per_pass = 16;  // units whose output rows stay in the L1 cache during a pass

// Units [first, first + count) of one row.
template <int bits, int plane = 0>
inline void deinterleave_planes(const uint8_t* block, int64_t units, int64_t first, int64_t count, int64_t row, uint8_t* to) {
  using U = Unit<bits>;
  if constexpr (plane < U::P::count) {
    constexpr int words_per_plane = U::words_per_plane(plane);
    const uint8_t* from = block + (first * U::words + U::first_word(plane)) * bytes_per_word + 4 * row;
    uint8_t* at = to + 4 * (units * U::first_word(plane) + first * words_per_plane);
    for (int64_t u = 0; u < count; u++, from += U::words * bytes_per_word, at += 4 * words_per_plane) {
      uint32_t words[words_per_plane];
      for (int w = 0; w < words_per_plane; w++) memcpy(words + w, from + w * bytes_per_word, 4);
      store_words<words_per_plane>(words, at);
    }
    deinterleave_planes<bits, plane + 1>(block, units, first, count, row, to);
  }
}

#if defined(__AVX512BW__)
// Transposes a 16 x 16 matrix of 32-bit words in registers.
inline void transpose(__m512i (&of)[16]) {
  __m512i temp[16];
  for (int i = 0; i < 16; i += 2) temp[i] = _mm512_unpacklo_epi32(of[i], of[i + 1]), temp[i + 1] = _mm512_unpackhi_epi32(of[i], of[i + 1]);
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      of[i + 2 * j] = _mm512_unpacklo_epi64(temp[i + j], temp[i + 2 + j]);
      of[i + 2 * j + 1] = _mm512_unpackhi_epi64(temp[i + j], temp[i + 2 + j]);
    }
  for (int j = 0; j < 4; j++) {
    const __m512i a = _mm512_shuffle_i32x4(of[j], of[4 + j], 0x44), b = _mm512_shuffle_i32x4(of[j], of[4 + j], 0xee);
    const __m512i c = _mm512_shuffle_i32x4(of[8 + j], of[12 + j], 0x44), d = _mm512_shuffle_i32x4(of[8 + j], of[12 + j], 0xee);
    temp[j] = _mm512_shuffle_i32x4(a, c, 0x88), temp[4 + j] = _mm512_shuffle_i32x4(a, c, 0xdd);
    temp[8 + j] = _mm512_shuffle_i32x4(b, d, 0x88), temp[12 + j] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
  for (int i = 0; i < 16; i++) of[i] = temp[i];
}

// Interleaves the bytes of `count` words of sixteen units of a row.
template <int count>
inline void store_words(const __m512i (*words)[16], int row, uint8_t* to) {
  if constexpr (count == 1) {
    _mm512_storeu_si512(to, words[0][row]);
  } else {
    const auto of_two = [&](int w, bool upper) {
      const __m512i a = words[w][row], b = words[w + 1][row];
      return upper ? _mm512_unpackhi_epi8(a, b) : _mm512_unpacklo_epi8(a, b);
    };
    const __m512i lower = of_two(0, false), upper = of_two(0, true);
    if constexpr (count == 2) {
      _mm512_storeu_si512(to, _mm512_permutex2var_epi64(lower, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), upper));
      _mm512_storeu_si512(to + 64, _mm512_permutex2var_epi64(lower, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), upper));
    } else {
      const __m512i lower2 = of_two(2, false), upper2 = of_two(2, true);
      const __m512i units[] = {_mm512_unpacklo_epi16(lower, lower2), _mm512_unpackhi_epi16(lower, lower2),
                               _mm512_unpacklo_epi16(upper, upper2), _mm512_unpackhi_epi16(upper, upper2)};
      for (int j = 0; j < 4; j++) {
        alignas(64) uint8_t of_lanes[64];
        _mm512_store_si512(of_lanes, units[j]);
        for (int lane = 0; lane < 4; lane++) memcpy(to + (4 * lane + j) * 16, of_lanes + 16 * lane, 16);
      }
    }
  }
}

// Units [first, first + 16) of all 32 rows.
template <int bits, int plane = 0>
inline void deinterleave_tile(const uint8_t* block, int64_t units, int64_t first, int64_t stride, uint8_t* to) {
  using U = Unit<bits>;
  if constexpr (plane < U::P::count) {
    constexpr int count = U::words_per_plane(plane);
    uint8_t* const at = to + 4 * (units * U::first_word(plane) + first * count);
    for (int64_t row = 0; row < rows_per_block; row += 16) {
      __m512i words[count][16];
      for (int w = 0; w < count; w++) {
        const uint8_t* from = block + (first * U::words + U::first_word(plane) + w) * bytes_per_word + 4 * row;
        for (int u = 0; u < 16; u++) words[w][u] = _mm512_loadu_si512(from + u * U::words * bytes_per_word);
        transpose(words[w]);
      }
      for (int r = 0; r < 16; r++) store_words<count>(words, r, at + (row + r) * stride);
    }
    deinterleave_tile<bits, plane + 1>(block, units, first, stride, to);
  }
}
#endif

template <int bits>
void deinterleave_block(const uint8_t* block, int64_t units, int64_t stride, uint8_t* to) {
  for (int64_t first = 0; first < units; first += units_per_pass) {
#if defined(__AVX512BW__)
    if (units - first >= units_per_pass) {
      deinterleave_tile<bits>(block, units, first, stride, to);
      continue;
    }
#endif
    for (int64_t row = 0; row < rows_per_block; row++)
      deinterleave_planes<bits>(block, units, first, std::min(units_per_pass, units - first), row, to + row * stride);
  }
}

inline void deinterleave_block(int bits, const uint8_t* block, int64_t units, int64_t stride, uint8_t* to) {
  switch (bits) {
    case 1: return deinterleave_block<1>(block, units, stride, to);
    case 2: return deinterleave_block<2>(block, units, stride, to);
    case 3: return deinterleave_block<3>(block, units, stride, to);
    case 4: return deinterleave_block<4>(block, units, stride, to);
    case 5: return deinterleave_block<5>(block, units, stride, to);
    case 6: return deinterleave_block<6>(block, units, stride, to);
    case 7: return deinterleave_block<7>(block, units, stride, to);
    default: return deinterleave_block<8>(block, units, stride, to);
  }
}

inline int64_t size_of(Dtype dtype) { return dtype == Dtype::float32 ? 4 : dtype == Dtype::bytes ? 1 : 2; }

// Transposes [G, 32] to [32, G].
template <typename Number>
void transpose_back(const Number* from, int64_t groups, Number* to) {
  for (int64_t r = 0; r < rows_per_block; r++)
    for (int64_t g = 0; g < groups; g++) to[r * groups + g] = from[g * rows_per_block + r];
}

// Buffer of `blocks` blocks of 32 rows in canonical order.
class CanonicalRows {
 public:
  // `blocks`: capacity in blocks of 32 rows.
  CanonicalRows(const Linear& a, int64_t blocks) : from_(a), block_(a) {
    groups_ = (a.k + a.group - 1) / a.group;
    const int64_t rows = blocks * rows_per_block;
    block_.packed_stride = padded_row_bytes(a.packed_stride);
    packed_.reset(new uint8_t[rows * block_.packed_stride]);
    scale_.reset(new uint8_t[rows * groups_ * size_of(a.scale.dtype)]);
    if (a.zero_point.data) zero_.reset(new uint8_t[rows * groups_ * size_of(a.zero_point.dtype)]);
    block_.interleaved = false;
  }
  // Converts the block that contains `row` into slot `place` of the buffer.
  void restore(int64_t row, int64_t place = 0) {
    const int64_t first = row / rows_per_block * rows_per_block, at = place * rows_per_block;
    deinterleave_block(from_.bits, from_.packed + first * from_.packed_stride, from_.k / columns_per_unit(from_.bits), block_.packed_stride,
                  packed_.get() + at * block_.packed_stride);
    transpose(from_.scale, first, scale_.get(), at);
    if (from_.zero_point.data) transpose(from_.zero_point, first, zero_.get(), at);
  }
  // The weight with pointers into the buffer, shifted so that row index `row` addresses the first row of slot 0.
  Linear from(int64_t row) const {
    Linear rows = block_;
    const auto shifted_back = [row](const void* data, int64_t stride) { return reinterpret_cast<uintptr_t>(data) - row * stride; };
    rows.packed = reinterpret_cast<const uint8_t*>(shifted_back(packed_.get(), block_.packed_stride));
    rows.scale.data = reinterpret_cast<const void*>(shifted_back(scale_.get(), groups_ * size_of(from_.scale.dtype)));
    if (zero_) rows.zero_point.data = reinterpret_cast<const void*>(shifted_back(zero_.get(), groups_ * size_of(from_.zero_point.dtype)));
    return rows;
  }

 private:
  // An odd number of whole cache lines: rows a power of two apart would map to few sets of the L1 cache.
  static int64_t padded_row_bytes(int64_t bytes) { return (bytes + 63) / 64 * 64 | 64; }
  void transpose(const ArrayView& of, int64_t first, uint8_t* all, int64_t at) const {
    const int64_t size = size_of(of.dtype), count = groups_ * size;
    const void* const from = static_cast<const uint8_t*>(of.data) + first * count;
    uint8_t* const to = all + at * count;
    if (size == 4) transpose_back(static_cast<const uint32_t*>(from), groups_, reinterpret_cast<uint32_t*>(to));
    else if (size == 2) transpose_back(static_cast<const uint16_t*>(from), groups_, reinterpret_cast<uint16_t*>(to));
    else transpose_back(static_cast<const uint8_t*>(from), groups_, to);
  }
  const Linear& from_;
  Linear block_;
  int64_t groups_;
  std::unique_ptr<uint8_t[]> packed_, scale_, zero_;
};

// Calls `body(weight, begin, end)` in order for parts of rows [begin, end), where `weight` has canonical rows.
template <typename Body>
void for_canonical_rows(const Linear& a, int64_t begin, int64_t end, const Body& body) {
  if (!a.interleaved) return body(a, begin, end);
  CanonicalRows rows(a, 1);
  for (int64_t row = begin; row < end;) {
    const int64_t first = row / rows_per_block * rows_per_block, stop = std::min(first + rows_per_block, end);
    rows.restore(row);
    body(rows.from(first), row, stop);
    row = stop;
  }
}

}  // namespace
}  // namespace lowbit::cpu
