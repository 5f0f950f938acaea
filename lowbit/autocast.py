"""What torch.autocast means for products with a quantized weight: what it means for those with a float one.

``x`` and ``bias`` take its dtype, unless they are float64. Within the operator it is off: kernels accumulate in float32,
and it would round what they multiply.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import lowbit_kernels.schemas  # noqa: F401 - names the operators

__all__: list[str] = []

_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA", "xpu": "AutocastXPU"}
_LIBRARY = torch.library.Library("lowbit", "IMPL")


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def _rule(operator: Any, device: str) -> Callable[..., Tensor]:
    def product(
        x: Tensor,
        packed: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        outer: Tensor | None,
        bias: Tensor | None,
        *settings: Any,
    ) -> Tensor:
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return operator(_cast(x, dtype), packed, scale, zero_point, outer, _cast(bias, dtype), *settings)

    return product


for _name in ("linear", "quantized_linear", "grouped_linear", "experts_linear"):
    for _device, _key in _KEYS.items():
        _LIBRARY.impl(_name, _rule(getattr(torch.ops.lowbit, _name).default, _device), _key)
