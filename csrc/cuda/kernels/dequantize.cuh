// Dequantizes a weight in the layout mma_fragment to bfloat16 [N, K], for torch's own GEMM.
//
//    units (global) --load_codes--> codes of a lane --weight_decoders--> operand A, f16x2 --widen, * scale, round--> bf16
//                                                           shared memory [16 rows][64 columns] --whole lines--> to [rows, K]
//
// Contract: weights rounded once: value times scale in fp32, rounded to bfloat16.
// Limit: the bytes of the output, 2 N K.
// Figures: with torch's GEMM as `cuda_dequant_gemm`, evals/results/gemv_h100.json: nf4 8192 x 8192 at M = 4096 836 us, 0.89 times
// F.linear's speed.
#pragma once

#include "../decode/weight_decoders.cuh"
#include "../decode/unit_scales.cuh"

namespace lowbit::cuda {

struct Dequantize {
  const uint8_t* units;  // first unit of the first tile to write
  UnitLayout unit;
  ScaleType scale_type;
  const void* scale;          // [rows] where a row is one group, else in the units
  const uint8_t* zero_point;  // [rows] where a row is one group with a zero point, else null
  const float* outer;         // the tensor scale, or null
  float factor;               // of the format: value of an integer step
  __nv_bfloat16* to;          // [rows, k]
  int64_t rows, tiles;
  int k, units_per_row;
  bool has_zero, is_signed;
};

// A block dequantizes a tile of 16 rows; its warps split the columns.
constexpr int dequantize_warps = 8;
__host__ __device__ constexpr int steps_per_warp(int bits) { return steps_per_run(bits) > 4 ? steps_per_run(bits) : 4; }
__host__ __device__ constexpr int warp_k(int bits) { return steps_per_warp(bits) * 32; }

template <class Codes>
__global__ void __launch_bounds__(dequantize_warps * 32) dequantize_fragments(const Dequantize a) {
  using T = __nv_bfloat16;
  // pitch: bytes from row to row, without bank conflicts
  constexpr int bits = Codes::bits, at_once = 64, pitch = at_once * 2 + 16;
  constexpr int steps = steps_per_warp(bits), parts = Unit<bits, 0, false>::columns / warp_k(bits);  // of a unit
  __shared__ __align__(16) uint8_t staged[dequantize_warps][tile_rows * pitch];
  const auto constants = [&] {
    if constexpr (Codes::parts == 1) {
      return Codes::constants(a.is_signed, nullptr);
    } else {
      __shared__ uint2 table[Codes::table_size];
      Codes::fill(table);
      __syncthreads();
      return Codes::constants(a.is_signed, table);
    }
  }();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int part = blockIdx.y * dequantize_warps + warp, from = part % parts * warp_k(bits);  // from: column in the unit
  if (part >= a.units_per_row * parts) return;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * tile_rows, row = first_row + lane / 4;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * a.units_per_row + part / parts;
  const int first_column = part * warp_k(bits);
  const uint8_t* const unit = a.units + index * a.unit.size;
  const float all = Codes::factor * a.factor * (a.outer ? *a.outer : 1.0f);
  const uint32_t middle = a.is_signed ? 1u << (bits - 1) : 0;
  float2 scale = {all, all};
  uint2 zeros = {middle, middle};
  if (!a.unit.groups) {
    const int64_t last = a.rows - 1;
    scale.x *= scale_at(a.scale, a.scale_type, min(row, last)), scale.y *= scale_at(a.scale, a.scale_type, min(row + 8, last));
    if (a.zero_point) zeros = {a.zero_point[min(row, last)], a.zero_point[min(row + 8, last)]};
  }
  auto of_row = Codes::row(zeros.x), of_row8 = Codes::row(zeros.y);
  uint8_t* const local = staged[warp];
  const bool on_16_bytes = a.k % 8 == 0;
  const auto write = [&](int column) {  // 64 columns
    __syncwarp();
#pragma unroll
    for (int i = 0; i < tile_rows / 4; i++) {
      const int r = lane / 8 + i * 4, k = column + lane % 8 * 8;
      const uint4 eight = *reinterpret_cast<const uint4*>(local + r * pitch + lane % 8 * 16);
      if (first_row + r >= a.rows || k >= a.k) continue;
      T* const to = a.to + (first_row + r) * a.k + k;
      if (on_16_bytes) {
        *reinterpret_cast<uint4*>(to) = eight;
      } else {
        const uint32_t pairs[] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
        for (int j = 0; j < 8; j++)
          if (k + j < a.k) reinterpret_cast<uint16_t*>(to)[j] = static_cast<uint16_t>(pairs[j / 2] >> 16 * (j % 2));
      }
    }
    __syncwarp();
  };
  HeldCodes<bits> held[steps / steps_per_run(bits)];
  const uint8_t* const codes = unit + from * (bits * tile_rows / 8);
#pragma unroll
  for (int s = 0; s < steps; s++) load_codes<bits>(codes, lane, s, held[s / steps_per_run(bits)]);
#pragma unroll
  for (int s = 0; s < steps; s++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int column = from + s * 32 + half * 16;
      if (a.unit.groups && column % a.unit.group == 0) {
        const int group = column / a.unit.group;
        const float2 two = two_scales_of(unit + a.unit.scale_at, a.scale_type, group, lane);
        scale = {two.x * all, two.y * all};
        if constexpr (Codes::supports_zero) {
          if (a.has_zero) {
            zeros = two_zeros_of(unit + a.unit.zero_at, group, lane);
            of_row = Codes::row(zeros.x), of_row8 = Codes::row(zeros.y);
          }
        }
      }
      uint32_t numbers[Codes::parts][4];
      Codes::fragment(constants, held[s / steps_per_run(bits)], s, half, of_row, of_row8, numbers);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float first = 0, second = 0;
#pragma unroll
        for (int p = Codes::parts - 1; p >= 0; p--)
          first += __uint_as_float(numbers[p][i] << 16), second += __uint_as_float(numbers[p][i] & 0xffff0000u);
        const float times = i % 2 ? scale.y : scale.x;
        const __nv_bfloat162 pair = __floats2bfloat162_rn(first * times, second * times);
        const int r = lane / 4 + i % 2 * 8, byte = (s % 2 * 32 + half * 16 + i / 2 * 8) * 2 + lane % 4 * 4;
        *reinterpret_cast<uint32_t*>(local + r * pitch + byte) = reinterpret_cast<const uint32_t&>(pair);
      }
    }
    if (s % 2 == 1) write(first_column + s / 2 * at_once);
  }
}

}  // namespace lowbit::cuda
