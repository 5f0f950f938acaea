# mypy: disallow-untyped-defs=False
# ruff: noqa: N803 - compile-time constants of a kernel are written in capitals
"""From the canonical bytes to whole numbers, inside a Triton kernel; see :mod:`lowbit.packing` for the bytes.

Everything here is plain Triton, with no assembly, so that every vendor and the interpreter take the same code.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def split_bytes(packed, WIDTH: tl.constexpr):
    """Fields of ``WIDTH`` bits (1, 2, 4 or 8) of bytes [R, C], the low bits first: uint8 [R, C * 8 / WIDTH]."""
    fields = packed
    if WIDTH <= 4:
        fields = tl.interleave(fields & 15, fields >> 4)
    if WIDTH <= 2:
        fields = tl.interleave(fields & 3, fields >> 2)
    if WIDTH <= 1:
        fields = tl.interleave(fields & 1, fields >> 1)
    return fields


@triton.jit
def load_plane(rows, row_mask, k0, K, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    """Fields k0 .. k0 + BLOCK_K - 1 of the plane that starts at the pointers ``rows`` [R]; zeros from K on.

    ``k0`` is a multiple of ``BLOCK_K`` and that of 16, so that every width starts on a whole byte.
    """
    column = k0 // 8 * WIDTH + tl.arange(0, BLOCK_K * WIDTH // 8)
    mask = row_mask[:, None]
    if not EVEN_K:
        mask = mask & (column < (K * WIDTH + 7) // 8)[None, :]
    return split_bytes(tl.load(rows[:, None] + column[None, :], mask=mask, other=0), WIDTH)


@triton.jit
def load_codes(rows, row_mask, k0, K, BITS: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    """Codes uint8 [R, BLOCK_K] of the packed rows that start at the pointers ``rows`` [R]; zeros from K on.

    A plane of width w exists exactly if ``BITS & w``, and the planes before it hold ``BITS & ~(2w - 1)`` bits.
    """
    plane = rows
    if BITS & 8:
        codes = load_plane(plane, row_mask, k0, K, 8, BLOCK_K, EVEN_K)
    else:
        codes = tl.zeros([rows.shape[0], BLOCK_K], tl.uint8)
    if BITS & 4:
        codes = load_plane(plane, row_mask, k0, K, 4, BLOCK_K, EVEN_K)
        plane += (K * 4 + 7) // 8
    if BITS & 2:
        codes = codes | (load_plane(plane, row_mask, k0, K, 2, BLOCK_K, EVEN_K) << (BITS & 4))
        plane += (K * 2 + 7) // 8
    if BITS & 1:
        codes = codes | (load_plane(plane, row_mask, k0, K, 1, BLOCK_K, EVEN_K) << (BITS & 6))
    return codes


@triton.jit
def widen(codes, WIDE: tl.constexpr):
    """uint8 ``codes`` as int16, or as int8 where they are below 128 or hold two's complement of eight bits."""
    if WIDE:
        whole = codes.to(tl.int16)
    else:
        whole = codes.to(tl.int8, bitcast=True)
    return whole


@triton.jit
def decode_integer(codes, BITS: tl.constexpr, SIGNED: tl.constexpr, WIDE: tl.constexpr):
    """The integers of codes of the formats ``int<BITS>`` (SIGNED) and ``uint<BITS>``; int1 is {-1, +1}."""
    whole = widen(codes, WIDE)
    if SIGNED:
        if BITS == 1:
            whole = whole + whole - 1
        elif BITS < 8:
            whole = (whole ^ (1 << (BITS - 1))) - (1 << (BITS - 1))
    return whole
