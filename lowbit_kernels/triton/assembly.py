"""PTX that turns codes into bfloat16 or float16, two at a time: field j of two words is packed into one register, so that each
instruction serves both.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from lowbit.decoding import FLOATS, INTEGERS, Decoding

__all__ = ["assembly", "bytes_as_floats"]


class _Lines:
    """Builder of PTX that fills registers $0 ... $7 with the values of fields 0 ... 7 of two words each."""

    def __init__(self) -> None:
        self.lines = ["{", ".reg .b32 l, h, t, s, one;", "mov.b32 one, 0x3F803F80;"]

    def add(self, line: str) -> None:
        self.lines.append(line)

    def moved(self, word: str, by: int) -> str:
        """The register that holds ``word`` shifted right by ``by``, or left where it is negative."""
        if by:
            self.add(f"shr.b32 t, {word}, {by};" if by > 0 else f"shl.b32 t, {word}, {-by};")
        return "t" if by else word

    def masked(self, word: str, mask: int, other: str | None, to: str) -> None:
        """``(word & mask) | other`` for both halves; ``other`` has no bit of the mask."""
        twice = hex(mask * 0x10001)
        self.add(f"and.b32 {to}, {word}, {twice};" if other is None else f"lop3.b32 {to}, {word}, {twice}, {other}, 0xEA;")

    def __str__(self) -> str:
        return "\n".join([*self.lines, "}"])


class _Slice(NamedTuple):
    """``width`` bits of a code, from its bit ``low`` on, at bit ``at`` of both halves of a register."""

    register: str
    at: int
    low: int
    width: int


def _slices(lines: _Lines, bits: int, j: int) -> list[_Slice]:
    """Where field ``j`` is: for 8 bits in register s, otherwise in the two words of the widest plane, l and h."""
    if bits == 8:  # byte j of both words, in both bytes of each half
        first, byte = 8 + j // 4 * 2, j % 4
        lines.add(f"prmt.b32 s, ${first}, ${first + 1}, {hex(byte * 0x11 + (byte + 4) * 0x1100)};")
        return [_Slice("s", 8, 0, 8)]
    found, low, register = [], 0, 8
    for width in (4, 2, 1):
        if bits & width:
            name = "lh"[j // 4] if width == 4 else f"${register}"
            found.append(_Slice(name, j * width % 16, low, width))
            low, register = low + width, register + (2 if width == 4 else 1)
    return found


def _integer(lines: _Lines, bits: int, flip: int, half: bool, j: int) -> None:
    """Bits of 1024 + code in float16 or 128 + code in bfloat16; for 8 bits in bfloat16 those of the signed code itself."""
    pieces, to = _slices(lines, bits, j), f"${j}"
    if bits == 8 and not half:  # 128 + the low seven bits, minus 128 or 256
        lines.add("lop3.b32 t, s, 0x00800080, 0xC300C300, 0xEA;")
        lines.masked("s", 0x7F, "0x43004300", to)
        lines.add(f"fma.rn.bf16x2 {to}, {to}, one, t;")
        return
    other = hex(((0x6400 if half else 0x4300) | flip) * 0x10001)
    for piece in pieces:
        at = 0 if bits == 8 else piece.at
        word = lines.moved(piece.register, at - piece.low)
        mask = hex((((1 << piece.width) - 1) << piece.low) * 0x10001)
        lines.add(f"lop3.b32 {to}, {word}, {mask}, {other}, 0x6A;")  # (word & mask) ^ other
        other = to


def _float(lines: _Lines, bits: int, mantissa: int, special: int, half: bool, j: int) -> None:
    """Bits of a float in the 16-bit format, smaller by a power of two."""
    shift, to, filled = (10 if half else 7) - mantissa, f"${j}", None
    pieces = _slices(lines, bits, j)
    for piece in pieces:
        width = min(piece.width, bits - 1 - piece.low)
        if width:
            word = lines.moved(piece.register, piece.at - piece.low - shift)
            lines.masked(word, ((1 << width) - 1) << (piece.low + shift), filled, to)
            filled = to
    top = shift + bits - 1  # adding the difference carries magnitudes from `special` on into it
    missing = (1 << (15 - top)) - 1  # ones above the magnitude, where the exponent of infinity has them
    if special and missing:
        lines.add(f"add.u32 t, {to}, {hex((((1 << (bits - 1)) - special) << shift) * 0x10001)};")
        lines.add(f"and.b32 t, t, {hex((1 << top) * 0x10001)};")
        lines.add(f"mad.lo.u32 {to}, t, {missing}, {to};")
    last = pieces[-1]
    word = lines.moved(last.register, last.at + last.width - 1 - 15)
    lines.masked(word, 0x8000, to, to)


@lru_cache(maxsize=256)
def assembly(dec: Decoding, bits: int, has_zero: bool, dtype: torch.dtype) -> str:
    """PTX for :func:`.float_bits.words_as_floats`: the bits of :func:`.float_bits.as_float_bits`; signed 8-bit integers in
    bfloat16 as they are. Empty where there is no PTX for the format.
    """
    half = dtype == torch.float16
    if dtype not in (torch.float16, torch.bfloat16) or dec.kind not in (INTEGERS, FLOATS):
        return ""
    if dec.kind == INTEGERS and bits == 8 and not half and (dec.flip != 128 or has_zero):
        return ""  # 256 and more are not exact
    if dec.kind == FLOATS and (bits - 1 - dec.mantissa > (5 if half else 8) or dec.mantissa > (10 if half else 7)):
        return ""
    if dec.kind == FLOATS and 0 < dec.special < (1 << (bits - 1)) - (1 << dec.mantissa):
        return ""  # infinity must have an all-ones exponent
    lines = _Lines()
    if bits < 8 and bits & 4:
        lines.add("prmt.b32 l, $8, $9, 0x5410;")
        lines.add("prmt.b32 h, $8, $9, 0x7632;")
    for j in range(8):
        if dec.kind == INTEGERS:
            _integer(lines, bits, dec.flip, half, j)
        else:
            _float(lines, bits, dec.mantissa, dec.special, half, j)
    return str(lines)


# Conversions that sm_89 and later have in hardware: the 8-bit float formats by their decoding.
_CONVERTED = {
    Decoding(FLOATS, mantissa=3, special=127, factor=2.0**120): "e4m3",
    Decoding(FLOATS, mantissa=2, special=124, factor=2.0**112): "e5m2",
}


def bytes_as_floats(dec: Decoding, arch: int) -> str:
    """PTX that converts a word of four 8-bit codes to four float32 values, through float16; empty where there is none."""
    if dec not in _CONVERTED or arch < 89:
        return ""
    lines = ["{", ".reg .b16 a, b;", ".reg .b32 c, d;", "mov.b32 {a, b}, $4;"]
    lines += [f"cvt.rn.f16x2.{_CONVERTED[dec]}x2 {to}, {pair};" for to, pair in (("c", "a"), ("d", "b"))]
    for first, both in ((0, "c"), (2, "d")):
        lines += [f"mov.b32 {{a, b}}, {both};", f"cvt.f32.f16 ${first}, a;", f"cvt.f32.f16 ${first + 1}, b;"]
    return "\n".join([*lines, "}"])
