// What a decoder layer computes between its products, a row or a head at a time. See decoder.cpp; decoder_step.h has the order.
//
// Numbers are rounded to the type of x wherever modules of torch round them; sums are of fp32.
#pragma once

#include "linear.h"
#include "../sets.h"

namespace lowbit::cpu {

// out = x / sqrt(mean(x^2) + eps), rounded, times weight; `count` numbers.
struct Norm {
  ArrayView weight;
  float eps;
};

// Heads of `size` numbers: a query's and those of a key that several queries read, turned by `cos` and `sin` [rows, size].
struct Heads {
  int64_t queries, keys, size;  // keys divides queries
  float scaling;                // of their products
  const Norm* of_query;         // of each head, or none
  const Norm* of_key;
};

// Keys or values of one layer: [batch, heads, places, size], numbers of a head in a row.
struct Kept {
  char* data;
  int64_t of_batch, of_head, of_place;  // strides in numbers
};

// What is added to scores: nothing; true where a place is seen; or numbers. [batch, 1, tokens, places]
struct Mask {
  const void* data = nullptr;
  bool is_bool_mask = false;
  int64_t of_batch = 0, of_token = 0;
};

// `tokens` in a row for each of a batch, that come after `stop` ones; `places`: those that are looked at, `stop + tokens` at least.
struct Attention {
  Heads heads;
  int64_t tokens, stop, places;
  const void *query, *key, *value;  // [batch, tokens, heads * size] before they are turned
  const void *cos, *sin;            // [batch or 1, tokens, size]
  int64_t cos_of_batch;
  Kept keys, values;
  Mask mask;
  Dtype type;
  void* y;  // [batch, tokens, queries * size]
};

constexpr int64_t largest_head = 256;
constexpr int64_t lanes_of_head = 16;  // a head's size is a multiple

// Numbers of fp32 that attend() works in.
static inline int64_t attention_scratch(const Attention& a, int64_t queries) {
  return (2 * queries + 2) * a.tokens * a.heads.size + queries * a.tokens * a.places;
}

// normalize: one row. attend: queries first .. first + count - 1, which share the key's head `head`; `keeps`: whether to write that
// head's keys and values. activate: silu(gate) * up of `count` numbers. add: to += x.
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
