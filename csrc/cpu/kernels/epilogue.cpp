// Epilogue of all products. Compiled once for each instruction set (LOWBIT_SET is its namespace); plain loops, which compilers
// vectorize.
//
//   sums [M, N] fp32 --> * row_scale [m] --> + bias [n] --> one rounding --> y [M, N]
//
// Contract: that of the product, whose one rounding this is.
// Limit: y is written once, from sums that lie in the L1 cache.
#include "epilogue.h"

#include "../isa/array_view.h"

namespace lowbit::cpu::LOWBIT_SET {
namespace {

constexpr int64_t batch = 64;  // sums that stay in the L1 cache between the loops

// to_bfloat16 without a branch.
inline uint16_t bfloat16_of(float number) {
  uint32_t bits;
  memcpy(&bits, &number, 4);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, quiet = bits >> 16 | 0x40;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

void store_rounded(const float* sums, int64_t count, float* to) { memcpy(to, sums, count * sizeof(float)); }

struct Brain {
  uint16_t bits;
};
void store_rounded(const float* sums, int64_t count, Brain* to) {
  for (int64_t i = 0; i < count; i++) to[i].bits = bfloat16_of(sums[i]);
}

struct Half {
  uint16_t bits;
};
void store_rounded(const float* sums, int64_t count, Half* to) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= count; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(sums + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  for (; i < count; i++) to[i].bits = to_half(sums[i]);
}

template <typename T>
void write_output_as(const Linear& a, const Epilogue& of, int64_t begin, int64_t end) {
  float added[batch], temp[batch];
  for (int64_t n = begin; n < end; n += batch) {
    const int64_t count = end - n < batch ? end - n : batch;
    if (of.bias)
      for (int64_t i = 0; i < count; i++) added[i] = load_float(*of.bias, n + i);
    for (int64_t m = 0; m < a.m; m++) {
      const float* sums = a.y + m * a.n + n;
      if (of.row_scale || of.bias) {
        const float row_scale = of.row_scale ? of.row_scale[m] : 1.0f;
        for (int64_t i = 0; i < count; i++) temp[i] = sums[i] * row_scale;
        if (of.bias)
          for (int64_t i = 0; i < count; i++) temp[i] += added[i];
        sums = temp;
      }
      store_rounded(sums, count, static_cast<T*>(of.y) + m * a.n + n);
    }
  }
}

}  // namespace

void write_output(const Linear& a, const Epilogue& of, int64_t begin, int64_t end) {
  if (of.type == Dtype::bfloat16) return write_output_as<Brain>(a, of, begin, end);
  if (of.type == Dtype::float16) return write_output_as<Half>(a, of, begin, end);
  write_output_as<float>(a, of, begin, end);
}

}  // namespace lowbit::cpu::LOWBIT_SET
