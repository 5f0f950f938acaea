// Selects the instantiation for a family of formats and a type of x; mixed_gemm_int*.cu, mixed_gemm_fp4_*.cu and
// mixed_gemm_fp8_*.cu hold them.
#include "mixed_gemm_args.cuh"
#include "mixed_gemm_launch.h"
#include "../decode/nf4_pair_lut.cuh"

namespace lowbit::cuda {

template <class Codes, class T>
cudaError_t launch_family(MixedGemm, const void*, int64_t, bool may_round, bool rounds_nothing, MixedGemmPlan, cudaStream_t);

template <class T>
static auto family_of(Family family) -> decltype(&launch_family<MixedIntegerDecoder<T, 4>, T>) {
  switch (family) {
    case Family::int2: return launch_family<MixedIntegerDecoder<T, 2>, T>;
    case Family::int3: return launch_family<MixedIntegerDecoder<T, 3>, T>;
    case Family::int4: return launch_family<MixedIntegerDecoder<T, 4>, T>;
    case Family::int5: return launch_family<MixedIntegerDecoder<T, 5>, T>;
    case Family::int6: return launch_family<MixedIntegerDecoder<T, 6>, T>;
    case Family::int7: return launch_family<MixedIntegerDecoder<T, 7>, T>;
    case Family::int8: return launch_family<MixedIntegerDecoder<T, 8>, T>;
    case Family::e2m1: return launch_family<FloatDecoder<T, 4, 2, TopExponent::number>, T>;
    case Family::e2m3: return launch_family<FloatDecoder<T, 6, 2, TopExponent::number>, T>;
    case Family::e3m2: return launch_family<FloatDecoder<T, 6, 3, TopExponent::number>, T>;
    case Family::e4m3: return launch_family<FloatDecoder<T, 8, 4, TopExponent::nan_where_all_ones>, T>;
    case Family::e5m2: return launch_family<FloatDecoder<T, 8, 5, TopExponent::infinity>, T>;
    default: return launch_family<Nf4PairDecoder<T>, T>;
  }
}

cudaError_t launch_mixed_gemm(Family family, bool x_is_half, MixedGemm a, const void* x, int64_t k, bool may_round, bool rounds_nothing,
                        MixedGemmPlan plan, cudaStream_t stream) {
  const auto launch = x_is_half ? family_of<__half>(family) : family_of<__nv_bfloat16>(family);
  return launch(a, x, k, may_round, rounds_nothing, plan, stream);
}

}  // namespace lowbit::cuda
