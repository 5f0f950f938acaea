// Choices of experts as bindings receive them.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "../schedule/segments.h"
#include "torch_helpers.h"

namespace lowbit::cuda {

// For y [rows, n] of x [rows / share, K]; `chosen` int64 [rows], and with more rows than one segment each `segments` int32 [S, 4] and
// `order` int32 [rows] of lowbit_cuda::sort_by_expert. Raises what does not fit.
inline ExpertRows expert_rows(const torch::stable::Tensor& x, const torch::stable::Tensor& y, int64_t n, int64_t num_experts,
                              const torch::stable::Tensor& chosen, const std::optional<torch::stable::Tensor>& segments,
                              const std::optional<torch::stable::Tensor>& order) {
  using torch::headeronly::ScalarType;
  const auto is_beside = [&](const torch::stable::Tensor& t, ScalarType type) {
    return t.is_cuda() && t.get_device_index() == x.get_device_index() && t.scalar_type() == type && t.is_contiguous();
  };
  STD_TORCH_CHECK(y.dim() == 2 && y.size(1) == n && is_beside(y, x.scalar_type()), "y must be contiguous [rows, ", n,
                  "] of the dtype and device of x");
  const int64_t rows = y.size(0);
  STD_TORCH_CHECK(n % 16 == 0, "experts must have a multiple of 16 rows, got ", n);
  STD_TORCH_CHECK(x.dim() == 2 && (rows == 0 || (x.size(0) > 0 && rows % x.size(0) == 0)), "x must be [", rows, " / share, K]");
  STD_TORCH_CHECK(chosen.dim() == 1 && chosen.size(0) == rows && is_beside(chosen, ScalarType::Long), "experts must be int64 [", rows,
                  "] on the device of x");
  STD_TORCH_CHECK(num_experts >= 1 && rows < (int64_t{1} << 30), "there must be experts and fewer than 2^30 rows, got ", num_experts,
                  " and ", rows);
  STD_TORCH_CHECK(segments.has_value() == order.has_value(), "segments and order go together");
  ExpertRows found = {};
  found.share = static_cast<int>(rows ? rows / x.size(0) : 1);
  if (!segments) {
    STD_TORCH_CHECK(rows < 65536, "without segments there must be fewer than 65536 rows, got ", rows);
    found.experts = static_cast<const int64_t*>(chosen.const_data_ptr());
    found.max_segments = static_cast<int>(rows);
    return found;
  }
  STD_TORCH_CHECK(segments->dim() == 2 && segments->size(1) == 4 && segments->size(0) < 65536 && is_beside(*segments, ScalarType::Int),
                  "segments must be int32 [S, 4] on the device of x, S < 65536");
  STD_TORCH_CHECK(order->dim() == 1 && order->size(0) == rows && is_beside(*order, ScalarType::Int), "order must be int32 [", rows,
                  "] on the device of x");
  found.segments = static_cast<const Segment*>(segments->const_data_ptr());
  found.order = static_cast<const int*>(order->const_data_ptr());
  found.max_segments = static_cast<int>(segments->size(0));
  return found;
}

// How many segments have rows where `rows` choose among experts evenly.
inline int busy_segments(int64_t rows, int64_t num_experts, int max_segments) {
  if (rows == max_segments) return static_cast<int>(rows);
  const double missed = std::pow(1.0 - 1.0 / static_cast<double>(num_experts), static_cast<double>(rows));
  return std::clamp(static_cast<int>(static_cast<double>(num_experts) * (1.0 - missed) + 0.5), 1, max_segments);
}

}  // namespace lowbit::cuda
