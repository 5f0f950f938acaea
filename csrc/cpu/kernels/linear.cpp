// Generic GEMV in fp32 for up to eight rows of x (1, 2, 4 or 8 with rows of zeros), any format and instruction set.
// Compiled once for each set (LOWBIT_SET is its namespace).
//
//    x [M, K] --arrange--> f32 [group][block][M][32]
//    row: packed --decode, - zero_point--> w f32 [32] --fma--> sums [R, M][16 lanes] --* group scale--> y [M, R rows]
//
// Each code is decoded once for all rows of x. Results do not depend on the number of threads.
// Contract: exact: fp32 sums of the exact quantized weights.
// Limit: at M = 1 the bytes of the weight, in practice the decoding.
// Figures: none in evals/results, whose formats have other kernels on the processors measured.
#include "linear.h"

#include "../decode/unpack_codes.h"
#include "../isa/array_view.h"
#include "../decode/truncated_half.h"
#include "../isa/simd.h"

namespace lowbit::cpu::LOWBIT_SET {
namespace {

// The codes of a whole block, or `count` codes of one that is not. Vectorized for any count they would be 60 KB.
template <int bits>
__attribute__((noinline)) void unpack_block(const uint8_t* row, int64_t n, int64_t first, int count, uint8_t* codes) {
  if (count == block) {
    const CodeBytes all = codes_from<bits>(row, n, first);
    memcpy(codes, &all, sizeof all);
  } else {
    for (int i = 0; i < count; i++) codes[i] = static_cast<uint8_t>(code_at<bits>(row, n, first + i));
  }
}
inline void unpack_any(int bits, const uint8_t* row, int64_t n, int64_t first, int count, uint8_t* codes) {
  switch (bits) {
    case 1: return unpack_block<1>(row, n, first, count, codes);
    case 2: return unpack_block<2>(row, n, first, count, codes);
    case 3: return unpack_block<3>(row, n, first, count, codes);
    case 4: return unpack_block<4>(row, n, first, count, codes);
    case 5: return unpack_block<5>(row, n, first, count, codes);
    case 6: return unpack_block<6>(row, n, first, count, codes);
    case 7: return unpack_block<7>(row, n, first, count, codes);
    default: return unpack_block<8>(row, n, first, count, codes);
  }
}

// The bytes at `at`, or a zero-padded copy where the row ends within them: nothing is read beyond a row.
template <int count>
inline const uint8_t* bytes_or_padded(const uint8_t* row, int64_t at, int64_t row_bytes, uint8_t* copy) {
  if (at + count <= row_bytes) return row + at;
  memset(copy, 0, count);
  memcpy(copy, row + at, row_bytes - at);
  return copy;
}

// Decodes one row's codes of one group, a block at a time, and subtracts the zero point. Lanes of a neighbouring group hold any
// finite value and are multiplied by zeros of the arranged x; a table may hold NaN, so its foreign lanes are set to 0.
template <Codes codes>
struct Decoder;

template <>
struct Decoder<Codes::nibbles> {
  Table table;
  Decoder(const Linear& a, float zero) : table(less(table16(a.values), zero)) {}
  void block_at(const Linear& a, const uint8_t* row, const Span&, int64_t first, F32x16& w0, F32x16& w1) const {
    uint8_t copy[16];
    nibbles(bytes_or_padded<16>(row, first / 2, (a.k + 1) / 2, copy), table, w0, w1);
  }
};

template <bool is_signed>
struct ByteDecoder {
  F32x16 zero;
  ByteDecoder(const Linear&, float z) : zero(broadcast(z)) {}
  void block_at(const Linear& a, const uint8_t* row, const Span&, int64_t first, F32x16& w0, F32x16& w1) const {
    uint8_t copy[32];
    const uint8_t* bytes = bytes_or_padded<32>(row, first, a.k, copy);
    if constexpr (is_signed) {  // signed formats have no zero point
      w0 = signed_bytes(bytes);
      w1 = signed_bytes(bytes + 16);
    } else {
      w0 = subtract(unsigned_bytes(bytes), zero);
      w1 = subtract(unsigned_bytes(bytes + 16), zero);
    }
  }
};
template <>
struct Decoder<Codes::signed_bytes> : ByteDecoder<true> {
  using ByteDecoder::ByteDecoder;
};
template <>
struct Decoder<Codes::unsigned_bytes> : ByteDecoder<false> {
  using ByteDecoder::ByteDecoder;
};

// groups are whole blocks
template <>
struct Decoder<Codes::truncated_half> {
  Decoder(const Linear&, float) {}
  template <int bits>
  static void of_width(const Linear& a, const uint8_t* row, const Span& span, int64_t first, F32x16& w0, F32x16& w1) {
    const int64_t left = span.first + span.count - first;
    CodeBytes codes;
    if (left >= block) {
      codes = codes_from<bits>(row, a.k, first);
    } else {  // nothing is read beyond a row
      uint8_t copy[block] = {};
      for (int64_t i = 0; i < left; i++) copy[i] = static_cast<uint8_t>(code_at<bits>(row, a.k, first + i));
      memcpy(&codes, copy, sizeof codes);
    }
    truncated_to_float<bits>(a.truncated_half, codes, w0, w1);
  }
  void block_at(const Linear& a, const uint8_t* row, const Span& span, int64_t first, F32x16& w0, F32x16& w1) const {
    if (a.bits == 8) return of_width<8>(a, row, span, first, w0, w1);
    of_width<6>(a, row, span, first, w0, w1);
  }
};

template <>
struct Decoder<Codes::table> {
  float zero;
  Decoder(const Linear&, float z) : zero(z) {}
  void block_at(const Linear& a, const uint8_t* row, const Span& span, int64_t first, F32x16& w0, F32x16& w1) const {
    uint8_t packed_codes[block];
    float numbers[block] = {};
    const int64_t end = span.first + span.lead + span.count;
    if (end - first >= block && (first > span.first || span.lead == 0)) {
      unpack_any(a.bits, row, a.k, first, block, packed_codes);
      w0 = subtract(look_up(packed_codes, a.values), broadcast(zero));
      w1 = subtract(look_up(packed_codes + 16, a.values), broadcast(zero));
      return;
    }
    const int count = static_cast<int>(end - first < block ? end - first : block);
    unpack_any(a.bits, row, a.k, first, count, packed_codes);
    for (int i = first == span.first ? static_cast<int>(span.lead) : 0; i < count; i++)
      numbers[i] = a.values[packed_codes[i]] - zero;
    w0 = load(numbers);
    w1 = load(numbers + 16);
  }
};

// Decodes `blocks` blocks of a group to 32 floats each. A function pointer, since the decoding does not depend on M and R: one
// copy serves all instantiations.
using Decode = void (*)(const Linear&, const uint8_t* row, const Span&, int64_t first, int64_t blocks, float zero, float* numbers);

template <int bits>
struct Integers {
  int sign;
  explicit Integers(const Linear& a) : sign(a.is_signed ? 1 << (bits - 1) : 0) {}
  void operator()(const CodeBytes& codes, F32x16& w0, F32x16& w1) const { integers(codes, sign, w0, w1); }
};
template <int bits>
struct Exact : HalfTable<bits> {
  explicit Exact(const Linear& a) : HalfTable<bits>(a.halves) {}
};

// A block at the edge of its group or row.
__attribute__((noinline)) void decode_edge(const Linear& a, const uint8_t* row, const Span& span, int64_t first, float zero, float* numbers) {
  F32x16 w0, w1;
  Decoder<Codes::table>(a, zero).block_at(a, row, span, first, w0, w1);
  store(numbers, w0);
  store(numbers + 16, w1);
}

template <class ArrayView, int bits>
void decode(const Linear& a, const uint8_t* row, const Span& span, int64_t first, int64_t blocks, float zero, float* numbers) {
  const ArrayView view_of(a);
  const F32x16 zeros = broadcast(zero);
  const int64_t end = span.first + span.lead + span.count;
  for (int64_t b = 0; b < blocks; b++, first += block, numbers += block) {
    if (end - first < block || (first == span.first && span.lead)) {
      decode_edge(a, row, span, first, zero, numbers);
      continue;
    }
    F32x16 w0, w1;
    view_of(codes_from<bits>(row, a.k, first), w0, w1);
    store(numbers, subtract(w0, zeros));
    store(numbers + 16, subtract(w1, zeros));
  }
}

template <template <int> class ArrayView>
Decode decode_of(int bits) {
  switch (bits) {
    case 1: return decode<ArrayView<1>, 1>;
    case 2: return decode<ArrayView<2>, 2>;
    case 3: return decode<ArrayView<3>, 3>;
    case 4: return decode<ArrayView<4>, 4>;
    case 5: return decode<ArrayView<5>, 5>;
    case 6: return decode<ArrayView<6>, 6>;
    case 7: return decode<ArrayView<7>, 7>;
    default: return decode<ArrayView<8>, 8>;
  }
}

// R rows of the weight times M rows of x, decoding some blocks at a time.
template <int M, int R>
void tile_of_decoded(const Linear& a, Decode decode, int64_t row) {
  constexpr int64_t batch = 8;
  alignas(64) float numbers[R][batch * block];
  F32x16 total[R][M];
  for (auto& r : total)
    for (F32x16& t : r) t = zeros();
  const float* x = a.arranged;
  for (int64_t g = 0; g * a.group < a.k; g++) {
    const Span span = span_of(a, g);
    F32x16 part[R][M];
    for (auto& r : part)
      for (F32x16& p : r) p = zeros();
    for (int64_t from = 0; from < span.blocks; from += batch) {
      const int64_t count = span.blocks - from < batch ? span.blocks - from : batch;
      for (int r = 0; r < R; r++)
        decode(a, a.packed + (row + r) * a.packed_stride, span, span.first + from * block, count, zero_of(a, row + r, g), numbers[r]);
      for (int64_t b = 0; b < count; b++, x += block * M) {
        for (int r = 0; r < R; r++) {
          const F32x16 w0 = load(numbers[r] + b * block), w1 = load(numbers[r] + b * block + 16);
          for (int m = 0; m < M; m++) {
            part[r][m] = fma(w0, load(x + block * m), part[r][m]);
            part[r][m] = fma(w1, load(x + block * m + 16), part[r][m]);
          }
        }
      }
    }
    for (int r = 0; r < R; r++) {
      const F32x16 scale = broadcast(scale_of(a, row + r, g));
      for (int m = 0; m < M; m++) total[r][m] = fma(part[r][m], scale, total[r][m]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int m = 0; m < M; m++)
      if (m < a.m) a.y[m * a.n + row + r] = sum(total[r][m]);
}

// Prefetches the same group of the next rows for the L2 cache: several short rows at once are more streams than the hardware
// prefetcher tracks.
inline void prefetch_next_tile(const Linear& a, const uint8_t* const* rows, int count, const Span& span) {
#if defined(__AVX2__)
  const auto prefetch_l2 = [&](int64_t from, int64_t bytes) {
    for (int r = 0; r < count; r++)
      for (int64_t at = 0; at < bytes; at += 64)
        _mm_prefetch(reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(rows[r] + from + at) + count * a.packed_stride), _MM_HINT_T1);
  };
  const int widest = a.bits & 8 ? 8 : a.bits & 4 ? 4 : a.bits & 2 ? 2 : 1;
  prefetch_l2(span.first * widest / 8, span.count * widest / 8);
  if (a.bits != widest) prefetch_l2((a.k * widest + 7) / 8 + span.first * (a.bits - widest) / 8, span.count * (a.bits - widest) / 8);
#else
  (void)a, (void)rows, (void)count, (void)span;
#endif
}

// R rows of the weight times M rows of x.
template <Codes codes, int M, int R>
void tile(const Linear& a, int64_t row) {
  F32x16 total[R][M];
  for (auto& r : total)
    for (F32x16& t : r) t = zeros();
  const float* x = a.arranged;
  const uint8_t* packed[R];
  for (int r = 0; r < R; r++) packed[r] = a.packed + (row + r) * a.packed_stride;
  for (int64_t g = 0; g * a.group < a.k; g++) {
    const Span span = span_of(a, g);
    auto sum_group = [&](const auto&... decoder) __attribute__((always_inline)) {
      const Decoder<codes>* decoders[] = {&decoder...};
      prefetch_next_tile(a, packed, R, span);
      F32x16 part[R][M];
      for (auto& r : part)
        for (F32x16& p : r) p = zeros();
      for (int64_t b = 0; b < span.blocks; b++, x += block * M) {
        for (int r = 0; r < R; r++) {
          F32x16 w0, w1;
          decoders[r]->block_at(a, packed[r], span, span.first + b * block, w0, w1);
          for (int m = 0; m < M; m++) {
            part[r][m] = fma(w0, load(x + block * m), part[r][m]);
            part[r][m] = fma(w1, load(x + block * m + 16), part[r][m]);
          }
        }
      }
      for (int r = 0; r < R; r++) {
        const F32x16 scale = broadcast(scale_of(a, row + r, g) * a.unit);
        for (int m = 0; m < M; m++) total[r][m] = fma(part[r][m], scale, total[r][m]);
      }
    };
    auto decoder = [&](int r) { return Decoder<codes>(a, zero_of(a, row + r, g)); };
    if constexpr (R == 1) sum_group(decoder(0));
    if constexpr (R == 2) sum_group(decoder(0), decoder(1));
    if constexpr (R == 4) sum_group(decoder(0), decoder(1), decoder(2), decoder(3));
  }
  for (int r = 0; r < R; r++)
    for (int m = 0; m < M; m++)
      if (m < a.m) a.y[m * a.n + row + r] = sum(total[r][m]);
}

template <Codes codes>
constexpr bool is_decoded = codes == Codes::integers || codes == Codes::halves;

// Chooses R as large as the sums fit in registers, which hides the latency of the multiply-add and reuses each load of x.
template <Codes codes, int M>
void rows(const Linear& a, int64_t begin, int64_t end) {
#if defined(__AVX512F__)
  constexpr int R = M <= 4 ? 4 : 2;
#else
  constexpr int R = M == 1 ? 4 : M == 2 ? 2 : 1;
#endif
  int64_t row = begin;
  if constexpr (is_decoded<codes>) {
    const Decode decode = codes == Codes::integers ? decode_of<Integers>(a.bits) : decode_of<Exact>(a.bits);
    for (; row + R <= end; row += R) tile_of_decoded<M, R>(a, decode, row);
    for (; row < end; row++) tile_of_decoded<M, 1>(a, decode, row);
  } else {
    for (; row + R <= end; row += R) tile<codes, M, R>(a, row);
    for (; row < end; row++) tile<codes, M, 1>(a, row);
  }
}

template <Codes codes>
void rows_for_m(const Linear& a, int64_t begin, int64_t end) {
  switch (arranged_rows(a.m)) {
    case 1: return rows<codes, 1>(a, begin, end);
    case 2: return rows<codes, 2>(a, begin, end);
    case 4: return rows<codes, 4>(a, begin, end);
    default: return rows<codes, 8>(a, begin, end);
  }
}

}  // namespace

void arrange(const Linear& a, const ArrayView& x, float* arranged) {
  for (int64_t g = 0; g * a.group < a.k; g++) {
    const Span span = span_of(a, g);
    for (int64_t b = 0; b < span.blocks; b++) {
      for (int64_t m = 0; m < arranged_rows(a.m); m++, arranged += block) {
        for (int i = 0; i < block; i++) {
          const int64_t at = b * block + i - span.lead;
          const float value = m < a.m && at >= 0 && at < span.count ? load_float(x, m * x.stride + span.first + b * block + i) : 0.0f;
          arranged[a.codes == Codes::nibbles ? i / 2 + i % 2 * 16 : i] = value;
        }
      }
    }
  }
}

void linear(const Linear& a, int64_t begin, int64_t end) {
  switch (a.codes) {
    case Codes::nibbles: return rows_for_m<Codes::nibbles>(a, begin, end);
    case Codes::signed_bytes: return rows_for_m<Codes::signed_bytes>(a, begin, end);
    case Codes::unsigned_bytes: return rows_for_m<Codes::unsigned_bytes>(a, begin, end);
    case Codes::integers: return rows_for_m<Codes::integers>(a, begin, end);
    case Codes::truncated_half: return rows_for_m<Codes::truncated_half>(a, begin, end);
    case Codes::halves: return rows_for_m<Codes::halves>(a, begin, end);
    case Codes::table: return rows_for_m<Codes::table>(a, begin, end);
  }
}

}  // namespace lowbit::cpu::LOWBIT_SET
