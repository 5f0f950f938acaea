// y = x W^T for up to eight rows of x on the 16-bit tensor cores, from the tiles layout, in every format of fragments.cuh.
//
// Weights are operand A of mma.m16n8k16 and the rows of x its eight columns, so one row costs what eight do. A warp keeps a
// slice of 512 columns of x in its registers, in the order of operand B, and takes that slice of one tile after the other:
// the codes are all that it reads. Where a row has more slices than a block has warps, it works in passes over them.
// Numbers are exact, the products of a group are summed in fp32, its scale multiplies the sum in fp32, and the slices' sums
// are added in a fixed order, then come bias and the one rounding.
//
// Each warp's units come through a ring of its own in shared memory. Weights never change, so their copies start before the
// kernel that writes x has ended.
#pragma once

#include "asynchrony.cuh"
#include "fragments.cuh"
#include "halves_launch.h"

namespace lowbit::cuda {

// A slice of x as operand B, two registers for each half of a step; zeros beyond the last row and column. The loads are all
// under way at once; then 64 columns at a time pass through shared memory, where ldmatrix gives each lane its own. Rows that
// do not lie on 16 bytes are read number by number. `after_loads` is called while the loads are under way.
template <class F>
__device__ __forceinline__ void load_slice(const Halves& a, int slice, uint8_t* memory, uint32_t (&x)[steps_of_slice * 4],
                                           F after_loads) {
  constexpr int pitch = pitch_of_x;
  const int lane = threadIdx.x, row = lane / 8, part = lane % 8, column = slice * columns_of_slice + part * 8;
  const uint16_t* from = static_cast<const uint16_t*>(a.x) + static_cast<int64_t>(row) * a.k + column;
#pragma unroll
  for (int j = 0; j < steps_of_slice; j++) {
    uint4 w = {0, 0, 0, 0};
    if (a.x_on_16_bytes && row + j % 2 * 4 < a.m && column + j / 2 * 64 < a.k)
      w = *reinterpret_cast<const uint4*>(from + static_cast<int64_t>(j % 2 * 4) * a.k + j / 2 * 64);
    x[4 * j] = w.x;
    x[4 * j + 1] = w.y;
    x[4 * j + 2] = w.z;
    x[4 * j + 3] = w.w;
  }
  after_loads();
  const uint32_t matrices = shared_address(memory + lane % 8 * pitch + lane / 8 * 16);
#pragma unroll
  for (int j = 0; j < steps_of_slice; j += 2) {
    __syncwarp();
    if (a.x_on_16_bytes) {
#pragma unroll
      for (int i = 0; i < 2; i++)
        if (j == 0 || row + i * 4 < a.m)  // the zeros of other rows stay
          *reinterpret_cast<uint4*>(memory + (row + i * 4) * pitch + part * 16) = {x[4 * (j + i)], x[4 * (j + i) + 1],
                                                                                  x[4 * (j + i) + 2], x[4 * (j + i) + 3]};
    } else {
#pragma unroll 1
      for (int i = lane; i < 8 * 64; i += 32) {
        const int m = i / 64, k = slice * columns_of_slice + j * 32 + i % 64;
        const bool is_there = m < a.m && k < a.k;
        *reinterpret_cast<uint16_t*>(memory + m * pitch + i % 64 * 2) =
            is_there ? static_cast<const uint16_t*>(a.x)[static_cast<int64_t>(m) * a.k + k] : 0;
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; i++)
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(x[4 * (j + i)]), "=r"(x[4 * (j + i) + 1]), "=r"(x[4 * (j + i) + 2]), "=r"(x[4 * (j + i) + 3])
                   : "r"(matrices + i * 64)
                   : "memory");
  }
}

// Which scales a kernel reads: of a type that is known when it is compiled, or one of the plain ones.
enum class Scales { bfloat16, plain, e8m0, e4m3 };

// The scales of a lane's two rows in a group; ones where they are not in the unit. Without a branch, where the type is known:
// the loads of a unit may then run ahead of its products.
template <Scales scales>
__device__ __forceinline__ float2 scales_of_group(const uint8_t* unit, const Halves& a, int group, int lane) {
  const uint8_t* of_unit = unit + a.unit.scale_at;
  if constexpr (scales == Scales::e8m0) return two_scales_of(of_unit, ScaleType::e8m0, group, lane);
  if constexpr (scales == Scales::e4m3) return two_scales_of(of_unit, ScaleType::e4m3, group, lane);
  if constexpr (scales == Scales::plain) return a.unit.groups ? two_scales_of(of_unit, a.scale_type, group, lane) : float2{1, 1};
  uint32_t two = *reinterpret_cast<const uint32_t*>(a.unit.groups ? of_unit + (group * rows_of_tile + lane / 4 * 2) * 2 : unit);
  if (a.unit.groups == 0) two = 0x3f803f80u;
  return {__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u)};
}

