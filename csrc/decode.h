// Unpacking of the canonical packing and values of codes, for CPU and CUDA kernels alike.
//
// The canonical packing (lowbit/packing.py): a width that divides 8 fills whole bytes, the first code in the low bits. Any other
// width is split into bit planes of such widths, the widest first, which holds the low bits; each plane of a row is padded to
// whole bytes. The widths of the planes of b bits are the powers of two in b.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__CUDACC__)
#define LOWBIT_INLINE __host__ __device__ __forceinline__
#else
#define LOWBIT_INLINE inline __attribute__((always_inline))
#endif

namespace lowbit {

// Bytes of a row of n codes.
LOWBIT_INLINE int64_t packed_size(int bits, int64_t n) {
  int64_t bytes = 0;
  for (int width = 8; width; width >>= 1)
    if (bits & width) bytes += (n * width + 7) / 8;
  return bytes;
}

// Multiples of this many codes start on a byte in every plane.
LOWBIT_INLINE constexpr int byte_aligned_codes(int bits) { return 8 / (bits & -bits); }

// Adds the plane of `width` bits, if any, to code i of a row of n codes, and advances to the next plane.
template <int bits, int width>
LOWBIT_INLINE void add_field(const uint8_t*& plane, int64_t n, int64_t i, int& shift, uint32_t& code) {
  if constexpr (bits & width) {
    code |= ((plane[i * width / 8] >> (i * width % 8)) & ((1u << width) - 1)) << shift;
    shift += width;
    plane += (n * width + 7) / 8;
  }
}

// Code i of a row of n codes.
template <int bits>
LOWBIT_INLINE uint32_t code_at(const uint8_t* row, int64_t n, int64_t i) {
  uint32_t code = 0;
  int shift = 0;
  add_field<bits, 8>(row, n, i, shift, code);
  add_field<bits, 4>(row, n, i, shift, code);
  add_field<bits, 2>(row, n, i, shift, code);
  add_field<bits, 1>(row, n, i, shift, code);
  return code;
}

// Adds the plane of `width` bits to `count` codes, from the plane's first byte on.
template <int width>
LOWBIT_INLINE void unpack_plane(const uint8_t* __restrict plane, int shift, int count, uint8_t* __restrict codes) {
  constexpr int per_byte = 8 / width, mask = (1 << width) - 1;
  const int whole = count / per_byte;
  for (int byte = 0; byte < whole; byte++)
    for (int field = 0; field < per_byte; field++)
      codes[byte * per_byte + field] |= ((plane[byte] >> (field * width)) & mask) << shift;
  for (int i = whole * per_byte; i < count; i++)
    codes[i] |= ((plane[i / per_byte] >> (i % per_byte * width)) & mask) << shift;
}

// Codes [first, first + count) of a row of n codes; first is a multiple of byte_aligned_codes(bits).
template <int bits>
LOWBIT_INLINE void unpack(const uint8_t* row, int64_t n, int64_t first, int count, uint8_t* codes) {
  memset(codes, 0, count);
  int shift = 0;
  const auto plane = [&](auto width_constant) {
    constexpr int width = decltype(width_constant)::value;
    if constexpr (bits & width) {
      unpack_plane<width>(row + first * width / 8, shift, count, codes);
      shift += width;
      row += (n * width + 7) / 8;
    }
  };
  plane(std::integral_constant<int, 8>());
  plane(std::integral_constant<int, 4>());
  plane(std::integral_constant<int, 2>());
  plane(std::integral_constant<int, 1>());
}

// IEEE half to float, exact for subnormals, infinities and NaN, without special instructions.
LOWBIT_INLINE float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16, magnitude = half & 0x7fffu;
  uint32_t bits;
  if (magnitude >= 0x7c00u) {
    bits = sign | 0x7f800000u | (magnitude & 0x3ffu) << 13;
  } else if (magnitude >= 0x400u) {
    bits = sign | ((magnitude << 13) + (112u << 23));
  } else {  // subnormal: a multiple of 2^-24
    const float value = static_cast<float>(magnitude) * 5.9604644775390625e-08f;
    memcpy(&bits, &value, 4);
    bits |= sign;
  }
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

LOWBIT_INLINE float bfloat16_to_float(uint16_t bfloat16) {
  const uint32_t bits = static_cast<uint32_t>(bfloat16) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

}  // namespace lowbit
