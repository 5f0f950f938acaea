// Launches eights_linear and fours_linear: the tensor maps, and how a product is cut into tiles for the device.
#include "fours.cuh"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cmath>

#include "eights_launch.h"

namespace lowbit::cuda::eights {

namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode encoder() {
  static const Encode found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result = {};
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
  }();
  return found;
}

}  // namespace

bool describe(CUtensorMap& map, const Operand& from, int64_t rows, int bits, int box_rows) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(from.bytes), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(from.stride)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(columns_of_stage * bits / 8), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[] = {1, 1};
  const CUtensorMapSwizzle swizzle = bits == 8 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  const Encode encode = encoder();
  return encode && encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(from.data), sizes, strides, box, steps,
                          CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

namespace {

struct Plan {
  int rows, blocks_of_cluster;
  bool splits_columns;
};

// What a block of so many rows of x costs, in microseconds of an H200 that is full of them: each stage, and the tile beside
// its stages. The ratios are what counts.
struct Cost {
  int rows;
  double stage, tile;
};
constexpr Cost costs[] = {{16, 0.45, 2.0}, {64, 0.33, 4.0}, {128, 0.40, 3.0}, {256, 0.70, 5.0}};
// The same where x is little, fitted to the times of every plan for 26 products of up to 128 rows.
constexpr Cost costs_of_little[] = {{16, 0.27, 0.28}, {64, 0.35, 1.34}, {128, 0.26, 4.4}};
constexpr int most_rows_of_little = 128;
// Where clusters of four blocks of 128 rows share the copies of x, as long as all of them run at once: what they spare.
constexpr double spared_of_four = 1.4, spared_of_four_of_little = 2.3;

struct Shape {
  int64_t m, n;
  int steps;
  Codes codes;
  int processors;
};

// Clusters of four leave some multiprocessors empty.
bool may_share_by_four(const Shape& s, int rows, int64_t tiles_m) {
  const int64_t clusters_n = (s.n + 4 * rows_of_block - 1) / (4 * rows_of_block);
  return rows == 128 && s.codes != Codes::int4 && s.n > 2 * rows_of_block && 4 * tiles_m * clusters_n <= s.processors * 3 / 4;
}

// What goes from the cache to the multiprocessors: W for each tile of x, and x for each tile of W, unless two blocks share it.
double time_of_moving(const Shape& s, const Cost& cost, int parts, int64_t tiles_m, int64_t tiles) {
  const double columns = static_cast<double>(s.steps) * columns_of_stage;
  const double sharing = cost.rows >= 128 && parts == 1 && s.n > rows_of_block ? 2 : 1;
  const double of_x = static_cast<double>(tiles) * parts * cost.rows * ((s.steps + parts - 1) / parts) * columns_of_stage / sharing;
  return (static_cast<double>(tiles_m) * s.n * columns * (s.codes == Codes::int4 ? 0.5 : 1.0) + of_x) / 5.3e6;
}

// Splitting the columns costs a tile more, the more the larger it is, and clusters of four and of eight leave some
// multiprocessors empty.
double time_of_much(const Shape& s, const Cost& cost, int parts, int64_t tiles_m, int64_t tiles) {
  const bool is_four = s.codes == Codes::int4;
  // Codes of 4 bits come apart, and every group's sums leave the tensor cores.
  const double slower = is_four ? 1.6 : 1.0;
  const double read = static_cast<double>(s.n) * s.steps * columns_of_stage / (is_four ? 8e6 : 4e6);  // W alone
  const double blocks = static_cast<double>(tiles) * parts;
  const int most = cost.rows == 16 || (cost.rows == 64 && !is_four) ? 2 : 1;
  const double shared = blocks > s.processors ? most : 1;
  double waves = blocks / (s.processors * shared * (parts > 2 ? 0.9 : 1.0));
  if (waves < 4) waves = std::max<double>(1, static_cast<int>(waves + 0.999));
  const double adding = (parts > 2 ? parts / 2 : parts - 1) * (1.5 + cost.rows / 16.0);
  const double stages = std::max({waves * ((s.steps + parts - 1) / parts) * cost.stage * slower * shared, read,
                                  time_of_moving(s, cost, parts, tiles_m, tiles)});
  return stages + waves * (cost.tile + adding);
}

// Of codes of 8 bits.
double time_of_little(const Shape& s, const Cost& cost, int parts, int64_t tiles_m, int64_t tiles) {
  const double columns = static_cast<double>(s.steps) * columns_of_stage, read = static_cast<double>(s.n) * columns / 4e6;
  const int steps = (s.steps + parts - 1) / parts;
  const double room = s.processors * (parts > 2 ? 0.75 : 1.0), blocks = static_cast<double>(tiles) * parts;
  const int shared = cost.rows < 128 && blocks > room ? 2 : 1;
  double waves = blocks / (room * shared);
  if (waves < 4) waves = std::ceil(waves);
  const double adding = (parts > 2 ? parts / 2 : parts - 1) * (0.36 + 0.0014 * cost.rows);
  const double stages = std::max({waves * steps * cost.stage * (shared == 2 ? 2.5 : 1.0), read,
                                  time_of_moving(s, cost, parts, tiles_m, tiles)});
  return stages + waves * (cost.tile + adding);
}

// The plan that takes least time.
Plan plan_for(const Shape& s) {
  Plan best = {};
  double least = 0;
  const bool is_little = s.m <= most_rows_of_little && s.codes != Codes::int4;
  const int64_t columns = static_cast<int64_t>(s.steps) * columns_of_stage;
  const auto consider = [&](const Cost& cost) {
    if (cost.rows > 16 && cost.rows >= 4 * s.m) return;
    const int64_t tiles_m = (s.m + cost.rows - 1) / cost.rows, tiles = tiles_m * ((s.n + rows_of_block - 1) / rows_of_block);
    for (int parts : {1, 2, 4, 8}) {
      if (columns > most_columns_of_block * int64_t{parts} ||
          (parts > 1 && (s.steps < 2 * parts && columns <= most_columns_of_block)))
        continue;
      double time = is_little ? time_of_little(s, cost, parts, tiles_m, tiles) : time_of_much(s, cost, parts, tiles_m, tiles);
      if (parts == 1 && may_share_by_four(s, cost.rows, tiles_m)) time -= is_little ? spared_of_four_of_little : spared_of_four;
      if (best.rows == 0 || time < least) {
        least = time;
        best = {cost.rows, parts, parts > 1};
      }
    }
  };
  if (is_little) {
    for (const Cost& cost : costs_of_little) consider(cost);
  } else {
    for (const Cost& cost : costs)
      if (cost.rows < 256 || s.codes == Codes::int8) consider(cost);
  }
  if (best.rows >= 128 && !best.splits_columns && s.n > rows_of_block)
    best.blocks_of_cluster = may_share_by_four(s, best.rows, (s.m + best.rows - 1) / best.rows) ? 4 : 2;
  return best;
}

using Kernel = void (*)(CUtensorMap, CUtensorMap, Product8);

template <Kernel kernel, int T, int bits>
cudaError_t launch_with(const CUtensorMap& w, const CUtensorMap& x, Product8 a, int processors, cudaStream_t stream) {
  const int cluster = a.blocks_of_cluster;
  const int64_t groups_n = a.splits_columns ? a.tiles_n : (a.tiles_n + cluster - 1) / cluster, clusters = a.tiles_m * groups_n;
  // Two blocks share a multiprocessor where there are enough of them, and of clusters that would leave some empty; one alone has
  // more stages.
  constexpr int all_room = 227 << 10;
  const bool shares = blocks_of_processor<T, bits> == 2 && clusters * cluster > (cluster > 2 ? processors * 3 / 4 : processors);
  const int room = shares ? 113 << 10 : all_room;
  a.stages = most_stages;
  if (a.splits_columns) {  // as many as a block has, in whose place the sums lie at the end
    constexpr int stages_of_sums = (T * rows_of_block * 4 + Memory<T, bits>::stage - 1) / Memory<T, bits>::stage;
    a.stages = std::min(most_stages, std::max((a.steps + cluster - 1) / cluster, stages_of_sums));
  }
  while (Memory<T, bits>::size(a.stages) > room) a.stages--;
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  static std::atomic<bool> may_use_all[64];
  if (device >= 64 || !may_use_all[device]) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, all_room);
    if (error != cudaSuccess) return error;
    if (device < 64) may_use_all[device] = true;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(clusters * cluster));
  config.blockDim = dim3(threads_of_block<T, bits>);
  config.dynamicSmemBytes = Memory<T, bits>::size(a.stages);
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  // The kernel before is the one that rounds x, which lets this one start when all before it have ended: W may be read.
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attributes;
  config.numAttrs = 1;
  if (!a.splits_columns) {  // as many clusters as the device holds at once: its processors come in groups of uneven size
    static std::atomic<int> most[64][2][9];
    std::atomic<int>& kept = most[device % 64][room == all_room][cluster];
    int fit = device < 64 ? kept.load() : 0;
    if (fit == 0) {
      if (const cudaError_t error = cudaOccupancyMaxActiveClusters(&fit, kernel, &config); error != cudaSuccess) return error;
      if (device < 64) kept = fit;
    }
    config.gridDim.x = static_cast<unsigned>(std::min<int64_t>(clusters, fit) * cluster);
  }
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kernel, w, x, a);
}

}  // namespace

