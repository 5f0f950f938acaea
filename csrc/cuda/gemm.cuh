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

#include <algorithm>

#include "fragments.cuh"
#include "gemm_again.cuh"
#include "gemm_arguments.cuh"
#include "gemm_sums.cuh"
#include "group_scales.cuh"
#include "numbers.cuh"
#include "tiles.cuh"
#include "warpgroups.cuh"
#include "wgmma.cuh"

namespace lowbit::cuda {

constexpr int columns_of_box = 64, most_stages = 8;
constexpr int copier_of_weights = tiles_of_block, copier_of_x = tiles_of_block + 1;  // warps
constexpr int begun = 2;  // a barrier of all threads: those in shared memory have been started

// How a block works: rows of x that it takes, columns of W whose products are under way together; the columns of a group (none
// where a row is one), and whether its scale multiplies the sums of their products, or else the operands; how many of those
// batches are decoded before their products begin.
template <int columns_, int batch_, int group_, bool is_exact_, Scaling scaling_, int ahead_ = 1>
struct Shape {
  static constexpr int columns = columns_, batch = batch_, group = group_, ahead = ahead_;
  static constexpr bool is_exact = is_exact_;
  static constexpr Scaling scaling = scaling_;
  static constexpr int boxes_of_stage = columns == 16 ? 4 : columns <= 64 ? 2 : 1, box_bytes = columns * columns_of_box * 2;
  static constexpr int stage_columns = boxes_of_stage * columns_of_box, stage_bytes = boxes_of_stage * box_bytes;
  static constexpr int threads = workers_of_block + 128;
};

constexpr int place_of_x = 1024;  // boxes lie on that; barriers come first: where they are is known at once
template <class S>
Places places_of(const Gemm& a, int table_bytes) {
  Places at;
  at.weights = place_of_x + a.x_stages * S::stage_bytes;
  const int rings = at.weights + a.weight_stages * tiles_of_block * a.unit.pitch();
  at.sums = a.sums_apart ? rings : place_of_x;
  at.ends = std::max(rings, at.sums + bytes_of_meeting<S::columns>(a.blocks)) + 15 & ~15;
  at.table = at.ends + rows_of_block * static_cast<int>(sizeof(float2));
  at.total = at.table + table_bytes;
  return at;
}

template <class Codes, class = void>
constexpr int table_bytes_of = 0;
template <class Codes>
constexpr int table_bytes_of<Codes, std::enable_if_t<(Codes::table_bytes > 0)>> = Codes::table_bytes;

// The codes as a kernel of so many rows of x takes them: with 64 the other half of a large table is better spent on sums that meet,
// with 256 there is no room for it.
template <class Codes, int columns, class = void>
struct CodesOf {
  using Type = Codes;
};
template <class Codes, int columns>
struct CodesOf<Codes, columns, std::enable_if_t<(Codes::table_bytes > 0 && (columns == 64 || columns == 256))>> {
  using Type = typename Codes::Smaller;
};

// Stages of x that are passed together: those of a piece, of which the ring then is a multiple, so that where each lies is known
// from where the first does. Beside a table there is no room for four large ones.
template <class Codes, class S>
constexpr int stages_of_run = table_bytes_of<Codes> > 0 && S::columns == 256
                                  ? 1
                                  : columns_of_piece(S::columns, Unit<Codes::bits, 0, false>::columns) / S::stage_columns;
// Whether that is all of the ring.
template <class Codes, class S>
constexpr bool is_ring_a_run = S::columns >= 128 && stages_of_run<Codes, S> > 1;

// Whether a code stands for NaN and none for infinity: then one of them makes all sums of its row NaN, whatever x is.
template <class Codes, class = void>
constexpr bool has_nan_of = false;
template <class Codes>
constexpr bool has_nan_of<Codes, std::enable_if_t<Codes::has_nan>> = true;

// Whether the scale of a group is multiplied in with the power of two that numbers have to be multiplied by in any case, of which
// 2^power_left is left for the sums. Scales of e8m0 that are too large for that are found out at the end, since to look at them
// before each product costs more than the multiplication that this saves; then all is done again (gemm_again.cuh).
template <class Codes, class S>
constexpr bool folds_scales = !Codes::takes_zero && !S::is_exact && (S::scaling == Scaling::e4m3 || S::scaling == Scaling::e8m0);
template <class Codes, class S>
__host__ __device__ constexpr int power_left() {
  if constexpr (!folds_scales<Codes, S>)
    return 0;
  else if constexpr (S::scaling == Scaling::e4m3)
    return 8;
  else
    return Codes::left_of_e8m0;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// The pieces of W, each all of a unit or half of it, and the columns of x that a block works on.
struct Share {
  int first, last;  // pieces of a row
  int64_t first_tile;
  int first_row_of_x;
};

struct Ring {
  uint64_t *full, *free;
  int stages, stage = 0, parity = 0;
  __device__ Ring(uint64_t* barriers, int stages) : full(barriers), free(barriers + most_stages), stages(stages) {}
  // By one thread, and all there may be: how many are used is an argument, which is far away. Barriers whose places are constants
  // start one behind the other; in a loop, or by threads side by side, each would wait for a fence of its own.
  __device__ __forceinline__ void start() const {
#pragma unroll
    for (int i = 0; i < most_stages; i++) start_barrier(full + i, 1), start_barrier(free + i, tiles_of_block);
  }
  __device__ void advance(int by = 1) {
    if ((stage += by) == stages) stage = 0, parity ^= 1;
  }
};

// The stages of x in runs, by their places in a piece, which are constants.
template <int run, bool is_all>
struct Runs : Ring {
  __device__ explicit Runs(const Ring& ring) : Ring(ring) {}
  __device__ __forceinline__ int at(int i) const { return (is_all ? 0 : stage) + i % run; }
  __device__ __forceinline__ void pass(int i) {
    if ((i + 1) % run) return;
    if constexpr (is_all)
      parity ^= 1;
    else
      advance(run);
  }
};

// The units that a block reads, those of a column of tiles at a time. Only `before_x` of them are asked for before x has begun to
// come: all wait for x, and it waits for them.
template <class S, int unit_columns>
struct Weights {
  const uint8_t* from;  // the next unit of the first tile
  int64_t row_bytes;
  int size, pitch, tiles, units;
  __device__ __forceinline__ Weights(const Gemm& a, const Share& share) : size(a.unit.size), pitch(a.unit.pitch()) {
    constexpr int pieces = unit_columns / columns_of_piece(S::columns, unit_columns);
    const int first = share.first / pieces;
    row_bytes = static_cast<int64_t>(a.units_of_row) * size;
    from = a.units + share.first_tile * row_bytes + first * size;
    tiles = static_cast<int>(min(static_cast<int64_t>(tiles_of_block), a.tiles - share.first_tile));
    units = share.first < share.last ? (share.last + pieces - 1) / pieces - first : 0;
  }
  static __device__ __forceinline__ uint64_t policy_of(const Gemm& a) { return a.m <= S::columns ? read_once() : read_again(); }
  // The first unit of each tile: a warp asks for that of its own, sooner than one could for all of them.
  __device__ __forceinline__ void copy_first(const Gemm& a, uint8_t* memory, const Ring& ring, int tile) const {
    if (units > 0 && tile < tiles)
      copy_expected(memory + tile * pitch, from + tile * row_bytes, size, ring.full, policy_of(a));
  }
  // All others, and how many bytes the first of them have.
  __device__ __forceinline__ void copy(const Gemm& a, uint8_t* memory, Ring ring, uint64_t* x_came) {
    const uint64_t policy = policy_of(a);
    if (units > 0) expect(ring.full, tiles * size);
#pragma unroll 1
    for (int u = 1; u < units; u++) {
      ring.advance();
      from += size;
      if (u == a.before_x) wait(x_came, 0);
      wait(ring.free + ring.stage, ring.parity ^ 1);
      expect(ring.full + ring.stage, tiles * size);
      const uint8_t* next = from;
      uint8_t* to = memory + ring.stage * tiles_of_block * pitch;
#pragma unroll 1
      for (int t = 0; t < tiles; t++, next += row_bytes, to += pitch) copy_expected(to, next, size, ring.full + ring.stage, policy);
    }
  }
};

// The first units of each share of the columns of all tiles into the cache, by the blocks that begin on multiprocessors which the
// kernel ahead has left free: when that ends, others find them there.
template <class S, int unit_columns>
__device__ __forceinline__ void prefetch_weights(const Gemm& a, int parts, int thread, int threads) {
  constexpr int pieces = unit_columns / columns_of_piece(S::columns, unit_columns), most_units = 4;
  for (int i = blockIdx.x * threads + thread; i < a.tiles * parts; i += a.early * threads) {
    const int tile = i / parts, part = i % parts, first = a.pieces_of_row * part / parts / pieces;
    const int last = (a.pieces_of_row * (part + 1) / parts + pieces - 1) / pieces;
    const int64_t at = static_cast<int64_t>(tile) * a.units_of_row + first;
    if (first < last) prefetch(a.units + at * a.unit.size, min(last - first, most_units) * a.unit.size);
  }
}

// What comes of rows beyond the last one of x is not written, and zeros in their place come slowly where many blocks ask for them
// at once: boxes of the last tile have the rows alone that there are.
template <class S>
__device__ __forceinline__ void copy_x(const Gemm& a, const Share& share, uint8_t* memory, Ring ring) {
  const int piece = columns_of_piece(S::columns, a.unit.columns), rows = min(a.m - share.first_row_of_x, S::columns);
  const CUtensorMap* const x = rows < S::columns ? &a.last_of_x : &a.x;
  for (int c = share.first * piece; c < share.last * piece; c += S::stage_columns, ring.advance()) {
    wait(ring.free + ring.stage, ring.parity ^ 1);
    expect(ring.full + ring.stage, S::boxes_of_stage * rows * columns_of_box * 2);
#pragma unroll
    for (int b = 0; b < S::boxes_of_stage; b++)
      copy_box(memory + ring.stage * S::stage_bytes + b * S::box_bytes, x, c + b * columns_of_box, share.first_row_of_x,
               ring.full + ring.stage);
  }
}

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
