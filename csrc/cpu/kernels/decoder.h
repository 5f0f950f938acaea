// What decoder layers compute between their products, a row or a head at a time: arguments of decoder.cpp. decoder_step.h has the
// order.
//
// Values are rounded to the type of x wherever torch's modules round them; sums are fp32.
#pragma once

#include "linear.h"
#include "../sets.h"

namespace lowbit::cpu {

// RMS norm of `count` values: out = x / sqrt(mean(x^2) + eps), rounded, times weight.
struct Norm {
  ArrayView weight;
  float eps;
};

// Heads of `size` values; queries / keys query heads share a key head. cos and sin: [rows, size].
struct Heads {
  int64_t queries, keys, size;  // query and key heads; keys divides queries
  float scaling;                // factor of the scores
  const Norm* of_query;         // norms of each head, or null
  const Norm* of_key;
};

// Keys or values of a layer's cache: [batch, heads, places, size], each head's values contiguous.
struct CacheView {
  char* data;
  int64_t of_batch, of_head, of_place;  // strides in elements
};

// Attention mask [batch, 1, tokens, places]: none, bool (true: visible) or values added to the scores.
struct Mask {
  const void* data = nullptr;
  bool is_bool_mask = false;
  int64_t of_batch = 0, of_token = 0;
};

// `tokens` new tokens in each sequence of a batch, behind `stop` cached ones; attends to `places` positions, at least stop +
// tokens.
struct Attention {
  Heads heads;
  int64_t tokens, stop, places;
  const void *query, *key, *value;  // [batch, tokens, heads * size], before the rotary embedding
  const void *cos, *sin;            // [batch or 1, tokens, size]
  int64_t cos_of_batch;
  CacheView keys, values;
  Mask mask;
  Dtype type;
  void* y;  // [batch, tokens, queries * size]
};

constexpr int64_t largest_head = 256;
constexpr int64_t lanes_of_head = 16;  // size must be a multiple

// Floats of scratch memory that attend() needs.
static inline int64_t attention_scratch(const Attention& a, int64_t queries) {
  return (2 * queries + 2) * a.tokens * a.heads.size + queries * a.tokens * a.places;
}

// normalize: RMS norm of one row. attend: query heads [first, first + count), which share key head `head`; `keeps`: also writes
// that head's new keys and values to the cache. activate: out = silu(gate) * up. add: to += x.
#define LOWBIT_DECLARE(set)                                                                                                    \
  namespace set {                                                                                                              \
  void normalize(const Norm&, Dtype type, const void* x, int64_t count, void* out);                                           \
  void attend(const Attention&, int64_t batch, int64_t head, int64_t first, int64_t count, bool keeps, float* scratch);           \
  void activate(Dtype type, const void* gate, const void* up, int64_t count, void* out);                                      \
  void add(Dtype type, const void* x, int64_t count, void* to);                                                               \
  }
LOWBIT_FOR_EACH_SET(LOWBIT_DECLARE)
#undef LOWBIT_DECLARE

}  // namespace lowbit::cpu
