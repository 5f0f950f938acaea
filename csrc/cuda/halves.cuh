// y = x W^T for up to sixteen rows of x on the 16-bit tensor cores, from the tiles layout, in every format of fragments.cuh.
//
// Weights are operand A of mma.m16n8k16 and eight rows of x its columns, so one row costs what eight do, and eight more one
// product for each operand. A warp keeps a slice of 512 columns of x in its registers, in the order of operand B, and takes
// that slice of one tile after the other: the codes are all that it reads. The blocks of a cluster have the same tiles and
// share out the slices, so that each loads a part of x alone. Where a block has more slices than warps, it works in passes
// over them. Numbers are exact, the products of a group are summed in fp32, its scale multiplies the sum in fp32, and the
// slices' sums, then the blocks', are added in a fixed order, then come bias and the one rounding.
//
// Each warp's units come through a ring of its own in shared memory. Weights never change, so their copies start before the
// kernel that writes x has ended.
#pragma once

#include <type_traits>

#include "clusters.cuh"
#include "halves_of_x.cuh"
#include "halves_products.cuh"

namespace lowbit::cuda {

// `octets`: eight rows of x, and as many again.
template <class F, class T, Scales scales, int run, int octets>
__global__ void __launch_bounds__(most_warps_of_halves * 32, 1) halves_linear(const __grid_constant__ Halves a) {
  using P = Piece<F, octets>;
  constexpr int outputs = outputs_of_tile(octets);
  extern __shared__ __align__(128) uint8_t memory[];
  const int lane = threadIdx.x, place = threadIdx.y, turn = threadIdx.z, warp = turn * a.slices_of_pass + place;
  const int thread = warp * 32 + lane, threads = a.slices_of_pass * a.turns * 32;
  float *partial = reinterpret_cast<float*>(memory + a.at.partial), *total = reinterpret_cast<float*>(memory + a.at.total);
  float* shares = reinterpret_cast<float*>(memory + a.at.shares);  // [block of the cluster][tile of this one] of outputs
  const int cluster = blockIdx.x / a.blocks_of_cluster, block = blockIdx.x % a.blocks_of_cluster;
  const int tiles = a.fewest_tiles + (cluster < a.clusters_with_more);
  const int64_t first_tile = static_cast<int64_t>(cluster) * a.fewest_tiles + min(cluster, a.clusters_with_more);
  const int tiles_of_share = (a.fewest_tiles + a.blocks_of_cluster) / a.blocks_of_cluster;
  const uint8_t* weights = a.units + first_tile * a.units_of_row * a.unit.size;
  const auto slice_in = [&](int pass) { return (block * a.passes + pass) * a.slices_of_pass + place; };
  const auto part_in = [&](int pass) { return slice_in(pass) % P::of_unit; };
  const auto pieces_in = [&](int pass) { return min(P::of_slice, a.units_of_row * P::of_unit - slice_in(pass) * P::of_slice); };
  const auto unit_of = [&](int pass, int tile, int piece) {
    const int unit = (slice_in(pass) * P::of_slice + piece) / P::of_unit;
    return weights + (static_cast<int64_t>(tile) * a.units_of_row + unit) * a.unit.size;
  };

  let_dependents_start();
  if (a.blocks_of_cluster > 1) arrive_at_cluster();
#if LOWBIT_BULK_COPIES
  uint8_t* ring = memory + a.at.ring + warp * a.stages * a.slot_bytes;
  uint64_t* barriers = reinterpret_cast<uint64_t*>(memory + a.at.barriers) + warp * a.stages;
  const uint64_t policy = read_once();
  // Of the two buffers of partial sums: that all warps have written them, and that all have added them up.
  uint64_t *written = reinterpret_cast<uint64_t*>(memory + a.at.barriers) + threads / 32 * a.stages, *added = written + 2;
  if (lane == 0) {
    if (warp == 0) {
#pragma unroll
      for (int b = 0; b < 4; b++) start_barrier(written + b, threads / 32);
    }
#pragma unroll 1
    for (int s = 0; s < a.stages; s++) start_barrier(barriers + s);
    show_barriers_to_copies();
  }
  __syncwarp();
  int stage = 0, parity = 0, slot = 0;  // where in the ring pieces are read and copied
  int next_pass = 0, copied = 0;        // of the warp's pieces in that pass
  const auto start_copy = [&] {
    const int count = next_pass < a.passes ? pieces_in(next_pass) : 0;
    if (count <= 0) return;
    const int slice = P::of_slice == 1 || count == 1 ? copied : copied / 2, tile = turn + slice * a.turns;
    if (tile < tiles) {
      if (lane == 0) {
        uint8_t* to = ring + slot * a.slot_bytes;
        const uint8_t* from = unit_of(next_pass, tile, copied - slice * count);
        expect(barriers + slot, a.slot_bytes);
        if constexpr (P::of_unit == 1) {
          copy_expected(to, from, a.slot_bytes, barriers + slot, policy);
        } else {
#pragma unroll
          for (int p = 0; p < planes_of(F::bits); p++) {
            copy_expected(to, from + P::plane_at(p, part_in(next_pass)), P::plane_bytes(p), barriers + slot, policy);
            to += P::plane_bytes(p);
          }
          if (a.unit.size > a.unit.scale_at)
            copy_expected(to, from + a.unit.scale_at, a.unit.size - a.unit.scale_at, barriers + slot, policy);
        }
      }
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
  float factor = a.outer ? a.factor * *a.outer : a.factor;
  if constexpr (F::factor != 1) factor *= F::factor;
  const auto write = [&](int tile, int output, float sum) {
    const int64_t n = (first_tile + tile) * rows_of_tile + output % rows_of_tile;
    if (n >= a.n) return;
    if (a.unit.groups == 0) sum *= scale_at(a.scale, a.scale_type, n);
    sum *= factor;
    if (a.bias) sum += to_float(static_cast<const T*>(a.bias)[n]);
    static_cast<T*>(a.y)[output / rows_of_tile * a.n + n] = from_float<T>(sum);
  };
  wait_for_predecessors();

  // Adds up the slices of one batch of a pass, which is the `index`-th of all.
  const auto add_slices = [&](int index, int pass, int batch) {
    const int first = batch * a.tiles_of_batch, count = min(a.tiles_of_batch, tiles - first);
    const float* sums = partial + index % 2 * a.tiles_of_batch * a.slices_of_pass * outputs;
#if LOWBIT_BULK_COPIES
    wait(written + index % 2, index / 2 & 1);
#else
    __syncthreads();
#endif
    for (int i = thread; i < count * outputs; i += threads) {
      const int tile = i / outputs, output = i % outputs, m = output / rows_of_tile;
      if (m >= a.m) continue;
      float sum = pass ? total[first * outputs + i] : 0;
      const float* slices = sums + tile * a.slices_of_pass * outputs + output;
#pragma unroll 4
      for (int s = 0; s < a.slices_of_pass; s++) sum += slices[s * outputs];
      if (pass + 1 < a.passes) {
        total[first * outputs + i] = sum;
      } else if (a.blocks_of_cluster == 1) {
        write(first + tile, output, sum);
      } else {
        const int owner = (first + tile) % a.blocks_of_cluster, place_there = (first + tile) / a.blocks_of_cluster;
        send(shares + (block * tiles_of_share + place_there) * outputs + output, owner, sum);
      }
    }
#if LOWBIT_BULK_COPIES
    __syncwarp();
    if (lane == 0) arrive(added + index % 2);
#endif
  };

  int index = 0;  // of the batch, of all passes; its slices are added when the warp has done the next one
  for (int pass = 0; pass < a.passes; pass++) {
    const int pieces = pieces_in(pass);
    SliceOfX<octets> slice;
    slice.start_loads(a, slice_in(pass));
#if LOWBIT_BULK_COPIES
    if (pass == 0) {
      __syncthreads();  // behind the loads of x of all warps, which would else wait behind these
      start_copies(a.stages - 1 - a.early_stages);
    }
#endif
    const auto put_in_order = [&](int step) {
      if (step % 2 == 0) slice.put_in_order(a, slice_in(pass), memory + a.at.x + warp * bytes_of_x, step);
    };
    // `is_first`: the first tile of a pass, which meets x while it comes in.
    const auto products_of_tile = [&](auto is_first, int tile, float (&sum)[octets][4]) {
      uint32_t zeros = 0x0101u << (F::bits - 1);
      if (F::takes_zero && a.has_zero && a.zero_point) {
        const int64_t n = (first_tile + tile) * rows_of_tile + lane / 4;
        zeros = (n < a.n ? a.zero_point[n] : 0) | (n + 8 < a.n ? a.zero_point[n + 8] : 0) << 8;
      }
#pragma unroll
      for (int u = 0; u < P::of_slice; u++) {
        if (u >= pieces) break;
#if LOWBIT_BULK_COPIES
        wait(barriers + stage, parity);
        start_copy();  // where the piece before this one was
        const P piece = P::copied(ring + stage * a.slot_bytes, a.unit, part_in(pass));
#else
        const P piece = P::in(unit_of(pass, tile, u), a.unit, part_in(pass));
#endif
        constexpr int steps = P::columns / 32;
        const auto as_it_is = [](int) {};
        const auto products = [&](auto is_folded, auto prepare) {
          products_of_piece<F, T, scales, run, decltype(is_folded)::value, octets>(piece, a, constants, zeros, slice.x, u * steps, sum, prepare);
        };
        const auto prepare = [&](int step) {
          if constexpr (decltype(is_first)::value) put_in_order(step);
        };
        if constexpr ((scales == Scales::e8m0 || scales == Scales::e4m3) && !F::takes_zero) {
          if (may_fold<F, scales, run, P::columns>(piece.scales, lane)) {
            products(std::true_type(), prepare);
          } else {
#pragma unroll
            for (int step = u * steps; step < (u + 1) * steps; step++) prepare(step);
            products(std::false_type(), as_it_is);
          }
        } else {
          products(std::false_type(), prepare);
        }
#if LOWBIT_BULK_COPIES
        __syncwarp();
        if (++stage == a.stages) stage = 0, parity ^= 1;
#endif
      }
    };
    if (pass == 0 && a.blocks_of_cluster > 1) wait_at_cluster();  // all blocks have started, so that they can be sent to
#pragma unroll 1
    for (int batch = 0; batch < batches; batch++, index++) {
      const int first = batch * a.tiles_of_batch, count = min(a.tiles_of_batch, tiles - first);
      float* sums = partial + index % 2 * a.tiles_of_batch * a.slices_of_pass * outputs;
#pragma unroll 1
      for (int tile = first + turn; tile < first + count; tile += a.turns) {
        float sum[octets][4] = {};
        if (batch == 0 && tile == turn) {
          products_of_tile(std::true_type(), tile, sum);
        } else {
          products_of_tile(std::false_type(), tile, sum);
        }
#if LOWBIT_BULK_COPIES
        if (index >= 2) wait(added + index % 2, (index / 2 - 1) & 1);
#endif
        float* to = sums + ((tile - first) * a.slices_of_pass + place) * outputs + lane % 4 * 2 * rows_of_tile + lane / 4;
#pragma unroll
        for (int e = 0; e < octets; e++)
#pragma unroll
          for (int i = 0; i < 4; i++) to[(e * 8 + i % 2) * rows_of_tile + i / 2 * 8] = sum[e][i];
      }
#if LOWBIT_BULK_COPIES
      __syncwarp();
      if (lane == 0) arrive(written + index % 2);
      if (batch > 0) {
        add_slices(index - 1, pass, batch - 1);
      } else if (pass > 0) {
        add_slices(index - 1, pass - 1, batches - 1);
      }
#else
      add_slices(index, pass, batch);
#endif
    }
  }
#if LOWBIT_BULK_COPIES
  add_slices(index - 1, a.passes - 1, batches - 1);
#endif
  if (a.blocks_of_cluster == 1) return;
  arrive_at_cluster();
  wait_at_cluster();
  for (int i = thread; i < tiles_of_share * outputs; i += threads) {
    const int tile = i / outputs * a.blocks_of_cluster + block, output = i % outputs;
    if (tile >= tiles || output / rows_of_tile >= a.m) continue;
    float sum = shares[i];
    for (int b = 1; b < a.blocks_of_cluster; b++) sum += shares[b * tiles_of_share * outputs + i];
    write(tile, output, sum);
  }
}

}  // namespace lowbit::cuda
