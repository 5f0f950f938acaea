"""Names of layers that differ in numbers alone, as one: what tables of a whole model are short by."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

__all__ = ["elided", "grouped"]

T = TypeVar("T")


def grouped(layers: Iterable[T], name: Callable[[T], str], alike: Callable[[T], Hashable]) -> list[tuple[str, list[T]]]:
    """``layers`` whose names differ in numbers alone and that are ``alike``, in the order of the first of each, with a name for
    all: ``model.layers.0-27.mlp.up_proj``."""
    groups: dict[Hashable, list[T]] = {}
    for layer in layers:
        groups.setdefault((re.sub(r"(?<=\.)\d+(?=\.)", "#", f".{name(layer)}."), alike(layer)), []).append(layer)
    return [(_name_of([name(layer) for layer in group]), group) for group in groups.values()]


def _name_of(names: list[str]) -> str:
    parts = []
    for column in zip(*(one.split(".") for one in names), strict=True):
        values = list(dict.fromkeys(column))
        parts.append(values[0] if len(values) == 1 else _ranges(sorted(map(int, values))))
    return ".".join(parts)


def _ranges(numbers: list[int]) -> str:
    """0-3,5,7-9."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def elided(text: str, width: int) -> str:
    """``text`` in ``width`` characters, cut in its middle where it has more."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"
