"""What rounding a layer's input costs, told from its statistics: no activation is at hand when scales are searched."""

from __future__ import annotations

import torch
from torch import Tensor

from ..grid import grouped
from ..scheme import Scheme

__all__ = ["input_noise"]

_LEVELS = 64  # numbers that stand for a normal distribution
_STEPS, _WIDEST = 257, 8.0  # of an integral from 0 to 8 deviations


def input_noise(moments: tuple[Tensor, Tensor], activation: Scheme, scale: str) -> Tensor:
    """The mean squared error of each channel of an input that is rounded to ``activation``, float64 [K].

    ``moments``: the mean square and the largest magnitude of each channel. A channel is taken for normal with its mean square.
    With a ``scale`` of ``"static"`` the largest magnitude of all sets the range; with ``"token"`` what a token's largest would be
    in the mean, were channels independent.
    """
    square, largest = (moment.double() for moment in moments)
    k, group = len(square), activation.group(len(square))
    spread, top = grouped(square.sqrt(), group), grouped(largest, group).amax(-1)
    reach = top.amax().expand_as(top) if scale == "static" else torch.minimum(_largest(spread), top)
    step = (reach / activation.fmt.symmetric_max)[:, None]
    normal = torch.special.ndtri((torch.arange(_LEVELS, dtype=torch.float64, device=square.device) + 0.5) / _LEVELS)
    x = spread[..., None] * normal / torch.where(step > 0, step, torch.inf)[..., None]
    x = x.clamp(-activation.fmt.symmetric_max, activation.fmt.symmetric_max)  # a token's largest is within its own range
    error = (activation.fmt.round(x.float()).double() - x).square().mean(-1) * step.square()
    return error.flatten()[:k]


def _largest(spread: Tensor) -> Tensor:
    """The root of the mean square of the largest of normal channels [G, group] with these deviations, [G]."""
    widest = spread.amax(-1, keepdim=True)
    at = torch.linspace(0, _WIDEST, _STEPS, dtype=spread.dtype, device=spread.device)
    share = spread / torch.where(widest > 0, widest, torch.inf)
    inside = torch.special.erf(at / torch.where(share > 0, share, 1e-30)[..., None] / 2**0.5)
    beyond = 1 - inside.log().sum(-2).exp()  # of one channel at least
    return widest[:, 0] * (2 * torch.trapezoid(beyond * at, at)).sqrt()
