// The kernel of dequantize.cuh for each family of codes.
#include "dequantize.cuh"

#include "../schedule/dequantize_launch.h"
#include "../schedule/mixed_gemm_args.cuh"
#include "../decode/nf4_lut.cuh"

namespace lowbit::cuda {

template <class Codes>
static cudaError_t launch(const Dequantize& a, cudaStream_t stream) {
  constexpr int columns = warp_k(Codes::bits) * dequantize_warps;
  const int64_t blocks_of_row = (static_cast<int64_t>(a.units_per_row) * a.unit.columns + columns - 1) / columns;
  if (a.tiles == 0 || blocks_of_row == 0) return cudaSuccess;
  if (blocks_of_row > 65535) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(a.tiles), static_cast<unsigned>(blocks_of_row));
  dequantize_fragments<Codes><<<grid, dequantize_warps * 32, 0, stream>>>(a);
  return cudaGetLastError();
}

cudaError_t launch_dequantize(Family family, const Dequantize& a, cudaStream_t stream) {
  using T = __nv_bfloat16;
  switch (family) {
    case Family::int2: return launch<MixedIntegerDecoder<T, 2>>(a, stream);
    case Family::int3: return launch<MixedIntegerDecoder<T, 3>>(a, stream);
    case Family::int4: return launch<MixedIntegerDecoder<T, 4>>(a, stream);
    case Family::int5: return launch<MixedIntegerDecoder<T, 5>>(a, stream);
    case Family::int6: return launch<MixedIntegerDecoder<T, 6>>(a, stream);
    case Family::int7: return launch<MixedIntegerDecoder<T, 7>>(a, stream);
    case Family::int8: return launch<MixedIntegerDecoder<T, 8>>(a, stream);
    case Family::e2m1: return launch<FloatDecoder<T, 4, 2, TopExponent::number>>(a, stream);
    case Family::e2m3: return launch<FloatDecoder<T, 6, 2, TopExponent::number>>(a, stream);
    case Family::e3m2: return launch<FloatDecoder<T, 6, 3, TopExponent::number>>(a, stream);
    case Family::e4m3: return launch<FloatDecoder<T, 8, 4, TopExponent::nan_where_all_ones>>(a, stream);
    case Family::e5m2: return launch<FloatDecoder<T, 8, 5, TopExponent::infinity>>(a, stream);
    default: return launch<Nf4Decoder<T>>(a, stream);
  }
}

}  // namespace lowbit::cuda
