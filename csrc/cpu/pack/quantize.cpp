// Round-to-nearest quantization of a weight [N, K] to integers, with a scale for each group from its largest magnitude or its
// range, and bit packing. Compiled once for each instruction set (LOWBIT_SET is its namespace) from plain loops that compilers
// vectorize.
//
//    w [N, K] --load--> f32 group --min, max--> scale, zero_point --round--> codes u8 [K] --pack_plane--> packed [N, K bits / 8]
//
// Contract: bit for bit the result of lowbit/scales.py and lowbit/grid.py, each step in fp32.
// Limit: the bytes of w, and one division for each weight.
#include "quantize.h"

#include <cmath>
#include <vector>

#include "../isa/array_view.h"

namespace lowbit::cpu::LOWBIT_SET {
namespace {

constexpr int vector_width = 16;

// Loads `count` values from element i on as floats, padded with zeros to a multiple of vector_width.
void load(const ArrayView& w, int64_t i, int64_t count, float* to) {
  if (w.dtype == Dtype::float32) {
    memcpy(to, static_cast<const float*>(w.data) + i, count * sizeof(float));
  } else if (w.dtype == Dtype::bfloat16) {
    const uint16_t* from = static_cast<const uint16_t*>(w.data) + i;
    for (int64_t j = 0; j < count; j++) to[j] = bfloat16_to_float(from[j]);
  } else {
    const uint16_t* from = static_cast<const uint16_t*>(w.data) + i;
    for (int64_t j = 0; j < count; j++) to[j] = half_to_f32(from[j]);
  }
  for (int64_t j = count; j % vector_width; j++) to[j] = 0;
}

struct Range {
  float low, high;
  bool finite;
};

// Minimum and maximum of a group, both including 0, and whether all values are finite.
Range range_of(const float* w, int64_t count) {
  float low[vector_width] = {}, high[vector_width] = {}, nothing[vector_width] = {};
  for (int64_t i = 0; i < count; i += vector_width)
    for (int j = 0; j < vector_width; j++) {
      const float x = w[i + j];
      low[j] = x < low[j] ? x : low[j];
      high[j] = x > high[j] ? x : high[j];
      nothing[j] += x * 0.0f;  // 0 * infinity and 0 * NaN are NaN
    }
  Range all = {0, 0, true};
  for (int j = 0; j < vector_width; j++) {
    all.low = low[j] < all.low ? low[j] : all.low;
    all.high = high[j] > all.high ? high[j] : all.high;
    all.finite = all.finite && nothing[j] == 0;
  }
  return all;
}

// Scales that the reference rejects: infinite, or 0 in float16 though the group has normal values. A group of subnormal values
// may have a scale of 0.
inline bool is_lost(const Quantize& a, float value, float scale) {
  return !std::isfinite(scale) || (a.dtype == Dtype::float16 && scale == 0 && std::fabs(value) * a.high >= 0x1p-126f);
}

// The scale of a group without zero_point; negative where the value of largest magnitude has to map to `low`.
inline float scale_of_range(const Quantize& a, const Range& range) {
  const bool is_even = a.reach == a.largest || -range.low == range.high, is_low = -range.low > range.high;
  return is_even ? (is_low ? -range.low : range.high) / a.largest : (is_low ? range.low : range.high) / a.reach;
}

// Stores a scale in its dtype and returns the rounded value.
float store_scale(const Quantize& a, int64_t at, float value) {
  if (a.dtype == Dtype::float32) return static_cast<float*>(a.scale)[at] = value;
  uint16_t* to = static_cast<uint16_t*>(a.scale) + at;
  if (a.dtype == Dtype::bfloat16) return bfloat16_to_float(*to = to_bfloat16(value));
  return half_to_f32(*to = to_half(value));
}

// codes = clamp(w / over + zero, low, high) rounded to nearest even. Adding 1.5 * 2^23 leaves the integer in the low bits of the
// float.
void round_all(const Quantize& a, const float* w, int64_t count, float over, float zero, uint8_t* codes) {
  constexpr float round_bias = 12582912.0f;
  const uint32_t mask = (1u << a.bits) - 1;
  for (int64_t i = 0; i < count; i += vector_width)
    for (int j = 0; j < vector_width; j++) {
      float value = w[i + j] / over + zero;
      value = value < a.low ? a.low : value;
      value = value > a.high ? a.high : value;
      value += round_bias;
      uint32_t bits;
      memcpy(&bits, &value, 4);
      codes[i + j] = static_cast<uint8_t>(bits & mask);
    }
}

template <int width>
void pack_plane(const uint8_t* codes, int64_t k, int shift, uint8_t* to) {
  constexpr int each = 8 / width, mask = (1 << width) - 1;
  for (int64_t i = 0; i < (k + each - 1) / each; i++) {  // codes are padded with zeros
    int byte = 0;
    for (int j = 0; j < each; j++) byte |= (codes[i * each + j] >> shift & mask) << (j * width);
    to[i] = static_cast<uint8_t>(byte);
  }
}

void pack(const uint8_t* codes, int bits, int64_t k, uint8_t* to) {
  int shift = 0;
  const auto plane = [&](auto constant) {
    constexpr int width = decltype(constant)::value;
    if (!(bits & width)) return;
    pack_plane<width>(codes, k, shift, to);
    shift += width, to += (k * width + 7) / 8;
  };
  plane(std::integral_constant<int, 8>());
  plane(std::integral_constant<int, 4>());
  plane(std::integral_constant<int, 2>());
  plane(std::integral_constant<int, 1>());
}

}  // namespace

bool quantize(const Quantize& a, int64_t begin, int64_t end) {
  const int64_t groups = (a.k + a.group - 1) / a.group, row_bytes = packed_size(a.bits, a.k);
  std::vector<float> temp((a.group < a.k ? a.group : a.k) + vector_width);
  std::vector<uint8_t> codes(a.k + 2 * vector_width);
  for (int64_t row = begin; row < end; row++) {
    for (int64_t g = 0; g < groups; g++) {
      const int64_t first = g * a.group, count = a.k - first < a.group ? a.k - first : a.group, at = row * groups + g;
      load(a.w, row * a.w.stride + first, count, temp.data());
      const Range range = range_of(temp.data(), count);
      const float value = a.zero ? range.high / a.high - range.low / a.high : scale_of_range(a, range);
      const float scale = store_scale(a, at, value);
      if (!range.finite || is_lost(a, value, scale)) return false;
      const float over = scale == 0 ? INFINITY : scale;
      float zero = 0;
      if (a.zero) {
        zero = std::nearbyint(-range.low / over);
        zero = zero > a.high ? a.high : zero;
        a.zero[at] = static_cast<uint8_t>(zero);
      }
      round_all(a, temp.data(), count, over, zero, codes.data() + first);
    }
    for (int64_t i = a.k; i < a.k + vector_width; i++) codes[i] = 0;
    pack(codes.data(), a.bits, a.k, a.packed + row * row_bytes);
  }
  return true;
}

}  // namespace lowbit::cpu::LOWBIT_SET
