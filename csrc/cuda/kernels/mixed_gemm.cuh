// GEMM of 16-bit x and low-bit weights on Hopper's tensor cores (wgmma), from the layout mma_fragment.
//
//    units of W (global) --bulk copies--> ring in shared memory --decode in registers--> operand A, 128 rows --+
//    x [M, K] (global) --TMA boxes, 128B swizzle--> ring in shared memory ------------------> operand B -------+--wgmma--> f32
//                                                                                                                          |
//    y [M, N] <--bias, round-- splitk_reduce.cuh (cluster, two clusters) <-- total [columns, 128] <--* scale (exact) <-----+
//
// A block computes 128 rows of W times `columns` rows of x. Producer warps fill the rings (mixed_gemm_producers.cuh); eight
// consumer warps, each with a tile of 16 rows, decode batches of codes while the tensor cores multiply the batch before. K is
// split among the blocks of a cluster, and between two clusters where that fills the device (tile_scheduler.cu); sums are added
// in a fixed order. Weights are constant, so their copies start before the kernel that writes x has ended (PDL).
//
// Contract: exact: the tensor cores add exact products of codes and x over a group, in fp32, and the group's scale multiplies
// that sum in fp32. Or weights rounded once: value times scale is rounded to the type of x before it is multiplied; with few bits
// (4-bit codes and power-of-two scales) nothing is rounded.
// Limit: the bytes of W up to M = 64; from M = 256 on the dense 16-bit tensor throughput.
// Reached (evals/results/gemv_h100.json, 8192 x 8192, bfloat16, one H100): int4 15.4 us at M = 16, 0.73 of the time to read its
// bytes and 3.1 times as fast as F.linear; 19.4 us at M = 64, 2.5 times; 756 us at M = 4096, 727 TFLOP/s, 0.97 times F.linear.
#pragma once

#include "../decode/weight_decoders.cuh"
#include "../epilogue/scale_overflow_fallback.cuh"
#include "../schedule/mixed_gemm_args.cuh"
#include "../pipeline/mixed_gemm_producers.cuh"
#include "../schedule/mixed_gemm_shape.cuh"
#include "../epilogue/splitk_reduce.cuh"
#include "../decode/group_scales.cuh"
#include "../decode/scalar_types.cuh"
#include "../decode/mma_fragment_layout.cuh"
#include "../ptx/sm90_ptx.cuh"
#include "../mma/wgmma_f16.cuh"

