// Products with arguments that were checked before. Checking a dozen arguments dominates the time of a small product; a weight
// that stays where it is needs it once.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstring>
#include <type_traits>

#include "../pack/split_int8_plan.h"

namespace lowbit::cpu {

// All arguments but x and y, in a byte tensor that the caller keeps, followed by the plan's group table. The caller also keeps
// the tensors that pointers refer to.
struct PreparedCall {
  uint64_t sign;   // checksum with a tag of the process: rejects other bytes, other processes and modified tensors
  int64_t bytes;   // including the group table
  Linear a;        // without m, y and values that may change
  const float* outer;  // read in each call, like the scale of x
  const float* input_scale;
  int64_t groups;  // in a row
  ArrayView bias;
  SplitInt8Plan plan;
  uint16_t halves[256];

  static uint64_t process_tag() {
    static const char here = 0;
    return 0x6c6f776269740002 ^ reinterpret_cast<uintptr_t>(&here) << 16;
  }

  // The PreparedCall in a tensor, or null.
  static const PreparedCall* of(const torch::stable::Tensor& t) {
    if (!t.is_cpu() || t.scalar_type() != torch::headeronly::ScalarType::Byte || !t.is_contiguous()) return nullptr;
    const int64_t bytes = t.numel();
    const void* data = t.const_data_ptr();
    if (bytes < static_cast<int64_t>(sizeof(PreparedCall)) || reinterpret_cast<uintptr_t>(data) % alignof(PreparedCall)) return nullptr;
    const PreparedCall* p = static_cast<const PreparedCall*>(data);
    return bytes % 4 == 0 && p->bytes == bytes && p->sign == checksum(data, bytes) ? p : nullptr;
  }

  // Checksum of `bytes` bytes but the first eight. Four chains hide the latency of the multiplication.
  static uint64_t checksum(const void* data, int64_t bytes) {
    uint64_t chains[4] = {process_tag(), 1, 2, 3};
    const char* const from = static_cast<const char*>(data);
    const auto add = [](uint64_t& chain, uint64_t word) { chain = (chain ^ word) * 0x9e3779b97f4a7c15, chain ^= chain >> 29; };
    int64_t at = sizeof(uint64_t);
    for (; at + 32 <= bytes; at += 32)
      for (int i = 0; i < 4; i++) {
        uint64_t word;
        std::memcpy(&word, from + at + 8 * i, sizeof word);
        add(chains[i], word);
      }
    for (; at + 4 <= bytes; at += 4) {
      uint32_t word;
      std::memcpy(&word, from + at, sizeof word);
      add(chains[0], word);
    }
    for (int i = 1; i < 4; i++) add(chains[0], chains[i]);
    return chains[0];
  }

  const int32_t* steps() const { return reinterpret_cast<const int32_t*>(this + 1); }

  // The weight with the values it has now.
  Linear weight() const {
    Linear now = a;
    if (a.halves) now.halves = halves;
    if (outer) now.outer = *outer;
    return now;
  }
};
static_assert(std::is_trivially_copyable_v<PreparedCall>);

}  // namespace lowbit::cpu
