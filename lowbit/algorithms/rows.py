"""Work on a slice of a weight's rows at a time, so that what is tried on the way takes little memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..grid import Scales
from ..scales import outer_of
from ..scheme import Scheme

__all__ = ["find_by_rows", "slices"]

_NUMBERS = {"cpu": 1 << 18}  # in a slice: what a core's cache holds
_LARGE = 1 << 24  # on any other device, where each operation has a price of its own


def slices(weight: Tensor, least: int = 1) -> Iterator[Tensor]:
    """``weight`` [N, K] in slices of its rows; one at least. ``least``: rows in a slice, for products with a large matrix."""
    rows = _NUMBERS.get(weight.device.type, _LARGE) // max(weight.shape[1], 1)
    yield from weight.split(max(rows, least))


def find_by_rows(weight: Tensor, scheme: Scheme, find: Callable[[Tensor, Tensor | None], Scales]) -> Scales:
    """Scales of ``weight`` [N, K], found for a slice of rows at a time: ``find(rows, outer)``, under the outer scale of all."""
    outer = outer_of(weight, scheme)
    found = [find(rows, outer) for rows in slices(weight)]
    zero = [scales.zero_point for scales in found if scales.zero_point is not None]
    return Scales(torch.cat([scales.scale for scales in found]), torch.cat(zero) if zero else None, outer)
