"""HQQ, half-quadratic quantization: scales and zero points fitted to the weight alone, few large errors let off.

Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023. The error is split in two: the part that
the sparse norm |e|^p takes for outliers, in closed form, and the rest, to which scale and zero point are fitted by least
squares. There only the zero point is fitted and errors are measured in units of the weight; here the scale follows too, and
errors are measured in units of it, so that a weight times a number is rounded to the same codes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..grid import Scales, decode, encode, grouped, scale_values, to_codes
from ..scales import least_cost, nearest_scale, squared
from ..scheme import Scheme
from ..statistics import Statistics
from .rounder import Rounded
from .rows import find_by_rows

__all__ = ["check", "hqq"]

_GROWTH = 1.01  # of beta, each step: outliers are let off less and less


def hqq(
    weight: Tensor,
    scheme: Scheme,
    statistics: Statistics | None = None,
    *,
    p: float = 0.7,
    beta: float = 1.0,
    steps: int = 10,
) -> Rounded:
    """``weight`` [N, K] (float32 or float64, finite) rounded to nearest under fitted scales; ``statistics`` are not looked at.

    Args:
        p: of the norm |e|^p, above 0 and at most 1.
        beta: how close the split parts are held together; errors beyond (1 / beta)^(1 / (2 - p)) steps of the grid begin
            to count as outliers. With 1, these are the errors of weights that the range leaves out.
        steps: how often codes and scales follow each other. It begins with the ranges of least squared error
            (:func:`lowbit.scales.least_cost`), and each group keeps those with the least in the end.

    A zero point is fitted where the scheme has one, the scale under every scheme. Raises ``ValueError`` for a scale that its
    own format cannot hold.
    """
    check(p=p, beta=beta, steps=steps)
    scales = find_by_rows(weight, scheme, lambda rows, outer: _searched(rows, scheme, outer, p, beta, steps))
    return Rounded(to_codes(weight, scheme, scales), scales)


def _searched(weight: Tensor, scheme: Scheme, outer: Tensor | None, p: float, beta: float, steps: int) -> Scales:
    scales = best = least_cost(weight, scheme, squared, outer, ends=True)
    if not weight.numel():
        return best
    k = weight.shape[1]
    x = grouped(weight, scheme.group(k))
    inside = grouped(torch.ones(k, dtype=weight.dtype, device=weight.device), scheme.group(k))
    least: Tensor | None = None
    for step in range(steps + 1):
        s, z = _spread(scales, scheme, weight.dtype)
        codes = encode(x, scheme.fmt, s, z)
        error = (x - decode(codes, scheme.fmt, s, z)) * inside
        found = squared(error)
        if least is None:
            least = found
        else:
            better = found < least
            best, least = scales.where(better, best), torch.where(better, found, least)
        if step == steps:
            break
        outliers = _shrunk(error / torch.where(s == 0, torch.inf, s), p, beta * _GROWTH**step) * s
        numbers = scheme.fmt.decode(codes, weight.dtype)
        scales = _fitted(numbers, x - outliers, inside, scheme, scales)
    return best


def check(*, p: float = 0.7, beta: float = 1.0, steps: int = 10) -> None:
    """Raises ``ValueError`` for options that :func:`hqq` cannot take."""
    if not 0 < p <= 1:
        raise ValueError(f"p must be above 0 and at most 1, got {p}")
    if not beta > 0:
        raise ValueError(f"beta must be above 0, got {beta}")
    if not isinstance(steps, int) or steps < 0:
        raise ValueError(f"steps must be a whole number and at least 0, got {steps!r}")


def _spread(scales: Scales, scheme: Scheme, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point [N, G, 1], as numbers."""
    zero = None if scales.zero_point is None else scales.zero_point[..., None].to(dtype)
    return scale_values(scheme, scales, dtype)[..., None], zero


def _shrunk(error: Tensor, p: float, beta: float) -> Tensor:
    """The outliers in ``error``: argmin over e of |e|^p + beta/2 (e - error)^2, by its generalised soft threshold."""
    size = error.abs()
    return torch.sign(error) * (size - size.clamp(min=1e-6).pow(p - 1) / beta).clamp(min=0)


def _fitted(numbers: Tensor, target: Tensor, inside: Tensor, scheme: Scheme, scales: Scales) -> Scales:
    """Scales for which ``numbers`` [N, G, group] come closest to ``target``; as they were where no scale of their sign does."""
    count = inside.sum(-1)
    old, z = _spread(scales, scheme, numbers.dtype)
    if scheme.zero_point == "float":
        middle = ((numbers * inside).sum(-1) / count)[..., None]
        from_zero = (numbers - middle) * inside
    else:
        from_zero = (numbers if z is None else numbers - z) * inside
    wanted = (from_zero * target).sum(-1) / from_zero.square().sum(-1)
    if scales.outer is not None:
        wanted = wanted / scales.outer[..., None, None]
    stored = nearest_scale(torch.where(wanted.sign() == old[..., 0].sign(), wanted, torch.zeros_like(wanted)), scheme)
    new = scale_values(scheme, Scales(stored, None, scales.outer), numbers.dtype)[..., None]
    usable = torch.isfinite(new) & (new != 0) & (old != 0)
    if scales.zero_point is None:
        return Scales(stored, None, scales.outer).where(usable[..., 0], scales)
    point = ((numbers - target / torch.where(usable, new, torch.inf)) * inside).sum(-1) / count
    if scheme.zero_point == "int":
        point = point.round().clamp(0, scheme.fmt.max)
    usable &= torch.isfinite(point.to(scales.zero_point.dtype))[..., None]
    return Scales(stored, point.to(scales.zero_point.dtype), scales.outer).where(usable[..., 0], scales)
