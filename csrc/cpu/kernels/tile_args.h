// What gemv_tile of split_int8_gemv_avx2.cpp and split_int8_gemv_avx512.cpp reads beside the codes.
#pragma once

#include <xmmintrin.h>

#include "split_int8_gemv.h"
#include "../decode/bit_planes.h"

namespace lowbit::cpu {
namespace {

constexpr int64_t max_groups = chunk / 4;   // groups whose scales are loaded at a time

// Each pointer is at the first step of the tile.
template <class Planes>
struct TileArgs {
  const uint8_t* at[Planes::count];  // planes of the first row of the weight
  int64_t stride;                    // bytes from one row of the weight to the next
  uintptr_t prefetch_at;                   // address to prefetch for the L2 cache
  const int32_t* group;              // [steps]
  const int32_t* lane_group;
  const int8_t* limbs;
  const int32_t* sums;
  const float* slice_scale;  // [M, slices]: value of 1 in the lowest limb
  int64_t m, slices;      // rows of x, and slices in each
  int64_t first;          // group of scale[0]
  const float* scale;     // [R, scale_slots] or, with quad sums, [scale_slots, R]
  const float* zero;
};

// from + by, hidden from the compiler: it would otherwise hold a pointer for each unrolled step and run out of registers.
template <typename Pointer>
inline Pointer opaque_advance(Pointer from, int64_t by) {
  from += by;
  asm("" : "+r"(from));
  return from;
}

// The row that this thread reaches `rows` rows after `row`, in its next range where this one ends.
inline int64_t row_to_prefetch(const RowRange& range, int64_t row, int64_t rows) {
  const int64_t target = row + rows;
  return target < range.end ? target : range.next_begin + (target - range.end);
}

// Prefetches for the L2 cache the share [from, to) of `all` of the values of `rows` rows from `row` on. asm, because a compiler drops
// calls of a function that only prefetches.
__attribute__((noinline)) inline void prefetch_l2(const ArrayView& of, int64_t row, int64_t rows, int64_t from, int64_t to, int64_t all) {
  const int64_t size = of.dtype == Dtype::float32 ? 4 : of.dtype == Dtype::bytes ? 1 : 2, bytes = rows * of.stride * size;
  const uintptr_t at = reinterpret_cast<uintptr_t>(of.data) + row * of.stride * size;
  for (int64_t i = bytes * from / all; i < bytes * to / all; i += 64) asm volatile("prefetcht1 (%0)" ::"r"(at + i));
}

}  // namespace
}  // namespace lowbit::cpu
