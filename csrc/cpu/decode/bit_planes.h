// Bit planes of a row, read in steps of `size` bytes of the widest plane (the packing: csrc/decode.h).
#pragma once

#include <cstdint>
#include <cstring>

namespace lowbit::cpu {
namespace {

// Pointers to the planes of a row.
template <int bits, int size>
struct Planes {
  static constexpr int count = bits == 7 ? 3 : (bits & (bits - 1)) ? 2 : 1;
  static constexpr int width(int plane) {
    return plane == 0 ? (bits & 8 ? 8 : bits & 4 ? 4 : bits & 2 ? 2 : 1) : plane == 1 && (bits & 6) == 6 ? 2 : 1;
  }
  static constexpr int fields = 8 / width(0);
  static constexpr int64_t bytes(int plane) { return size * width(plane) / width(0); }  // bytes of a step in `plane`
  static constexpr int64_t bytes_per_step = size * bits / width(0);                      // in all planes
  const uint8_t* at[count];
  Planes() = default;
  Planes(const uint8_t* row, int64_t k) {
    for (int p = 0; p < count; p++) at[p] = row, row += (k * width(p) + 7) / 8;
  }
};

// A copy of a row's last, partial step, padded with zeros, so that vector loads stay within the row.
template <int bits, int size>
struct LastStep {
  uint8_t bytes[Planes<bits, size>::count][size];
  Planes<bits, size> planes;
  LastStep() = default;
  __attribute__((noinline)) void copy(const Planes<bits, size>& row, int64_t step, int64_t k) {
    using P = Planes<bits, size>;
    for (int p = 0; p < P::count; p++) {
      memset(bytes[p], 0, size);
      memcpy(bytes[p], row.at[p] + step * P::bytes(p), ((k - step * size * P::fields) * P::width(p) + 7) / 8);
      planes.at[p] = bytes[p];
    }
  }
};

}  // namespace
}  // namespace lowbit::cpu
