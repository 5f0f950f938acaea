// A vector of sixteen floats for the instruction set this file is compiled for, and three ways to fill it: nibbles through a
// table in registers, bytes as integers, bytes through a table in memory.
//
// All in an unnamed namespace, so that each instruction set has its own copy: the linker would otherwise merge inline functions
// and run code of a wider set on a narrower processor.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)

struct F32x16 {
  __m512 v;
};
inline F32x16 zeros() { return {_mm512_setzero_ps()}; }
inline F32x16 broadcast(float a) { return {_mm512_set1_ps(a)}; }
inline F32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F32x16 subtract(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline void store(float* p, F32x16 a) { _mm512_storeu_ps(p, a.v); }

using Table = F32x16;
inline Table table16(const float* values) { return load(values); }
inline Table less(Table table, float zero) { return subtract(table, broadcast(zero)); }
inline void nibbles(const uint8_t* bytes, const Table& table, F32x16& even, F32x16& odd) {
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
  even.v = _mm512_permutexvar_ps(wide, table.v);  // uses the low four bits of each index only
  odd.v = _mm512_permutexvar_ps(_mm512_srli_epi32(wide, 4), table.v);
}
inline F32x16 signed_bytes(const uint8_t* bytes) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes))))};
}
inline F32x16 unsigned_bytes(const uint8_t* bytes) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes))))};
}
inline F32x16 look_up(const uint8_t* codes, const float* table) {
  const __m512i index = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  return {_mm512_i32gather_ps(index, table, 4)};
}

#elif defined(__AVX2__)

struct F32x16 {
  __m256 a, b;
};
inline F32x16 zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F32x16 broadcast(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
inline F32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm256_fmadd_ps(a.a, b.a, c.a), _mm256_fmadd_ps(a.b, b.b, c.b)}; }
inline F32x16 subtract(F32x16 a, F32x16 b) { return {_mm256_sub_ps(a.a, b.a), _mm256_sub_ps(a.b, b.b)}; }
inline void store(float* p, F32x16 a) {
  _mm256_storeu_ps(p, a.a);
  _mm256_storeu_ps(p + 8, a.b);
}

using Table = F32x16;
inline Table table16(const float* values) { return load(values); }
inline Table less(Table table, float zero) { return subtract(table, broadcast(zero)); }
// The permutation uses three bits of the index; the fourth, shifted to the sign, selects the half of the table.
inline __m256 nibble(__m256i index, const Table& table) {
  const __m256 high = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
  return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.a, index), _mm256_permutevar8x32_ps(table.b, index), high);
}
inline void nibbles(const uint8_t* bytes, const Table& table, F32x16& even, F32x16& odd) {
  const __m256i low = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
  const __m256i high = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes + 8)));
  even = {nibble(low, table), nibble(high, table)};
  odd = {nibble(_mm256_srli_epi32(low, 4), table), nibble(_mm256_srli_epi32(high, 4), table)};
}
inline F32x16 signed_bytes(const uint8_t* bytes) {
  const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(all)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(all, 8)))};
}
inline F32x16 unsigned_bytes(const uint8_t* bytes) {
  const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(all)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(all, 8)))};
}
inline F32x16 look_up(const uint8_t* codes, const float* table) {
  const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  return {_mm256_i32gather_ps(table, _mm256_cvtepu8_epi32(all), 4),
          _mm256_i32gather_ps(table, _mm256_cvtepu8_epi32(_mm_srli_si128(all, 8)), 4)};
}

#else

// Plain loops, which compilers vectorize. Without hardware FMA the product is rounded before the addition.
struct F32x16 {
  float v[16];
};
inline F32x16 broadcast(float a) {
  F32x16 r;
  for (float& e : r.v) e = a;
  return r;
}
inline F32x16 zeros() { return broadcast(0); }
inline F32x16 load(const float* p) {
  F32x16 r;
  memcpy(r.v, p, sizeof r.v);
  return r;
}
inline F32x16 fma(const F32x16& a, const F32x16& b, const F32x16& c) {
  F32x16 r;
  for (int i = 0; i < 16; i++) r.v[i] = a.v[i] * b.v[i] + c.v[i];
  return r;
}
inline F32x16 subtract(const F32x16& a, const F32x16& b) {
  F32x16 r;
  for (int i = 0; i < 16; i++) r.v[i] = a.v[i] - b.v[i];
  return r;
}
inline void store(float* p, const F32x16& a) { memcpy(p, a.v, sizeof a.v); }

using Table = F32x16;
inline Table table16(const float* values) { return load(values); }
inline Table less(const Table& table, float zero) { return subtract(table, broadcast(zero)); }
inline void nibbles(const uint8_t* bytes, const Table& table, F32x16& even, F32x16& odd) {
  for (int i = 0; i < 16; i++) {
    even.v[i] = table.v[bytes[i] & 15];
    odd.v[i] = table.v[bytes[i] >> 4];
  }
}
inline F32x16 signed_bytes(const uint8_t* bytes) {
  F32x16 r;
  for (int i = 0; i < 16; i++) r.v[i] = static_cast<int8_t>(bytes[i]);
  return r;
}
inline F32x16 unsigned_bytes(const uint8_t* bytes) {
  F32x16 r;
  for (int i = 0; i < 16; i++) r.v[i] = bytes[i];
  return r;
}
inline F32x16 look_up(const uint8_t* codes, const float* table) {
  F32x16 r;
  for (int i = 0; i < 16; i++) r.v[i] = table[codes[i]];
  return r;
}

#endif

// Sum of the lanes, in the same order for every instruction set.
inline float sum(const F32x16& a) {
  float v[16];
  store(v, a);
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) v[i] += v[i + half];
  return v[0];
}

}  // namespace
