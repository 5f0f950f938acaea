// Formats that the kernels over mma_fragment support, by their Python names.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <string>

#include "../decode/format_family.h"
#include "../decode/unit_scales.cuh"

namespace lowbit::cuda {

struct KnownFormat {
  const char* name;
  Family family;
  int bits;
  bool is_signed;
  float factor;
};
constexpr KnownFormat known_formats[] = {
    {"int2", Family::int2, 2, true, 1},         {"uint2", Family::int2, 2, false, 1},      {"int3", Family::int3, 3, true, 1},
    {"uint3", Family::int3, 3, false, 1},       {"int4", Family::int4, 4, true, 1},        {"uint4", Family::int4, 4, false, 1},
    {"int5", Family::int5, 5, true, 1},         {"uint5", Family::int5, 5, false, 1},      {"int6", Family::int6, 6, true, 1},
    {"uint6", Family::int6, 6, false, 1},       {"int7", Family::int7, 7, true, 1},        {"uint7", Family::int7, 7, false, 1},
    {"int8", Family::int8, 8, true, 1},         {"uint8", Family::int8, 8, false, 1},      {"mxint8", Family::int8, 8, true, 0x1p-6f},
    {"fp4_e2m1", Family::e2m1, 4, false, 1},    {"fp6_e2m3", Family::e2m3, 6, false, 1},   {"fp6_e3m2", Family::e3m2, 6, false, 1},
    {"fp8_e4m3fn", Family::e4m3, 8, false, 1},  {"fp8_e5m2", Family::e5m2, 8, false, 1},   {"nf4", Family::nf4, 4, false, 1},
};

inline const KnownFormat& known_format(const std::string& name) {
  for (const KnownFormat& known : known_formats)
    if (name == known.name) return known;
  STD_TORCH_CHECK(false, "no kernel for weights of the format ", name);
}

inline ScaleType scale_type_of(const torch::stable::Tensor& scale, const std::string& name) {
  using torch::headeronly::ScalarType;
  const ScalarType dtype = scale.scalar_type();
  if (name == "fp32" && dtype == ScalarType::Float) return ScaleType::float32;
  if (name == "bf16" && dtype == ScalarType::BFloat16) return ScaleType::bfloat16;
  if (name == "fp16" && dtype == ScalarType::Half) return ScaleType::float16;
  if (name == "e8m0" && dtype == ScalarType::Byte) return ScaleType::e8m0;
  if (name == "fp8_e4m3fn" && dtype == ScalarType::Byte) return ScaleType::e4m3;
  STD_TORCH_CHECK(false, "scale must be fp32, bf16, fp16, or uint8 codes of e8m0 or fp8_e4m3fn, got ",
                  torch::headeronly::toString(dtype), " for ", name);
}

// Group sizes that a unit may hold.
inline void check_group_size(int64_t size) {
  STD_TORCH_CHECK(size == -1 || size == 16 || size == 32 || size == 64 || size == 128, "group_size must be -1, 16, 32, 64 or 128, got ",
                  size);
}

}  // namespace lowbit::cuda
