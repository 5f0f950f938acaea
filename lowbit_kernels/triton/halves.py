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
    mantissa where the dtype has them, a power of two too small."""
    if KIND == _INTEGERS:
        bits = (codes ^ FLIP) | (0x6400 if tl.float16 == DTYPE else 0x4300)
    else:
        SHIFT: tl.constexpr = (10 if tl.float16 == DTYPE else 7) - MANTISSA
        magnitude = codes & ((1 << (BITS - 1)) - 1)
        bits = ((codes >> (BITS - 1)) << 15) | (magnitude << SHIFT)
        if SPECIAL > 0:
            bits = tl.where(magnitude >= SPECIAL, bits | (0x7C00 if tl.float16 == DTYPE else 0x7F80), bits)
    return bits.to(tl.int16)


def _assembly(lines: list[str]) -> tl.constexpr:
    """PTX that takes two words ($8, $9), puts their lower halves side by side into l and their upper ones into h, and fills
    the eight registers $0 ... $7 with fields 0 ... 7 of both."""
    head = ["{", ".reg .b32 l, h, s, t;", "prmt.b32 l, $8, $9, 0x5410;", "prmt.b32 h, $8, $9, 0x7632;"]
    return tl.constexpr("\n".join([*head, *lines, "}"]))


def _shifted(to: str, word: str, by: int) -> str:
    return f"shr.b32 {to}, {word}, {by};" if by >= 0 else f"shl.b32 {to}, {word}, {-by};"


def _integers(magic: int, flip: int) -> tl.constexpr:
    lines = []
    for j in range(8):
        lines += [_shifted("t", "lh"[j // 4], j % 4 * 4)]
        lines += [f"lop3.b32 ${j}, t, 0x000F000F, {hex((magic | flip) * 0x10001)}, 0x6A;"]  # (t & fields) ^ magic
    return _assembly(lines)


def _floats(shift: int) -> tl.constexpr:
    lines = []
    for j in range(8):
        word, at = "lh"[j // 4], j % 4 * 4
        lines += [_shifted("s", word, at + 3 - 15), _shifted("t", word, at - shift), "and.b32 s, s, 0x80008000;"]
        lines += [f"lop3.b32 ${j}, t, {hex((7 << shift) * 0x10001)}, s, 0xEA;"]  # (t & magnitudes) | s
    return _assembly(lines)


_BF16, _BF16_FLIPPED, _FP16, _FP16_FLIPPED = (_integers(magic, flip) for magic in (0x4300, 0x6400) for flip in (0, 8))
_SHIFTED_BF16_1, _SHIFTED_BF16_0 = _floats(6), _floats(7)
_SHIFTED_FP16_1, _SHIFTED_FP16_0 = _floats(9), _floats(10)


@triton.jit
def nibbles_as_floats(words, DTYPE: tl.constexpr, KIND: tl.constexpr, FLIP: tl.constexpr, MANTISSA: tl.constexpr):
    """:func:`as_float_bits` of all eight codes of four bits of each word, two words at a time: half the instructions."""
    tl.static_assert(KIND != _INTEGERS or FLIP == 0 or FLIP == 8)
    tl.static_assert(KIND == _INTEGERS or MANTISSA <= 1)
    integers: tl.constexpr = (
        (_FP16_FLIPPED if FLIP == 8 else _FP16) if tl.float16 == DTYPE else (_BF16_FLIPPED if FLIP == 8 else _BF16)
    )
    floats: tl.constexpr = (
        (_SHIFTED_FP16_1 if MANTISSA == 1 else _SHIFTED_FP16_0)
        if tl.float16 == DTYPE
        else (_SHIFTED_BF16_1 if MANTISSA == 1 else _SHIFTED_BF16_0)
    )
    return tl.inline_asm_elementwise(
        integers if KIND == _INTEGERS else floats,
        "=r,=r,=r,=r,=r,=r,=r,=r,r,r",
        [words],
        dtype=(tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16),
        is_pure=True,
        pack=2,
    )
