"""Signal over noise."""

from __future__ import annotations

import math

from torch import Tensor

__all__ = ["SignalToNoise", "decibels", "format_db"]


def decibels(signal: float, noise: float) -> float:
    """10 log10 of ``signal`` over ``noise``: infinity without noise, minus infinity without signal or with noise that is not
    finite."""
    if noise == 0:
        return math.inf
    if not math.isfinite(noise) or not math.isfinite(signal) or signal <= 0:
        return -math.inf
    return 10 * math.log10(signal / noise)


def format_db(value: float | None) -> str:
    """Decibels for a table."""
    return "" if value is None else f"{value:.1f}" if math.isfinite(value) else "exact" if value > 0 else "none"


class SignalToNoise:
    """Energies that are summed up over batches, in float64."""

    def __init__(self) -> None:
        self.signal = self.noise = 0.0

    def add(self, wanted: Tensor, got: Tensor) -> None:
        """Rows that should be ``wanted`` and are ``got``."""
        wanted = wanted.double()
        self.signal += float(wanted.square().sum())
        self.noise += float((got.double() - wanted).square().sum())

    @property
    def decibels(self) -> float | None:
        """None where nothing was added."""
        return None if self.signal == self.noise == 0 else decibels(self.signal, self.noise)
