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

constexpr int columns_of_slice = 512, steps_of_slice = columns_of_slice / 32;

// Shared memory, in this order and each on 16 bytes.
struct HalvesMemory {
  static constexpr int pitch_of_x = 144, bytes_of_x = 8 * pitch_of_x;  // 64 columns of each row, spread over all banks
  int ring, x, partial, total, table, barriers, all;
  __host__ __device__ HalvesMemory(const Halves& a, int stages, int table_bytes) {
    const int warps = a.slices_of_pass * a.turns, outputs = a.m * rows_of_tile * 4;
    const int most_tiles = a.fewest_tiles + (a.blocks_with_more > 0);
    ring = 0;
    x = ring + warps * stages * a.unit.size;
    partial = x + warps * bytes_of_x;
    total = partial + 2 * a.tiles_of_batch * a.slices_of_pass * outputs;
    table = total + (a.slices > a.slices_of_pass ? most_tiles * outputs : 0);
    barriers = table + table_bytes;
    all = barriers + warps * stages * 8;
  }
};

// A slice of x as operand B, two registers for each half of a step; zeros beyond the last row and column. The loads are all
// under way at once; then 64 columns at a time pass through shared memory, where ldmatrix gives each lane its own. Rows that
// do not lie on 16 bytes are read number by number. `after_loads` is called while the loads are under way.
template <class F>
__device__ __forceinline__ void load_slice(const Halves& a, int slice, uint8_t* memory, uint32_t (&x)[steps_of_slice * 4],
                                           F after_loads) {
  constexpr int pitch = HalvesMemory::pitch_of_x;
  const int lane = threadIdx.x % 32, row = lane / 8, part = lane % 8, column = slice * columns_of_slice + part * 8;
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

// Which scales a kernel reads; the plain ones have one of three types, known when it runs.
enum class Scales { plain, e8m0, e4m3 };

template <Scales scales>
__device__ __forceinline__ float2 scales_of_group(const uint8_t* unit, const Halves& a, int group, int lane) {
  const ScaleType type = scales == Scales::e8m0 ? ScaleType::e8m0 : scales == Scales::e4m3 ? ScaleType::e4m3 : a.scale_type;
  return two_scales_of(unit + a.unit.scale_at, type, group, lane);
}

// Adds the products of a unit to `sum`: rows g and g + 8 of the tile times rows 2t and 2t + 1 of x. `run`: columns whose sum
// is scaled at once, a divisor of a group.
template <class F, class T, Scales scales, int run>
__device__ __forceinline__ void products_of_unit(const uint8_t* unit, const Halves& a, const typename F::Constants& constants,
                                                 typename F::Row row, typename F::Row row8, const uint32_t* x, float (&sum)[4]) {
  constexpr int steps = Unit<F::bits, 0, false>::columns / 32;
  const int lane = threadIdx.x % 32;
  Held<F::bits> held;
  float c[4];
  float2 scale = {1, 1};
#pragma unroll
  for (int step = 0; step < steps; step++) {
    hold<F::bits>(unit, lane, step, held);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int column = step * 32 + half * 16;
      if (column % run == 0) {
        c[0] = c[1] = c[2] = c[3] = 0;
        if (scales != Scales::plain || a.unit.groups) {
          const int group = scales == Scales::plain ? column >> a.group_shift : column / run;
          scale = scales_of_group<scales>(unit, a, group, lane);
          if constexpr (F::takes_zero) {
            if (a.has_zero) {
              const uint2 zeros = two_zeros_of(unit + a.unit.zero_at, group, lane);
              row = F::row(zeros.x);
              row8 = F::row(zeros.y);
            }
          }
        }
      }
      uint32_t operand[F::parts][4];
      F::fragment(constants, held, step, half, row, row8, operand);
#pragma unroll
      for (int p = 0; p < F::parts; p++) multiply<T>(c, operand[p], x[4 * step + 2 * half], x[4 * step + 2 * half + 1]);
      if ((column + 16) % run == 0) {
#pragma unroll
        for (int i = 0; i < 4; i++) sum[i] = fmaf(c[i], i < 2 ? scale.x : scale.y, sum[i]);
      }
    }
  }
}

// A place among the units that a warp takes: pass by pass, in each its slice of its tiles.
struct Position {
  int pass, tile, unit;
};

