// What decoder layers compute between their products, for a few tokens: RMS norm, rotary embedding, attention over the KV cache,
// SwiGLU. Compiled once for each instruction set (LOWBIT_SET is its namespace); element-wise loops are plain, for compilers to
// vectorize.
//
//    q, k, v [tokens, heads, size] --norm, rope--> queries f32 --score--> [tokens, places] --softmax--> gather --> y
//                                          |                      ^                                           ^
//                                          +--> new keys, values  K cache [heads, places, size]               V cache
//
// Contract: rounds to the type of x where torch's modules round; sums are fp32 in another order.
// Limit: the bytes of the KV cache, read once for all query heads that share a key head.
// Figures: steps of whole models in evals/results/decoding_cpu.json.
#include "decoder.h"

#include <cmath>

#include "../isa/array_view.h"
#include "../isa/simd.h"

namespace lowbit::cpu::LOWBIT_SET {
namespace {

// ---- types of x -----------------------------------------------------------------------------------------------------

struct F32 {
  float bits;
};
struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

inline float number_of(F32 x) { return x.bits; }
inline float number_of(Bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float number;
  memcpy(&number, &bits, 4);
  return number;
}
inline float number_of(F16 x) { return half_to_f32(x.bits); }

inline void store_rounded(float number, F32& to) { to.bits = number; }
inline void store_rounded(float number, Bf16& to) {  // as to_bfloat16, without a branch
  uint32_t bits;
  memcpy(&bits, &number, 4);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, quiet = bits >> 16 | 0x40;
  to.bits = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}
inline void store_rounded(float number, F16& to) { to.bits = to_half(number); }

template <typename T>
inline float rounded(float number) {
  T as;
  store_rounded(number, as);
  return number_of(as);
}

// Loads sixteen values as floats.
inline F32x16 load_of(const F32* p) { return load(&p->bits); }
#if defined(__AVX512F__)
inline F32x16 load_of(const Bf16* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline F32x16 load_of(const F16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
inline float total(const F32x16& a) { return _mm512_reduce_add_ps(a.v); }
#elif defined(__AVX2__)
inline __m256 eight_of(const Bf16* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline __m256 eight_of(const F16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
template <typename T>
inline F32x16 load_of(const T* p) {
  return {eight_of(p), eight_of(p + 8)};
}
inline float total(const F32x16& a) {
  const __m256 eight = _mm256_add_ps(a.a, a.b);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
#else
template <typename T>
inline F32x16 load_of(const T* p) {
  F32x16 r;
  for (int i = 0; i < 16; i++) r.v[i] = number_of(p[i]);
  return r;
}
inline float total(const F32x16& a) { return sum(a); }
#endif

// e^x to about 1 ulp (Cephes): a polynomial of the remainder modulo log 2, times a power of two in two factors, since one might
// overflow.
inline float exp_of(float x) {
  const float above = x > 89.0f ? 89.0f : x, within = above < -104.0f ? -104.0f : above;
  const float near = within * 1.44269504088896341f + 0x1.8p23f;
  int32_t whole;
  memcpy(&whole, &near, 4);
  whole -= 0x4b400000;
  const float times = near - 0x1.8p23f, r = (within - times * 0.693359375f) - times * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const int32_t half = whole >> 1, first = (half + 127) << 23, second = (whole - half + 127) << 23;
  float low, high;
  memcpy(&low, &first, 4);
  memcpy(&high, &second, 4);
  return p * low * high;
}

// ---- norms and heads ------------------------------------------------------------------------------------------------

template <typename T>
void normalize_as(const Norm& norm, const T* x, int64_t count, T* out) {
  F32x16 squares[2] = {zeros(), zeros()};
  int64_t i = 0;
  for (; i + 32 <= count; i += 32)
    for (int j = 0; j < 2; j++) {
      const F32x16 temp = load_of(x + i + 16 * j);
      squares[j] = fma(temp, temp, squares[j]);
    }
  float all = total(squares[0]) + total(squares[1]);
  for (; i < count; i++) all += number_of(x[i]) * number_of(x[i]);
  const float over = 1.0f / std::sqrt(all / static_cast<float>(count) + norm.eps);
  const T* weight = static_cast<const T*>(norm.weight.data);
  for (i = 0; i < count; i++) store_rounded(rounded<T>(number_of(x[i]) * over) * number_of(weight[i]), out[i]);
}

// Rotary embedding of one head: x cos + rotate_half(x) sin, where rotate_half(x) = (-second half, first half).
template <typename T>
void apply_rope(const T* x, const T* cos, const T* sin, int64_t size, T* out) {
  const int64_t half = size / 2;
  for (int64_t i = 0; i < half; i++) {
    const float a = number_of(x[i]), b = number_of(x[i + half]);
    store_rounded(rounded<T>(a * number_of(cos[i])) + rounded<T>(-b * number_of(sin[i])), out[i]);
    store_rounded(rounded<T>(b * number_of(cos[i + half])) + rounded<T>(a * number_of(sin[i + half])), out[i + half]);
  }
}

template <typename T>
void apply_rope_head(const Norm* norm, const T* x, const T* cos, const T* sin, int64_t size, T* out) {
  T local[largest_head];
  if (norm) normalize_as(*norm, x, size, local), x = local;
  apply_rope(x, cos, sin, size, out);
}

// ---- attention ------------------------------------------------------------------------------------------------------

// Keys or values of a head by position: cached ones, and those of this step, which are not in the cache yet.
template <typename T>
struct Places {
  const T* kept;
  int64_t stride;
  const T* new_rows;
  int64_t new_stride, stop, tokens;
  const T* operator[](int64_t t) const {
    const int64_t i = t - stop;
    return i >= 0 && i < tokens ? new_rows + i * new_stride : kept + t * stride;
  }
};

// scores [R, places] = queries [R, size] keys^T * scaling.
template <int R, typename T>
void score(const float* queries, const Places<T>& keys, int64_t size, float scaling, int64_t places, float* scores, int64_t stride) {
  for (int64_t t = 0; t < places; t++) {
    const T* key = keys[t];
    F32x16 sums[R];
    for (F32x16& sum : sums) sum = zeros();
    for (int64_t i = 0; i < size; i += lanes_of_head) {
      const F32x16 temp = load_of(key + i);
      for (int r = 0; r < R; r++) sums[r] = fma(temp, load(queries + r * size + i), sums[r]);
    }
    for (int r = 0; r < R; r++) scores[r * stride + t] = total(sums[r]) * scaling;
  }
}

// out [R, 16 C] = shares [R, places] values[:, at : at + 16 C].
template <int R, int C, typename T>
void gather(const float* shares, int64_t stride, const Places<T>& values, int64_t at, int64_t size, int64_t places, float* out) {
  F32x16 sums[R][C];
  for (auto& of_query : sums)
    for (F32x16& sum : of_query) sum = zeros();
  for (int64_t t = 0; t < places; t++) {
    const T* value = values[t] + at;
    F32x16 temp[C];
    for (int c = 0; c < C; c++) temp[c] = load_of(value + 16 * c);
    for (int r = 0; r < R; r++) {
      const F32x16 share = broadcast(shares[r * stride + t]);
      for (int c = 0; c < C; c++) sums[r][c] = fma(temp[c], share, sums[r][c]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) store(out + r * size + at + 16 * c, sums[r][c]);
}

template <int R, typename T>
void gather_heads(const float* shares, int64_t stride, const Places<T>& values, int64_t size, int64_t places, float* out) {
#if defined(__AVX512F__)
  constexpr int C = R > 4 ? 2 : 4;
#else
  constexpr int C = R > 2 ? 1 : 2;
#endif
  int64_t at = 0;
  for (; at + 16 * C <= size; at += 16 * C) gather<R, C>(shares, stride, values, at, size, places, out);
  for (; at < size; at += 16) gather<R, 1>(shares, stride, values, at, size, places, out);
}

// Number of positions up to the last one that any token of the batch may attend to.
int64_t visible_places(const Attention& a, int64_t batch) {
  if (!a.mask.data || !a.mask.is_bool_mask) return a.places;
  int64_t maximum = 0;
  for (int64_t s = 0; s < a.tokens; s++) {
    const uint8_t* row = static_cast<const uint8_t*>(a.mask.data) + batch * a.mask.of_batch + s * a.mask.of_token;
    int64_t t = a.places;
    while (t > maximum && !row[t - 1]) t--;
    maximum = t > maximum ? t : maximum;
  }
  return maximum;
}

// Turns the scores of a token into exp(score - max) in place; returns 1 / their sum, 0 where every position is masked.
template <typename T>
float softmax_in_place(const Mask& mask, int64_t batch, int64_t token, int64_t places, float* scores) {
  const int64_t row = batch * mask.of_batch + token * mask.of_token;
  if (mask.data && mask.is_bool_mask) {
    const uint8_t* sees = static_cast<const uint8_t*>(mask.data) + row;
    for (int64_t t = 0; t < places; t++) scores[t] = sees[t] ? scores[t] : -INFINITY;
  } else if (mask.data) {
    const T* added = static_cast<const T*>(mask.data) + row;
    for (int64_t t = 0; t < places; t++) scores[t] += number_of(added[t]);
  }
  constexpr int64_t width = 16;
  float largest[width], maximum = -INFINITY;
  for (float& of : largest) of = -INFINITY;
  int64_t t = 0;
  for (; t + width <= places; t += width)
    for (int64_t i = 0; i < width; i++) largest[i] = scores[t + i] > largest[i] ? scores[t + i] : largest[i];
  for (; t < places; t++) maximum = scores[t] > maximum ? scores[t] : maximum;
  for (float of : largest) maximum = of > maximum ? of : maximum;
  if (maximum == -INFINITY) maximum = 0;  // all positions masked, or all scores NaN
  for (t = 0; t < places; t++) scores[t] = exp_of(scores[t] - maximum);
  F32x16 sums = zeros();
  const F32x16 one = broadcast(1);
  for (t = 0; t + 16 <= places; t += 16) sums = fma(load(scores + t), one, sums);
  float all = total(sums);
  for (; t < places; t++) all += scores[t];
  return all == 0 ? 0 : 1 / all;
}

// Calls `body(R, row)` over all rows, with R as large as registers allow.
template <int maximum, typename Body>
inline void by_rows(int64_t rows, const Body& body, int64_t row = 0) {
  for (; row + maximum <= rows; row += maximum) body(std::integral_constant<int, maximum>(), row);
  if constexpr (maximum > 1) by_rows<maximum == 8 ? 6 : maximum == 6 ? 4 : maximum - 1>(rows, body, row);
}

#if defined(__AVX512F__)
constexpr int most_at_once = 8;
#else
constexpr int most_at_once = 4;
#endif

template <typename T>
void attend_as(const Attention& a, int64_t batch, int64_t head, int64_t first, int64_t count, bool keeps, float* scratch) {
  const int64_t size = a.heads.size, tokens = a.tokens, rows = count * tokens, places = visible_places(a, batch);
  float* const queries = scratch;  // [count, tokens, size]
  float* const out = queries + rows * size;
  float* const scores = out + rows * size;  // [count, tokens, places]
  T* const new_keys = reinterpret_cast<T*>(scores + rows * a.places);  // [tokens, size]
  T rotated[largest_head];
  const T* const value = static_cast<const T*>(a.value) + (batch * tokens * a.heads.keys + head) * size;
  const int64_t value_stride = a.heads.keys * size;
  for (int64_t s = 0; s < tokens; s++) {
    const int64_t token = batch * tokens + s, at = batch * a.cos_of_batch + s * size;
    const T *cos = static_cast<const T*>(a.cos) + at, *sin = static_cast<const T*>(a.sin) + at;
    for (int64_t j = 0; j < count; j++) {
      const T* x = static_cast<const T*>(a.query) + (token * a.heads.queries + first + j) * size;
      apply_rope_head(a.heads.of_query, x, cos, sin, size, rotated);
      for (int64_t i = 0; i < size; i++) queries[(j * tokens + s) * size + i] = number_of(rotated[i]);
    }
    apply_rope_head(a.heads.of_key, static_cast<const T*>(a.key) + (token * a.heads.keys + head) * size, cos, sin, size, new_keys + s * size);
    if (!keeps) continue;
    const auto keep = [&](const CacheView& of, const T* x) {
      T* to = reinterpret_cast<T*>(of.data) + batch * of.of_batch + head * of.of_head + (a.stop + s) * of.of_place;
      memcpy(to, x, size * sizeof(T));
    };
    keep(a.keys, new_keys + s * size);
    keep(a.values, value + s * value_stride);
  }
  const auto cache_of = [&](const CacheView& of) { return reinterpret_cast<const T*>(of.data) + batch * of.of_batch + head * of.of_head; };
  const Places<T> keys = {cache_of(a.keys), a.keys.of_place, new_keys, size, a.stop, tokens};
  const Places<T> values = {cache_of(a.values), a.values.of_place, value, value_stride, a.stop, tokens};
  by_rows<most_at_once>(rows, [&](auto R, int64_t row) {
    score<decltype(R)::value>(queries + row * size, keys, size, a.heads.scaling, places, scores + row * a.places, a.places);
  });
  float* const inverse_sums = queries;  // [rows]: reuses queries, which are no longer needed
  for (int64_t row = 0; row < rows; row++) inverse_sums[row] = softmax_in_place<T>(a.mask, batch, row % tokens, places, scores + row * a.places);
  by_rows<most_at_once>(rows, [&](auto R, int64_t row) {
    gather_heads<decltype(R)::value>(scores + row * a.places, a.places, values, size, places, out + row * size);
  });
  for (int64_t row = 0; row < rows; row++) {
    T* y = static_cast<T*>(a.y) + ((batch * tokens + row % tokens) * a.heads.queries + first + row / tokens) * size;
    for (int64_t i = 0; i < size; i++) store_rounded(out[row * size + i] * inverse_sums[row], y[i]);
  }
}

// ---- element by element ---------------------------------------------------------------------------------------------

template <typename T>
void activate_as(const T* gate, const T* up, int64_t count, T* out) {
  for (int64_t i = 0; i < count; i++) {
    const float x = number_of(gate[i]);
    store_rounded(rounded<T>(x / (1.0f + exp_of(-x))) * number_of(up[i]), out[i]);
  }
}

template <typename T>
void add_as(const T* x, int64_t count, T* to) {
  for (int64_t i = 0; i < count; i++) store_rounded(number_of(to[i]) + number_of(x[i]), to[i]);
}

template <typename Body>
inline void as(Dtype type, const Body& body) {
  if (type == Dtype::bfloat16) return body(Bf16());
  if (type == Dtype::float16) return body(F16());
  body(F32());
}

}  // namespace

void normalize(const Norm& norm, Dtype type, const void* x, int64_t count, void* out) {
  as(type, [&](auto T) { normalize_as(norm, static_cast<const decltype(T)*>(x), count, static_cast<decltype(T)*>(out)); });
}

void attend(const Attention& a, int64_t batch, int64_t head, int64_t first, int64_t count, bool keeps, float* scratch) {
  as(a.type, [&](auto T) { attend_as<decltype(T)>(a, batch, head, first, count, keeps, scratch); });
}

void activate(Dtype type, const void* gate, const void* up, int64_t count, void* out) {
  as(type, [&](auto T) {
    using Of = decltype(T);
    activate_as(static_cast<const Of*>(gate), static_cast<const Of*>(up), count, static_cast<Of*>(out));
  });
}

void add(Dtype type, const void* x, int64_t count, void* to) {
  as(type, [&](auto T) { add_as(static_cast<const decltype(T)*>(x), count, static_cast<decltype(T)*>(to)); });
}

}  // namespace lowbit::cpu::LOWBIT_SET
