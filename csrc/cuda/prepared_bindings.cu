// lowbit_cuda::prepared_linear: products whose weight digits_prepared or halves_prepared has checked.
#include <torch/csrc/stable/library.h>

#include "prepared.h"

namespace {

using torch::stable::Tensor;
using namespace lowbit::cuda;

Tensor prepared_linear(Tensor x, Tensor prepared) {
  check_held(prepared, "prepared");
  Prepared const* p = nullptr;
  if (!prepared.is_cuda() && are_codes(prepared) && prepared.numel() == sizeof(Prepared) && prepared.is_contiguous())
    p = static_cast<const Prepared*>(prepared.const_data_ptr());
  STD_TORCH_CHECK(p && p->sign == Prepared::own_sign, "prepared must be what digits_prepared or halves_prepared returned");
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  const bool right = x.is_cuda() && x.get_device_index() == p->device && dtype == p->dtype && x.dim() >= 1 &&
                     x.size(x.dim() - 1) == p->k;
  STD_TORCH_CHECK(right, "x must have ", p->k, " columns and the device and dtype of the x that this was prepared for");
  const OnDevice guard(p->device);
  return product_of(*p, x);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lowbit_cuda, m) { m.def("prepared_linear(Tensor x, Tensor prepared) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(lowbit_cuda, CUDA, m) { m.impl("prepared_linear", TORCH_BOX(&prepared_linear)); }
