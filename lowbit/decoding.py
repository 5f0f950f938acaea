"""How the codes of a format become numbers, as a kernel computes it: read off the table of its numbers, so any format has one.

``Format.decoding`` is what the kernels of PyTorch, Triton and C++ are handed. Nothing else asks which family a format is of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["FLOATS", "INTEGERS", "POWERS", "TABLE", "Decoding", "decoding_of"]

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


def decoding_of(values: Sequence[float]) -> Decoding:
    """The decoding of the format with these numbers."""
    half = len(values) // 2
    step = abs(values[1])
    for flip in (0, half):
        integers = [(code ^ flip) - flip for code in range(2 * half)]
        if step and math.frexp(step)[0] == 0.5 and list(values) == [i * step for i in integers]:
            return Decoding(INTEGERS, flip=flip, factor=step)
    for mantissa in range(len(values).bit_length() - 2):
        if (found := _as_float(values, mantissa)) is not None:
            return found
    powers = [math.ldexp(1.0, code - 127) for code in range(255)]
    return Decoding(POWERS) if list(values[:255]) == powers and math.isnan(values[255]) else Decoding(TABLE)


def _as_float(values: Sequence[float], mantissa: int) -> Decoding | None:
    """The decoding of ``values`` as floats of so many mantissa bits; None if it holds other numbers."""
    half, top = len(values) // 2, 1 << mantissa
    magnitudes = [
        math.ldexp(m, -mantissa) if m < top else math.ldexp(top + m % top, m // top - 1 - mantissa) for m in range(half)
    ]
    finite = next((code for code, value in enumerate(values[:half]) if not math.isfinite(value)), half)
    if finite < 2:
        return None
    unit = values[1] / magnitudes[1]
    if unit <= 0 or math.frexp(unit)[0] != 0.5 or not -126 <= math.log2(unit) <= 1:
        return None
    inf_or_nan = [math.inf if m % top == 0 else math.nan for m in range(finite, half)]
    wanted = [magnitude * unit for magnitude in magnitudes[:finite]] + inf_or_nan
    if any(_unlike(a, b) for a, b in zip(values, wanted + [-v for v in wanted], strict=True)):
        return None
    # Where float32 has them the numbers are those of a bias of 127.
    return Decoding(FLOATS, mantissa=mantissa, special=finite if finite < half else 0, factor=unit * 2.0**126)


def _unlike(a: float, b: float) -> bool:
    return math.isnan(a) != math.isnan(b) or (not math.isnan(a) and (a != b or math.copysign(1, a) != math.copysign(1, b)))
