"""How a QTensor comes back from a pickle; registered so that ``torch.load(weights_only=True)`` takes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .tensor import QTensor

__all__ = ["rebuild"]


def rebuild(
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    outer: Tensor | None,
    scheme: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    transposed: bool,
    is_parameter: bool,
) -> QTensor | torch.nn.Parameter:
    """A QTensor from its canonical parts; a parameter that wants no gradient if it was one."""
    from .scheme import Scheme
    from .tensor import QTensor

    tensor = QTensor(packed, scale, zero_point, outer, Scheme.parse(scheme), tuple(shape), dtype, transposed=transposed)
    return torch.nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor


torch.serialization.add_safe_globals([rebuild])
