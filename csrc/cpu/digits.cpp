// Linear for one or two rows of x on integer dot products. Compiled for AVX-512 with VBMI and VNNI.
//
// x is written in digits: in a slice of 512 columns, x = scale * (65536 d0 + 256 d1 + d2) with digits of -128 to 127, to
// 2^-22 of the largest. Sixty-four codes come out of their planes by one look-up each (a byte takes the eight bits from any
// place of its quadword), and a dot product of four bytes adds each digit's products to sixteen integers. These sums, less the
// zero point's share, are exact; what follows is fp32: the digits put together, the scales, the sum of runs, the sum of lanes.
// No sum depends on the number of threads.
#include "digits.h"

#include <immintrin.h>

#include <cmath>

namespace lowbit::cpu::avx512vnni {
namespace {

inline float number_at(const Numbers& numbers, int64_t i) {
  switch (numbers.stored) {
    case Stored::float32: return static_cast<const float*>(numbers.data)[i];
    case Stored::bfloat16: return bfloat16_to_float(static_cast<const uint16_t*>(numbers.data)[i]);
    case Stored::float16: return _cvtsh_ss(static_cast<const uint16_t*>(numbers.data)[i]);
    case Stored::bytes: break;
  }
  const uint8_t byte = static_cast<const uint8_t*>(numbers.data)[i];
  return numbers.table ? numbers.table[byte] : static_cast<float>(byte);
}

// Where the planes of a row begin.
template <int bits>
struct Planes {
  static constexpr int count = bits == 7 ? 3 : (bits & (bits - 1)) ? 2 : 1;
  static constexpr int width(int plane) {
    return plane == 0 ? (bits & 8 ? 8 : bits & 4 ? 4 : bits & 2 ? 2 : 1) : plane == 1 && (bits & 6) == 6 ? 2 : 1;
  }
  const uint8_t* at[count];
  Planes() = default;
  Planes(const uint8_t* row, int64_t k) {
    for (int p = 0; p < count; p++) at[p] = row, row += (k * width(p) + 7) / 8;
  }
};

// Fields of `width` bits as bytes, each from bit `low` of its byte on; the other bits are anything.
template <int width, int low>
inline __m512i fields(const uint8_t* p) {
  __m512i quads;  // eight fields each
  if constexpr (width == 4) quads = _mm512_cvtepu32_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  else quads = _mm512_cvtepu16_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  uint64_t from = 0;
  for (int i = 0; i < 8; i++) from |= static_cast<uint64_t>((i * width - low) & 63) << 8 * i;
  return _mm512_multishift_epi64_epi8(_mm512_set1_epi64(static_cast<int64_t>(from)), quads);
}

template <int width, int low>
inline __m512i with_plane(__m512i codes, const uint8_t* p) {
  if constexpr (width == 1) {
    uint64_t bits;
    memcpy(&bits, p, 8);
    return _mm512_mask_add_epi8(codes, bits, codes, _mm512_set1_epi8(static_cast<char>(1 << low)));
  } else {
    const __m512i mask = _mm512_set1_epi8(static_cast<char>(((1 << width) - 1) << low));
    return _mm512_ternarylogic_epi64(fields<width, low>(p), mask, codes, 0xea);  // (a & b) | c
  }
}

// The codes of a step.
template <int bits>
inline __m512i codes_of(const Planes<bits>& planes, int64_t step_number) {
  using P = Planes<bits>;
  const auto at = [&](int p) { return planes.at[p] + step_number * P::width(p) * (step / 8); };
  __m512i codes;
  if constexpr (P::width(0) == 8) codes = _mm512_loadu_si512(at(0));
  else codes = with_plane<P::width(0), 0>(_mm512_setzero_si512(), at(0));
  if constexpr (P::count > 1) codes = with_plane<P::width(1), P::width(0)>(codes, at(1));
  if constexpr (P::count > 2) codes = with_plane<1, P::width(0) + 2>(codes, at(2));
  return codes;
}

template <bool has_table>
inline __m512i bytes_of(__m512i codes, __m512i flipped, __m512i table) {
  if constexpr (has_table) return _mm512_permutexvar_epi8(codes, table);
  return _mm512_xor_si512(codes, flipped);
}

// What the lanes of a run are multiplied by, and the integers that they are less than their bytes: one of each a group.
struct OfRun {
  __m512 scale;
  __m512i zero;
};

// `groups_of_step`: how many share a step; 1 where a group is no smaller. `group_of_lane`: which of them a lane is of.
inline OfRun of_run(const Linear& a, const Bytewise& how, int64_t group, int64_t row, int groups_of_step, __m512i group_of_lane) {
  const int64_t groups = (a.k + a.group - 1) / a.group, at = row * a.scale.stride + group;
  const uint8_t* zeros = static_cast<const uint8_t*>(a.zero_point.data) + (a.zero_point.data ? row * a.zero_point.stride + group : 0);
  const float unit = a.has_outer ? how.unit * a.outer : how.unit;
  if (groups_of_step == 1)
    return {_mm512_set1_ps(number_at(a.scale, at) * unit), _mm512_set1_epi32(a.zero_point.data ? -zeros[0] - how.offset : 0)};
  alignas(16) float scale[4] = {};
  alignas(16) int zero[4] = {};
  for (int i = 0; i < groups_of_step && group + i < groups; i++) {
    scale[i] = number_at(a.scale, at + i) * unit;
    if (a.zero_point.data) zero[i] = -zeros[i] - how.offset;
  }
  return {_mm512_permutexvar_ps(group_of_lane, _mm512_castps128_ps512(_mm_load_ps(scale))),
          _mm512_permutexvar_epi32(group_of_lane, _mm512_castsi128_si512(_mm_load_si128(reinterpret_cast<__m128i*>(zero))))};
}

// R rows of the weight times M rows of x.
template <int bits, bool has_table, int M, int R>
void tile(const Linear& a, const Bytewise& how, const DigitsOfX& x, int64_t row) {
  const __m512i flipped = _mm512_set1_epi8(static_cast<char>(how.flipped));
  const __m512i table = has_table ? _mm512_loadu_si512(how.table) : _mm512_setzero_si512();
  const int groups_of_step = a.group < a.k && a.group < step ? static_cast<int>(step / a.group) : 1;
  alignas(64) int group_of_lane[lanes];
  for (int lane = 0; lane < lanes; lane++) group_of_lane[lane] = lane * groups_of_step / lanes;
  const __m512i of_lane = _mm512_load_si512(group_of_lane);
  const int64_t whole = a.k / step, slices = (a.k + slice - 1) / slice;
  Planes<bits> planes[R];
  for (int r = 0; r < R; r++) planes[r] = Planes<bits>(a.packed + (row + r) * a.packed_stride, a.k);
  __m512 total[R][M];
  for (auto& of_row : total)
    for (__m512& t : of_row) t = _mm512_setzero_ps();

  for (int64_t i = 0; i < x.runs; i++) {
    const Run& run = x.run[i];
    OfRun of[R];
    for (int r = 0; r < R; r++) of[r] = of_run(a, how, run.group, row + r, groups_of_step, of_lane);
    __m512i sum[R][M][digits_of_number];
    for (int m = 0; m < M; m++)
      for (int d = 0; d < digits_of_number; d++) {
        const __m512i share = _mm512_loadu_si512(x.sums + ((m * x.runs + i) * digits_of_number + d) * lanes);
        for (int r = 0; r < R; r++) sum[r][m][d] = a.zero_point.data ? _mm512_mullo_epi32(of[r].zero, share) : share;
      }
    const auto add = [&](const Planes<bits>& of_row, int64_t at, int64_t digits_at, int r) {
      const __m512i bytes = bytes_of<has_table>(codes_of<bits>(of_row, at), flipped, table);
      for (int m = 0; m < M; m++)
        for (int d = 0; d < digits_of_number; d++)
          sum[r][m][d] = _mm512_dpbusd_epi32(
              sum[r][m][d], bytes, _mm512_loadu_si512(x.digits + (m * digits_of_number + d) * x.padded + digits_at * step));
    };
    const int64_t end = run.step + run.steps;
    for (int64_t s = run.step; s < (end < whole ? end : whole); s++)
      for (int r = 0; r < R; r++) add(planes[r], s, s, r);
    if (end > whole) {  // the last step is no whole one: nothing is read beyond a row
      for (int r = 0; r < R; r++) {
        uint8_t copies[Planes<bits>::count][step] = {};
        Planes<bits> copied;
        for (int p = 0; p < Planes<bits>::count; p++) {
          const int width = Planes<bits>::width(p);
          memcpy(copies[p], planes[r].at[p] + whole * width * (step / 8), ((a.k - whole * step) * width + 7) / 8);
          copied.at[p] = copies[p];
        }
        add(copied, 0, whole, r);
      }
    }
    for (int r = 0; r < R; r++)
      for (int m = 0; m < M; m++) {
        const __m512 high = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][m][0]), _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(sum[r][m][1]));
        const __m512 all = _mm512_fmadd_ps(high, _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(sum[r][m][2]));
        // One half of the scale of x with either factor, so that neither leaves what a float can hold.
        const float* of_x = x.scale + (m * slices + run.slice) * 2;
        const __m512 scale = _mm512_mul_ps(of[r].scale, _mm512_set1_ps(of_x[1]));
        total[r][m] = _mm512_fmadd_ps(_mm512_mul_ps(all, _mm512_set1_ps(of_x[0])), scale, total[r][m]);
      }
  }
  for (int r = 0; r < R; r++)
    for (int m = 0; m < M; m++) a.y[m * a.n + row + r] = _mm512_reduce_add_ps(total[r][m]);
}

