"""The operator ``experts_linear``: rows of x times the matrices of the experts that they chose. Meaning, fake and checks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit.scheme import Scheme

from . import epilogues
from .ops import _check_weight, _check_x, _like, _likes, call_for, on_one_device
from .registry import Call, run
from .rules import refused
from .schemas import Operator

__all__ = ["OPERATORS", "experts_call"]


def experts_call(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    outer: Tensor | None,
    bias: Tensor | None,
    experts: Tensor,
    scheme: Scheme,
    layout: str,
    epilogue: str = "none",
) -> Call:
    """The :class:`Call` of such a product, checked. Its M is the mean number of rows of an expert, rounded up."""
    if x.dim() != 2 or packed.dim() != 3:
        raise ValueError(f"x must be [rows, K] and the weight [E, N, K], got {tuple(x.shape)} and {tuple(packed.shape)}")
    if experts.dim() != 1 or experts.dtype != torch.int64 or experts.device != x.device:
        raise ValueError(f"experts must be int64 [rows] on {x.device}, got {_like(experts)} on {experts.device}")
    rows, of_x = len(experts), len(x)
    if (rows % of_x if of_x else rows) or (of_x and not rows):
        raise ValueError(f"there must be as many experts for each row of x, got {rows} for {of_x} rows")
    _check_x(_like(x), None if bias is None else _like(bias), _like(packed))
    _check_weight(scheme, layout, x.shape[-1], _like(packed), _like(scale), *_likes(zero_point, outer))
    epilogues.epilogue(epilogue)
    mean, n, k = -(-rows // max(packed.shape[0], 1)), packed.shape[-2], x.shape[-1]
    return call_for("experts_linear", scheme, layout, x.device, x.dtype, mean, n, k, epilogue=epilogue)


def _experts_linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    outer: Tensor | None,
    bias: Tensor | None,
    experts: Tensor,
    scheme: str,
    layout: str,
    epilogue: str = "none",
) -> Tensor:
    spec, weight = Scheme.parse(scheme), (packed, scale, zero_point, outer)
    return run(experts_call(x, *weight, bias, experts, spec, layout, epilogue), x, *weight, bias, experts, spec)


def _fake(x: Tensor, packed: Tensor, *rest: Any) -> Tensor:
    if x.device != packed.device:
        raise ValueError(f"x is on {x.device} and the weight on {packed.device}: move one of them")
    on_one_device(packed, *rest)
    return x.new_empty((rest[4].shape[0], packed.shape[-2]))


OPERATORS: dict[str, Operator] = {
    "experts_linear": Operator(
        _experts_linear, _fake, refused("experts_linear has no gradient: multiply the rows of each expert by lowbit::linear")
    )
}
