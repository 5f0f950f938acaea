"""Where the names of points go, so that they stand neither on each other nor on what is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = ["Name", "place", "short", "tail"]

_LETTER, _LINE = 0.58, 1.15  # of the type size: the width of a letter, the height of a line
# Sides of a point in the order of preference: how far right and up in parts of the name's own size, and its anchor.
_SIDES = ((0.0, 1, "left"), (0.0, -1, "left"), (-1.0, 1, "right"), (-1.0, -1, "right"), (-0.5, 1, "center"), (-0.5, -1, "center"))
_Box = tuple[float, float, float, float]  # left, bottom, right, top


class Name(NamedTuple):
    """A name for the point at ``x`` and ``y`` of the data, whose whisker reaches from ``low`` to ``high``."""

    text: str
    x: float
    y: float
    low: float
    high: float
    color: str
    strong: bool


def short(name: str, longest: int = 22) -> str:
    """A recipe's name for a chart: what its activations become said in brief, and its middle left out where it is long."""
    activation, cut, weight = name.partition("_dynamic_activation_")
    if cut and weight.endswith("_weight"):
        name = f"{weight.removesuffix('_weight')}, x {activation}"
    return name if len(name) <= longest else f"{name[: longest // 2]}…{name[-(longest - longest // 2 - 1) :]}"


def tail(name: str, longest: int) -> str:
    """The end of a layer's name, which tells it from others."""
    return name if len(name) <= longest else f"…{name[1 - longest :]}"


def place(axes: Any, names: Sequence[Name], size: float, line: float | None = None) -> None:
    """Write ``names`` into ``axes``, whose limits and place must be final; the first have the first choice.

    ``line``: a value of the data at which a line runs across.
    """
    taken: list[_Box] = []
    for name in names:
        (x, low), (_, y), (_, high) = (axes.transData.transform((name.x, value)) for value in (name.low, name.y, name.high))
        taken += [(x - 2, low, x + 2, high), (x - 4, y - 4, x + 4, y + 4)]
    frame = axes.get_window_extent()
    if line is not None:
        _, across = axes.transData.transform((names[0].x, line))
        taken.append((frame.x0, across - 1, frame.x1, across + 1))
    for name in names:
        x, y = axes.transData.transform((name.x, name.y))
        boxes = _boxes(x, y, _LETTER * size * len(name.text), _LINE * size)
        costs = [_cost(box, taken, frame) + 0.02 * far for far, (box, _) in enumerate(boxes)]
        box, anchor = boxes[costs.index(min(costs))]
        taken.append(box)
        left, bottom, right, top = box
        at = {"left": left, "right": right, "center": (left + right) / 2}[anchor], (bottom + top) / 2
        spot = axes.transData.inverted().transform(at)
        weight = "bold" if name.strong else "normal"
        axes.text(*spot, name.text, ha=anchor, va="center", fontsize=size, color=name.color, weight=weight)


def _boxes(x: float, y: float, width: float, height: float) -> list[tuple[_Box, str]]:
    """Places for a name, the nearest first."""
    found = []
    for away in (2, 9, 18, 30, 44):
        for across, up, anchor in _SIDES:
            left = x + across * width + {"left": 5, "right": -5, "center": 0}[anchor]
            bottom = y + away if up > 0 else y - away - height
            found.append(((left, bottom, left + width, bottom + height), anchor))
    return found


def _cost(box: _Box, taken: Sequence[_Box], frame: Any) -> float:
    """Pixels of ``box`` that are taken or outside of the frame, in parts of its own."""
    left, bottom, right, top = box
    area = max((right - left) * (top - bottom), 1.0)
    inside = max(0.0, min(right, frame.x1 + 4) - max(left, frame.x0)) * max(0.0, min(top, frame.y1) - max(bottom, frame.y0))
    covered = sum(
        max(0.0, min(right, r) - max(left, l)) * max(0.0, min(top, t) - max(bottom, b))
        for l, b, r, t in taken  # noqa: E741
    )
    return covered / area + 3 * (1 - inside / area)