template <int bits, bool has_table, int M>
void rows(const Linear& a, const Bytewise& how, const DigitsOfX& x, int64_t begin, int64_t end) {
  constexpr int R = M == 1 ? 4 : 2;
  int64_t row = begin;
  for (; row + R <= end; row += R) tile<bits, has_table, M, R>(a, how, x, row);
  for (; row < end; row++) tile<bits, has_table, M, 1>(a, how, x, row);
}

template <int bits, bool has_table>
void for_m(const Linear& a, const Bytewise& how, const DigitsOfX& x, int64_t begin, int64_t end) {
  if (a.m == 1) return rows<bits, has_table, 1>(a, how, x, begin, end);
  return rows<bits, has_table, 2>(a, how, x, begin, end);
}

}  // namespace

bool take_digits(const Linear& a, const Bytewise& how, const Numbers& x, const DigitsOfX& to) {
  const int64_t slices = (a.k + slice - 1) / slice;
  for (int64_t m = 0; m < a.m; m++) {
    for (int64_t s = 0; s < slices; s++) {
      const int64_t first = s * slice, count = a.k - first < slice ? a.k - first : slice;
      const int64_t padded = to.padded - first < slice ? to.padded - first : slice;
      alignas(64) float numbers[slice] = {};
      __m512i largest = _mm512_setzero_si512();  // as integers, of which those of infinity and NaN are the largest
      for (int64_t i = 0; i < count; i++) numbers[i] = number_at(x, m * x.stride + first + i);
      for (int64_t i = 0; i < padded; i += lanes)
        largest = _mm512_max_epi32(largest, _mm512_castps_si512(_mm512_abs_ps(_mm512_load_ps(numbers + i))));
      const int32_t bits = _mm512_reduce_max_epi32(largest);
      if (bits >= 0x7f800000) return false;
      float most;
      memcpy(&most, &bits, 4);
      // 2^e <= most < 2^(e + 1): a digit's unit is 2^(e - 21), no smaller than a float goes.
      const int e = most > 0 ? std::ilogb(most) : 0, low = e - 21 < -149 ? -149 : e - 21;
      const int half = low / 2;
      to.scale[(m * slices + s) * 2] = std::ldexp(1.0f, half);
      to.scale[(m * slices + s) * 2 + 1] = std::ldexp(1.0f, low - half);
      const __m512 up = _mm512_set1_ps(std::ldexp(1.0f, -half)), further = _mm512_set1_ps(std::ldexp(1.0f, half - low));
      for (int64_t i = 0; i < padded; i += lanes) {
        const __m512i all = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_mul_ps(_mm512_load_ps(numbers + i), up), further));
        // Digits of -128 to 127, the lowest first: what is left is divided by 256 without a rest.
        const __m512i half_digit = _mm512_set1_epi32(128);
        const __m512i second = _mm512_srai_epi32(_mm512_add_epi32(all, half_digit), 8);
        const __m512i first_digit = _mm512_srai_epi32(_mm512_add_epi32(second, half_digit), 8);
        const __m512i digit[digits_of_number] = {first_digit, _mm512_sub_epi32(second, _mm512_slli_epi32(first_digit, 8)),
                                                 _mm512_sub_epi32(all, _mm512_slli_epi32(second, 8))};
        for (int d = 0; d < digits_of_number; d++)
          _mm_storeu_si128(reinterpret_cast<__m128i*>(to.digits + (m * digits_of_number + d) * to.padded + first + i),
                           _mm512_cvtepi32_epi8(digit[d]));
      }
    }
    for (int64_t i = 0; i < to.runs; i++) {
      const Run& run = to.run[i];
      for (int d = 0; d < digits_of_number; d++) {
        __m512i sums = _mm512_setzero_si512();
        for (int64_t s = run.step; s < run.step + run.steps; s++)
          sums = _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(1),
                                     _mm512_loadu_si512(to.digits + (m * digits_of_number + d) * to.padded + s * step));
        // Without zero points the share is that of the offset, whatever the row.
        if (!a.zero_point.data) sums = _mm512_mullo_epi32(sums, _mm512_set1_epi32(-how.offset));
        _mm512_storeu_si512(to.sums + ((m * to.runs + i) * digits_of_number + d) * lanes, sums);
      }
    }
  }
  return true;
}

void digits_linear(const Linear& a, const Bytewise& how, const DigitsOfX& x, int64_t begin, int64_t end) {
  const auto with = [&](auto bits) {
    constexpr int b = decltype(bits)::value;
    if constexpr (b <= 6)
      if (how.table) return for_m<b, true>(a, how, x, begin, end);
    return for_m<b, false>(a, how, x, begin, end);
  };
  switch (a.bits) {
    case 1: return with(std::integral_constant<int, 1>());
    case 2: return with(std::integral_constant<int, 2>());
    case 3: return with(std::integral_constant<int, 3>());
    case 4: return with(std::integral_constant<int, 4>());
    case 5: return with(std::integral_constant<int, 5>());
    case 6: return with(std::integral_constant<int, 6>());
    case 7: return with(std::integral_constant<int, 7>());
    default: return with(std::integral_constant<int, 8>());
  }
}

}  // namespace lowbit::cpu::avx512vnni