// Whether the products of numbers and scales of a unit are exact in 16 bits: whether all scales are of the usual sizes.
template <class F, Scales scales, int run>
__device__ __forceinline__ bool may_fold(const uint8_t* of_unit, int lane) {
  uint32_t unusual = 0;  // the highest bit of each byte
#pragma unroll
  for (int i = 0; i < Unit<F::bits, 0, false>::columns / run / 8; i++) {
    const uint32_t four = *reinterpret_cast<const uint32_t*>(of_unit + (i * 32 + lane) * 4);
    if constexpr (scales == Scales::e8m0) {
      unusual |= four;
      if constexpr (F::lowest_e8m0 > 0) unusual |= ~(four + (0x80u - F::lowest_e8m0) * 0x01010101u);
    } else {
      unusual |= four | (four + 0x01010101u) | ~(four + 0x78787878u);
    }
  }
  return __all_sync(0xffffffffu, (unusual & 0x80808080u) == 0);
}

// Adds the products of a unit to `sum`: rows g and g + 8 of the tile times rows 2t and 2t + 1 of x. `run`: columns whose sum
// is scaled at once, a divisor of a group. `is_folded`: scales multiply the weights instead.
template <class F, class T, Scales scales, int run, bool is_folded>
__device__ __forceinline__ void products_of_unit(const uint8_t* unit, const Halves& a, const typename F::Constants& constants,
                                                 uint32_t row_zeros, const uint32_t* x, float (&sum)[4]) {
  constexpr int steps = Unit<F::bits, 0, false>::columns / 32;
  const int lane = threadIdx.x;
  Held<F::bits> held;
  typename F::Row row = F::row(row_zeros & 0xff), row8 = F::row(row_zeros >> 8);
  float c[2][4] = {};  // of the halves of steps: one product waits for the one before it in its sum
  float2 scale = {1, 1};
#pragma unroll
  for (int step = 0; step < steps; step++) {
    hold<F::bits>(unit, lane, step, held);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int column = step * 32 + half * 16;
      const int group = scales == Scales::e8m0 || scales == Scales::e4m3 ? column / run : column >> a.group_shift;
      if constexpr (is_folded) {
        if (column % run == 0) {
          const uint8_t* two = unit + a.unit.scale_at + group * rows_of_tile + lane / 4 * 2;
          row = scales == Scales::e8m0 ? F::row_with_e8m0(two[0]) : F::row_with_e4m3(two[0]);
          row8 = scales == Scales::e8m0 ? F::row_with_e8m0(two[1]) : F::row_with_e4m3(two[1]);
        }
      } else if (column % run == 0) {
#pragma unroll
        for (int i = 0; i < 4; i++) c[0][i] = c[1][i] = 0;
        scale = scales_of_group<scales>(unit, a, group, lane);
        if constexpr (F::takes_zero) {
          const bool has_zeros = a.has_zero && a.unit.groups;
          uint32_t zeros = *reinterpret_cast<const uint16_t*>(
              has_zeros ? unit + a.unit.zero_at + group * rows_of_tile + lane / 4 * 2 : unit);
          if (!has_zeros) zeros = row_zeros;
          row = F::row(zeros & 0xff);
          row8 = F::row(zeros >> 8);
        }
      }
      uint32_t operand[F::parts][4];
      F::fragment(constants, held, step, half, row, row8, operand);
#pragma unroll
      for (int p = 0; p < F::parts; p++) multiply<T>(c[half], operand[p], x[4 * step + 2 * half], x[4 * step + 2 * half + 1]);
      if (!is_folded && (column + 16) % run == 0) {
#pragma unroll
        for (int i = 0; i < 4; i++) sum[i] = fmaf(run > 16 ? c[0][i] + c[1][i] : c[half][i], i < 2 ? scale.x : scale.y, sum[i]);
      }
    }
  }
  if constexpr (is_folded) {
#pragma unroll
    for (int i = 0; i < 4; i++) sum[i] = fmaf(c[0][i] + c[1][i], scales == Scales::e4m3 ? 256.0f : 1.0f, sum[i]);
  }
}

