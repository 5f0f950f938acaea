// Launches split_int8_gemv: number of blocks, warps and stages, and how much of x a warp holds at a time.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>

#include "../kernels/split_int8_gemv.cuh"
#include "../mma/split_int8_mma_subbyte.cuh"
#include "device_info.h"

namespace lowbit::cuda {

// 0: chosen by the launcher. early -1: nothing starts before the predecessor has ended.
struct SplitInt8Plan {
  int column_warps, tile_warps, stages, max_in_flight, early;
  int pairs;         // two blocks on a multiprocessor: 1 yes, -1 no
  int units_per_run;  // 1, 2 or 4
};

// m: 1 or 2 rows of x; group: a multiple of 32 up to 128, or 0 where the whole row is one.
template <int bits>
cudaError_t launch_split_int8(SplitInt8Args a, int m, int group, SplitInt8Plan plan, cudaStream_t stream);

// e2m1 and one row of x: groups of 16 with e4m3 and of 32 with e8m0 (a.scale_size 1), otherwise as above.
cudaError_t launch_split_int8_e2m1(SplitInt8Args a, int m, int group, SplitInt8Plan plan, cudaStream_t stream);
// Signed 8-bit integers, groups of 32 with e8m0.
cudaError_t launch_split_int8_mxint8(SplitInt8Args a, int m, int group, SplitInt8Plan plan, cudaStream_t stream);

// Warps that split the units of a row evenly: of `maximum` down to three quarters of it, the number that idles least.
inline int column_warps_for(int units, int maximum) {
  if (units <= maximum) return std::max(units, 1);
  int best = maximum;
  const auto waste = [&](int warps) { return (units + warps - 1) / warps * warps - units; };
  for (int warps = best; warps >= maximum * 3 / 4; warps--)
    if (waste(warps) < waste(best)) best = warps;
  return best;
}

template <class W, int M>
cudaError_t launch_split_int8_kernel(SplitInt8Args a, SplitInt8Plan plan, cudaStream_t stream) {
  constexpr int slice_size = W::columns / 64 * W::template Order<M>::size_of_pair;
  const auto kernel = split_int8_gemv<W, M>;
  int index = 0;
  Gpu device = {};
  if (const cudaError_t error = this_gpu(index, device); error != cudaSuccess) return error;
  static std::atomic<bool> may_use_all[64];
  if (index >= 64 || !may_use_all[index]) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, device.memory);
    if (error != cudaSuccess) return error;
    if (index < 64) may_use_all[index] = true;
  }

  // Only code for sm_90 has bulk copies and PDL; newer devices run that for sm_80.
  const bool has_ring = device.generation == 90;

  // In a CUDA graph a kernel may start while its predecessor ends (PDL). Elsewhere launching takes longer than that hides, and
  // the weights may have been written by the kernel just before.
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (const cudaError_t error = cudaStreamIsCapturing(stream, &capture); error != cudaSuccess) return error;
  const bool is_early = has_ring && capture == cudaStreamCaptureStatusActive && plan.early >= 0;

  const int64_t blocks = std::min(a.tiles, std::max<int64_t>(device.sms, (a.tiles + 31) / 32));
  a.min_tiles = static_cast<int>(a.tiles / blocks);
  a.extra_blocks = static_cast<int>(a.tiles % blocks);
  const int max_tiles = a.min_tiles + (a.extra_blocks > 0);
  // Two blocks on a multiprocessor where half of its memory holds everything that a block copies: the next kernel's copies run
  // while this one multiplies. Only with the same number of column warps, so that sums do not depend on the mode.
  const int64_t size = int64_t{max_tiles} * a.units_per_row * a.unit_size;
  const bool is_small = is_early && size <= 80 << 10 && a.units_per_row <= max_split_int8_warps / 2;
  const bool is_paired = plan.pairs > 0 || (plan.pairs == 0 && is_small);
  const int max_warps = is_paired ? max_split_int8_warps / 2 : max_split_int8_warps;
  const int memory = is_paired ? (device.memory + 1024) / 2 - 1024 : device.memory;  // each block has 1 KB reserved
  a.column_warps =
      plan.column_warps ? std::min(plan.column_warps, std::max(a.units_per_row, 1)) : column_warps_for(a.units_per_row, max_warps);
  a.tile_warps = std::max(1, std::min(plan.tile_warps ? plan.tile_warps : max_warps / a.column_warps, max_tiles));
  while (a.column_warps * a.tile_warps > max_split_int8_warps) a.tile_warps--;
  const auto warps = [&] { return a.column_warps * a.tile_warps; };
  const auto memory_with = [&](int stages, int units) {
    const int slices = warps() * units;
    SplitInt8Memory at = {};
    at.limbs = (stages << a.run_log2) * a.unit_size;
    at.factors = at.limbs + slices * slice_size;
    at.shares = at.factors + slices * 64;
    at.partial = at.shares + (W::has_shares ? slices * W::grains * 32 : 0);
    at.of_row = at.partial + max_tiles * a.column_warps * M * tile_rows * 4;
    at.barriers = at.of_row + max_tiles * tile_rows * 8;
    at.total = (at.barriers + 2 * stages * 8 + 15) / 16 * 16;
    return at;
  };
  const int units = std::max(1, max_tiles * a.units_per_row);
  const auto runs = [&] { return (units - 1 >> a.run_log2) + 1; };
  // Most copies that a warp may be ahead by: the stage it waits for must not be one that may still be in flight for the previous
  // round, since the barrier's parity could not tell them apart.
  const auto lookahead = [&] {
    const int columns = a.column_warps, step = (a.tile_warps - 1) * a.units_per_row + columns + a.units_per_row % columns;
    return (step - 1 >> a.run_log2) + 1;
  };
  const auto min_stages = [&] { return !has_ring ? 0 : std::min(runs(), lookahead() + 1); };
  // One thread issues all copies, so each should have 8 KB or more; a block with few of them gains more from starting early.
  a.run_log2 = plan.units_per_run ? plan.units_per_run / 2 : is_paired ? 1 : 2;
  a.units_per_pass = std::max(1, (a.units_per_row + a.column_warps - 1) / a.column_warps);
  while (memory_with(min_stages() + 1, a.units_per_pass).total > memory && (a.units_per_pass > 1 || a.column_warps > 1)) {
    a.tile_warps = 1;  // all warps go through the passes together
    if (a.units_per_pass > 1)
      a.units_per_pass = (a.units_per_pass + 1) / 2;
    else
      a.column_warps = (a.column_warps + 1) / 2;
    // The units of a pass are contiguous only within a tile.
    while ((a.units_per_row | a.units_per_pass * a.column_warps) % (1 << a.run_log2)) a.run_log2--;
  }
  const int usual = 64 >> a.run_log2;
  a.stages = !has_ring ? 0 : std::min(std::max(plan.stages ? plan.stages : usual, min_stages()), runs());
  while (a.stages > min_stages() && memory_with(a.stages, a.units_per_pass).total > memory) a.stages--;
  a.at = memory_with(a.stages, a.units_per_pass);
  // Enough bytes in flight to keep memory busy; more would delay the loads of x, which matters less the longer the copies take,
  // and more where the products dominate.
  constexpr int maximum = (W::bits == 8 ? 104 : W::bits > 4 ? 72 : W::bits == 4 ? 54 : 40) << 10;
  const int run = a.unit_size << a.run_log2;
  const int64_t enough = std::clamp<int64_t>(int64_t{units} * a.unit_size / 4, 36 << 10, maximum);
  const int room = a.stages < runs() ? a.stages - lookahead() : a.stages;
  a.max_in_flight = std::min(room, plan.max_in_flight ? plan.max_in_flight : std::max(2, static_cast<int>(enough / run)));
  a.is_early = is_early;

  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3((warps() + has_ring) * 32);
  config.dynamicSmemBytes = a.at.total;
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = is_early;
  return cudaLaunchKernelEx(&config, kernel, a);
}

template <int bits>
cudaError_t launch_split_int8(SplitInt8Args a, int m, int group, SplitInt8Plan plan, cudaStream_t stream) {
  const auto with = [&](auto grain, auto zero) {
    using TwoRows = IntegerWeights<bits, grain.value, zero.value>;  // two rows of x fill operand B
    using OneRow = std::conditional_t<bits == 8, TwoRows, FieldWeights<bits, grain.value, zero.value>>;
    return m == 1 ? launch_split_int8_kernel<OneRow, 1>(a, plan, stream) : launch_split_int8_kernel<TwoRows, 2>(a, plan, stream);
  };
  const auto with_zero = [&](auto zero) {
    switch (group) {
      case 32: return with(std::integral_constant<int, 1>(), zero);
      case 64: return with(std::integral_constant<int, 2>(), zero);
      default: return with(std::integral_constant<int, 4>(), zero);
    }
  };
  return a.has_zero ? with_zero(std::true_type()) : with_zero(std::false_type());
}

}  // namespace lowbit::cuda
