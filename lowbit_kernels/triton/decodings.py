"""How a kernel turns the codes of a format into numbers: read off the format's table, so that any format has one."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.formats import Format, format_named

__all__ = ["FLOATS", "INTEGERS", "POWERS", "TABLE", "Decoding", "decoding", "table_of"]

INTEGERS, FLOATS, POWERS, TABLE = range(4)


class Decoding(NamedTuple):
    """``INTEGERS``: ``((code ^ flip) - flip) * factor``. ``FLOATS``: a sign, exponent and ``mantissa`` bits, which stand for a
    float's number once they lie where float32 has them and are multiplied by ``factor``; magnitudes from ``special`` on are
    infinite or NaN. ``POWERS``: e8m0. ``TABLE``: the number stands in a table."""

    kind: int
    flip: int = 0
    mantissa: int = 0
    special: int = 0
    factor: float = 1.0


def decoding(name: str) -> Decoding:
    """The decoding of the format called ``name``."""
    return _decoding(format_named(name))


@lru_cache(maxsize=256)
def _decoding(fmt: Format) -> Decoding:
    half = len(fmt.values) // 2
    step = abs(fmt.values[1])
    for flip in (0, half):
        integers = [(code ^ flip) - flip for code in range(2 * half)]
        if step and math.frexp(step)[0] == 0.5 and list(fmt.values) == [i * step for i in integers]:
            return Decoding(INTEGERS, flip=flip, factor=step)
    for mantissa in range(fmt.bits - 1):
        if (found := _as_float(fmt, mantissa)) is not None:
            return found
    powers = [math.ldexp(1.0, code - 127) for code in range(255)]
    return Decoding(POWERS) if list(fmt.values[:255]) == powers and math.isnan(fmt.values[255]) else Decoding(TABLE)


def _as_float(fmt: Format, mantissa: int) -> Decoding | None:
    """The decoding of ``fmt`` as floats of so many mantissa bits; None if it holds other numbers."""
    half, top = len(fmt.values) // 2, 1 << mantissa
    magnitudes = [
        math.ldexp(m, -mantissa) if m < top else math.ldexp(top + m % top, m // top - 1 - mantissa) for m in range(half)
    ]
    finite = next((code for code, value in enumerate(fmt.values[:half]) if not math.isfinite(value)), half)
    if finite < 2:
        return None
    unit = fmt.values[1] / magnitudes[1]
    if unit <= 0 or math.frexp(unit)[0] != 0.5 or not -126 <= math.log2(unit) <= 1:
        return None
    inf_or_nan = [math.inf if m % top == 0 else math.nan for m in range(finite, half)]
    wanted = [magnitude * unit for magnitude in magnitudes[:finite]] + inf_or_nan
    if any(_unlike(a, b) for a, b in zip(fmt.values, wanted + [-v for v in wanted], strict=True)):
        return None
    # Where float32 has them the numbers are those of a bias of 127.
    return Decoding(FLOATS, mantissa=mantissa, special=finite if finite < half else 0, factor=unit * 2.0**126)


def _unlike(a: float, b: float) -> bool:
    return math.isnan(a) != math.isnan(b) or (not math.isnan(a) and (a != b or math.copysign(1, a) != math.copysign(1, b)))


_tables: dict[tuple[str, torch.device], tuple[Format, Tensor]] = {}


def table_of(name: str, device: torch.device) -> Tensor:
    """The numbers of a format, float32 [2**bits] on ``device``: kept, so that a CUDA graph can capture its use."""
    known = _tables.get((name, device))
    if known is None or known[0] is not format_named(name):
        fmt = format_named(name)
        with torch.inference_mode(False), torch.no_grad():
            known = _tables[name, device] = (fmt, torch.tensor(fmt.values, dtype=torch.float32, device=device))
    return known[1]
