"""How kernels encode a format: its values, and how the nearest code is found."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.decoding import FLOATS, INTEGERS, TABLE
from lowbit.formats import Format, get_format

__all__ = ["Encoding", "encoding", "steps_of", "table_of"]

_MAX = 16  # largest table that is searched linearly


class Encoding(NamedTuple):
    """``INTEGERS``: ``low`` to ``high`` times the format's step, 1 over ``inverse``. ``FLOATS``: so many bits of ``mantissa``;
    ``first``, the least normal exponent as float32 stores it; ``high``, the largest number; ``nan``, its code or -1.
    ``TABLE``: ``size`` numbers, searched."""

    kind: int
    mantissa: int = 0
    first: int = 0
    inverse: float = 1.0
    low: float = 0.0
    high: float = 0.0
    nan: int = -1
    size: int = 0

    @property
    def constants(self) -> dict[str, int | float]:
        """What :func:`.rounding.nearest` takes."""
        return {
            "KIND": self.kind, "MANTISSA": self.mantissa, "FIRST": self.first, "INVERSE": self.inverse,
            "LOW": self.low, "HIGH": self.high, "NAN": self.nan, "COUNT": self.size,
        }  # fmt: skip


def encoding(name: str) -> Encoding | None:
    """The encoding of the format called ``name``; None where no kernel rounds to it."""
    return _encoding(get_format(name))


@lru_cache(maxsize=256)
def _encoding(fmt: Format) -> Encoding | None:
    dec = fmt.decoding
    if dec.kind == INTEGERS and fmt.step is not None and fmt.nan is None:
        return Encoding(INTEGERS, inverse=1 / fmt.step, low=fmt.min / fmt.step, high=fmt.max / fmt.step)
    # The sign of zero is kept, and no code below the largest value is unused.
    if dec.kind == FLOATS and not fmt.unused and fmt.negative_zero is not None and fmt.max < 2.0**64:
        least = round(math.log2(dec.factor)) + 1
        if least + 23 - dec.mantissa > 0:
            nan = -1 if fmt.nan is None else fmt.nan
            return Encoding(FLOATS, mantissa=dec.mantissa, first=least, high=fmt.max, nan=nan)
    if dec.kind in (TABLE, INTEGERS) and len(fmt.numbers) <= _MAX and fmt.nan is None and fmt.negative_zero is None:
        return Encoding(TABLE, size=len(fmt.numbers))
    return None


_steps: dict[tuple[str, torch.device], tuple[Format, Tensor, Tensor]] = {}


def steps_of(name: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Boundaries between the values of a format (float32), and its codes in the order of values (uint8); cached, so that a CUDA
    graph can capture their use.
    """
    known = _steps.get((name, device))
    if known is None or known[0] is not get_format(name):
        fmt = get_format(name)
        with torch.inference_mode(False), torch.no_grad():
            thresholds = torch.tensor([*fmt._thresholds(torch.float32), math.inf], dtype=torch.float32, device=device)
            order = torch.tensor([code for _, code in fmt._grid], dtype=torch.uint8, device=device)
        known = _steps[name, device] = (fmt, thresholds, order)
    return known[1], known[2]


_tables: dict[tuple[str, torch.device], tuple[Format, Tensor]] = {}


def table_of(name: str, device: torch.device) -> Tensor:
    """The values of a format, float32 [2**bits] on ``device``; cached, so that a CUDA graph can capture their use."""
    known = _tables.get((name, device))
    if known is None or known[0] is not get_format(name):
        fmt = get_format(name)
        with torch.inference_mode(False), torch.no_grad():
            known = _tables[name, device] = (fmt, torch.tensor(fmt.values, dtype=torch.float32, device=device))
    return known[1]
