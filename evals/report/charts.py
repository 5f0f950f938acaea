"""The charts of a report: which there are, and each as a picture and for the page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure

from . import bars, histograms, tradeoff
from .drawing import png, settle, style, svg
from .entries import Runs

__all__ = ["NAMES", "NARROW", "WIDE", "Chart", "draw"]

WIDE, NARROW = 880, 352
"""Pixels of a page on a desk and of one on a phone: each chart is laid out for both, and the page shows one."""

# What gives a figure of a width, or None where nothing of it was measured.
_CHARTS: dict[str, Callable[[Runs, int], Figure | None]] = {
    "accuracy": tradeoff.accuracy,
    "size": bars.sizes,
    "layers": bars.layers,
    "weights": histograms.weights,
    "speed": bars.speeds,
}
NAMES = tuple(_CHARTS)


@dataclass(frozen=True)
class Chart:
    """A chart as a picture and as two ``svg`` elements."""

    name: str
    png: bytes
    wide: str
    narrow: str


def draw(runs: Runs) -> list[Chart]:
    """Every chart that something was measured for."""
    found = []
    with style():
        for name, make in _CHARTS.items():
            wide, narrow = make(runs, WIDE), make(runs, NARROW)
            if wide is not None and narrow is not None:
                settle(wide)
                settle(narrow)
                found.append(Chart(name, png(wide), svg(wide, f"{name}-wide"), svg(narrow, f"{name}-narrow")))
    return found
