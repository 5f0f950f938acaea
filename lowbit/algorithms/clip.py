"""Clip search: ranges that leave out the few largest weights where that helps the others more.

With statistics the error is that of the layer's output, tr(E G E^T), as in AWQ's clip search (Lin et al. 2023) but on the Gram
matrix, so that no activation is kept, and with what the groups do to each other counted in.
"""

from __future__ import annotations

from torch import Tensor

from ..grid import Scales, to_codes, to_values
from ..scales import choose, least_cost, rounding_error, squared
from ..scheme import Scheme
from ..statistics import Statistics
from .rounder import Rounded

__all__ = ["check", "clip"]


def clip(weight: Tensor, scheme: Scheme, statistics: Statistics | None = None, *, passes: int = 2) -> Rounded:
    """``weight`` [N, K] (float32 or float64, finite) rounded to nearest, within ranges that are searched.

    Without statistics each group's squared error is made least. With them the groups are gone over ``passes`` times, and each
    takes the range for which the output errs least as the others stand; it begins with whole ranges and no step makes it worse.

    Raises ``ValueError`` for statistics of another K and a scale that its own format cannot hold.
    """
    check(passes=passes)
    if statistics is None or not weight.numel():
        scales = least_cost(weight, scheme, squared, ends=True)
        return Rounded(to_codes(weight, scheme, scales), scales)
    gram = statistics.gram.to(weight.device, weight.dtype)
    if len(gram) != weight.shape[1]:
        raise ValueError(f"statistics are of {len(gram)} channels and the weight has {weight.shape[1]}: not the same layer's")
    scales = choose(weight, scheme)
    scale, zero = scales.scale.clone(), None if scales.zero_point is None else scales.zero_point.clone()
    group = scheme.group(weight.shape[1])
    error = to_values(to_codes(weight, scheme, scales), scheme, scales, weight.dtype).sub_(weight)
    for _ in range(passes):
        for g, start in enumerate(range(0, weight.shape[1], group)):
            part = slice(start, start + group)
            columns, inner = weight[:, part], gram[part, part]
            pull = (error @ gram[:, part]).addmm_(error[:, part], inner, alpha=-1)[:, None]  # of the other groups

            def cost(e: Tensor, inner: Tensor = inner, pull: Tensor = pull) -> Tensor:
                return (e @ inner).add_(pull, alpha=2).mul_(e).sum(-1)

            found = least_cost(columns, scheme, cost, scales.outer, ends=True)
            error[:, part] = rounding_error(columns[:, None], columns.shape[1], scheme, found)[:, 0]
            scale[:, g : g + 1] = found.scale
            if zero is not None and found.zero_point is not None:
                zero[:, g : g + 1] = found.zero_point
    scales = Scales(scale, zero, scales.outer)
    return Rounded(to_codes(weight, scheme, scales), scales)


def check(*, passes: int = 2) -> None:
    """Raises ``ValueError`` for options that :func:`clip` cannot take."""
    if not isinstance(passes, int) or passes < 1:
        raise ValueError(f"passes must be a whole number and at least 1, got {passes!r}")