template <class F, class T, Scales scales, int run>
__global__ void __launch_bounds__(most_warps_of_halves * 32, 1) halves_linear(const __grid_constant__ Halves a) {
  constexpr int units_of_slice = columns_of_slice / Unit<F::bits, 0, false>::columns, outputs = outputs_of_tile;
  extern __shared__ __align__(128) uint8_t memory[];
  const int lane = threadIdx.x, place = threadIdx.y, turn = threadIdx.z, warp = turn * a.slices_of_pass + place;
  const int thread = warp * 32 + lane, threads = a.slices_of_pass * a.turns * 32;
  float *partial = reinterpret_cast<float*>(memory + a.at.partial), *total = reinterpret_cast<float*>(memory + a.at.total);
  const int block = blockIdx.x, tiles = a.fewest_tiles + (block < a.blocks_with_more);
  const int64_t first_tile = static_cast<int64_t>(block) * a.fewest_tiles + min(block, a.blocks_with_more);
  const uint8_t* weights = a.units + first_tile * a.units_of_row * a.unit.size;
  const auto units_in = [&](int pass) {  // of the warp's slice
    return min(units_of_slice, a.units_of_row - (pass * a.slices_of_pass + place) * units_of_slice);
  };
  const auto bytes_of = [&](int pass, int tile) {  // the first unit of the slice
    const int unit = (pass * a.slices_of_pass + place) * units_of_slice;
    return weights + (static_cast<int64_t>(tile) * a.units_of_row + unit) * a.unit.size;
  };

  let_dependents_start();
#if LOWBIT_BULK_COPIES
  uint8_t* ring = memory + a.at.ring + warp * a.stages * a.unit.size;
  uint64_t* barriers = reinterpret_cast<uint64_t*>(memory + a.at.barriers) + warp * a.stages;
  const uint64_t policy = read_once();
  if (lane == 0) {
#pragma unroll 1
    for (int s = 0; s < a.stages; s++) start_barrier(barriers + s);
    show_barriers_to_copies();
  }
  __syncwarp();
  int stage = 0, parity = 0, slot = 0;  // where in the ring units are read and copied
  int next_pass = 0, copied = 0;        // of the warp's units in that pass
  const auto start_copy = [&] {
    const int count = units_in(next_pass);
    if (count <= 0) return;
    const int slice = units_of_slice == 1 || count == 1 ? copied : copied / 2, tile = turn + slice * a.turns;
    if (tile < tiles) {
      if (lane == 0)
        copy(ring + slot * a.unit.size, bytes_of(next_pass, tile) + (copied - slice * count) * a.unit.size, a.unit.size,
             barriers + slot, policy);
      if (++slot == a.stages) slot = 0;
      copied++;
    }
    if (tile + a.turns >= tiles && copied == (slice + 1) * count) next_pass++, copied = 0;
  };
  const auto start_copies = [&](int count) {
#pragma unroll 1
    for (; count > 0; count--) start_copy();
  };
  start_copies(a.early_stages);
#endif
  const uint2* table = reinterpret_cast<const uint2*>(memory + a.at.table);
  if constexpr (F::parts > 1) {
    F::fill(reinterpret_cast<uint2*>(memory + a.at.table), thread, threads);
    __syncthreads();
  }
  const typename F::Constants constants = F::constants(a.is_signed, table);
  const int batches = (tiles + a.tiles_of_batch - 1) / a.tiles_of_batch;
  const float factor = a.outer ? a.factor * *a.outer : a.factor;
  wait_for_predecessors();

  int turned = 0;  // the buffer of `partial` that is written next
  for (int pass = 0; pass * a.slices_of_pass < a.slices; pass++) {
    const int units = units_in(pass);
    const bool is_last = (pass + 1) * a.slices_of_pass >= a.slices;
    uint32_t x[steps_of_slice * 4];
    load_slice(a, pass * a.slices_of_pass + place, memory + a.at.x + warp * bytes_of_x, x, [&] {
#if LOWBIT_BULK_COPIES
      if (pass) return;
      __syncthreads();  // behind the loads of x of all warps, which would else wait behind these
      start_copies(a.stages - 1 - a.early_stages);
#endif
    });
#pragma unroll 1
    for (int batch = 0; batch < batches; batch++, turned ^= 1) {
      const int first = batch * a.tiles_of_batch, count = min(a.tiles_of_batch, tiles - first);
      float* sums = partial + turned * a.tiles_of_batch * a.slices_of_pass * outputs;
#pragma unroll 1
      for (int tile = first + turn; tile < first + count; tile += a.turns) {
        float sum[4] = {};
        uint32_t zeros = 0x0101u << (F::bits - 1);
        if (F::takes_zero && a.has_zero && a.zero_point) {
          const int64_t n = (first_tile + tile) * rows_of_tile + lane / 4;
          zeros = (n < a.n ? a.zero_point[n] : 0) | (n + 8 < a.n ? a.zero_point[n + 8] : 0) << 8;
        }
#pragma unroll
        for (int u = 0; u < units_of_slice; u++) {
          if (u >= units) break;
#if LOWBIT_BULK_COPIES
          wait(barriers + stage, parity);
          start_copy();  // where the unit before this one was
          const uint8_t* unit = ring + stage * a.unit.size;
#else
          const uint8_t* unit = bytes_of(pass, tile) + u * a.unit.size;
#endif
          const uint32_t* of_unit = x + u * (steps_of_slice * 4 / units_of_slice);
          if constexpr ((scales == Scales::e8m0 || scales == Scales::e4m3) && !F::takes_zero) {
            if (may_fold<F, scales, run>(unit + a.unit.scale_at, lane)) {
              products_of_unit<F, T, scales, run, true>(unit, a, constants, zeros, of_unit, sum);
            } else {
              products_of_unit<F, T, scales, run, false>(unit, a, constants, zeros, of_unit, sum);
            }
          } else {
            products_of_unit<F, T, scales, run, false>(unit, a, constants, zeros, of_unit, sum);
          }
#if LOWBIT_BULK_COPIES
          __syncwarp();
          if (++stage == a.stages) stage = 0, parity ^= 1;
#endif
        }
        float* to = sums + ((tile - first) * a.slices_of_pass + place) * outputs + lane % 4 * 2 * rows_of_tile + lane / 4;
#pragma unroll
        for (int i = 0; i < 4; i++) to[i % 2 * rows_of_tile + i / 2 * 8] = sum[i];
      }
      __syncthreads();
      for (int i = thread; i < count * outputs; i += threads) {
        const int tile = i / outputs, output = i % outputs, m = output / rows_of_tile;
        if (m >= a.m) continue;
        float sum = pass ? total[first * outputs + i] : 0;
        const float* slices = sums + tile * a.slices_of_pass * outputs + output;
#pragma unroll 4
        for (int s = 0; s < a.slices_of_pass; s++) sum += slices[s * outputs];
        if (!is_last) {
          total[first * outputs + i] = sum;
          continue;
        }
        const int64_t n = (first_tile + first + tile) * rows_of_tile + output % rows_of_tile, to = m * a.n + n;
        if (n >= a.n) continue;
        if (a.unit.groups == 0) sum *= scale_at(a.scale, a.scale_type, n);
        sum *= factor;
        if (a.bias) sum += to_float(static_cast<const T*>(a.bias)[n]);
        static_cast<T*>(a.y)[to] = from_float<T>(sum);
      }
    }
  }
}

}  // namespace lowbit::cuda
