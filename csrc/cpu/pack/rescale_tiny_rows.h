// Rows of x so small that products with them would be subnormal (slow and imprecise) are scaled up by a power of two.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <type_traits>

#include "../../decode.h"
#include "../kernels/linear.h"

namespace lowbit::cpu {

// Bits of the largest magnitude in a row, as an integer of its width; infinity and NaN are the largest.
template <typename Bits>
Bits largest_of(const void* row, int64_t k) {
  constexpr Bits magnitude = static_cast<Bits>(-1) >> 1;
  const Bits* numbers = static_cast<const Bits*>(row);
  std::make_signed_t<Bits> largest = 0;
  for (int64_t i = 0; i < k; i++) {
    const auto bits = static_cast<std::make_signed_t<Bits>>(numbers[i] & magnitude);
    largest = bits > largest ? bits : largest;
  }
  return static_cast<Bits>(largest);
}

// Scales rows of x with max |x| < 2^-64 up to 2^-64 by a power of two, which is exact.
struct RescaledRows {
  static constexpr int minimum = -64;
  std::unique_ptr<float[]> numbers;       // [m, k], where any row is scaled
  float row_scale[max_float_rows];                  // [m]: factor of each row's sums
  RescaledRows(const ArrayView& x, int64_t m, int64_t k) {
    std::fill(row_scale, row_scale + max_float_rows, 1.0f);
    if (x.dtype == Dtype::float16) return;  // no float16 value is that small
    int up[max_float_rows] = {};
    bool any = false;
    for (int64_t row = 0; row < m; row++) {
      const float maximum = of_row(x, row);
      if (maximum > 0 && maximum < std::ldexp(1.0f, minimum)) up[row] = minimum - std::ilogb(maximum), any = true;
    }
    if (!any) return;
    numbers.reset(new float[m * k]);
    for (int64_t row = 0; row < m; row++) {
      const float times = std::ldexp(1.0f, up[row]);
      row_scale[row] = std::ldexp(1.0f, -up[row]);
      for (int64_t i = 0; i < k; i++) numbers[row * k + i] = times * at(x, row * x.stride + i);
    }
  }

 private:
  static float at(const ArrayView& x, int64_t i) {
    return x.dtype == Dtype::float32 ? static_cast<const float*>(x.data)[i]
                                       : lowbit::bfloat16_to_float(static_cast<const uint16_t*>(x.data)[i]);
  }
  static float of_row(const ArrayView& x, int64_t row) {
    float maximum;
    if (x.dtype == Dtype::float32) {
      const uint32_t bits = largest_of<uint32_t>(static_cast<const float*>(x.data) + row * x.stride, x.stride);
      std::memcpy(&maximum, &bits, sizeof maximum);
      return maximum;
    }
    return lowbit::bfloat16_to_float(largest_of<uint16_t>(static_cast<const uint16_t*>(x.data) + row * x.stride, x.stride));
  }
};

}  // namespace lowbit::cpu
