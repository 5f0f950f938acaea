// What some steps of a weight's rows read beside limbs of x, whichever instruction set multiplies them.
#pragma once

#include <xmmintrin.h>

#include "split_int8_gemv.h"
#include "../decode/bit_planes.h"

namespace lowbit::cpu {
namespace {

constexpr int64_t max_groups = chunk / 4;   // whose scales are taken at a time

// Each pointer is at the first of the steps.
template <class Planes>
struct TileArgs {
  const uint8_t* at[Planes::count];  // planes of the first row
  int64_t stride;                    // bytes from row to row
  uintptr_t prefetch_at;                   // what to fetch for the second-level cache
  const int32_t* group;              // of each step
  const int32_t* lane_group;
  const int8_t* limbs;
  const int32_t* sums;
  const float* slice_scale;  // what the lowest limb counts
  int64_t m, slices;      // rows of x, and its slices
  int64_t first;          // group of the first scale
  const float* scale;     // [R, room], or four rows of a group together
  const float* zero;
};

// A pointer further on, in a way that keeps a compiler from holding one for each of some steps, for which there are no registers.
template <typename Pointer>
inline Pointer opaque_advance(Pointer from, int64_t by) {
  from += by;
  asm("" : "+r"(from));
  return from;
}

// The row that a thread multiplies so many rows behind this one.
inline int64_t row_to_prefetch(const RowRange& range, int64_t row, int64_t rows) {
  const int64_t prefetch_at = row + rows;
  return prefetch_at < range.end ? prefetch_at : range.next_begin + (prefetch_at - range.end);
}

// For the second-level cache: the numbers of so many rows, the part of them that steps from .. to - 1 of all are of.
inline void prefetch_l2(const ArrayView& of, int64_t row, int64_t rows, int64_t from, int64_t to, int64_t all) {
  const int64_t size = of.dtype == Dtype::float32 ? 4 : of.dtype == Dtype::bytes ? 1 : 2, bytes = rows * of.stride * size;
  const uintptr_t at = reinterpret_cast<uintptr_t>(of.data) + row * of.stride * size;
  for (int64_t i = bytes * from / all; i < bytes * to / all; i += 64)
    _mm_prefetch(reinterpret_cast<const char*>(at + i), _MM_HINT_T1);
}

}  // namespace
}  // namespace lowbit::cpu
