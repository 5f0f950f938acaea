// y = x W^T for many rows of x on Hopper's tensor cores, from the tiles layout.
//
// A block makes 128 rows of W times `columns` rows of x. One thread copies units of W into a ring in shared memory, another
// boxes of x into a second one; eight warps, each with a tile of 16 rows, decode their lanes' codes into operand A of wgmma, in
// registers, and multiply by x where it lies.
//
// Exact: the tensor cores add up exact products of codes and x for the columns of a group, in fp32, and its scale multiplies
// that sum in fp32. Else: each weight is its number times its scale, rounded once to the type of x, before it is multiplied;
// where such products have few bits (codes of four bits and scales that are powers of two) nothing is rounded.
//
// The columns of W may be cut among the blocks of a cluster, whose sums meet in their shared memory, always in the same order,
// and between two clusters, the last of which adds the sums of the first.
// Weights never change, so their copies start before the kernel that writes x has ended.
#pragma once

#include "fragments.cuh"
#include "gemm_again.cuh"
#include "gemm_arguments.cuh"
#include "gemm_copies.cuh"
#include "gemm_shape.cuh"
#include "gemm_sums.cuh"
#include "group_scales.cuh"
#include "numbers.cuh"
#include "tiles.cuh"
#include "warpgroups.cuh"
#include "wgmma.cuh"

