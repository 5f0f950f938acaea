"""Layouts: lossless rearrangements of a weight's bytes for one kernel family.

A layout is a pair of functions over :class:`Parts`. Files, pickles, slices and ``state_dict`` always see ``canonical``
(rows of packed codes, see :mod:`lowbit.packing`), so a layout is a choice of this run and never data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lowbit.catalog import Catalog
from lowbit.packing import packed_size
from lowbit.scheme import Scheme

from . import interleaved, mma_fragment

__all__ = ["LAYOUTS", "Layout", "Parts"]


class Parts(NamedTuple):
    """The tensors that a layout moves: ``packed`` [..., N, bytes], ``scale`` and ``zero_point`` [..., N, G]."""

    packed: Tensor
    scale: Tensor
    zero_point: Tensor | None


def _canonical_sizes(scheme: Scheme, n: int, k: int) -> tuple[int, int]:
    return packed_size(scheme.bits, k), scheme.groups(k) if k else 0


@dataclass(frozen=True)
class Layout:
    """A named bijection. ``arrange(parts, scheme, k)`` takes canonical parts, ``restore`` gives them back bit for bit.

    ``sizes(scheme, n, k)``: the last dimensions of ``packed`` and of ``scale`` for a weight [n, k] in this layout. ``rows``: rows
    that are stored together; weights with multiples of as many can be concatenated. ``is_looked_up``: whether embeddings, whose
    rows are looked up one by one, are stored so, too.
    """

    name: str
    arrange: Callable[[Parts, Scheme, int], Parts]
    restore: Callable[[Parts, Scheme, int], Parts]
    sizes: Callable[[Scheme, int, int], tuple[int, int]] = _canonical_sizes
    rows: int = 1
    is_looked_up: bool = True


def _same(parts: Parts, scheme: Scheme, k: int) -> Parts:
    return parts


def _to_mma_fragment(parts: Parts, scheme: Scheme, k: int) -> Parts:
    return Parts(*mma_fragment.arrange(*parts, scheme, k))


def _from_mma_fragment(parts: Parts, scheme: Scheme, k: int) -> Parts:
    return Parts(*mma_fragment.restore(*parts, scheme, k))


def _interleave(parts: Parts, scheme: Scheme, k: int) -> Parts:
    return Parts(*interleaved.arrange(*parts, scheme, k))


def _from_interleaved(parts: Parts, scheme: Scheme, k: int) -> Parts:
    return Parts(*interleaved.restore(*parts, scheme, k))


def _check(name: str, layout: Layout) -> None:
    if not isinstance(layout, Layout):
        raise TypeError(f"LAYOUTS[{name!r}] must be a Layout, got {type(layout).__name__}")
    if layout.name != name:
        raise ValueError(f"the layout {layout.name!r} stands under its own name alone, got {name!r}")


LAYOUTS: Catalog[Layout] = Catalog(
    "LAYOUTS",
    {
        "canonical": Layout("canonical", _same, _same),
        "mma_fragment": Layout("mma_fragment", _to_mma_fragment, _from_mma_fragment, mma_fragment.sizes, mma_fragment.ROWS),
        "interleaved": Layout("interleaved", _interleave, _from_interleaved, rows=interleaved.ROWS, is_looked_up=False),
    },
    _check,
)
