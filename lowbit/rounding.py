"""Rounding a weight to its scheme's grid, by the rounder of a layer config."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .algorithms import ROUNDERS
from .layer_config import LayerConfig
from .statistics import Statistics
from .tensor import QTensor

__all__ = ["RoundedWeight", "round_weight", "static_scale"]


class RoundedWeight(NamedTuple):
    """A weight on the grid, the error of its products (see :attr:`lowbit.plans.LayerPlan.loss`), what to know of it,
    and the scale of all its inputs."""

    weight: QTensor
    loss: float | None = None
    notes: tuple[str, ...] = ()
    input_scale: Tensor | None = None


def round_weight(
    weight: Tensor, config: LayerConfig, statistics: Statistics | None = None, dtype: torch.dtype | None = None
) -> RoundedWeight:
    """``weight`` [N, K] as ``config`` wants it, for products in ``dtype`` (its own by default, which a rewrite may have made a
    wider one); a rounder that needs ``statistics`` and has none gives way to rtn, and the notes of the plan say that no data
    came."""
    dtype = dtype or weight.dtype
    rounder = ROUNDERS[config.rounder]
    without_statistics = rounder.needs_statistics and statistics is None
    if (
        config.rounder == "rtn" or without_statistics
    ):  # the operator does this in chunks of rows, in a fused kernel where there is one
        rounded = QTensor.quantize(weight, config.weight, method="mse" if without_statistics else config.scales)
        parts = (rounded.packed, rounded.scale, rounded.zero_point, rounded.outer)
        return RoundedWeight(QTensor(*parts, rounded.scheme, tuple(rounded.shape), dtype, rounded.byte_layout))
    compute = weight if weight.dtype == torch.float64 else weight.float()
    if statistics is not None:
        statistics = statistics.to(weight.device)
    codes, scales, notes = rounder.round(compute, config.weight, statistics, **dict(config.options))
    return RoundedWeight(QTensor.from_codes(codes, scales, config.weight, dtype), notes=notes)


def static_scale(statistics: Statistics, config: LayerConfig) -> Tensor:
    """The one scale, float32, under which the largest input seen is the largest number of the activation's format."""
    assert config.activation is not None
    top = statistics.absmax.max().float()
    return torch.where(top > 0, top / config.activation.fmt.symmetric_max, 1.0)
