# mypy: disallow-untyped-defs=False
# ruff: noqa: N803, N806 - compile-time constants of a kernel are written in capitals
"""Codes as the bits of bfloat16 or float16, for products on the tensor cores."""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import _INTEGERS


@triton.jit
def as_float_bits(
    codes, DTYPE: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, FLIP: tl.constexpr, MANTISSA: tl.constexpr,
    SPECIAL: tl.constexpr,
):  # fmt: skip
    """int16 bits: of an integer 128 + code in bfloat16 or 1024 + code in float16, exact; of a float its sign, exponent and
    mantissa in the place of the dtype's, smaller by a power of two.
    """
    if KIND == _INTEGERS:
        bits = (codes ^ FLIP) | (0x6400 if tl.float16 == DTYPE else 0x4300)
    else:
        SHIFT: tl.constexpr = (10 if tl.float16 == DTYPE else 7) - MANTISSA
        magnitude = codes & ((1 << (BITS - 1)) - 1)
        bits = ((codes >> (BITS - 1)) << 15) | (magnitude << SHIFT)
        if SPECIAL > 0:
            bits = tl.where(magnitude >= SPECIAL, bits | (0x7C00 if tl.float16 == DTYPE else 0x7F80), bits)
    return bits.to(tl.int16)


_TO_EIGHT = tl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r")


@triton.jit
def words_as_floats(first, second, third, BITS: tl.constexpr, ASM: tl.constexpr):
    """The int16 bits of the eight fields of each word, by the PTX of :mod:`.assembly` for the format."""
    if BITS == 8:
        words = (first, second)
    else:
        words = (first,) if BITS >= 4 else (first.to(tl.int16),)  # type: ignore[assignment]
        if BITS == 3 or BITS > 4:
            words = words + (second.to(tl.int16),)  # type: ignore[assignment] # noqa: RUF005
        if BITS == 7:
            words = words + (third.to(tl.int16),)  # type: ignore[assignment] # noqa: RUF005
    return tl.inline_asm_elementwise(
        ASM,
        _TO_EIGHT + ",r" * (4 if BITS == 8 else BITS // 4 * 2 + BITS // 2 % 2 + BITS % 2),
        words,
        dtype=(tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16),
        is_pure=True,
        pack=2,
    )
