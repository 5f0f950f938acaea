"""What was lost against the bits of a weight, with intervals and the front of what nothing else beats."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from .drawing import ACCENT, INK, MUTED, PAPER, canvas, settle
from .entries import Entry, Runs, clean, finite, front
from .labels import Name, place, short

__all__ = ["accuracy"]

MARKS = "os^Dvp*h"
_APART = 0.14  # bits between the same recipe in two runs, so that neither hides the other
_LINEAR = 2.0  # points of difference up to which the scale is even where the worst recipe needs a compressed one
_TICKS = [0, *(sign * value for value in (1, 2, 5, 10, 20, 50, 100) for sign in (1, -1))]


@dataclass(frozen=True)
class _Point:
    entry: Entry
    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class _Panel:
    title: str
    unit: str
    points: list[_Point]
    log: bool  # a quantity above zero of which less is better; otherwise points of accuracy


def accuracy(runs: Runs, width: int) -> Figure | None:
    """A panel for each task, and one for the divergence; of the perplexity where there is neither."""
    panels = [panel for panel in (*(_of_task(runs, task) for task in runs.tasks), _of_divergence(runs)) if panel.points]
    panels = panels or [panel for panel in (_of_perplexity(runs),) if panel.points]
    if not panels:
        return None
    columns = 1 if width < 500 or len(panels) == 1 else 2
    lines = -(-len(panels) // columns)
    height = 330 if columns == 2 or width < 500 else 400
    figure = canvas(width, lines * height)
    drawn = [(figure.add_subplot(lines, columns, i + 1), panel) for i, panel in enumerate(panels)]
    for axes, panel in drawn:
        _frame(axes, panel)
    settle(figure)
    for axes, panel in drawn:
        _fill(axes, panel, runs)
    return figure


def _of_task(runs: Runs, task: str) -> _Panel:
    points = []
    for entry in runs.entries:
        found, bits = entry.difference(task), _place(entry, runs)
        if entry.is_float and entry.task(task) is not None and bits is not None:
            points.append(_Point(entry, bits, 0.0, 0.0, 0.0))
        elif found is not None and bits is not None:
            y, low, high = (100 * (finite(found[key]) or 0.0) for key in ("difference", "low", "high"))
            points.append(_Point(entry, bits, y, min(low, y), max(high, y)))
    asked = max((entry.difference(task) or {}).get("n", 0) for entry in runs.entries)
    compared = any(not point.entry.is_float for point in points)
    return _Panel(f"{clean(task, 24)}, {asked:,} questions", "points against float", points if compared else [], False)


def _of_divergence(runs: Runs) -> _Panel:
    points = []
    for entry in runs.entries:
        kl, bits = finite(entry.part("divergence").get("kl")), _place(entry, runs)
        if kl is not None and kl > 0 and bits is not None:
            low, high = (finite(entry.part("divergence").get(key)) for key in ("kl_low", "kl_high"))
            low = kl if low is None else max(min(low, kl), kl / 30)
            points.append(_Point(entry, bits, kl, low, kl if high is None else max(high, kl)))
    return _Panel("KL divergence from float", "nats a token, less is better", points, True)


def _of_perplexity(runs: Runs) -> _Panel:
    found = [(e, _place(e, runs), finite(e.part("perplexity").get("value"))) for e in runs.entries]
    points = [_Point(e, x, v, v, v) for e, x, v in found if x is not None and v is not None and v > 0]
    return _Panel("Perplexity", "less is better", points, True)


def _place(entry: Entry, runs: Runs) -> float | None:
    """Where a recipe stands on the axis of bits."""
    bits = finite(entry.bits)
    return None if bits is None else bits + _APART * (entry.run - (len(runs.results) - 1) / 2)


def _frame(axes: Any, panel: _Panel) -> None:
    """Title, scales and ticks: all that decides where the points will lie."""
    axes.set_title(panel.title)
    axes.set_xlabel("bits per weight")
    axes.set_ylabel(panel.unit)
    axes.grid(axis="y")
    axes.tick_params(length=0)
    xs = [point.x for point in panel.points]
    axes.set_xlim(max(0.0, min(xs) - 0.8), max(xs) + 0.12 * (max(xs) - min(xs) + 4))
    low, high = min(point.low for point in panel.points), max(point.high for point in panel.points)
    if panel.log:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.6, high * 2.2)
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
        return
    if low < -8 * _LINEAR:
        axes.set_yscale("symlog", linthresh=_LINEAR, linscale=1.1)
        axes.yaxis.set_major_locator(FixedLocator([tick for tick in _TICKS if low * 1.3 <= tick <= max(high, 1.0)]))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_ylim(low * 1.5, max(2 * high, 1.5))
    else:
        room = 0.12 * max(high - low, 1.0)
        axes.set_ylim(low - room, high + 1.6 * room)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+g}".replace("-", "\u2212") if value else "0"))


def _fill(axes: Any, panel: _Panel, runs: Runs) -> None:
    if not panel.log:
        axes.axhline(0, color=MUTED, linewidth=0.9)
    best = _front(panel)
    for run in range(len(runs.results)):
        points_of_run = sorted((p.x, p.y) for p, on in zip(panel.points, best, strict=True) if on and p.entry.run == run)
        axes.plot(*zip(*points_of_run, strict=True), color=ACCENT, linewidth=1, alpha=0.55, zorder=2) if len(
            points_of_run
        ) > 1 else None
    for point, on in zip(panel.points, best, strict=True):
        color = INK if point.entry.is_float else ACCENT if on else MUTED
        if point.high > point.low:
            axes.vlines(point.x, point.low, point.high, color=color, linewidth=1.3, zorder=3, capstyle="butt")
        face = color if on or point.entry.is_float else PAPER
        mark = MARKS[point.entry.run % len(MARKS)]
        axes.scatter([point.x], [point.y], s=34, marker=mark, color=face, edgecolors=color, linewidths=1.3, zorder=4)
    # The best first: they are what a reader looks for.
    order = sorted(zip(panel.points, best, strict=True), key=lambda pair: not pair[1])
    place(
        axes,
        [Name(_name(p.entry), p.x, p.y, p.low, p.high, INK if on else MUTED, on) for p, on in order],
        10,
        None if panel.log else 0.0,
    )


def _front(panel: _Panel) -> list[bool]:
    """Whether each point is on the front of its own run."""
    best = [False] * len(panel.points)
    for run in {point.entry.run for point in panel.points}:
        points_of_run = [i for i, point in enumerate(panel.points) if point.entry.run == run]
        loss = [math.log(panel.points[i].y) if panel.log else -panel.points[i].y for i in points_of_run]
        for i, on in zip(
            points_of_run, front([(panel.points[i].x, y) for i, y in zip(points_of_run, loss, strict=True)]), strict=True
        ):
            best[i] = on
    return best


def _name(entry: Entry) -> str:
    return f"{short(entry.recipe)} {entry.letter}".rstrip()
