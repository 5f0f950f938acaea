"""A QTensor times a number, in place: where its scales take the number exactly no code is rounded again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .formats import Format, get_format
from .qtensor import QTensor
from .scheme import PLAIN_SCALES
from .tensor_writes import _put, _upright

__all__ = ["multiply"]


def multiply(q: QTensor, factor: Any, inverse: bool = False) -> bool:
    """Multiply ``q`` by the number ``factor`` (divide, where ``inverse``), in place, if its scales can be: whether it is done.

    A power of two that leads out of no scale's range can; so can any number that all scales take without being rounded.
    """
    if not isinstance(factor, (int, float)) or not 0 < factor < float("inf"):
        return False
    old = _upright(q)
    scale: Tensor | None = old.scale
    outer = old.outer
    if outer is not None:
        if (outer := _times(outer, factor, inverse)) is None:
            return False
    elif old.scheme.scale in PLAIN_SCALES:
        scale = _times(old.scale, factor, inverse)
    else:
        scale = _coded_times(old.scale, get_format(old.scheme.scale), factor, inverse)
    if scale is None:
        return False
    _put(q, QTensor(old.packed, scale, old.zero_point, outer, old.scheme, old._stored_shape, old.dtype))
    return True


def _coded_times(codes: Tensor, form: Format, factor: float, inverse: bool) -> Tensor | None:
    """The codes of ``form`` of what ``codes`` stand for times ``factor``, or over it; None where one of them has none."""
    values = _times(form.decode(codes, torch.float64), factor, inverse)
    found = None if values is None else form.nearest(values)
    return found if found is not None and torch.equal(form.decode(found, torch.float64), values) else None  # type: ignore[arg-type]


def _times(numbers: Tensor, factor: float, inverse: bool) -> Tensor | None:
    """``numbers`` times ``factor``, or over it; None where their dtype cannot hold each of them exactly."""
    wide = numbers.double()
    exact = wide / factor if inverse else wide * factor
    found = exact.to(numbers.dtype)
    back = found.double() * factor if inverse else found.double()
    return found if torch.equal(back, wide if inverse else exact) else None
