"""AWQ: the weights that read large inputs are scaled up before rounding and their inputs down, so that they lose less.

Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", 2023. The scale of a channel is a
power of the size of its inputs; the power is searched on the Gram matrix alone, for all layers that read one input together.
The size is the root of the mean square, where the paper has the mean magnitude, which the Gram matrix does not tell.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..grid import grouped
from .search import Choice, Pool, Reader, centred_scale, choose_divisor, losses_of

__all__ = ["awq", "check"]

RANGES = ("range", "mse")


def awq(pool: Pool, *, grid: int = 20, ranges: str = "range", weights: bool = False) -> Choice:
    """What the input of ``pool``'s readers is divided by: size^alpha for the best alpha of 0, 1 / grid, ..., 1.

    Args:
        grid: how many powers are tried beside 0, which leaves everything as it is.
        ranges: how scales are chosen while powers are compared, ``"range"`` or, at 25 times the work, ``"mse"``.
        weights: try each power also over the size of the channel's weights to the power of 1 - alpha; a weight counts by its
            share of the largest in its group.
    """
    check(grid=grid, ranges=ranges, weights=weights)
    size = pool.mean(lambda reader: reader.statistics.gram.diagonal()).sqrt()
    divisors, labels = [torch.ones_like(size)], [""]
    share = pool.mean(_shares) if weights else None
    for step in range(1, grid + 1):
        alpha = step / grid
        divisors.append(centred_scale(size**alpha))
        labels.append(f"alpha {alpha:.3g}")
        if share is not None:
            by_weight = torch.where(share > 0, share, torch.inf) ** (1 - alpha)
            divisors.append(centred_scale(size**alpha / by_weight))
            labels.append(f"alpha {alpha:.3g} over weights")
    return choose_divisor(divisors, labels, losses_of(pool, divisors, ranges))


def _shares(reader: Reader) -> Tensor:
    """Of each channel of the input, the mean over rows of its weights' share of the largest in their group, [K]."""
    k = reader.weight.shape[1]
    size = grouped(reader.weight.abs(), reader.config.weight.group(k))
    top = size.amax(-1, keepdim=True)
    return (size / torch.where(top > 0, top, 1.0)).flatten(1)[:, :k].mean(0)


def check(*, grid: int = 20, ranges: str = "range", weights: bool = False) -> None:
    """Raises ``ValueError`` for options that :func:`awq` cannot take."""
    if type(grid) is not int or grid < 1:
        raise ValueError(f"grid must be a whole number and at least 1, got {grid!r}")
    if ranges not in RANGES:
        raise ValueError(f"ranges must be one of {', '.join(RANGES)}, got {ranges!r}")
    if not isinstance(weights, bool):
        raise ValueError(f"weights must be true or false, got {weights!r}")
