"""SmoothQuant: what makes inputs hard to round, few channels far larger than the others, is moved into the weights.

Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models", 2022.
"""

from __future__ import annotations

import torch

from .search import Choice, Pool, centred_scale, choose_divisor, losses_of

__all__ = ["check", "smoothquant"]

_GRID = 20


def smoothquant(pool: Pool, *, alpha: float | str = 0.5) -> Choice:
    """What the input of ``pool``'s readers is divided by: max \\|x\\|^alpha / max \\|w\\|^(1 - alpha), channel by channel.

    Args:
        alpha: how much of the difficulty the weights take: 0 to 1; or ``"auto"``, the best of 0, 0.05, ..., 1 and of leaving
            everything as it is, for each input on its own: what rounding the weights and rounding the inputs costs together.
    """
    check(alpha=alpha)
    x = pool.largest(lambda reader: reader.statistics.absmax)
    w = pool.largest(lambda reader: reader.weight.abs().amax(0))
    alphas = [float(alpha)] if alpha != "auto" else [step / _GRID for step in range(_GRID + 1)]
    # A channel that is never heard, or that nothing weighs, has nothing to give or to take.
    divisors = [centred_scale(torch.where((x > 0) & (w > 0), x**a / w ** (1 - a), 0.0)) for a in alphas]
    divisors, labels = [torch.ones_like(x), *divisors], ["", *(f"alpha {a:.3g}" for a in alphas)]
    return choose_divisor(divisors, labels, losses_of(pool, divisors), None if alpha == "auto" else 1)


def check(*, alpha: float | str = 0.5) -> None:
    """Raises ``ValueError`` for an ``alpha`` that :func:`smoothquant` cannot take."""
    number = isinstance(alpha, (int, float)) and not isinstance(alpha, bool)
    if alpha != "auto" and not (number and 0 <= float(alpha) <= 1):
        raise ValueError(f"alpha must be 0 to 1, or auto, got {alpha!r}")
