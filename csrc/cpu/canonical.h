// Rows of an interleaved weight as canonical ones, a block at a time, for kernels that know no others.
#pragma once

#include <algorithm>
#include <memory>

#include "interleaved.h"

namespace lowbit::cpu {
namespace {

// A word's bytes, one of every two.
inline uint64_t apart(uint32_t word) {
  uint64_t bytes = word;
  bytes = (bytes | bytes << 16) & 0x0000ffff0000ffff;
  return (bytes | bytes << 8) & 0x00ff00ff00ff00ff;
}

// The bytes of `count` words in turn: 1, 2 or 4.
template <int count>
inline void put_words(const uint32_t* words, uint8_t* to) {
  if constexpr (count == 1) {
    memcpy(to, words, 4);
  } else {
    const uint64_t first = apart(words[0]) | apart(words[1]) << 8;
    if constexpr (count == 2) {
      memcpy(to, &first, 8);
    } else {
      const uint64_t second = apart(words[2]) | apart(words[3]) << 8;
      const auto pairs = [](uint64_t two) { return (two | two << 16) & 0x0000ffff0000ffff; };
      const uint64_t both[] = {pairs(first & 0xffffffff) | pairs(second & 0xffffffff) << 16, pairs(first >> 32) | pairs(second >> 32) << 16};
      memcpy(to, both, 16);
    }
  }
}

template <int bits, int plane = 0>
inline void restore_planes(const uint8_t* block, int64_t units, int64_t row, uint8_t* to) {
  using U = Unit<bits>;
  if constexpr (plane < U::P::count) {
    constexpr int count = U::words_of_plane(plane);
    const uint8_t* from = block + U::first_word(plane) * bytes_of_words + 4 * row;
    for (int64_t u = 0; u < units; u++, from += U::words * bytes_of_words, to += 4 * count) {
      uint32_t words[count];
      for (int w = 0; w < count; w++) memcpy(words + w, from + w * bytes_of_words, 4);
      put_words<count>(words, to);
    }
    restore_planes<bits, plane + 1>(block, units, row, to);
  }
}

template <int bits>
void restore_block(const uint8_t* block, int64_t units, int64_t stride, uint8_t* to) {
  for (int64_t row = 0; row < rows_together; row++) restore_planes<bits>(block, units, row, to + row * stride);
}

inline void restore_block(int bits, const uint8_t* block, int64_t units, int64_t stride, uint8_t* to) {
  switch (bits) {
    case 1: return restore_block<1>(block, units, stride, to);
    case 2: return restore_block<2>(block, units, stride, to);
    case 3: return restore_block<3>(block, units, stride, to);
    case 4: return restore_block<4>(block, units, stride, to);
    case 5: return restore_block<5>(block, units, stride, to);
    case 6: return restore_block<6>(block, units, stride, to);
    case 7: return restore_block<7>(block, units, stride, to);
    default: return restore_block<8>(block, units, stride, to);
  }
}

inline int64_t size_of(Stored stored) { return stored == Stored::float32 ? 4 : stored == Stored::bytes ? 1 : 2; }

// What was turned in blocks of rows, [G, 32], as [32, G].
template <typename Number>
void turn_back(const Number* from, int64_t groups, Number* to) {
  for (int64_t r = 0; r < rows_together; r++)
    for (int64_t g = 0; g < groups; g++) to[r * groups + g] = from[g * rows_together + r];
}

// Some rows, from block to block.
class CanonicalRows {
 public:
  // `blocks`: as many as are held at once.
  CanonicalRows(const Linear& a, int64_t blocks) : from_(a), held_(a) {
    groups_ = (a.k + a.group - 1) / a.group;
    const int64_t rows = blocks * rows_together;
    packed_.reset(new uint8_t[rows * a.packed_stride]);
    scale_.reset(new uint8_t[rows * groups_ * size_of(a.scale.stored)]);
    if (a.zero_point.data) zero_.reset(new uint8_t[rows * groups_ * size_of(a.zero_point.stored)]);
    held_.interleaved = false;
  }
  // The block that `row` is in becomes the one that is held at `place`.
  void restore(int64_t row, int64_t place = 0) {
    const int64_t first = row / rows_together * rows_together, at = place * rows_together;
    restore_block(from_.bits, from_.packed + first * from_.packed_stride, from_.k / columns_of_unit(from_.bits), from_.packed_stride,
                  packed_.get() + at * from_.packed_stride);
    turn(from_.scale, first, scale_.get(), at);
    if (from_.zero_point.data) turn(from_.zero_point, first, zero_.get(), at);
  }
  // A weight whose rows, counted from that of the first block held on, are those that were restored. The first is `row`.
  Linear from(int64_t row) const {
    Linear rows = held_;
    const auto behind = [row](const void* data, int64_t stride) { return reinterpret_cast<uintptr_t>(data) - row * stride; };
    rows.packed = reinterpret_cast<const uint8_t*>(behind(packed_.get(), from_.packed_stride));
    rows.scale.data = reinterpret_cast<const void*>(behind(scale_.get(), groups_ * size_of(from_.scale.stored)));
    if (zero_) rows.zero_point.data = reinterpret_cast<const void*>(behind(zero_.get(), groups_ * size_of(from_.zero_point.stored)));
    return rows;
  }

 private:
  void turn(const Numbers& of, int64_t first, uint8_t* all, int64_t at) const {
    const int64_t size = size_of(of.stored), count = groups_ * size;
    const void* const from = static_cast<const uint8_t*>(of.data) + first * count;
    uint8_t* const to = all + at * count;
    if (size == 4) turn_back(static_cast<const uint32_t*>(from), groups_, reinterpret_cast<uint32_t*>(to));
    else if (size == 2) turn_back(static_cast<const uint16_t*>(from), groups_, reinterpret_cast<uint16_t*>(to));
    else turn_back(static_cast<const uint8_t*>(from), groups_, to);
  }
  const Linear& from_;
  Linear held_;
  int64_t groups_;
  std::unique_ptr<uint8_t[]> packed_, scale_, zero_;
};

// `take(weight, begin, end)` for rows begin .. end - 1 in order, where the weight is one whose rows are canonical.
template <typename Take>
void in_canonical_rows(const Linear& a, int64_t begin, int64_t end, const Take& take) {
  if (!a.interleaved) return take(a, begin, end);
  CanonicalRows rows(a, 1);
  for (int64_t row = begin; row < end;) {
    const int64_t first = row / rows_together * rows_together, past = std::min(first + rows_together, end);
    rows.restore(row);
    take(rows.from(first), row, past);
    row = past;
  }
}

}  // namespace
}  // namespace lowbit::cpu
