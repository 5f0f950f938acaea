"""What a layer reads in one run and in another: compared channel by channel, exactly, in memory of a few rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["SUBNORMAL", "InputRecord", "max_difference", "is_close", "sample_rows"]

_ROWS = 64  # that are compared, beside the largest number of each channel
SUBNORMAL = {torch.float16: 2.0**-24}
"""The step below the smallest normal number, in a dtype in which real numbers are as small as that."""


@dataclass
class InputRecord:
    """What a layer read in one call: for each channel its largest number and where it was, and some rows, exactly."""

    shape: tuple[int, ...]
    places: Tensor
    largest: Tensor
    rows: Tensor

    @staticmethod
    def of(x: Tensor, places: Tensor | None = None) -> InputRecord:
        flat = x.detach().reshape(-1, x.shape[-1])
        if places is None:
            places = flat.abs().nan_to_num(torch.inf).argmax(0) if len(flat) else torch.zeros(0, dtype=torch.long)
        largest = flat.gather(0, places[None])[0] if len(flat) else flat.new_zeros(flat.shape[1])
        return InputRecord(tuple(x.shape), places, _wide(largest), _wide(sample_rows(flat, _ROWS)))


def is_close(a: list[Tensor], b: list[Tensor]) -> bool:
    """Whether these are one result, but for numbers that the dtype of one holds with fewer digits than others, as below the
    smallest normal one: each within two units in its last place."""
    if len(a) != len(b) or not any(x.dtype in SUBNORMAL for x in b):
        return False
    for x, y in zip(a, b, strict=True):
        wide = y.double()
        room = 2 * torch.finfo(y.dtype).eps * torch.maximum(wide.abs(), wide.square().mean().sqrt() / 256)
        if x.shape != y.shape or not bool(((x.double() - wide).abs() <= room).all()):
            return False
    return True


def max_difference(a: list[Tensor], b: list[Tensor]) -> float:
    if len(a) != len(b) or any(x.shape != y.shape for x, y in zip(a, b, strict=True)):
        return math.inf
    return sum(float((x.double() - y.double()).square().sum()) for x, y in zip(a, b, strict=True)) ** 0.5


def sample_rows(rows: Tensor, count: int) -> Tensor:
    """At most ``count`` of ``rows``, from all parts of them, in memory of their own."""
    if len(rows) <= count:
        return rows.clone()
    return rows[torch.linspace(0, len(rows) - 1, count, dtype=torch.float64).long().to(rows.device)]


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
