"""The multiple-choice knapsack: one option of each class, the least cost in all, within a capacity. Solved exactly.

States (size and cost so far) are carried from class to class; of two the one that is both larger and dearer goes, and so does
every state that cannot lead to a better whole than one that is known: Dudzinski and Walukiewicz, "Exact methods for the
knapsack problem and its generalizations", 1987. The bound is that of the Lagrangian relaxation. Sizes are whole numbers, so
that no rounding decides what fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

__all__ = ["Option", "cheapest"]

_SLACK = 1e-9  # of the costs: sums in another order differ in the last bits, and must not cost the best choice its place


class Option(NamedTuple):
    """``size``: a whole number, at least 0. ``cost``: finite."""

    size: int
    cost: float


def cheapest(classes: Sequence[Sequence[Option]], capacity: int) -> list[int]:
    """The place of the option to take of each class: the least sum of costs whose sum of sizes is at most ``capacity``.

    Of equally cheap choices one of the smallest. Memory and time grow with the states that have to be kept, at most one for
    each size; with costs that fall with size, as those of quantization do, they are few. Raises ``ValueError`` where even the
    smallest options do not fit, and for a class without options.
    """
    if any(not options for options in classes):
        raise ValueError("every class needs an option to choose")
    least = sum(min(option.size for option in options) for options in classes)
    if least > capacity:
        raise ValueError(f"the smallest options take {least} and the capacity is {capacity}")
    price, known = _relaxed(classes, capacity)
    # The classes about which the relaxation is surest come first: their other options go at once.
    order = sorted(range(len(classes)), key=lambda i: -_gap(classes[i], price))
    sizes = [np.array([option.size for option in classes[i]], dtype=np.int64) for i in order]
    costs = [np.array([option.cost for option in classes[i]], dtype=np.float64) for i in order]
    rest_size = _suffixes([float(s.min()) for s in sizes])
    rest_bound = _suffixes([float((c + price * s).min()) for s, c in zip(sizes, costs, strict=True)])
    limit = known + _SLACK * (1 + sum(float(np.abs(c).max()) for c in costs))
    size, cost = np.zeros(1, dtype=np.int64), np.zeros(1)
    steps: list[tuple[np.ndarray, np.ndarray]] = []  # of each state where it came from and what it took
    for i, (s, c) in enumerate(zip(sizes, costs, strict=True)):
        new_size, new_cost = (size[:, None] + s).ravel(), (cost[:, None] + c).ravel()
        fits = new_size <= capacity - int(rest_size[i + 1])
        bound = new_cost + rest_bound[i + 1] - price * (capacity - new_size)
        undominated = np.flatnonzero(fits & (bound <= limit))
        undominated = undominated[np.lexsort((new_cost[undominated], new_size[undominated]))]
        below = np.minimum.accumulate(new_cost[undominated])
        undominated = undominated[np.concatenate(([True], new_cost[undominated][1:] < below[:-1]))]
        size, cost = new_size[undominated], new_cost[undominated]
        steps.append((undominated // len(s), undominated % len(s)))
    state, choice = int(cost.argmin()), [0] * len(classes)
    for i, (parents, chosen) in zip(reversed(order), reversed(steps), strict=True):
        choice[i] = int(chosen[state])
        state = int(parents[state])
    return choice


def _relaxed(classes: Sequence[Sequence[Option]], capacity: int) -> tuple[float, float]:
    """The price of a unit of size under which options chosen apart just about fill the capacity, and the cost of a choice
    that fits."""
    room, cost = capacity, 0.0
    steps: list[tuple[float, int, int, int, float]] = []  # (what a unit gains, class, order in it, size, gain)
    for i, options in enumerate(classes):
        hull = _hull(options)
        room, cost = room - hull[0].size, cost + hull[0].cost
        for n, (a, b) in enumerate(pairwise(hull)):
            steps.append(((a.cost - b.cost) / (b.size - a.size), i, n, b.size - a.size, a.cost - b.cost))
    price, stopped = 0.0, set()
    for worth, i, _, size, gain in sorted(steps, key=lambda step: (-step[0], step[1], step[2])):
        if i in stopped:
            continue
        if size > room:
            price = price or worth
            stopped.add(i)  # its later steps stand on this one
            continue
        room, cost = room - size, cost - gain
    return price, cost


def _hull(options: Sequence[Option]) -> list[Option]:
    """The options on the lower convex hull, from the smallest to the cheapest."""
    hull: list[Option] = []
    for option in sorted(options):
        if hull and option.cost >= hull[-1].cost:
            continue
        while len(hull) > 1 and _above(hull[-2], hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull


def _above(a: Option, b: Option, c: Option) -> bool:
    """Whether ``b`` lies on or above the line from ``a`` to ``c``."""
    return (b.cost - a.cost) * (c.size - a.size) >= (c.cost - a.cost) * (b.size - a.size)


def _gap(options: Sequence[Option], price: float) -> float:
    """By how much the second best option is worse than the best, at this price of a unit of size."""
    costs = sorted(option.cost + price * option.size for option in options)
    return costs[1] - costs[0] if len(costs) > 1 else float("inf")


def _suffixes(values: list[float]) -> list[float]:
    """The sums of ``values`` from each place on."""
    found = [0.0]
    for value in reversed(values):
        found.append(found[-1] + value)
    return found[::-1]