template <class F, class T, Scales scales, int run>
__global__ void __launch_bounds__(most_warps_of_halves * 32, 1) halves_linear(const __grid_constant__ Halves a) {
  constexpr int units_of_slice = columns_of_slice / Unit<F::bits, 0, false>::columns;
  constexpr int table_bytes = F::parts > 1 ? 256 * sizeof(uint2) : 0;
  extern __shared__ __align__(128) uint8_t memory[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int place = warp % a.slices_of_pass, turn = warp / a.slices_of_pass;
  const HalvesMemory at(a, a.stages, table_bytes);
  float *partial = reinterpret_cast<float*>(memory + at.partial), *total = reinterpret_cast<float*>(memory + at.total);
  const int block = blockIdx.x, tiles = a.fewest_tiles + (block < a.blocks_with_more);
  const int64_t first_tile = static_cast<int64_t>(block) * a.fewest_tiles + min(block, a.blocks_with_more);
  const uint8_t* weights = a.units + first_tile * a.units_of_row * a.unit.size;
  const auto units_in = [&](int pass) {  // of the warp's slice
    return min(units_of_slice, a.units_of_row - (pass * a.slices_of_pass + place) * units_of_slice);
  };
  const auto bytes_of = [&](const Position& p) {
    const int unit = (p.pass * a.slices_of_pass + place) * units_of_slice + p.unit;
    return weights + (static_cast<int64_t>(p.tile) * a.units_of_row + unit) * a.unit.size;
  };

  let_dependents_start();
#if LOWBIT_BULK_COPIES
  uint8_t* ring = memory + at.ring + warp * a.stages * a.unit.size;
  uint64_t* barriers = reinterpret_cast<uint64_t*>(memory + at.barriers) + warp * a.stages;
  const uint64_t policy = read_once();
  if (lane == 0) {
#pragma unroll 1
    for (int s = 0; s < a.stages; s++) start_barrier(barriers + s);
    show_barriers_to_copies();
  }
  __syncwarp();
  int stage = 0, parity = 0, slot = 0;
  Position next = {0, turn, 0};
  int units_left = turn < tiles ? units_in(0) : 0;  // of the slice that is copied next; none behind the last
  const auto start_copies = [&](int count) {
#pragma unroll 1
    for (; count > 0 && units_left > 0; count--) {
      if (lane == 0) copy(ring + slot * a.unit.size, bytes_of(next), a.unit.size, barriers + slot, policy);
      if (++slot == a.stages) slot = 0;
      next.unit++;
      if (--units_left > 0) continue;
      next.unit = 0;
      next.tile += a.turns;
      if (next.tile >= tiles) next.tile = turn, next.pass++;
      units_left = units_in(next.pass);
    }
  };
  start_copies(a.early_stages);
#endif
  const uint2* table = reinterpret_cast<const uint2*>(memory + at.table);
  if constexpr (F::parts > 1) {
    F::fill(reinterpret_cast<uint2*>(memory + at.table));
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
    load_slice(a, pass * a.slices_of_pass + place, memory + at.x + warp * HalvesMemory::bytes_of_x, x, [&] {
#if LOWBIT_BULK_COPIES
      if (pass) return;
      __syncthreads();  // behind the loads of x of all warps, which would else wait behind these
      start_copies(a.stages - 1 - a.early_stages);
#endif
    });
#pragma unroll 1
    for (int batch = 0; batch < batches; batch++, turned ^= 1) {
      const int first = batch * a.tiles_of_batch, count = min(a.tiles_of_batch, tiles - first);
      float* sums = partial + turned * a.tiles_of_batch * a.slices_of_pass * a.m * rows_of_tile;
#pragma unroll 1
      for (int tile = first + turn; tile < first + count; tile += a.turns) {
        float sum[4] = {};
        typename F::Row row = F::row(1u << (F::bits - 1)), row8 = row;
        if constexpr (F::takes_zero) {
          if (a.has_zero && a.zero_point) {
            const int64_t n = (first_tile + tile) * rows_of_tile + lane / 4;
            row = F::row(n < a.n ? a.zero_point[n] : 0);
            row8 = F::row(n + 8 < a.n ? a.zero_point[n + 8] : 0);
          }
        }
#pragma unroll
        for (int u = 0; u < units_of_slice; u++) {
          if (u >= units) break;
#if LOWBIT_BULK_COPIES
          wait(barriers + stage, parity);
          start_copies(1);  // where the unit before this one was
          const uint8_t* unit = ring + stage * a.unit.size;
#else
          const uint8_t* unit = bytes_of({pass, tile, u});
#endif
          products_of_unit<F, T, scales, run>(unit, a, constants, row, row8, x + u * (steps_of_slice * 4 / units_of_slice), sum);
#if LOWBIT_BULK_COPIES
          __syncwarp();
          if (++stage == a.stages) stage = 0, parity ^= 1;
#endif
        }
        float* to = sums + ((tile - first) * a.slices_of_pass + place) * a.m * rows_of_tile + lane / 4;
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int m = lane % 4 * 2 + i % 2;
          if (m < a.m) to[m * rows_of_tile + i / 2 * 8] = sum[i];
        }
      }
      __syncthreads();
      const int outputs = a.m * rows_of_tile;
      for (int i = threadIdx.x; i < count * outputs; i += blockDim.x) {
        const int tile = i / outputs, output = i % outputs;
        float sum = pass ? total[first * outputs + i] : 0;
        for (int s = 0; s < a.slices_of_pass; s++) sum += sums[(tile * a.slices_of_pass + s) * outputs + output];
        if (!is_last) {
          total[first * outputs + i] = sum;
          continue;
        }
        const int64_t n = (first_tile + first + tile) * rows_of_tile + output % rows_of_tile, to = output / rows_of_tile * a.n + n;
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
