"""Layouts: lossless rearrangements of a weight's bytes for one kernel family.

A layout is a pair of functions over :class:`Parts`. Files, pickles, slices and ``state_dict`` always see ``canonical``
(rows of packed codes, see :mod:`lowbit.packing`), so a layout is a choice of this run and never data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lowbit.scheme import Scheme

__all__ = ["LAYOUTS", "Layout", "Parts"]


class Parts(NamedTuple):
    """The tensors that a layout moves: ``packed`` [..., N, bytes], ``scale`` and ``zero_point`` [..., N, G]."""

    packed: Tensor
    scale: Tensor
    zero_point: Tensor | None


@dataclass(frozen=True)
class Layout:
    """A named bijection. ``arrange(parts, scheme, k)`` takes canonical parts, ``restore`` gives them back bit for bit."""

    name: str
    arrange: Callable[[Parts, Scheme, int], Parts]
    restore: Callable[[Parts, Scheme, int], Parts]


def _same(parts: Parts, scheme: Scheme, k: int) -> Parts:
    return parts


LAYOUTS: dict[str, Layout] = {"canonical": Layout("canonical", _same, _same)}
