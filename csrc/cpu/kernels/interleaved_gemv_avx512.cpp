// Interleaved split-int8 GEMV for AVX-512 with VBMI and VNNI (see interleaved_gemv.h): dpbusd adds four products to each of
// sixteen rows.
#include <algorithm>
#include <utility>

#include "../decode/unpack_avx512.h"

#include "interleaved_gemv.h"

// Widths: 2 3 4 5 6 7 8
namespace lowbit::cpu::avx512vnni {
namespace {

struct Wide {
  using ByteReg = __m512i;
  using FloatReg = __m512;
  static constexpr int size = 64, lanes = 16, max_tile_m = 4, narrow_table_max = 127;
  static constexpr int registers(int, int) { return 2; }
  static constexpr int streams(int) { return 2; }
  static constexpr int chains(int sums) { return sums < 8 ? 2 : 1; }
  static constexpr bool uses_words(int) { return false; }

  struct Table {
    __m512i numbers;
    explicit Table(const uint8_t* table) : numbers(table ? _mm512_loadu_si512(table) : _mm512_setzero_si512()) {}
  };
  struct Scales {
    const ArrayView& scale;
    ByteScales byte_scales;
    explicit Scales(const ArrayView& scale) : scale(scale), byte_scales(scale) {}
    void operator()(int64_t i, __m512 (&to)[2]) const {
      if (scale.dtype == Dtype::bytes && scale.table && byte_scales.short_numbers)
        return byte_scales(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const uint8_t*>(scale.data) + i)), to[0], to[1]);
      for (int r = 0; r < 2; r++) {
        if (scale.dtype == Dtype::bfloat16) {  // the most frequent type of scales
          const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(scale.data) + i + 16 * r));
          to[r] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
        } else {
          to[r] = load_floats(scale, i + 16 * r, static_cast<__mmask16>(~0u));
        }
      }
    }
  };
  template <bool words, int max_byte>
  struct Sum {
    static constexpr int adds_per_flush = 1 << 16;
    __m512i sums = _mm512_setzero_si512();
    inline void add(__m512i bytes, __m512i limbs) { sums = _mm512_dpbusd_epi32(sums, bytes, limbs); }
    inline void flush() {}
  };

  static inline __m512i broadcast_u8(int byte) { return avx512vnni::broadcast_u8(byte); }
  static inline __m512i load(const uint8_t* p) {
    __m512i value = _mm512_loadu_si512(p);
    asm("" : "+v"(value));  // keeps the value in a register: a second load would cost as much as the product
    return value;
  }
  static inline __m512i integers(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static inline __m512 floats(__m512i integers) { return _mm512_cvtepi32_ps(integers); }
  static inline __m512i broadcast(int32_t bytes4) {
    __m512i value = _mm512_set1_epi32(bytes4);
    asm("" : "+v"(value));
    return value;
  }
  static inline __m512 broadcast(float number) { return _mm512_set1_ps(number); }
  static inline __m512 zero() { return _mm512_setzero_ps(); }
  static inline __m512i bit_xor(__m512i a, __m512i b) { return _mm512_xor_si512(a, b); }
  static inline __m512i bit_and(__m512i a, __m512i b) { return _mm512_and_si512(a, b); }
  static inline __m512i or_masked(__m512i a, __m512i b, __m512i mask) { return _mm512_ternarylogic_epi64(a, b, mask, 0xf8); }  // a | (b & mask)
  template <int by>
  static inline __m512i shift_right(__m512i a) { return _mm512_srli_epi16(a, by); }
  template <int by>
  static inline __m512i shift_left(__m512i a) { return _mm512_slli_epi16(a, by); }
  static inline __m512i look_up(const Table& table, __m512i codes) { return _mm512_permutexvar_epi8(codes, table.numbers); }
  static inline __m512i plus(__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }
  static inline __m512i times(__m512i a, __m512i b) { return _mm512_mullo_epi32(a, b); }
  static inline __m512 times(__m512 a, __m512 b) { return _mm512_mul_ps(a, b); }
  static inline __m512 fma(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
  static inline void store(float* p, __m512 a) { _mm512_storeu_ps(p, a); }
};

}  // namespace

template <int bits>
void interleaved_linear(const Linear& a, const ByteDecoding& decoding, const InterleavedLimbs& x, const RowRange& range) {
  gemv_for_bits<Wide, bits>(a, decoding, x, range);
}
template void interleaved_linear<LOWBIT_BITS>(const Linear&, const ByteDecoding&, const InterleavedLimbs&, const RowRange&);

}  // namespace lowbit::cpu::avx512vnni
