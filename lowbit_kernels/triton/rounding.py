# mypy: disallow-untyped-defs=False
# ruff: noqa: N803, N806 - compile-time constants of a kernel are written in capitals
"""Rounding and packing inside Triton kernels, the inverse of :mod:`.codes`, bit for bit as the reference."""

from __future__ import annotations

import triton
import triton.language as tl

from lowbit.decoding import FLOATS, INTEGERS

_INTEGERS = tl.constexpr(INTEGERS)
_FLOATS = tl.constexpr(FLOATS)


@triton.jit
def divided(x, by):
    """``x / by`` in float32 as IEEE rounds it, which Triton's division does not guarantee; x / 0 is 0."""
    return tl.math.div_rn(x, tl.where(by == 0.0, float("inf"), by) + tl.zeros_like(x))


@triton.jit
def nearest(
    x, thresholds_ptr, order_ptr, KIND: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr, FIRST: tl.constexpr,
    INVERSE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, NAN: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """int32 codes of the numbers nearest to ``x`` (float32), ties to even, by an :class:`~.encodings.Encoding`."""
    if KIND == _INTEGERS:
        whole = tl.minimum(tl.maximum(tl.where(x == x, x, 0.0) * INVERSE, LOW), HIGH)
        # 1.5 * 2**23: the low bits of the sum are the integer, rounded to nearest, ties to even.
        codes = (whole + 12582912.0).to(tl.int32, bitcast=True) & ((1 << BITS) - 1)
    elif KIND == _FLOATS:
        # 2**23 times the distance of neighbouring values: the sum's low bits count such distances.
        size = tl.minimum(tl.abs(tl.where(x == x, x, 0.0)), HIGH)
        exponent = tl.maximum(size.to(tl.int32, bitcast=True) >> 23, FIRST)
        ruler = (exponent + (23 - MANTISSA)) << 23
        distances = (size + ruler.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - ruler
        sign = (x.to(tl.int32, bitcast=True) >> 31) & 1
        codes = (sign << (BITS - 1)) | (distances + ((exponent - FIRST) << MANTISSA))
        if NAN >= 0:
            codes = tl.where(x == x, codes, NAN)
    else:
        place = tl.zeros(x.shape, tl.int32)
        for i in tl.static_range(COUNT - 1):
            place += (x > tl.load(thresholds_ptr + i)).to(tl.int32)
        codes = tl.load(order_ptr + place).to(tl.int32)
    return codes


@triton.jit
def bfloat16_bits(x):
    """Bits of ``x`` (float32, not NaN) rounded to bfloat16, ties to even: int32. Interpreters would truncate."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


@triton.jit
def _store_plane(rows, mask, word, codes, K, WIDTH: tl.constexpr, AT: tl.constexpr, ALIGNED: tl.constexpr):
    """Bits ``AT`` to ``AT + WIDTH`` of codes [R, B, 8] as words ``word`` [B] of the plane that starts at the pointers ``rows``
    [R]. ``mask`` [R, B]."""
    shifts = tl.arange(0, 8) * WIDTH
    words = tl.sum(((codes >> AT) & ((1 << WIDTH) - 1)) << shifts[None, None, :], axis=2).to(tl.int32)
    if ALIGNED and WIDTH == 4:
        tl.store(rows.to(tl.pointer_type(tl.int32))[:, None] + word[None, :], words, mask=mask)
    elif ALIGNED and WIDTH == 2:
        tl.store(rows.to(tl.pointer_type(tl.int16))[:, None] + word[None, :], words.to(tl.int16), mask=mask)
    else:
        for byte in tl.static_range(WIDTH):
            column = word * WIDTH + byte
            target = mask & (column < (K * WIDTH + 7) // 8)[None, :]
            tl.store(rows[:, None] + column[None, :], ((words >> (8 * byte)) & 0xFF).to(tl.uint8), mask=target)


@triton.jit
def store_codes(rows, mask, word, codes, K, BITS: tl.constexpr, ALIGNED: tl.constexpr):
    """Codes [R, B, 8] as words ``word`` [B] of the packed rows at the pointers ``rows`` [R]; see :mod:`lowbit.packing`.

    ``ALIGNED``: words start at multiples of their size and K is a multiple of eight.
    """
    if BITS == 8:
        column = word[:, None] * 8 + tl.arange(0, 8)[None, :]
        target = mask[:, :, None] & (column < K)[None, :, :]
        tl.store(rows[:, None, None] + column[None, :, :], codes.to(tl.uint8), mask=target)
    else:
        FIRST: tl.constexpr = 4 if BITS >= 4 else 2 if BITS >= 2 else 1
        _store_plane(rows, mask, word, codes, K, FIRST, 0, ALIGNED)
        plane = rows + (K * FIRST + 7) // 8
        if BITS == 6 or BITS == 7:
            _store_plane(plane, mask, word, codes, K, 2, 4, ALIGNED)
            plane += (K * 2 + 7) // 8
        if BITS == 3 or BITS == 5:
            _store_plane(plane, mask, word, codes, K, 1, FIRST, ALIGNED)
        if BITS == 7:
            _store_plane(plane, mask, word, codes, K, 1, 6, ALIGNED)
