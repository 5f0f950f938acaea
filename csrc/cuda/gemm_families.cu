// The kernel for a family of codes and a type of x: gemm_integers_*.cu and gemm_floats_*.cu hold them.
#include "gemm_arguments.cuh"
#include "gemm_launch.h"
#include "quantile_pairs.cuh"

namespace lowbit::cuda {

template <class Codes, class T>
cudaError_t launch_family(Gemm, const void*, int64_t, bool may_round, bool rounds_nothing, GemmPlan, cudaStream_t);

template <class T>
static auto family_of(Family family) -> decltype(&launch_family<Whole<T, 4>, T>) {
  switch (family) {
    case Family::int2: return launch_family<Whole<T, 2>, T>;
    case Family::int3: return launch_family<Whole<T, 3>, T>;
    case Family::int4: return launch_family<Whole<T, 4>, T>;
    case Family::int5: return launch_family<Whole<T, 5>, T>;
    case Family::int6: return launch_family<Whole<T, 6>, T>;
    case Family::int7: return launch_family<Whole<T, 7>, T>;
    case Family::int8: return launch_family<Whole<T, 8>, T>;
    case Family::e2m1: return launch_family<Floats<T, 4, 2, Top::number>, T>;
    case Family::e2m3: return launch_family<Floats<T, 6, 2, Top::number>, T>;
    case Family::e3m2: return launch_family<Floats<T, 6, 3, Top::number>, T>;
    case Family::e4m3: return launch_family<Floats<T, 8, 4, Top::nan_where_all_ones>, T>;
    case Family::e5m2: return launch_family<Floats<T, 8, 5, Top::infinity>, T>;
    default: return launch_family<QuantilePairs<T>, T>;
  }
}

cudaError_t launch_gemm(Family family, bool x_is_half, Gemm a, const void* x, int64_t k, bool may_round, bool rounds_nothing,
                        GemmPlan plan, cudaStream_t stream) {
  const auto launch = x_is_half ? family_of<__half>(family) : family_of<__nv_bfloat16>(family);
  return launch(a, x, k, may_round, rounds_nothing, plan, stream);
}

}  // namespace lowbit::cuda
