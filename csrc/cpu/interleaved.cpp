// Products with interleaved weights in AVX-512 with VBMI and VNNI. A dot product of four bytes adds a digit's products to the sums
// of sixteen rows.
#include <algorithm>
#include <utility>

#include "steps.h"

#include "interleaved_products.h"

// Widths: 2 3 4 5 6 7 8
namespace lowbit::cpu::avx512vnni {
namespace {

struct Wide {
  using Bytes = __m512i;
  using Floats = __m512;
  static constexpr int size = 64, lanes = 16, most_rows = 4, few_of_table = 127;
  static constexpr int registers(int, int) { return 2; }
  static constexpr int streams(int) { return 2; }
  static constexpr int chains(int sums) { return sums < 8 ? 2 : 1; }
  static constexpr bool takes_words(int) { return false; }

  struct Table {
    __m512i numbers;
    explicit Table(const uint8_t* of) : numbers(of ? _mm512_loadu_si512(of) : _mm512_setzero_si512()) {}
  };
  struct Scales {
    const Numbers& of;
    ByteScales of_byte;
    explicit Scales(const Numbers& scale) : of(scale), of_byte(scale) {}
    void operator()(int64_t i, __m512 (&to)[2]) const {
      if (of.stored == Stored::bytes && of.table && of_byte.short_numbers)
        return of_byte(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const uint8_t*>(of.data) + i)), to[0], to[1]);
      for (int r = 0; r < 2; r++) {
        if (of.stored == Stored::bfloat16) {  // the usual ones
          const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(of.data) + i + 16 * r));
          to[r] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
        } else {
          to[r] = numbers_at(of, i + 16 * r, static_cast<__mmask16>(~0u));
        }
      }
    }
  };
  template <bool words, int most>
  struct Sum {
    static constexpr int adds = 1 << 16;
    __m512i sums = _mm512_setzero_si512();
    inline void add(__m512i bytes, __m512i digits) { sums = _mm512_dpbusd_epi32(sums, bytes, digits); }
    inline void move() {}
  };

  static inline __m512i every(int byte) { return avx512vnni::every(byte); }
  static inline __m512i load(const uint8_t* p) {
    __m512i of = _mm512_loadu_si512(p);
    asm("" : "+v"(of));  // read once: a load takes as long as a product
    return of;
  }
  static inline __m512i integers(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static inline __m512 floats(__m512i integers) { return _mm512_cvtepi32_ps(integers); }
  static inline __m512i broadcast(int32_t four) {
    __m512i of = _mm512_set1_epi32(four);
    asm("" : "+v"(of));
    return of;
  }
  static inline __m512 broadcast(float number) { return _mm512_set1_ps(number); }
  static inline __m512 zero() { return _mm512_setzero_ps(); }
  static inline __m512i exclusive(__m512i a, __m512i b) { return _mm512_xor_si512(a, b); }
  static inline __m512i both(__m512i a, __m512i b) { return _mm512_and_si512(a, b); }
  static inline __m512i put(__m512i a, __m512i b, __m512i mask) { return _mm512_ternarylogic_epi64(a, b, mask, 0xf8); }  // a | (b & mask)
  template <int by>
  static inline __m512i right(__m512i a) { return _mm512_srli_epi16(a, by); }
  template <int by>
  static inline __m512i left(__m512i a) { return _mm512_slli_epi16(a, by); }
  static inline __m512i look_up(const Table& table, __m512i codes) { return _mm512_permutexvar_epi8(codes, table.numbers); }
  static inline __m512i plus(__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }
  static inline __m512i times(__m512i a, __m512i b) { return _mm512_mullo_epi32(a, b); }
  static inline __m512 times(__m512 a, __m512 b) { return _mm512_mul_ps(a, b); }
  static inline __m512 fma(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
  static inline void store(float* p, __m512 a) { _mm512_storeu_ps(p, a); }
};

}  // namespace

template <int bits>
void interleaved_linear(const Linear& a, const Bytewise& how, const DigitsOfUnits& x, const Turn& turn) {
  take_digits_of<Wide, bits>(a, how, x, turn);
}
template void interleaved_linear<LOWBIT_BITS>(const Linear&, const Bytewise&, const DigitsOfUnits&, const Turn&);

}  // namespace lowbit::cpu::avx512vnni
