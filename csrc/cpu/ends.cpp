// Sums of fp32 into y: what they are multiplied by, bias, one rounding. Compiled once for each instruction set (LOWBIT_SET is its
// namespace); the loops are plain, so that a compiler turns each into vectors.
#include "ends.h"

#include "numbers.h"

namespace lowbit::cpu::LOWBIT_SET {
namespace {

constexpr int64_t at_a_time = 64;  // sums that stay in the first-level cache between their loops

// The same as to_bfloat16, without a branch.
inline uint16_t bfloat16_of(float number) {
  uint32_t bits;
  memcpy(&bits, &number, 4);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, quiet = bits >> 16 | 0x40;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

void put(const float* sums, int64_t count, float* to) { memcpy(to, sums, count * sizeof(float)); }

struct Brain {
  uint16_t bits;
};
void put(const float* sums, int64_t count, Brain* to) {
  for (int64_t i = 0; i < count; i++) to[i].bits = bfloat16_of(sums[i]);
}

struct Half {
  uint16_t bits;
};
void put(const float* sums, int64_t count, Half* to) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= count; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(sums + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  for (; i < count; i++) to[i].bits = to_half(sums[i]);
}

template <typename T>
void finish_as(const Linear& a, const Ends& of, int64_t begin, int64_t end) {
  float added[at_a_time], some[at_a_time];
  for (int64_t n = begin; n < end; n += at_a_time) {
    const int64_t count = end - n < at_a_time ? end - n : at_a_time;
    if (of.bias)
      for (int64_t i = 0; i < count; i++) added[i] = number_at(*of.bias, n + i);
    for (int64_t m = 0; m < a.m; m++) {
      const float* sums = a.y + m * a.n + n;
      if (of.back || of.bias) {
        const float back = of.back ? of.back[m] : 1.0f;
        for (int64_t i = 0; i < count; i++) some[i] = sums[i] * back;
        if (of.bias)
          for (int64_t i = 0; i < count; i++) some[i] += added[i];
        sums = some;
      }
      put(sums, count, static_cast<T*>(of.y) + m * a.n + n);
    }
  }
}

}  // namespace

void finish(const Linear& a, const Ends& of, int64_t begin, int64_t end) {
  if (of.type == Stored::bfloat16) return finish_as<Brain>(a, of, begin, end);
  if (of.type == Stored::float16) return finish_as<Half>(a, of, begin, end);
  finish_as<float>(a, of, begin, end);
}

}  // namespace lowbit::cpu::LOWBIT_SET