cudaError_t launch(Product8 a, Codes codes, const Operand& w, const Operand& x, const int (&forced)[3], cudaStream_t stream) {
  int device = 0, processors = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (const cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device); error != cudaSuccess)
    return error;
  const int bits = codes == Codes::int4 ? 4 : 8;
  a.steps = static_cast<int>((x.bytes + columns_of_stage - 1) / columns_of_stage);
  Plan plan = plan_for({a.m, a.n, a.steps, codes, processors});
  if (forced[0]) plan = {forced[0], forced[1], forced[2] != 0};
  a.blocks_of_cluster = plan.blocks_of_cluster;
  a.splits_columns = plan.splits_columns;
  a.tiles_m = static_cast<int>((a.m + plan.rows - 1) / plan.rows);
  a.tiles_n = static_cast<int>((a.n + rows_of_block - 1) / rows_of_block);
  CUtensorMap w_map = {}, x_map = {};
  const int sharing = plan.splits_columns ? 1 : plan.blocks_of_cluster;
  if (!describe(w_map, w, a.n, bits, rows_of_block) || !describe(x_map, x, rows_with_room(a.m), 8, plan.rows / sharing))
    return cudaErrorInvalidValue;
  const auto with = [&](auto width) {
    constexpr int T = decltype(width)::value;
    if (codes == Codes::int8) return launch_with<eights_linear<int32_t, T>, T, 8>(w_map, x_map, a, processors, stream);
    if constexpr (T < 256) {
      if (codes == Codes::e4m3) return launch_with<eights_linear<float, T>, T, 8>(w_map, x_map, a, processors, stream);
      if (a.columns_of_group == 32) return launch_with<fours_linear<T, 1>, T, 4>(w_map, x_map, a, processors, stream);
      if (a.columns_of_group == 64) return launch_with<fours_linear<T, 2>, T, 4>(w_map, x_map, a, processors, stream);
      return launch_with<fours_linear<T, 4>, T, 4>(w_map, x_map, a, processors, stream);
    }
    return cudaErrorInvalidValue;
  };
  switch (plan.rows) {
    case 16: return with(std::integral_constant<int, 16>());
    case 64: return with(std::integral_constant<int, 64>());
    case 128: return with(std::integral_constant<int, 128>());
    default: return with(std::integral_constant<int, 256>());
  }
}

}  // namespace lowbit::cuda::eights
