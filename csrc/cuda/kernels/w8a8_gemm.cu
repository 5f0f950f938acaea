// Launches w8a8_gemm.cuh and w4a8_gemm.cuh: tensor maps, and the choice of tile, cluster and split by a cost model.
#include "w4a8_gemm.cuh"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cmath>

#include "../schedule/w8a8_launch.h"

namespace lowbit::cuda::w8a8 {

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

bool encode_tensormap(CUtensorMap& map, const Operand& from, int64_t rows, int bits, int box_rows) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(from.bytes), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(from.stride)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(stage_k * bits / 8), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[] = {1, 1};
  const CUtensorMapSwizzle swizzle = bits == 8 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  const Encode encode = encoder();
  return encode && encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(from.data), sizes, strides, box, steps,
                          CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

namespace {

struct Plan {
  int rows, cluster_size;
  bool splits_columns;
};

// Cost of a block with `rows` rows of x in microseconds, on an H200 that is full of them: a stage, and a tile beside its stages.
// Only ratios matter.
struct Cost {
  int rows;
  double stage, tile;
};
constexpr Cost costs[] = {{16, 0.45, 2.0}, {64, 0.33, 4.0}, {128, 0.40, 3.0}, {256, 0.70, 5.0}};
// The same for small M, fitted to the times of every plan of 26 products of up to 128 rows.
constexpr Cost small_m_costs[] = {{16, 0.27, 0.28}, {64, 0.35, 1.34}, {128, 0.26, 4.4}};
constexpr int small_m_max_rows = 128;
// Saving of clusters of four blocks of 128 rows that share the copies of x, as long as all run at once.
constexpr double cluster4_saving = 1.4, small_m_cluster4_saving = 2.3;

struct Shape {
  int64_t m, n;
  int steps;
  Codes codes;
  int sms;
};

// Clusters of four leave some multiprocessors empty.
bool may_multicast_by_4(const Shape& s, int rows, int64_t tiles_m) {
  const int64_t clusters_n = (s.n + 4 * block_rows - 1) / (4 * block_rows);
  return rows == 128 && s.codes != Codes::int4 && s.n > 2 * block_rows && 4 * tiles_m * clusters_n <= s.sms * 3 / 4;
}

// Traffic from L2: W once for each tile of x, and x once for each tile of W unless two blocks share it.
double time_of_l2_traffic(const Shape& s, const Cost& cost, int parts, int64_t tiles_m, int64_t tiles) {
  const double columns = static_cast<double>(s.steps) * stage_k;
  const double sharing = cost.rows >= 128 && parts == 1 && s.n > block_rows ? 2 : 1;
  const double of_x = static_cast<double>(tiles) * parts * cost.rows * ((s.steps + parts - 1) / parts) * stage_k / sharing;
  return (static_cast<double>(tiles_m) * s.n * columns * (s.codes == Codes::int4 ? 0.5 : 1.0) + of_x) / 5.3e6;
}

// Splitting K costs a reduction, the more the larger the tile, and clusters of four and eight leave some multiprocessors empty.
double time_large_m(const Shape& s, const Cost& cost, int parts, int64_t tiles_m, int64_t tiles) {
  const bool is_four = s.codes == Codes::int4;
  // 4-bit codes are unpacked, and each group's sums leave the tensor cores
  const double slower = is_four ? 1.6 : 1.0;
  const double read = static_cast<double>(s.n) * s.steps * stage_k / (is_four ? 8e6 : 4e6);  // the bytes of W alone
  const double blocks = static_cast<double>(tiles) * parts;
  const int maximum = cost.rows == 16 || (cost.rows == 64 && !is_four) ? 2 : 1;
  const double shared = blocks > s.sms ? maximum : 1;
  double waves = blocks / (s.sms * shared * (parts > 2 ? 0.9 : 1.0));
  if (waves < 4) waves = std::max<double>(1, static_cast<int>(waves + 0.999));
  const double adding = (parts > 2 ? parts / 2 : parts - 1) * (1.5 + cost.rows / 16.0);
  const double stages = std::max({waves * ((s.steps + parts - 1) / parts) * cost.stage * slower * shared, read,
                                  time_of_l2_traffic(s, cost, parts, tiles_m, tiles)});
  return stages + waves * (cost.tile + adding);
}

// For 8-bit codes.
double time_small_m(const Shape& s, const Cost& cost, int parts, int64_t tiles_m, int64_t tiles) {
  const double columns = static_cast<double>(s.steps) * stage_k, read = static_cast<double>(s.n) * columns / 4e6;
  const int steps = (s.steps + parts - 1) / parts;
  const double room = s.sms * (parts > 2 ? 0.75 : 1.0), blocks = static_cast<double>(tiles) * parts;
  const int shared = cost.rows < 128 && blocks > room ? 2 : 1;
  double waves = blocks / (room * shared);
  if (waves < 4) waves = std::ceil(waves);
  const double adding = (parts > 2 ? parts / 2 : parts - 1) * (0.36 + 0.0014 * cost.rows);
  const double stages = std::max({waves * steps * cost.stage * (shared == 2 ? 2.5 : 1.0), read,
                                  time_of_l2_traffic(s, cost, parts, tiles_m, tiles)});
  return stages + waves * (cost.tile + adding);
}

// The plan with the least estimated time.
Plan plan_for(const Shape& s) {
  Plan best = {};
  double minimum = 0;
  const bool is_small_m = s.m <= small_m_max_rows && s.codes != Codes::int4;
  const int64_t columns = static_cast<int64_t>(s.steps) * stage_k;
  const auto consider = [&](const Cost& cost) {
    if (cost.rows > 16 && cost.rows >= 4 * s.m) return;
    const int64_t tiles_m = (s.m + cost.rows - 1) / cost.rows, tiles = tiles_m * ((s.n + block_rows - 1) / block_rows);
    for (int parts : {1, 2, 4, 8}) {
      if (columns > max_block_columns * int64_t{parts} ||
          (parts > 1 && (s.steps < 2 * parts && columns <= max_block_columns)))
        continue;
      double time = is_small_m ? time_small_m(s, cost, parts, tiles_m, tiles) : time_large_m(s, cost, parts, tiles_m, tiles);
      if (parts == 1 && may_multicast_by_4(s, cost.rows, tiles_m)) time -= is_small_m ? small_m_cluster4_saving : cluster4_saving;
      if (best.rows == 0 || time < minimum) {
        minimum = time;
        best = {cost.rows, parts, parts > 1};
      }
    }
  };
  if (is_small_m) {
    for (const Cost& cost : small_m_costs) consider(cost);
  } else {
    for (const Cost& cost : costs)
      if (cost.rows < 256 || s.codes == Codes::int8) consider(cost);
  }
  if (best.rows >= 128 && !best.splits_columns && s.n > block_rows)
    best.cluster_size = may_multicast_by_4(s, best.rows, (s.m + best.rows - 1) / best.rows) ? 4 : 2;
  return best;
}

using Kernel = void (*)(CUtensorMap, CUtensorMap, W8A8Args);

template <Kernel kernel, int T, int bits>
cudaError_t launch_with(const CUtensorMap& w, const CUtensorMap& x, W8A8Args a, int sms, cudaStream_t stream) {
  const int cluster = a.cluster_size;
  const int64_t groups_n = a.splits_columns ? a.tiles_n : (a.tiles_n + cluster - 1) / cluster, clusters = a.tiles_m * groups_n;
  // Two blocks on a multiprocessor where there are enough blocks, and for clusters that would leave some empty; a single one gets
  // more stages.
  constexpr int all_room = 227 << 10;
  const bool shares = blocks_per_sm<T, bits> == 2 && clusters * cluster > (cluster > 2 ? sms * 3 / 4 : sms);
  const int room = shares ? 113 << 10 : all_room;
  a.stages = max_stages;
  if (a.splits_columns) {  // as many stages as a block has: the sums overwrite them at the end
    constexpr int stages_of_sums = (T * block_rows * 4 + Memory<T, bits>::stage - 1) / Memory<T, bits>::stage;
    a.stages = std::min(max_stages, std::max((a.steps + cluster - 1) / cluster, stages_of_sums));
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
  config.blockDim = dim3(threads_per_block<T, bits>);
  config.dynamicSmemBytes = Memory<T, bits>::size(a.stages);
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  // The kernel before quantizes x and starts this one when all kernels before it have ended, so W may be read at once.
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attributes;
  config.numAttrs = 1;
  if (!a.splits_columns) {  // as many clusters as fit the device at once: GPCs have different numbers of multiprocessors
    static std::atomic<int> maximum[64][2][9];
    std::atomic<int>& load_args = maximum[device % 64][room == all_room][cluster];
    int fit = device < 64 ? load_args.load() : 0;
    if (fit == 0) {
      if (const cudaError_t error = cudaOccupancyMaxActiveClusters(&fit, kernel, &config); error != cudaSuccess) return error;
      if (device < 64) load_args = fit;
    }
    config.gridDim.x = static_cast<unsigned>(std::min<int64_t>(clusters, fit) * cluster);
  }
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kernel, w, x, a);
}

}  // namespace

cudaError_t launch(W8A8Args a, Codes codes, const Operand& w, const Operand& x, const int (&forced)[3], cudaStream_t stream) {
  int device = 0, sms = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (const cudaError_t error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device); error != cudaSuccess)
    return error;
  const int bits = codes == Codes::int4 ? 4 : 8;
  a.steps = static_cast<int>((x.bytes + stage_k - 1) / stage_k);
  Plan plan = plan_for({a.m, a.n, a.steps, codes, sms});
  if (forced[0]) plan = {forced[0], forced[1], forced[2] != 0};
  a.cluster_size = plan.cluster_size;
  a.splits_columns = plan.splits_columns;
  a.tiles_m = static_cast<int>((a.m + plan.rows - 1) / plan.rows);
  a.tiles_n = static_cast<int>((a.n + block_rows - 1) / block_rows);
  CUtensorMap w_map = {}, x_map = {};
  const int sharing = plan.splits_columns ? 1 : plan.cluster_size;
  if (!encode_tensormap(w_map, w, a.n, bits, block_rows) || !encode_tensormap(x_map, x, padded_rows(a.m), 8, plan.rows / sharing))
    return cudaErrorInvalidValue;
  const auto with = [&](auto width) {
    constexpr int T = decltype(width)::value;
    if (codes == Codes::int8) return launch_with<w8a8_linear<int32_t, T>, T, 8>(w_map, x_map, a, sms, stream);
    if constexpr (T < 256) {
      if (codes == Codes::e4m3) return launch_with<w8a8_linear<float, T>, T, 8>(w_map, x_map, a, sms, stream);
      if (a.group_k == 32) return launch_with<w4a8_linear<T, 1>, T, 4>(w_map, x_map, a, sms, stream);
      if (a.group_k == 64) return launch_with<w4a8_linear<T, 2>, T, 4>(w_map, x_map, a, sms, stream);
      return launch_with<w4a8_linear<T, 4>, T, 4>(w_map, x_map, a, sms, stream);
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

}  // namespace lowbit::cuda::w8a8
