// y = x W^T for many rows of x on Hopper's tensor cores, from the tiles layout.
//
// A block makes 128 rows of W times `columns` rows of x. One thread copies units of W into a ring in shared memory, another
// boxes of x into a second one; teams of eight warps, each warp with a tile of 16 rows, decode their lanes' codes into operand
// A of wgmma, in registers, and multiply by x where it lies. Several teams take the units of a row in turn.
//
// Exact: the tensor cores add up exact products of codes and x for the columns of a group, in fp32, and its scale multiplies
// that sum in fp32. Else: each weight is its number times its scale, rounded once to the type of x, before it is multiplied;
// where such products have few bits (codes of four bits and scales that are powers of two) nothing is rounded.
//
// The columns of W may be cut among the blocks of a cluster, whose sums meet in their shared memory, always in the same order.
// Weights never change, so their copies start before the kernel that writes x has ended.
#pragma once

#include "fragments.cuh"
#include "gemm_arguments.cuh"
#include "group_scales.cuh"
#include "numbers.cuh"
#include "tiles.cuh"
#include "warpgroups.cuh"
#include "wgmma.cuh"

namespace lowbit::cuda {

constexpr int rows_of_block = 128, tiles_of_block = rows_of_block / rows_of_tile, columns_of_box = 64;
constexpr int threads_of_team = 32 * tiles_of_block;

// How a block works: rows of x that it takes, columns of W whose products are under way together, teams of warps; the columns
// of a group (0: 16 to 128), and whether its scale multiplies the sums of their products, or else the operands.
template <int columns_, int batch_, int teams_, int group_, bool is_exact_, Scaling scaling_>
struct Shape {
  static constexpr int columns = columns_, batch = batch_, teams = teams_, group = group_;
  static constexpr bool is_exact = is_exact_;
  static constexpr Scaling scaling = scaling_;
  static constexpr int boxes_of_stage = columns <= 64 ? 2 : 1, box_bytes = columns * columns_of_box * 2;
  static constexpr int stage_columns = boxes_of_stage * columns_of_box, stage_bytes = boxes_of_stage * box_bytes;
  static constexpr int workers = teams * threads_of_team, threads = workers + 128;
  // At the end sums, or y, take the place of the rings.
  static constexpr int pitch = rows_of_block + 4, sums_bytes = columns * pitch * 4, y_pitch = rows_of_block + 8;
};

template <class S>
struct GemmMemory {
  int weights, table, barriers, total;  // x comes first
  __host__ __device__ GemmMemory(int unit_size, int weight_stages, int x_stages, int table_bytes) {
    weights = x_stages * S::stage_bytes;
    const int rings = weights + weight_stages * tiles_of_block * unit_size, sums = S::teams * S::sums_bytes;
    table = (rings > sums ? rings : sums) + 15 & ~15;
    barriers = table + table_bytes;
    total = barriers + 16 * (weight_stages + x_stages) + 1024;  // the first box lies on 1024 bytes
  }
};

template <class Codes, class = void>
constexpr int table_bytes_of = 0;
template <class Codes>
constexpr int table_bytes_of<Codes, std::enable_if_t<(Codes::table_size > 0)>> = Codes::table_size * sizeof(uint2);

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// The units of W and the columns of x that a block works on.
struct Share {
  int first, last;  // units of a row
  int64_t first_tile;
  int first_row_of_x;
};

struct Ring {
  uint64_t *full, *free;
  int stages, stage = 0, parity = 0;
  __device__ void advance(int by = 1) {
    stage += by;
    if (stage >= stages) stage -= stages, parity ^= 1;
  }
};

__device__ __forceinline__ void copy_weights(const Gemm& a, const Share& share, uint8_t* memory, Ring ring) {
  const int tiles = static_cast<int>(min(static_cast<int64_t>(tiles_of_block), a.tiles - share.first_tile)), size = a.unit.size;
  const uint64_t policy = gridDim.z == 1 ? read_once() : read_again();
  for (int u = share.first; u < share.last; u++, ring.advance()) {
    wait(ring.free + ring.stage, ring.parity ^ 1);
    expect(ring.full + ring.stage, tiles * size);
    for (int t = 0; t < tiles; t++)
      copy_expected(memory + (ring.stage * tiles_of_block + t) * size, a.units + ((share.first_tile + t) * a.units_of_row + u) * size,
                    size, ring.full + ring.stage, policy);
  }
}

template <class S>
__device__ __forceinline__ void copy_x(const Gemm& a, const Share& share, uint8_t* memory, Ring ring) {
  for (int c = share.first * a.unit.columns; c < share.last * a.unit.columns; c += S::stage_columns, ring.advance()) {
    wait(ring.free + ring.stage, ring.parity ^ 1);
    expect(ring.full + ring.stage, S::stage_bytes);
#pragma unroll
    for (int b = 0; b < S::boxes_of_stage; b++)
      copy_box(memory + ring.stage * S::stage_bytes + b * S::box_bytes, &a.x, c + b * columns_of_box, share.first_row_of_x,
               ring.full + ring.stage);
  }
}

// The sums of a lane: rows lane / 4 and that + 8 of its warp's tile, columns 8 i + 2 (lane % 4) and that + 1 of x.
// While the tensor cores multiply one batch of codes, the next one is decoded, and the sums of the one before are scaled.
template <class Codes, class T, class S>
__device__ __forceinline__ void multiply(const Gemm& a, const Share& share, uint8_t* memory, const uint8_t* units,
                                         const uint2* table, Ring weights, Ring x, float (&total)[S::columns / 2]) {
  constexpr int bits = Codes::bits, unit_columns = Unit<bits, 0, false>::columns, batch = S::batch, batches = unit_columns / batch;
  constexpr int halves = batch / 16, parts = S::is_exact ? Codes::parts : 1, stages_of_unit = unit_columns / S::stage_columns;
  constexpr bool has_rest = S::scaling == Scaling::plain;  // T may not hold the scales
  constexpr bool drains = S::is_exact || S::teams > 1;  // at the end of a unit no products are under way
  static_assert(batches % 2 == 0 && (batch % S::stage_columns == 0 || S::stage_columns % batch == 0));
  const int lane = threadIdx.x % 32, tile = threadIdx.x / 32 % tiles_of_block, team = threadIdx.x / threads_of_team;
  const auto constants = Codes::constants(a.is_signed, table);
  const uint32_t middle = a.is_signed ? 1u << (bits - 1) : 0;
  uint2 zeros = {middle, middle};
  if (a.zero_point) {
    const int64_t n = (share.first_tile + tile) * rows_of_tile + lane / 4;
    zeros = {n < a.n ? a.zero_point[n] : 0u, n + 8 < a.n ? a.zero_point[n + 8] : 0u};
  }
  const uint32_t boxes_of_x = operand_b(shared_address(memory));
  float sum[S::is_exact ? 2 : 1][S::columns / 2] = {};
  float2 scale[2] = {};
  uint32_t operand[2][halves][parts][4];
  weights.advance(team);
  x.advance(team * stages_of_unit);
  Ring read = x;  // what the products have read to its end
  const auto free_x = [&](int g) {
    if ((g + 1) * batch % S::stage_columns) return;
#pragma unroll
    for (int s = 0; s < (batch > S::stage_columns ? batch / S::stage_columns : 1); s++, read.advance())
      if (lane == 0) arrive(read.free + read.stage);
    if (g + 1 == batches) read.advance((S::teams - 1) * stages_of_unit);
  };
  const auto add = [&](int g) {
    if constexpr (S::is_exact) {
      hold_registers(sum[g % 2]);
#pragma unroll
      for (int i = 0; i < S::columns / 2; i++)
        total[i] = fmaf(i % 4 < 2 ? scale[g % 2].x : scale[g % 2].y, sum[g % 2][i], total[i]);
    }
  };
#pragma unroll 1
  for (int u = share.first + team; u < share.last; u += S::teams) {
    wait(weights.full + weights.stage, weights.parity);
    const uint8_t* unit = units + (weights.stage * tiles_of_block + tile) * a.unit.size;
    GroupScales<S::scaling> scales(unit, a.unit, a.scale_type, lane);
    float2 now = {1.0f, 1.0f};
    ScaleParts of_row, of_row8;
    Held<bits> held;
#pragma unroll
    for (int g = 0; g < batches; g++) {
#pragma unroll
      for (int i = 0; i < halves; i++) {
        const int half = g * halves + i, at = half * 16;
        const bool begins = S::group ? at % S::group == 0
                                     : at % 128 == 0 || (at % 64 == 0 && a.unit.group <= 64) ||
                                           (at % 32 == 0 && a.unit.group <= 32) || a.unit.group == 16;
        if (begins && a.unit.groups) {
          if (a.has_zero) zeros = scales.next_zeros();
          if constexpr (S::is_exact) {
            now = scales.next();
          } else if constexpr (has_rest) {
            const float2 two = scales.next();
            of_row = parts_of<T>(two.x), of_row8 = parts_of<T>(two.y);
          } else {
            const uint32_t two = scales.template next_exact<T>();
            of_row.high = __byte_perm(two, 0, 0x1010), of_row8.high = __byte_perm(two, 0, 0x3232);
          }
        }
        if (i == 0) scale[g % 2] = now;
        if (half % 2 == 0) hold<bits>(unit, lane, half / 2, held);
        uint32_t numbers[Codes::parts][4];
        Codes::fragment(constants, held, half / 2, half % 2, Codes::row(zeros.x), Codes::row(zeros.y), numbers);
        if (!S::is_exact && a.unit.groups) scale_operand<T, has_rest>(numbers, of_row, of_row8);
#pragma unroll
        for (int p = 0; p < parts; p++)
#pragma unroll
          for (int j = 0; j < 4; j++) operand[g % 2][i][p][j] = numbers[p][j];
      }
      if (g + 1 == batches) {  // the codes of this unit are in registers
        __syncwarp();
        if (lane == 0) arrive(weights.free + weights.stage);
        weights.advance(S::teams);
      }
      uint32_t b = 0;
#pragma unroll
      for (int i = 0; i < halves; i++) {
        const int at = (g * batch + i * 16) % S::stage_columns;
        if (at == 0) wait(x.full + x.stage, x.parity);
        if (at == 0 || i == 0) b = boxes_of_x + x.stage * (S::stage_bytes / 16);
        if (i == 0) fence_products();
#pragma unroll
        for (int p = 0; p < parts; p++)
          Product<S::columns, T>::add(S::is_exact ? sum[g % 2 * S::is_exact] : total, operand[g % 2][i][p],
                                      b + at / columns_of_box * (S::box_bytes / 16) + at % columns_of_box / 8,
                                      !S::is_exact || i > 0 || p > 0);
        if (at + 16 == S::stage_columns) x.advance();
      }
      if (g + 1 == batches) x.advance((S::teams - 1) * stages_of_unit);
      commit_products();
      if constexpr (drains) {
        if (g > 0) {
          wait_for_products<1>();
          free_x(g - 1);
          add(g - 1);
        }
      } else {
        wait_for_products<1>();
        if (g > 0 || u >= share.first + S::teams) free_x((g + batches - 1) % batches);
      }
    }
    if constexpr (drains) {
      wait_for_products<0>();
      free_x(batches - 1);
      add(batches - 1);
    }
  }
  wait_for_products<0>();
  hold_registers(total);
}

// What a row's sums are multiplied by at the end, and what is added to them.
template <class Codes, class T>
struct RowEnd {
  float scale = 1.0f, bias = 0.0f;
  __device__ RowEnd() {}
  __device__ RowEnd(const Gemm& a, int64_t n) {
    if (n >= a.n) return;
    if (!a.unit.groups) scale = scale_at(a.scale, a.scale_type, n);
    scale *= a.factor;
    if (a.outer) scale *= *a.outer;
    if constexpr (Codes::parts > 1) scale *= Codes::factor;
    if (a.bias) bias = to_float(static_cast<const T*>(a.bias)[n]);
  }
  __device__ float of(float sum) const { return fmaf(sum, scale, bias); }
};

// Eight neighbours of a row of y.
template <class T>
__device__ __forceinline__ void store(const Gemm& a, int m, int64_t n, const uint4& eight) {
  T* to = static_cast<T*>(a.y) + m * a.n + n;
  if (a.n % 8 == 0) {
    *reinterpret_cast<uint4*>(to) = eight;
  } else {
#pragma unroll
    for (int j = 0; j < 8; j++)
      if (n + j < a.n) to[j] = reinterpret_cast<const T*>(&eight)[j];
  }
}

// y where one team of one block has all of its sums.
template <class Codes, class T, class S>
__device__ __forceinline__ void write(const Gemm& a, const Share& share, uint8_t* memory, const float (&total)[S::columns / 2]) {
  const int lane = threadIdx.x % 32, tile = threadIdx.x / 32;
  const int64_t first_n = share.first_tile * rows_of_tile, n = first_n + tile * rows_of_tile + lane / 4;
  const RowEnd<Codes, T> end(a, n), end8(a, n + 8);
  const uint32_t to = shared_address(memory) + ((lane / 16 * 8 + lane % 8) * S::y_pitch + tile * rows_of_tile + lane / 8 % 2 * 8) * 2;
#pragma unroll
  for (int j = 0; j < S::columns / 8; j += 2) {
    uint32_t two[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float* s = total + 4 * j + 2 * i;
      const T low = from_float<T>((i % 2 ? end8 : end).of(s[0])), high = from_float<T>((i % 2 ? end8 : end).of(s[1]));
      two[i] = reinterpret_cast<const uint16_t&>(low) | reinterpret_cast<const uint16_t&>(high) << 16;
    }
    store_transposed(to + j * 8 * S::y_pitch * 2, two);
  }
  wait_for_threads<1, S::workers>();
  const int rows = min(S::columns, a.m - share.first_row_of_x);
  for (int i = threadIdx.x; i < rows * (rows_of_block / 8); i += S::workers) {
    const int m = i / (rows_of_block / 8), at = i % (rows_of_block / 8) * 8;
    if (first_n + at < a.n)
      store<T>(a, share.first_row_of_x + m, first_n + at, *reinterpret_cast<const uint4*>(memory + (m * S::y_pitch + at) * 2));
  }
}

// y from the sums of all teams of the cluster's blocks, added in that order. A thread makes eight neighbours of a row.
template <class Codes, class T, class S>
__device__ __forceinline__ void add_and_write(const Gemm& a, const Share& share, uint32_t sums) {
  const int parts = gridDim.x, rows = min(S::columns, a.m - share.first_row_of_x);
  const int at = threadIdx.x % (rows_of_block / 8) * 8;
  const int64_t n = share.first_tile * rows_of_tile + at;
  if (n >= a.n) return;
  RowEnd<Codes, T> ends[8];
#pragma unroll
  for (int j = 0; j < 8; j++) ends[j] = RowEnd<Codes, T>(a, n + j);
  for (int i = blockIdx.x * S::workers + threadIdx.x; i < rows * (rows_of_block / 8); i += parts * S::workers) {
    const int m = i / (rows_of_block / 8);
    float y[8] = {};
#pragma unroll 2
    for (int p = 0; p < parts * S::teams; p++) {
      const uint32_t from = sums + p % S::teams * S::sums_bytes + (m * S::pitch + at) * 4;
      const float4 low = floats_of_block(from, p / S::teams), high = floats_of_block(from + 16, p / S::teams);
      y[0] += low.x, y[1] += low.y, y[2] += low.z, y[3] += low.w;
      y[4] += high.x, y[5] += high.y, y[6] += high.z, y[7] += high.w;
    }
    uint4 eight;
#pragma unroll
    for (int j = 0; j < 8; j++) reinterpret_cast<T*>(&eight)[j] = from_float<T>(ends[j].of(y[j]));
    store<T>(a, share.first_row_of_x + m, n, eight);
  }
}
#endif

template <class Codes, class T, class S>
__global__ void __launch_bounds__(S::threads, 1) tiles_gemm(const __grid_constant__ Gemm a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t unaligned[];
  uint8_t* memory = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  const GemmMemory<S> at(a.unit.size, a.weight_stages, a.x_stages, table_bytes_of<Codes>);
  uint64_t* barriers = reinterpret_cast<uint64_t*>(memory + at.barriers);
  uint2* table = reinterpret_cast<uint2*>(memory + at.table);
  const Ring weights = {barriers, barriers + a.weight_stages, a.weight_stages};
  const Ring x = {barriers + 2 * a.weight_stages, barriers + 2 * a.weight_stages + a.x_stages, a.x_stages};
  const int parts = gridDim.x, part = blockIdx.x;
  const Share share = {a.units_of_row * part / parts, a.units_of_row * (part + 1) / parts,
                       static_cast<int64_t>(blockIdx.y) * tiles_of_block, static_cast<int>(blockIdx.z) * S::columns};
  if (threadIdx.x == 0) {
    for (int s = 0; s < weights.stages; s++) start_barrier(weights.full + s, 1), start_barrier(weights.free + s, tiles_of_block);
    for (int s = 0; s < x.stages; s++) start_barrier(x.full + s, 1), start_barrier(x.free + s, tiles_of_block);
    show_barriers_to_copies();
  }
  if constexpr (table_bytes_of<Codes> > 0) Codes::fill(table);
  __syncthreads();
  let_dependents_start();

  if (threadIdx.x >= S::workers) {
    give_registers_back<S::teams == 1 ? 40 : 32>();
    if (threadIdx.x == S::workers) {
      copy_weights(a, share, memory + at.weights, weights);
    } else if (threadIdx.x == S::workers + 32) {
      wait_for_predecessors();
      copy_x<S>(a, share, memory, x);
    }
  } else {
    take_registers<S::teams == 1 ? 232 : 112>();  // what the others gave, of 168 or 96 each
    float total[S::columns / 2] = {};
    multiply<Codes, T, S>(a, share, memory, memory + at.weights, table, weights, x, total);

    wait_for_threads<1, S::workers>();  // all that was copied has been read: the sums take its place
    if (parts == 1 && S::teams == 1) {
      wait_for_predecessors();  // whose reads of y must have ended before it is written
      write<Codes, T, S>(a, share, memory, total);
      return;
    }
    float* sums = reinterpret_cast<float*>(memory + threadIdx.x / threads_of_team * S::sums_bytes);
    const int lane = threadIdx.x % 32, n = threadIdx.x / 32 % tiles_of_block * rows_of_tile + lane / 4;
#pragma unroll
    for (int i = 0; i < S::columns / 2; i++)
      sums[(i / 4 * 8 + lane % 4 * 2 + i % 2) * S::pitch + n + i % 4 / 2 * 8] = total[i];
    wait_for_predecessors();
    wait_for_cluster();
    add_and_write<Codes, T, S>(a, share, shared_address(memory));
    wait_for_cluster();  // no block leaves while another reads its sums
  }
#endif
}

}  // namespace lowbit::cuda