namespace lowbit::cuda {

constexpr int weight_warp = tiles_per_block, x_warp = tiles_per_block + 1;  // warps
constexpr int barriers_ready_barrier = 2;  // named barrier 2: the mbarriers in shared memory have been initialized

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Fills `total`, a lane's sums: rows lane / 4 and lane / 4 + 8 of its warp's tile, columns 8 i + 2 (lane % 4) and one more of x.
// While the tensor cores multiply some batches of codes, the sums of earlier batches are scaled and the next batches are decoded.
template <class Codes, class T, class S>
__device__ __forceinline__ void multiply(const MixedGemm& a, const BlockShare& share, uint8_t* memory, const uint8_t* units,
                                         uint8_t* table, Ring weights, Ring ring_of_x, uint64_t* x_arrived_bar,
                                         float (&total)[S::columns / 2]) {
  constexpr int bits = Codes::bits, batch = S::batch, unit_columns = Unit<bits, 0, false>::columns;
  constexpr int piece_columns = k_per_piece(S::columns, unit_columns), pieces = unit_columns / piece_columns;
  constexpr int batches = piece_columns / batch;
  constexpr int halves = batch / 16, steps = batch / 32, parts = S::is_exact ? Codes::parts : 1;
  constexpr int batches_per_group = S::is_exact ? S::group / batch : batches;
  constexpr bool has_zeros = Codes::supports_zero && (S::scaling == Scaling::plain || S::scaling == Scaling::local);
  // has_rest: T cannot hold the scales exactly
  constexpr bool has_groups = S::scaling != Scaling::row, has_rest = S::scaling == Scaling::plain;
  // Up to `lookahead` batches may have products in flight; those `lag` batches back have finished.
  constexpr int lookahead = S::lookahead, operands = 2 * lookahead;
  constexpr int lag = S::is_exact && batches_per_group < lookahead ? batches_per_group : lookahead;
  constexpr int groups = batches / batches_per_group, kept_scales = groups < 4 ? groups : 4;
  static_assert(!S::is_exact || batches_per_group - 1 + lag + lookahead <= kept_scales * batches_per_group);
  static_assert(batches % operands == 0 && (!S::is_exact || S::group % batch == 0));
  static_assert(batch % S::stage_columns == 0 || S::stage_columns % batch == 0);
  const int lane = threadIdx.x % 32, tile = threadIdx.x / 32;
  const auto constants = [&] {
    if constexpr (table_bytes_of<Codes> == 0) {
      return Codes::constants(a.is_signed, nullptr);
    } else {
      Codes::fill(table);
      bar_sync<1, mma_threads>();
      return Codes::constants(a.is_signed, table);
    }
  }();
  const uint32_t middle = a.is_signed ? 1u << (bits - 1) : 0;
  uint2 zeros = {middle, middle};
  if (a.zero_point) {
    const int64_t n = (share.first_tile + tile) * tile_rows + lane / 4;
    zeros = {n < a.n ? a.zero_point[n] : 0u, n + 8 < a.n ? a.zero_point[n + 8] : 0u};
  }
  auto row = Codes::row(zeros.x), row8 = Codes::row(zeros.y);
  const uint32_t boxes_of_x = smem_descriptor_low(shared_address(memory + x_offset));
  float sum[2][S::is_exact ? S::columns / 2 : 1];
  float2 scale[4] = {};
  uint32_t operand[operands][halves][parts][4];
  HeldCodes<bits> held[steps];
  Runs<stages_per_run<Codes, S>, is_ring_a_run<Codes, S>> x(ring_of_x), free = x;  // free: stages whose products have finished
  const auto free_x = [&](int g) {
    if ((g + 1) * batch % S::stage_columns) return;
#pragma unroll
    for (int s = g * batch / S::stage_columns; s < (g + 1) * batch / S::stage_columns; s++) {
      if (lane == 0) arrive(free.free + free.at(s));
      free.pass(s);
    }
  };
  const auto add = [&](int g) {  // adds the sums of the group that ends with batch g
    if constexpr (S::is_exact) {
      const int group = g / batches_per_group;
      pin_registers(sum[group % 2]);
#pragma unroll
      for (int i = 0; i < S::columns / 2; i++)
        total[i] = fmaf(i % 4 < 2 ? scale[group % 4].x : scale[group % 4].y, sum[group % 2][i], total[i]);
    }
  };
  const auto sum_of = [&](int g) -> float (&)[S::columns / 2] {
    if constexpr (S::is_exact)
      return sum[g / batches_per_group % 2];
    else
      return total;
  };
  const uint8_t* unit = units;
  GroupScales<S::scaling> scales(unit, a.unit, a.scale_type, lane);
  bool is_last_of_unit = true;
  const auto go_to_piece = [&](int piece) {
    unit = units + (weights.stage * tiles_per_block + tile) * a.unit.pitch();
    scales = GroupScales<S::scaling>(unit, a.unit, a.scale_type, lane);
    if (pieces == 1) return;
    const int of_unit = piece % pieces;
    unit += of_unit * (piece_columns * bits * tile_rows / 8);
    scales.skip(of_unit * a.unit.groups / pieces);
    is_last_of_unit = of_unit + 1 == pieces;
  };
  const auto read = [&](int g) {  // loads the codes of batch g; a block of words serves several batches
#pragma unroll
    for (int s = 0; s < steps; s++) {
      held[s] = held[s ? s - 1 : steps - 1];
      load_codes<bits>(unit, lane, g * steps + s, held[s]);
    }
  };
  uint32_t largest[2] = {}, largest_used[2];  // [2 rows]: largest code without its sign, to find NaN
  uint32_t largest_scale = 0, largest_scale_used = 0;
  float2 now = {1.0f, 1.0f};
  ScaleParts of_row, of_row8;
  const auto decode = [&](int g) {
#pragma unroll
    for (int i = 0; i < halves; i++) {
      const int half = g * halves + i;
      if (has_groups && half * 16 % S::group == 0) {
        if constexpr (has_zeros) {  // branch-free: without zero points the loaded value is ignored
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
      if (i == 0 && g % batches_per_group == 0) scale[g / batches_per_group % 4] = now;
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
    if (g + 1 == batches && is_last_of_unit) {  // all of this unit is in registers: its stage is free
      __syncwarp();
      if (lane == 0) arrive(weights.free + weights.stage);
      weights.advance();
    }
  };
  if (share.first < share.last) {
    mbarrier_wait(weights.full + weights.stage, weights.parity);
    go_to_piece(share.first);
#pragma unroll
    for (int g = 0; g < lookahead; g++) {
      read(g);
      decode(g);
    }
    mbarrier_wait(x.full + x.at(0), x.parity);
    if (threadIdx.x == 0) arrive(x_arrived_bar);
  }
  pin_registers(total);
#pragma unroll 1
  for (int u = share.first; u < share.last; u++) {
#pragma unroll
    for (int g = 0; g < batches; g++) {
      uint64_t b = 0;
#pragma unroll
      for (int i = 0; i < halves; i++) {
        const int stage = (g * batch + i * 16) / S::stage_columns, at = (g * batch + i * 16) % S::stage_columns;
        if (at == 0) mbarrier_wait(x.full + x.at(stage), x.parity);
        if (at == 0 || i == 0) b = smem_descriptor(boxes_of_x) + x.at(stage) * (S::stage_bytes / 16);
        if (i == 0) {
          wgmma_fence();
          if (g + lookahead < batches) read(g + lookahead);
        }
#pragma unroll
        for (int p = 0; p < parts; p++)
          Wgmma<S::columns, T>::add(sum_of(g), operand[g % operands][i][p],
                                      b + at / box_k * (S::box_bytes / 16) + at % box_k / 8,
                                      !S::is_exact || i > 0 || p > 0 || g % batches_per_group > 0);
        if (at + 16 == S::stage_columns) x.pass(stage);
      }
      wgmma_commit();
      if (g + lookahead == batches) {
        if (u + 1 < share.last && (u + 1) % pieces == 0) mbarrier_wait(weights.full + weights.stage, weights.parity);
        go_to_piece(u + 1);  // after the last piece nothing follows, and what is decoded here is not used
        largest_used[0] = largest[0], largest_used[1] = largest[1], largest_scale_used = largest_scale;
      }
      if (g + lookahead >= batches) read(g + lookahead - batches);
      wgmma_wait<lag>();
      if (g >= lookahead || (!S::is_exact && u > share.first)) free_x((g + batches - lookahead) % batches);
      if (g >= lag && (g - lag + 1) % batches_per_group == 0) add(g - lag);
      decode((g + lookahead) % batches);
    }
    if constexpr (S::is_exact) {  // no products are in flight between two pieces
      wgmma_wait<0>();
#pragma unroll
      for (int g = batches - lookahead; g < batches; g++) {
        free_x(g);
        if (g >= batches - lag && (g + 1) % batches_per_group == 0) add(g);
      }
    }
  }
  wgmma_wait<0>();
  pin_registers(total);
  if constexpr (folds_scales<Codes, S> && S::scaling == Scaling::e8m0) {
    const bool is_here = share.first_tile + tile < a.tiles;
    if (__any_sync(~0u, is_here && largest_scale_used > Codes::max_e8m0))
      multiply_with_overflow<Codes, T, S>(a, share.first * piece_columns, share.last * piece_columns, share.first_tile + tile,
                                  share.first_row_of_x, constants, total);
  }
  if constexpr (has_nan_of<Codes>) {
    if (share.first == share.last) return;
    const auto is_nan = [&](uint32_t two) {
      const bool launch_tag = two >> 16 == Codes::magnitude >> 16 || (two & 0xffff) == (Codes::magnitude & 0xffff);
      return (__ballot_sync(~0u, launch_tag) >> lane / 4 * 4 & 15) != 0;  // in any of the four lanes that share the row
    };
    const bool row_is = is_nan(largest_used[0]), row8_is = is_nan(largest_used[1]);
#pragma unroll
    for (int i = 0; i < S::columns / 2; i++)
      if (i % 4 < 2 ? row_is : row8_is) total[i] = __uint_as_float(0x7fc00000u);
  }
}
#endif

template <class Codes, class T, class S>
__global__ void __launch_bounds__(S::threads, 1) mixed_gemm_kernel(const __grid_constant__ MixedGemm a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t memory[];
  uint64_t* barriers = reinterpret_cast<uint64_t*>(memory);
  const Ring weights(barriers, a.weight_stages), x(barriers + 2 * max_stages, a.x_stages);
  const EpilogueBarriers arrivals(barriers + 4 * max_stages);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp >= weight_warp) {
    if (lane == 0) {
      if (warp == weight_warp) weights.start();
      if (warp == x_warp) prefetch_tensormap(a.m < S::columns ? &a.last_of_x : &a.x), x.start();
      if (warp == x_warp + 1) arrivals.start(a.blocks);
      fence_barrier_init();
    }
    __syncwarp();
    if (warp > x_warp)
      named_barrier_sync(barriers_ready_barrier, S::threads);
    else
      arrive(barriers_ready_barrier, S::threads);
  }
  const BlockPart part = block_part(a);
  const auto cut = [&](int parts) { return static_cast<int>(a.by_blocks.divide(a.pieces_per_row * parts) >> (part.clusters - 1)); };
  const int self = part.cluster * a.blocks + part.block;
  const BlockShare share = {cut(self), cut(self + 1), static_cast<int64_t>(part.rows) * tiles_per_block, part.rows_of_x * S::columns};
  Weights<S, Unit<Codes::bits, 0, false>::columns> units(a, share);
  float2* row_epilogues = reinterpret_cast<float2*>(memory + a.at.row_epilogues);
  if (warp >= weight_warp) {
    if (a.blocks > 1) cluster_arrive_relaxed();
    launch_dependents();
    setmaxnreg_dec<40>();
    if (warp == weight_warp) {
      if (lane == 0) units.copy(a, memory + a.at.weights, weights, arrivals.x);
    } else if (warp == x_warp) {
      if (lane == 0) {
        wait_for_dependencies();
        copy_x<S>(a, share, memory + x_offset, x);
      }
    } else {
      constexpr int threads = 64;
      constexpr float factor = 1 << power_left<Codes, S>();
      const int thread = threadIdx.x - (x_warp + 1) * 32;
      if (blockIdx.x < a.early)
        prefetch_weights<S, Unit<Codes::bits, 0, false>::columns>(a, a.blocks * part.clusters, thread, threads);
      for (int row = thread; row < block_rows; row += threads)
        row_epilogues[row] = row_epilogue<Codes, T>(a, share.first_tile * tile_rows + row, factor);
      arrive(arrivals.row_epilogues);
    }
  } else {
    named_barrier_sync(barriers_ready_barrier, S::threads);
    if (lane == 0) units.copy_first(a, memory + a.at.weights, weights, warp);
    __syncwarp();
    if (a.blocks > 1) cluster_arrive_relaxed();
    launch_dependents();
    setmaxnreg_inc<232>();  // the producers gave up registers; all start with 168
    float total[S::columns / 2] = {};
    multiply<Codes, T, S>(a, share, memory, memory + a.at.weights, memory + a.at.table, weights, x, arrivals.x, total);
    mbarrier_wait(arrivals.row_epilogues, 0);
    reduce_and_write<T, S::columns>(a, arrivals, row_epilogues, memory + a.at.sums, total);
  }
#endif
}

}  // namespace lowbit::cuda
