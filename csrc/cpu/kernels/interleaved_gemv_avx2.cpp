// Interleaved split-int8 GEMV for AVX2 (see interleaved_gemv.h). maddubs adds pairs of products in int16; adds_per_flush of these
// fit before they are widened to int32. 8-bit codes would overflow int16 at once and are multiplied as 16-bit words.
#include <algorithm>
#include <utility>

#include "../decode/unpack_avx2.h"

#include "interleaved_gemv.h"

// Widths: 2 3 4 5 6 7 8
namespace lowbit::cpu::avx2 {
namespace {

struct Narrow {
  using ByteReg = __m256i;
  using FloatReg = __m256;
  static constexpr int size = 32, lanes = 8, max_tile_m = 2, narrow_table_max = small_table_max;
  // 4 and 8 bits: four registers, a whole cache line. Their int32 sums spill to the stack, which is rare enough to be cheap.
  static constexpr int registers(int bits, int m) { return (m == 1 && bits % 4 == 0) || (m == 2 && bits == 8) ? 4 : 2; }
  static constexpr int streams(int bits) { return bits % 4 == 0 ? 2 : 1; }
  static constexpr int chains(int) { return 1; }
  static constexpr bool uses_words(int bits) { return cpu::uses_words(bits, lanes); }

  struct Table {
    __m256i numbers;
    explicit Table(const uint8_t* table)
        : numbers(table ? _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))) : _mm256_setzero_si256()) {}
  };
  struct Scales {
    const ArrayView& scale;
    bool exponents;
    explicit Scales(const ArrayView& scale) : scale(scale), exponents(scale.dtype == Dtype::bytes && scale.table && are_exponents(scale.table)) {}
    template <int R>
    void operator()(int64_t i, __m256 (&to)[R]) const {
      for (int r = 0; r < R; r++) to[r] = load_floats(scale, exponents, i + 8 * r);
    }
  };
  template <bool words, int max_byte>
  struct Sum {
    static constexpr int adds_per_flush = words ? 1 << 16 : std::max(1, 32767 / (2 * 128 * max_byte));
    __m256i sums = _mm256_setzero_si256(), short_sums = _mm256_setzero_si256();
    static inline __m256i in_32(__m256i of_16) { return _mm256_madd_epi16(of_16, _mm256_set1_epi16(1)); }
    inline void add(__m256i codes, __m256i limbs) {
      if constexpr (words) sums = _mm256_add_epi32(sums, _mm256_madd_epi16(codes, limbs));
      else if constexpr (adds_per_flush == 1) sums = _mm256_add_epi32(sums, in_32(_mm256_maddubs_epi16(codes, limbs)));
      else short_sums = _mm256_add_epi16(short_sums, _mm256_maddubs_epi16(codes, limbs));
      asm("" : "+x"(short_sums));  // forces a chain of additions: the compiler would keep all products alive for a tree and spill
                                   // them
    }
    inline void flush() {
      if constexpr (words || adds_per_flush == 1) return;
      sums = _mm256_add_epi32(sums, in_32(short_sums)), short_sums = _mm256_setzero_si256();
    }
  };

  static inline __m256i broadcast_u8(int byte) { return avx2::broadcast_u8(byte); }
  static inline __m256i load(const uint8_t* p) { return bytes32(p); }
  static inline __m256i integers(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
  static inline __m256 floats(__m256i integers) { return _mm256_cvtepi32_ps(integers); }
  static inline __m256i broadcast(int32_t bytes4) { return _mm256_set1_epi32(bytes4); }
  static inline __m256 broadcast(float number) { return _mm256_set1_ps(number); }
  static inline __m256 zero() { return _mm256_setzero_ps(); }
  static inline __m256i bit_xor(__m256i a, __m256i b) { return _mm256_xor_si256(a, b); }
  static inline __m256i bit_and(__m256i a, __m256i b) { return _mm256_and_si256(a, b); }
  static inline __m256i or_masked(__m256i a, __m256i b, __m256i mask) { return _mm256_or_si256(a, _mm256_and_si256(b, mask)); }
  template <int by>
  static inline __m256i shift_right(__m256i a) { return _mm256_srli_epi16(a, by); }
  template <int by>
  static inline __m256i shift_left(__m256i a) { return _mm256_slli_epi16(a, by); }
  template <int field>
  static inline __m256i words_of_field(__m256i bytes) {
    if constexpr (field) return _mm256_srli_epi16(bytes, 8);
    else return _mm256_and_si256(bytes, _mm256_set1_epi16(255));
  }
  static inline __m256i look_up(const Table& table, __m256i codes) { return _mm256_shuffle_epi8(table.numbers, codes); }
  static inline __m256i plus(__m256i a, __m256i b) { return _mm256_add_epi32(a, b); }
  static inline __m256i times(__m256i a, __m256i b) { return _mm256_mullo_epi32(a, b); }
  static inline __m256 times(__m256 a, __m256 b) { return _mm256_mul_ps(a, b); }
  static inline __m256 fma(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
  static inline void store(float* p, __m256 a) { _mm256_storeu_ps(p, a); }
};

}  // namespace

template <int bits>
void interleaved_linear(const Linear& a, const ByteDecoding& decoding, const InterleavedLimbs& x, const RowRange& range) {
  gemv_for_bits<Narrow, bits>(a, decoding, x, range);
}
template void interleaved_linear<LOWBIT_BITS>(const Linear&, const ByteDecoding&, const InterleavedLimbs&, const RowRange&);

}  // namespace lowbit::cpu::avx2
