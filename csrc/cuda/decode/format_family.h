// The families of formats that kernels of tiles are compiled for.
#pragma once

namespace lowbit::cuda {

// Codes whose numbers come about alike. Two's complement and plain binary are one family.
enum class Family { int2, int3, int4, int5, int6, int7, int8, e2m1, e2m3, e3m2, e4m3, e5m2, nf4 };

}  // namespace lowbit::cuda
