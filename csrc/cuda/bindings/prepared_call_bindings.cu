// lowbit_cuda::prepared_linear: products with a weight that split_int8_gemv_prepare or skinny_gemm_prepare has checked.
#include <torch/csrc/stable/library.h>

#include "prepared_call.h"

namespace {

using torch::stable::Tensor;
using namespace lowbit::cuda;

Tensor prepared_linear(Tensor x, Tensor prepared) {
  check_storage(prepared, "prepared");
  PreparedCall const* p = nullptr;
  if (!prepared.is_cuda() && are_codes(prepared) && prepared.numel() == sizeof(PreparedCall) && prepared.is_contiguous())
    p = static_cast<const PreparedCall*>(prepared.const_data_ptr());
  STD_TORCH_CHECK(p && p->sign == PreparedCall::tag, "prepared must be what split_int8_gemv_prepare or skinny_gemm_prepare returned");
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  const bool right = x.is_cuda() && x.get_device_index() == p->device && dtype == p->dtype && x.dim() >= 1 &&
                     x.size(x.dim() - 1) == p->k;
  STD_TORCH_CHECK(right, "x must have ", p->k, " columns and the device and dtype of the x that this was prepared for");
  const DeviceGuardIfNeeded guard(p->device);
  return product_of(*p, x);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lowbit_cuda, m) { m.def("prepared_linear(Tensor x, Tensor prepared) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(lowbit_cuda, CUDA, m) { m.impl("prepared_linear", TORCH_BOX(&prepared_linear)); }
