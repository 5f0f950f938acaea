"""What a kernel is told of a format gives back the format's table, for formats that nobody has registered too."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from lowbit.decoding import FLOATS, INTEGERS, POWERS, TABLE, Decoding
from lowbit.formats import FORMATS, Format
from tests.support.strategies import formats, random_formats


def numbers(how: Decoding, bits: int) -> np.ndarray:
    """The numbers of all codes as the kernels compute them, float32."""
    codes = np.arange(1 << bits, dtype=np.uint32)
    if how.kind == INTEGERS:
        return ((codes ^ how.flip).astype(np.float32) - np.float32(how.flip)) * np.float32(how.factor)
    if how.kind == FLOATS:
        magnitude = codes & ((1 << (bits - 1)) - 1)
        placed = (codes >> (bits - 1) << 31) | (magnitude << (23 - how.mantissa))
        if how.special:
            placed = np.where(magnitude >= how.special, placed | 0x7F800000, placed)
        with np.errstate(invalid="ignore"):  # of NaN that signal
            return placed.astype(np.uint32).view(np.float32) * np.float32(how.factor)
    assert how.kind == POWERS
    placed = np.where(codes == 0, 0x00400000, np.where(codes == 255, 0x7FC00000, codes << 23))
    return placed.astype(np.uint32).view(np.float32)


@given(formats | random_formats)
def test_a_decoding_gives_the_table(fmt: Format) -> None:
    how = fmt.decoding
    if how.kind != TABLE:
        found, exact = numbers(how, fmt.bits), np.array(fmt.values, dtype=np.float32)
        assert np.array_equal(found, exact, equal_nan=True)
        if how.kind == FLOATS:
            assert np.array_equal(np.signbit(found)[~np.isnan(exact)], np.signbit(exact)[~np.isnan(exact)])


@pytest.mark.parametrize("kind", [INTEGERS, FLOATS, POWERS, TABLE])
def test_no_kind_is_for_nothing(kind: int) -> None:
    assert any(fmt.decoding.kind == kind for fmt in FORMATS.values())


@pytest.mark.parametrize("name", ["int4", "uint8", "mxint8", "fp4_e2m1", "fp6_e3m2", "fp8_e4m3fn", "fp8_e5m2"])
def test_usual_formats_need_no_table(name: str) -> None:
    assert FORMATS[name].decoding.kind != TABLE
