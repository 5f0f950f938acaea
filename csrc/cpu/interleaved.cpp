// Products with interleaved weights in AVX-512 with VBMI and VNNI. A dot product of four bytes adds a digit's products to the sums
// of sixteen rows.
#include <algorithm>
#include <utility>

#include "steps.h"

#include "interleaved_products.h"

namespace lowbit::cpu::avx512vnni {
namespace {

struct Wide {
  using Bytes = __m512i;
  using Floats = __m512;
  static constexpr int size = 64, lanes = 16, most_rows = 4, few_of_table = 127;
  static constexpr int registers(int) { return 2; }
  static constexpr int chains(int m) { return m == 1 ? 2 : 1; }
  static constexpr bool takes_words(int) { return false; }

  struct Table {
    __m512i numbers;
    explicit Table(const uint8_t* of) : numbers(of ? _mm512_loadu_si512(of) : _mm512_setzero_si512()) {}
  };
  struct Scales {
    ByteScales of_byte;
    explicit Scales(const Numbers& scale) : of_byte(scale) {}
    void operator()(const Linear& a, int64_t row, int64_t first, int64_t count, float unit, float* to) const {
      take_scales(a, of_byte, row, first, count, unit, to);
    }
  };
  static void take_zeros(const Linear& a, int64_t row, int64_t first, int64_t count, float* to) {
    avx512vnni::take_zeros(a, row, first, count, false, to);
  }
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
  static inline __m512i integers(const float* p) { return _mm512_load_si512(p); }
  static inline __m512 floats(const float* p) { return _mm512_load_ps(p); }
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
  static inline __m512 fma(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
  static inline void store(float* p, __m512 a) { _mm512_storeu_ps(p, a); }
};

}  // namespace

void interleaved_linear(const Linear& a, const Bytewise& how, const DigitsOfUnits& x, const Turn& turn) {
  take_interleaved<Wide>(a, how, x, turn);
}

}  // namespace lowbit::cpu::avx512vnni
