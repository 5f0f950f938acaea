"""How weights were spread before and after, with the grid that they were rounded to."""

from __future__ import annotations

import itertools
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from .drawing import ACCENT, FILL, INK, canvas, legend
from .entries import Entry, Runs, clean, finite
from .labels import short, tail

__all__ = ["weights"]

_PANELS = 24  # at most, so that the page stays one that is read
_LINES = 64  # of a grid that are drawn in full


def weights(runs: Runs, width: int) -> Figure | None:
    """A panel for each recipe and layer."""
    panels = chosen(runs)
    if not panels:
        return None
    columns = 1 if width < 500 else 3
    lines = -(-len(panels) // columns)
    figure = canvas(width, 26 + 128 * lines)
    for i, (entry, histogram) in enumerate(panels):
        axes = figure.add_subplot(lines, columns, i + 1)
        _panel(axes, histogram)
        axes.set_title(f"{short(entry.recipe)} {entry.letter}".rstrip(), pad=4)
        axes.set_xlabel(tail(clean(histogram["name"]), 34), fontsize=9, labelpad=2)
    legend(figure, [Patch(color=FILL, label="before"), Line2D([], [], color=ACCENT, label="after"),
                    Line2D([], [], color=INK, linewidth=0.8, alpha=0.5, label="grid")])  # fmt: skip
    return figure


def chosen(runs: Runs) -> list[tuple[Entry, dict[str, Any]]]:
    """The histograms that are drawn: as many layers of each recipe as there is room for."""
    found = [(entry, [h for h in entry.outcome.get("histograms") or () if _drawable(h)]) for entry in runs.entries]
    found = [(entry, histograms) for entry, histograms in found if histograms]
    each = max(1, min(3, _PANELS // max(len(found), 1)))
    return [(entry, histogram) for entry, histograms in found for histogram in histograms[:each]][:_PANELS]


def _drawable(histogram: dict[str, Any]) -> bool:
    numbers = [*histogram["edges"], *histogram["before"], *histogram["after"], *(histogram.get("grid") or ())]
    edges = histogram["edges"]
    return all(finite(number) is not None for number in numbers) and all(a < b for a, b in itertools.pairwise(edges))


def _panel(axes: Any, histogram: dict[str, Any]) -> None:
    edges, before, after = (histogram[key] for key in ("edges", "before", "after"))
    grid = [value for value in histogram.get("grid") or () if edges[0] <= value <= edges[-1]]
    top = max(*before, *after, 1e-12)
    # Of a fine grid, where no line could be told from the next, the feet alone.
    high, alpha = (1.0, 0.4) if len(grid) <= _LINES else (0.07, 0.5)
    axes.stairs(before, edges, fill=True, color=FILL, zorder=1)
    axes.vlines(grid, 0, high, transform=axes.get_xaxis_transform(), color=INK, linewidth=0.6, alpha=alpha, zorder=2)
    axes.stairs(after, edges, color=ACCENT, linewidth=1.2, zorder=3)
    # Rounding piles weights up on the grid: what is before stays readable where a pile is cut.
    shown = min(top, 3.2 * max(*before, 1e-12))
    axes.set_ylim(0, 1.06 * shown)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.tick_params(length=0, labelsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=3, symmetric=True))
