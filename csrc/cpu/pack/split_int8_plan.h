// What a split-int8 product derives from the weight alone: how codes become bytes, and the groups of its steps.
#pragma once

#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../isa/instruction_sets.h"

namespace lowbit::cpu {

// Whether the values times `up` are those of two's complement or of unsigned integer codes.
inline bool are_integers(const float* values, int bits, bool is_signed, float up = 1) {
  const int sign = is_signed ? 1 << (bits - 1) : 0;
  for (int code = 0; code < 1 << bits; code++)
    if (values[code] * up != static_cast<float>((code ^ sign) - sign)) return false;
  return true;
}

// Expresses a format as (byte - offset) * 2^-log, with the code as the byte or looked up in table [64]; false where its values
// are not small integers times a power of two.
inline bool to_byte_decoding(const Linear& a, ByteDecoding& decoding, uint8_t* table) {
  for (int log = 0; log <= 8; log++) {
    const float up = static_cast<float>(1 << log);
    const bool is_signed = are_integers(a.values, a.bits, true, up);
    if (!is_signed && !are_integers(a.values, a.bits, false, up)) continue;
    const int sign = is_signed ? 1 << (a.bits - 1) : 0;
    decoding = {sign, sign, nullptr, 1 / up};
    return true;
  }
  if (a.bits > 6) return false;
  const int codes = 1 << a.bits;
  for (int log = 0; log <= 8; log++) {
    const float up = static_cast<float>(1 << log);
    float minimum = 0, maximum = 0;
    bool whole = true;
    for (int code = 0; code < codes && whole; code++) {
      const float number = a.values[code] * up;
      whole = std::abs(number) <= 255 && number == std::floor(number);
      minimum = number < minimum ? number : minimum, maximum = number > maximum ? number : maximum;
    }
    if (!whole) continue;
    if (maximum - minimum > 127) return false;  // the int16 sums of AVX2 would overflow
    for (int code = 0; code < 64; code++) table[code] = static_cast<uint8_t>(a.values[code % codes] * up - minimum);
    decoding = {0, static_cast<int>(-minimum), table, 1 / up};
    return true;
  }
  return false;
}

// Whether a lane's sum fits in int32: x has 22 bits and a sign, so the sum of |code| in a lane may be 512 at most.
inline bool sums_fit_int32(const Linear& a, const ByteDecoding& decoding, bool has_zeros) {
  int maximum = (1 << a.bits) - 1;
  if (!has_zeros) {
    int minimum = 255, largest = 0;
    for (int code = 0; code < 1 << a.bits; code++) {
      const int byte = decoding.table ? decoding.table[code] : code ^ decoding.flipped;
      minimum = byte < minimum ? byte : minimum, largest = byte > largest ? byte : largest;
    }
    maximum = std::max(std::abs(minimum - decoding.offset), std::abs(largest - decoding.offset));
  }
  return maximum * 4 * fields_of(a.bits) <= 512;
}

// Position independent: it holds no pointer into itself and may be copied as bytes. The caller keeps the group table.
struct SplitInt8Plan {
  const GemvKernels* kernels;
  int count;           // limbs of a value of x
  int64_t size;        // bytes of those
  int64_t columns, steps, slices;
  bool uniform;        // each step lies in one group
  bool quad_sums;
  bool has_table;
  int flipped, offset;
  float unit;
  uint8_t table[64];

  SplitInt8Plan(const Linear& a, int count) : kernels(instruction_set().steps), count(count) {
    STD_TORCH_CHECK(kernels, "this processor has no products of integers for limbs");
    ByteDecoding decoding;
    STD_TORCH_CHECK(a.bits > 1 && to_byte_decoding(a, decoding, table) && sums_fit_int32(a, decoding, a.zero_point.data),
                    "limbs take weights that are small integers");
    STD_TORCH_CHECK(!a.zero_point.data || !(decoding.table || decoding.flipped), "zero points go with integers that have no sign");
    STD_TORCH_CHECK(a.interleaved || supports_group(a.bits, a.group, a.k), "limbs of ", a.bits, "-bit weights take groups of a multiple of ",
                    4 * fields_of(a.bits), ", got groups of ", a.group);
    has_table = decoding.table, flipped = decoding.flipped, offset = decoding.offset, unit = decoding.unit;
    const int lanes = kernels->lanes;
    columns = columns_per_step(a.bits, lanes), steps = (a.k + columns - 1) / columns, slices = (a.k + slice - 1) / slice;
    size = uses_words(a.bits, lanes) ? 2 * words_for(count) : count;
    uniform = a.group >= a.k || a.group % columns == 0;
    quad_sums = supports_quad_sums(a.bits, count, a.group, a.k);
  }

  ByteDecoding byte_decoding() const { return {flipped, offset, has_table ? table : nullptr, unit}; }

  // Entries of the group table: [steps] first group of each step, then, unless uniform, [steps, lanes] group of each lane.
  int64_t group_table_size() const { return steps * (uniform ? 1 : 1 + kernels->lanes); }
  void fill_groups(const Linear& a, int32_t* groups) const {
    const int lanes = kernels->lanes, lane_group = 4 * fields_of(a.bits);
    for (int64_t s = 0; s < steps; s++) {
      groups[s] = static_cast<int32_t>(s * columns / a.group);
      for (int64_t lane = 0; lane < lanes && !uniform; lane++) {
        const int32_t group = static_cast<int32_t>((s * columns + lane * lane_group) / a.group) - groups[s];
        groups[steps + s * lanes + lane] = quad_sums ? 4 * group + lane % 4 : group;
      }
    }
  }
};

}  // namespace lowbit::cpu
