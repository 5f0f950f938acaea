"""GPTQ: the error that rounding one column makes is made up for by the columns that are still to be rounded.

Frantar, Ashkboos, Hoefler and Alistarh, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
2022. Three things are added, each of which lowers the error of the layer's output at equal bits: ranges are searched for the
error that is left after the later columns have done their part; and :mod:`~lowbit.algorithms.coordinate_descent` goes over the
codes and the scales that come out. Scales belong to groups of neighbours whatever the order of rounding, so no order is stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..grid import Scales, divisor, encode, grouped, rounded, scale_values
from ..scales import choose, least_cost
from ..scheme import Scheme
from ..statistics import Statistics
from .coordinate_descent import descend
from .hessian import Factor, damped, drift_target, factored, notes_on
from .rounder import Rounded
from .rows import find_by_rows
from .rtn import rtn

__all__ = ["needs_drift", "check", "gptq"]

RANGES = ("output", "mse", "range")
_AIM = 0.01  # the damping under which a weight is aimed: more of it, as codes may want, would aim at the old weight again
_BLOCK = 128  # columns that are rounded one by one before what they owe the others is paid in one matrix product


def gptq(
    weight: Tensor,
    scheme: Scheme,
    statistics: Statistics | None,
    *,
    damping: float = 0.01,
    act_order: bool = True,
    ranges: str = "output",
    passes: int = 3,
    asymmetric: bool = False,
) -> Rounded:
    """Codes for ``weight`` [N, K] (float32 or float64, finite) that keep tr(E G E^T) low, for G = ``statistics.gram``.

    Args:
        damping: how much of its mean is added to the diagonal of the Gram matrix.
        act_order: round the columns with the largest inputs first.
        ranges: how scales are chosen: ``"output"`` (searched for the least error of the output that later columns cannot make
            up for), ``"mse"`` or ``"range"`` (as in :func:`lowbit.scales.choose`).
        passes: how often the result is gone over (:func:`~lowbit.algorithms.coordinate_descent.descend`). With 0,
            ``ranges="range"`` and ``act_order=False`` this is the method as it was published.
        asymmetric: round what comes nearest, on the inputs that the quantized layers before give, to the outputs of the float
            model (:func:`~lowbit.algorithms.hessian.drift_target`), where the statistics tell how far those inputs drifted.
            Calibration then rounds the layers of a block in the order in which they run, beside the float block.

    Work is N K^2 / 2 multiplications, as many as :func:`~lowbit.algorithms.coordinate_descent.descend` says for the passes,
    nearly all of them in matrix products, and K^3 / 6 in float64 for the factor. Raises ``ValueError`` for missing statistics,
    those of another K, and a scale that its own format cannot hold.
    """
    if statistics is None:
        raise ValueError("gptq needs statistics of the layer's inputs: give calibration data, or choose hqq, which needs none")
    check(damping=damping, act_order=act_order, ranges=ranges, passes=passes, asymmetric=asymmetric)
    if not weight.numel():
        return rtn(weight, scheme)
    _check_channels(statistics, weight)
    factor = _factored(statistics, weight, damping, act_order)
    if asymmetric:
        weight = drift_target(
            weight, statistics, factor if factor.damping == _AIM else _factored(statistics, weight, _AIM, False)
        )
    scales = _ranges(weight, scheme, ranges, factor)
    codes = _swept(weight, scheme, scales, factor)
    used = factor.damping
    del factor  # the largest matrix
    if passes:
        gram = damped(statistics.gram.to(weight.device, weight.dtype), used)
        codes, scales = descend(weight, scheme, gram, codes, scales, passes)
    return Rounded(codes, scales, notes_on(statistics, damping, used))


def needs_drift(*, asymmetric: bool = False, **others: object) -> bool:
    """Whether :func:`gptq` looks at the drift of the inputs."""
    return asymmetric


def check(
    *, damping: float = 0.01, act_order: bool = True, ranges: str = "output", passes: int = 3, asymmetric: bool = False
) -> None:
    """Raises ``ValueError`` for options that :func:`gptq` cannot take."""
    if not 0 <= damping <= 1:
        raise ValueError(f"damping must be 0 to 1 of the diagonal's mean, got {damping}")
    if ranges not in RANGES:
        raise ValueError(f"ranges must be one of {', '.join(RANGES)}, got {ranges!r}")
    if not isinstance(act_order, bool):
        raise ValueError(f"act_order must be true or false, got {act_order!r}")
    if not isinstance(asymmetric, bool):
        raise ValueError(f"asymmetric must be true or false, got {asymmetric!r}")
    if not isinstance(passes, int) or passes < 0:
        raise ValueError(f"passes must be a whole number and at least 0, got {passes!r}")


def _check_channels(statistics: Statistics, weight: Tensor) -> None:
    k = len(statistics.gram)
    if k != weight.shape[1]:
        raise ValueError(f"statistics are of {k} channels and the weight has {weight.shape[1]}: not the same layer's")


def _factored(statistics: Statistics, weight: Tensor, damping: float, act_order: bool) -> Factor:
    """The factor, with the columns in the order in which they are rounded."""
    gram = statistics.gram.to(weight.device)
    return factored(gram, damping, gram.diagonal().argsort(descending=True, stable=True) if act_order else None)


def _ranges(weight: Tensor, scheme: Scheme, ranges: str, factor: Factor) -> Scales:
    if ranges != "output":
        return choose(weight, scheme, ranges)
    # The loss of the sweep below is the sum over columns of error^2 * left: what is left of the square of a column's input once
    # the later ones have told what they can of it.
    left = torch.empty_like(factor.diagonal)
    left[factor.order] = factor.diagonal.square()
    importance = grouped(left.to(weight.dtype), scheme.group(weight.shape[1]))

    def found(rows: Tensor, outer: Tensor | None) -> Scales:
        return least_cost(rows, scheme, lambda error: error.square_().mul_(importance).sum(-1), outer, ends=True)

    return find_by_rows(weight, scheme, found)


def _swept(weight: Tensor, scheme: Scheme, scales: Scales, factor: Factor) -> Tensor:
    """Codes [N, K], column by column in the order of ``factor``.

    Each column is rounded from where the loss is least as those before it stand: that is ``weight`` without
    :meth:`~lowbit.algorithms.hessian.Factor.shares` of their errors.
    """
    k = weight.shape[1]
    w = weight.T[factor.order]  # a column is a contiguous row here
    scale = scale_values(scheme, scales, w.dtype).T
    zero = None if scales.zero_point is None else scales.zero_point.T.to(w.dtype)
    codes, errors = torch.empty_like(w, dtype=torch.uint8), torch.empty_like(w)
    for start in range(0, k, _BLOCK):
        stop = min(start + _BLOCK, k)
        groups = factor.order[start:stop] // scheme.group(k)
        s, z = scale[groups], None if zero is None else zero[groups]
        shares = factor.shares(start, stop).to(w.dtype)  # [stop, B]
        block = torch.addmm(w[start:stop], shares[:start].T, errors[:start], alpha=-1)
        _round_columns(block, w[start:stop], errors[start:stop], shares[start:], scheme, s, z)
        codes[start:stop] = encode(block, scheme.fmt, s, z)
    return torch.empty_like(codes).index_copy_(0, factor.order, codes).T.contiguous()


def _round_columns(
    block: Tensor, w: Tensor, errors: Tensor, shares: Tensor, scheme: Scheme, scale: Tensor, zero: Tensor | None
) -> None:
    """The columns ``block`` [B, N] one after another, each less its ``shares`` [B, B] of the ``errors`` of those before, which
    are written to; a column is as it was when it was rounded, since nothing is owed to it afterwards."""
    zeros = [None] * len(block) if zero is None else zero
    columns = zip(block, w, errors, scale, divisor(scale), zeros, shares.triu(1), strict=True)
    for column, was, error, *grid, share in columns:
        torch.sub(rounded(column, scheme.fmt, *grid), was, out=error)
        block.addr_(share, error, alpha=-1)
