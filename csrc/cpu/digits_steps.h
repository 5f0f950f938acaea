// What some steps of a weight's rows read beside digits of x, whichever instruction set multiplies them.
#pragma once

#include <xmmintrin.h>

#include "digits.h"
#include "planes.h"

namespace lowbit::cpu {
namespace {

constexpr int64_t most_groups = chunk / 4;   // whose scales are taken at a time

// Each pointer is at the first of the steps.
template <class Planes>
struct Steps {
  const uint8_t* at[Planes::count];  // planes of the first row
  int64_t stride;                    // bytes from row to row
  uintptr_t ahead;                   // what to fetch for the second-level cache
  const int32_t* group;              // of each step
  const int32_t* of_lane;
  const int8_t* digits;
  const int32_t* sums;
  const float* of_slice;  // what the lowest digit counts
  int64_t m, slices;      // rows of x, and its slices
  int64_t first;          // group of the first scale
  const float* scale;     // [R, room], or four rows of a group together
  const float* zero;
};

// A pointer further on, in a way that keeps a compiler from holding one for each of some steps, for which there are no registers.
template <typename Pointer>
inline Pointer moved(Pointer from, int64_t by) {
  from += by;
  asm("" : "+r"(from));
  return from;
}

// The row that a thread multiplies so many rows behind this one.
inline int64_t row_ahead(const Turn& turn, int64_t row, int64_t rows) {
  const int64_t ahead = row + rows;
  return ahead < turn.end ? ahead : turn.then + (ahead - turn.end);
}

// For the second-level cache: the numbers of so many rows, the part of them that steps from .. to - 1 of all are of.
inline void fetch(const Numbers& of, int64_t row, int64_t rows, int64_t from, int64_t to, int64_t all) {
  const int64_t size = of.stored == Stored::float32 ? 4 : of.stored == Stored::bytes ? 1 : 2, bytes = rows * of.stride * size;
  const uintptr_t at = reinterpret_cast<uintptr_t>(of.data) + row * of.stride * size;
  for (int64_t i = bytes * from / all; i < bytes * to / all; i += 64)
    _mm_prefetch(reinterpret_cast<const char*>(at + i), _MM_HINT_T1);
}

}  // namespace
}  // namespace lowbit::cpu
