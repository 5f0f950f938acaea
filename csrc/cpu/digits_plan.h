// What a product by digits of x works out from the weight alone: whether its numbers are bytes, and the groups of its steps.
#pragma once

#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "instruction_sets.h"

namespace lowbit::cpu {

// Whether the numbers, times `up`, are those of two's complement codes, or of codes without a sign.
inline bool are_integers(const float* values, int bits, bool is_signed, float up = 1) {
  const int sign = is_signed ? 1 << (bits - 1) : 0;
  for (int code = 0; code < 1 << bits; code++)
    if (values[code] * up != static_cast<float>((code ^ sign) - sign)) return false;
  return true;
}

// Weights as bytes less an offset, times a power of two; false where a format's numbers are not that.
inline bool are_bytes(const Linear& a, Bytewise& how, uint8_t* table) {
  for (int log = 0; log <= 8; log++) {
    const float up = static_cast<float>(1 << log);
    const bool is_signed = are_integers(a.values, a.bits, true, up);
    if (!is_signed && !are_integers(a.values, a.bits, false, up)) continue;
    const int sign = is_signed ? 1 << (a.bits - 1) : 0;
    how = {sign, sign, nullptr, 1 / up};
    return true;
  }
  if (a.bits > 6) return false;
  const int codes = 1 << a.bits;
  for (int log = 0; log <= 8; log++) {
    const float up = static_cast<float>(1 << log);
    float least = 0, most = 0;
    bool whole = true;
    for (int code = 0; code < codes && whole; code++) {
      const float number = a.values[code] * up;
      whole = std::abs(number) <= 255 && number == std::floor(number);
      least = number < least ? number : least, most = number > most ? number : most;
    }
    if (!whole) continue;
    if (most - least > 127) return false;  // AVX2 adds products in 16 bits
    for (int code = 0; code < 64; code++) table[code] = static_cast<uint8_t>(a.values[code % codes] * up - least);
    how = {0, static_cast<int>(-least), table, 1 / up};
    return true;
  }
  return false;
}

// Whether the sums of a lane hold in 32 bits: columns of x as integers less than 2^22, times 512 at most.
inline bool fits(const Linear& a, const Bytewise& how, bool has_zeros) {
  int most = (1 << a.bits) - 1;
  if (!has_zeros) {
    int least = 255, largest = 0;
    for (int code = 0; code < 1 << a.bits; code++) {
      const int byte = how.table ? how.table[code] : code ^ how.flipped;
      least = byte < least ? byte : least, largest = byte > largest ? byte : largest;
    }
    most = std::max(std::abs(least - how.offset), std::abs(largest - how.offset));
  }
  return most * 4 * fields_of(a.bits) <= 512;
}

// It holds no pointer into itself, so that its bytes may lie anywhere; the groups of its steps lie where whoever makes it likes.
struct DigitsPlan {
  const StepKernels* kernels;
  int count;           // digits of a number of x
  int64_t size;        // bytes of those
  int64_t columns, steps, slices;
  bool uniform;        // each step is of one group
  bool in_quarters;
  bool has_table;
  int flipped, offset;
  float unit;
  uint8_t table[64];

  DigitsPlan(const Linear& a, int count) : kernels(instruction_set().steps), count(count) {
    STD_TORCH_CHECK(kernels, "this processor has no products of integers for digits");
    Bytewise how;
    STD_TORCH_CHECK(a.bits > 1 && are_bytes(a, how, table) && fits(a, how, a.zero_point.data),
                    "digits take weights that are small integers");
    STD_TORCH_CHECK(!a.zero_point.data || !(how.table || how.flipped), "zero points go with integers that have no sign");
    STD_TORCH_CHECK(a.interleaved || takes_group(a.bits, a.group, a.k), "digits of ", a.bits, "-bit weights take groups of a multiple of ",
                    4 * fields_of(a.bits), ", got groups of ", a.group);
    has_table = how.table, flipped = how.flipped, offset = how.offset, unit = how.unit;
    const int lanes = kernels->lanes;
    columns = columns_of(a.bits, lanes), steps = (a.k + columns - 1) / columns, slices = (a.k + slice - 1) / slice;
    size = takes_words(a.bits, lanes) ? 2 * words_of(count) : count;
    uniform = a.group >= a.k || a.group % columns == 0;
    in_quarters = takes_quarters(a.bits, count, a.group, a.k);
  }

  Bytewise bytewise() const { return {flipped, offset, has_table ? table : nullptr, unit}; }

  // Numbers that tell the groups: the first of each step, and behind those of all steps what each lane is of.
  int64_t numbers_of_groups() const { return steps * (uniform ? 1 : 1 + kernels->lanes); }
  void take_groups(const Linear& a, int32_t* groups) const {
    const int lanes = kernels->lanes, of_lane = 4 * fields_of(a.bits);
    for (int64_t s = 0; s < steps; s++) {
      groups[s] = static_cast<int32_t>(s * columns / a.group);
      for (int64_t lane = 0; lane < lanes && !uniform; lane++) {
        const int32_t group = static_cast<int32_t>((s * columns + lane * of_lane) / a.group) - groups[s];
        groups[steps + s * lanes + lane] = in_quarters ? 4 * group + lane % 4 : group;
      }
    }
  }
};

}  // namespace lowbit::cpu
