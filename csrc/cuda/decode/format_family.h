// Families of formats that the kernels over mma_fragment are compiled for.
#pragma once

namespace lowbit::cuda {

// Formats that are decoded alike. Two's complement and unsigned codes are one family.
enum class Family { int2, int3, int4, int5, int6, int7, int8, e2m1, e2m3, e3m2, e4m3, e5m2, nf4 };

}  // namespace lowbit::cuda