namespace lowbit::cuda {

constexpr int copier_of_weights = tiles_of_block, copier_of_x = tiles_of_block + 1;  // warps
constexpr int begun = 2;  // a barrier of all threads: those in shared memory have been started

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// The sums of a lane: rows lane / 4 and that + 8 of its warp's tile, columns 8 i + 2 (lane % 4) and that + 1 of x.
// While the tensor cores multiply some batches of codes, the sums of those before are scaled, and the next ones are decoded.
template <class Codes, class T, class S>
__device__ __forceinline__ void multiply(const Gemm& a, const Share& share, uint8_t* memory, const uint8_t* units,
                                         uint8_t* table, Ring weights, Ring ring_of_x, uint64_t* x_came,
                                         float (&total)[S::columns / 2]) {
  constexpr int bits = Codes::bits, batch = S::batch, unit_columns = Unit<bits, 0, false>::columns;
  constexpr int piece_columns = columns_of_piece(S::columns, unit_columns), pieces = unit_columns / piece_columns;
  constexpr int batches = piece_columns / batch;
  constexpr int halves = batch / 16, steps = batch / 32, parts = S::is_exact ? Codes::parts : 1;
  constexpr int batches_of_group = S::is_exact ? S::group / batch : batches;
  constexpr bool has_zeros = Codes::takes_zero && (S::scaling == Scaling::plain || S::scaling == Scaling::own);
  constexpr bool has_groups = S::scaling != Scaling::row, has_rest = S::scaling == Scaling::plain;  // T may not hold the scales
  // As many batches as are ahead may have their products under way; those before `behind` of them have ended.
  constexpr int ahead = S::ahead, operands = 2 * ahead;
  constexpr int behind = S::is_exact && batches_of_group < ahead ? batches_of_group : ahead;
  constexpr int groups = batches / batches_of_group, kept_scales = groups < 4 ? groups : 4;
  static_assert(!S::is_exact || batches_of_group - 1 + behind + ahead <= kept_scales * batches_of_group);
  static_assert(batches % operands == 0 && (!S::is_exact || S::group % batch == 0));
  static_assert(batch % S::stage_columns == 0 || S::stage_columns % batch == 0);
  const int lane = threadIdx.x % 32, tile = threadIdx.x / 32;
  const auto constants = [&] {
    if constexpr (table_bytes_of<Codes> == 0) {
      return Codes::constants(a.is_signed, nullptr);
    } else {
      Codes::fill(table);
      wait_for_threads<1, workers_of_block>();
      return Codes::constants(a.is_signed, table);
    }
  }();
  const uint32_t middle = a.is_signed ? 1u << (bits - 1) : 0;
  uint2 zeros = {middle, middle};
  if (a.zero_point) {
    const int64_t n = (share.first_tile + tile) * rows_of_tile + lane / 4;
    zeros = {n < a.n ? a.zero_point[n] : 0u, n + 8 < a.n ? a.zero_point[n + 8] : 0u};
  }
  auto row = Codes::row(zeros.x), row8 = Codes::row(zeros.y);
  const uint32_t boxes_of_x = operand_b(shared_address(memory + place_of_x));
  float sum[2][S::is_exact ? S::columns / 2 : 1];
  float2 scale[4] = {};
  uint32_t operand[operands][halves][parts][4];
  Held<bits> held[steps];
  Runs<stages_of_run<Codes, S>, is_ring_a_run<Codes, S>> x(ring_of_x), free = x;  // free: what the products have read to its end
  const auto free_x = [&](int g) {
    if ((g + 1) * batch % S::stage_columns) return;
#pragma unroll
    for (int s = g * batch / S::stage_columns; s < (g + 1) * batch / S::stage_columns; s++) {
      if (lane == 0) arrive(free.free + free.at(s));
      free.pass(s);
    }
  };
  const auto add = [&](int g) {  // the sums of the group that ends with a batch
    if constexpr (S::is_exact) {
      const int group = g / batches_of_group;
      hold_registers(sum[group % 2]);
#pragma unroll
      for (int i = 0; i < S::columns / 2; i++)
        total[i] = fmaf(i % 4 < 2 ? scale[group % 4].x : scale[group % 4].y, sum[group % 2][i], total[i]);
    }
  };
  const auto sum_of = [&](int g) -> float (&)[S::columns / 2] {
    if constexpr (S::is_exact)
      return sum[g / batches_of_group % 2];
    else
      return total;
  };
  const uint8_t* unit = units;
  GroupScales<S::scaling> scales(unit, a.unit, a.scale_type, lane);
  bool is_last_of_unit = true;
  const auto go_to_piece = [&](int piece) {
    unit = units + (weights.stage * tiles_of_block + tile) * a.unit.pitch();
    scales = GroupScales<S::scaling>(unit, a.unit, a.scale_type, lane);
    if (pieces == 1) return;
    const int of_unit = piece % pieces;
    unit += of_unit * (piece_columns * bits * rows_of_tile / 8);
    scales.skip(of_unit * a.unit.groups / pieces);
    is_last_of_unit = of_unit + 1 == pieces;
  };
  const auto read = [&](int g) {  // the codes of a batch; blocks of words last for several
#pragma unroll
    for (int s = 0; s < steps; s++) {
      held[s] = held[s ? s - 1 : steps - 1];
      hold<bits>(unit, lane, g * steps + s, held[s]);
    }
  };
  uint32_t largest[2] = {}, largest_used[2];  // codes of each row, without their signs
  uint32_t largest_scale = 0, largest_scale_used = 0;
  float2 now = {1.0f, 1.0f};
  ScaleParts of_row, of_row8;
  const auto decode = [&](int g) {
#pragma unroll
    for (int i = 0; i < halves; i++) {
      const int half = g * halves + i;
      if (has_groups && half * 16 % S::group == 0) {
        if constexpr (has_zeros) {  // where there are none, what is read is something else: a choice, not a jump
          const uint2 read = scales.next_zeros();
          row = Codes::row(a.has_zero ? read.x : middle), row8 = Codes::row(a.has_zero ? read.y : middle);
        }
        if constexpr (S::is_exact) {
          now = scales.template next<T>();
        } else if constexpr (has_rest) {
          const float2 two = scales.template next<T>();
          of_row = parts_of<T>(two.x), of_row8 = parts_of<T>(two.y);
        } else if constexpr (folds_scales<Codes, S>) {
          constexpr int power = Codes::power - power_left<Codes, S>();
          const uint2 two = scales.template next_with_power<T, power>(largest_scale);
          row.factor = two.x, row8.factor = two.y;
        } else {
          const uint2 two = scales.template next_exact<T>();
          of_row.high = two.x, of_row8.high = two.y;
        }
      }
      if (i == 0 && g % batches_of_group == 0) scale[g / batches_of_group % 4] = now;
      uint32_t numbers[Codes::parts][4];
      if constexpr (has_nan_of<Codes>) {
        uint32_t seen[4];
        const auto see = [&](int j, uint32_t pair) { seen[j] = pair; };
        Codes::fragment(constants, held[i / 2], half / 2, half % 2, row, row8, numbers, see);
        largest[0] = __vimax3_u16x2(largest[0], seen[0], seen[2]);
        largest[1] = __vimax3_u16x2(largest[1], seen[1], seen[3]);
      } else {
        Codes::fragment(constants, held[i / 2], half / 2, half % 2, row, row8, numbers);
      }
      if constexpr (!S::is_exact && has_groups && !folds_scales<Codes, S>) scale_operand<T, has_rest>(numbers, of_row, of_row8);
#pragma unroll
      for (int p = 0; p < parts; p++)
#pragma unroll
        for (int j = 0; j < 4; j++) operand[g % operands][i][p][j] = numbers[p][j];
    }
    if (g + 1 == batches && is_last_of_unit) {  // all of this unit is in registers
      __syncwarp();
      if (lane == 0) arrive(weights.free + weights.stage);
      weights.advance();
    }
  };
  if (share.first < share.last) {
    wait(weights.full + weights.stage, weights.parity);
    go_to_piece(share.first);
#pragma unroll
    for (int g = 0; g < ahead; g++) {
      read(g);
      decode(g);
    }
    wait(x.full + x.at(0), x.parity);
    if (threadIdx.x == 0) arrive(x_came);
  }
  hold_registers(total);
#pragma unroll 1
  for (int u = share.first; u < share.last; u++) {
#pragma unroll
    for (int g = 0; g < batches; g++) {
      uint64_t b = 0;
#pragma unroll
      for (int i = 0; i < halves; i++) {
        const int stage = (g * batch + i * 16) / S::stage_columns, at = (g * batch + i * 16) % S::stage_columns;
        if (at == 0) wait(x.full + x.at(stage), x.parity);
        if (at == 0 || i == 0) b = description(boxes_of_x) + x.at(stage) * (S::stage_bytes / 16);
        if (i == 0) {
          fence_products();
          if (g + ahead < batches) read(g + ahead);
        }
#pragma unroll
        for (int p = 0; p < parts; p++)
          Product<S::columns, T>::add(sum_of(g), operand[g % operands][i][p],
                                      b + at / columns_of_box * (S::box_bytes / 16) + at % columns_of_box / 8,
                                      !S::is_exact || i > 0 || p > 0 || g % batches_of_group > 0);
        if (at + 16 == S::stage_columns) x.pass(stage);
      }
      commit_products();
      if (g + ahead == batches) {
        if (u + 1 < share.last && (u + 1) % pieces == 0) wait(weights.full + weights.stage, weights.parity);
        go_to_piece(u + 1);  // behind the last one there is no other: what is decoded then is not used
        largest_used[0] = largest[0], largest_used[1] = largest[1], largest_scale_used = largest_scale;
      }
      if (g + ahead >= batches) read(g + ahead - batches);
      wait_for_products<behind>();
      if (g >= ahead || (!S::is_exact && u > share.first)) free_x((g + batches - ahead) % batches);
      if (g >= behind && (g - behind + 1) % batches_of_group == 0) add(g - behind);
      decode((g + ahead) % batches);
    }
    if constexpr (S::is_exact) {  // at the end of a piece no products are under way
      wait_for_products<0>();
#pragma unroll
      for (int g = batches - ahead; g < batches; g++) {
        free_x(g);
        if (g >= batches - behind && (g + 1) % batches_of_group == 0) add(g);
      }
    }
  }
  wait_for_products<0>();
  hold_registers(total);
  if constexpr (folds_scales<Codes, S> && S::scaling == Scaling::e8m0) {
    const bool is_here = share.first_tile + tile < a.tiles;
    if (__any_sync(~0u, is_here && largest_scale_used > Codes::most_e8m0))
      multiply_again<Codes, T, S>(a, share.first * piece_columns, share.last * piece_columns, share.first_tile + tile,
                                  share.first_row_of_x, constants, total);
  }
  if constexpr (has_nan_of<Codes>) {
    if (share.first == share.last) return;
    const auto is_nan = [&](uint32_t two) {
      const bool here = two >> 16 == Codes::magnitude >> 16 || (two & 0xffff) == (Codes::magnitude & 0xffff);
      return (__ballot_sync(~0u, here) >> lane / 4 * 4 & 15) != 0;  // in any of the lanes that share the row
    };
    const bool row_is = is_nan(largest_used[0]), row8_is = is_nan(largest_used[1]);
#pragma unroll
    for (int i = 0; i < S::columns / 2; i++)
      if (i % 4 < 2 ? row_is : row8_is) total[i] = __uint_as_float(0x7fc00000u);
  }
}
#endif

template <class Codes, class T, class S>
__global__ void __launch_bounds__(S::threads, 1) tiles_gemm(const __grid_constant__ Gemm a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t memory[];
  uint64_t* barriers = reinterpret_cast<uint64_t*>(memory);
  const Ring weights(barriers, a.weight_stages), x(barriers + 2 * most_stages, a.x_stages);
  const Arrivals arrivals(barriers + 4 * most_stages);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp >= copier_of_weights) {
    if (lane == 0) {
      if (warp == copier_of_weights) weights.start();
      if (warp == copier_of_x) prefetch_description(a.m < S::columns ? &a.last_of_x : &a.x), x.start();
      if (warp == copier_of_x + 1) arrivals.start(a.blocks);
      show_barriers_to_copies();
    }
    __syncwarp();
    if (warp > copier_of_x)
      synchronize(begun, S::threads);
    else
      arrive(begun, S::threads);
  }
  const Part part = part_of(a);
  const auto cut = [&](int parts) { return static_cast<int>(a.by_blocks.divide(a.pieces_of_row * parts) >> (part.clusters - 1)); };
  const int mine = part.cluster * a.blocks + part.block;
  const Share share = {cut(mine), cut(mine + 1), static_cast<int64_t>(part.rows) * tiles_of_block, part.rows_of_x * S::columns};
  Weights<S, Unit<Codes::bits, 0, false>::columns> units(a, share);
  float2* ends = reinterpret_cast<float2*>(memory + a.at.ends);
  if (warp >= copier_of_weights) {
    if (a.blocks > 1) announce_to_cluster();
    let_dependents_start();
    give_registers_back<40>();
    if (warp == copier_of_weights) {
      if (lane == 0) units.copy(a, memory + a.at.weights, weights, arrivals.x);
    } else if (warp == copier_of_x) {
      if (lane == 0) {
        wait_for_predecessors();
        copy_x<S>(a, share, memory + place_of_x, x);
      }
    } else {
      constexpr int threads = 64;
      constexpr float factor = 1 << power_left<Codes, S>();
      const int thread = threadIdx.x - (copier_of_x + 1) * 32;
      if (blockIdx.x < a.early)
        prefetch_weights<S, Unit<Codes::bits, 0, false>::columns>(a, a.blocks * part.clusters, thread, threads);
      for (int row = thread; row < rows_of_block; row += threads)
        ends[row] = end_of<Codes, T>(a, share.first_tile * rows_of_tile + row, factor);
      arrive(arrivals.ends);
    }
  } else {
    synchronize(begun, S::threads);
    if (lane == 0) units.copy_first(a, memory + a.at.weights, weights, warp);
    __syncwarp();
    if (a.blocks > 1) announce_to_cluster();
    let_dependents_start();
    take_registers<232>();  // what the others gave, of 168 each
    float total[S::columns / 2] = {};
    multiply<Codes, T, S>(a, share, memory, memory + a.at.weights, memory + a.at.table, weights, x, arrivals.x, total);
    wait(arrivals.ends, 0);
    meet_and_write<T, S::columns>(a, arrivals, ends, memory + a.at.sums, total);
  }
#endif
}

}  // namespace lowbit::cuda
