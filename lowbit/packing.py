"""Codes to bytes and back, and arithmetic on the bytes, from the number of bits alone.

The canonical form: K (the last dimension) is contiguous. A width that divides 8 fills whole bytes, the first value in
the low bits: ``(a & 0xF) | (b << 4)``. Any other width is the sum of widths that do, each stored as a plane, the
widest first and holding the low bits (3 = 2 + 1, 5 = 4 + 1, 6 = 4 + 2, 7 = 4 + 2 + 1). The planes of a row lie side
by side, each padded with zeros to whole bytes, so ``n`` codes take ``sum(ceil(n * width / 8))`` bytes a row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = [
    "pack",
    "packed_add",
    "packed_and",
    "packed_or",
    "packed_size",
    "packed_sub",
    "packed_xor",
    "plane_widths",
    "planes",
    "unpack",
]

_WIDTHS = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}


def plane_widths(bits: int) -> tuple[int, ...]:
    """The widths of the planes that ``bits`` is stored as, widest (and lowest bits) first."""
    try:
        return _WIDTHS[bits]
    except KeyError:
        raise ValueError(f"bits must be 1..8, got {bits!r}") from None


def plane_bytes(bits: int, n: int) -> tuple[int, ...]:
    """Bytes of each plane of a row of ``n`` codes."""
    return tuple(-(-n * width // 8) for width in plane_widths(bits))


def packed_size(bits: int, n: int) -> int:
    """Bytes of a packed row of ``n`` codes of ``bits`` bits, 1 to 8."""
    return sum(plane_bytes(bits, n))


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack integer ``codes`` [..., n] in 0 .. 2**bits - 1 into bytes, uint8 [..., packed_size(bits, n)].

    Any integer dtype, shape, stride and device. Raises ``ValueError`` for a code out of range, ``TypeError`` for
    floating point.
    """
    plane_widths(bits)
    if codes.dtype.is_floating_point or codes.dtype.is_complex:
        raise TypeError(f"codes must be integers, got {codes.dtype}: use FORMATS[name].encode(x) first")
    if codes.dim() == 0:
        raise ValueError("codes must have at least one dimension, got a scalar: use codes.reshape(1)")
    if codes.numel():
        # torch has no aminmax for these; a uint64 beyond int64 turns negative, which is out of range as well.
        wide = codes.to(torch.int64) if codes.dtype in (torch.bool, torch.uint16, torch.uint32, torch.uint64) else codes
        low, high = (int(v) for v in torch.aminmax(wide))
        if low < 0 or high >= 1 << bits:
            raise ValueError(f"codes must be 0..{(1 << bits) - 1} for {bits} bits, got {low}..{high}")
    return pack_unchecked(codes.to(torch.uint8), bits)


def pack_unchecked(codes: Tensor, bits: int) -> Tensor:
    """:meth:`pack` of uint8 codes that are known to be in range."""
    parts, shift = [], 0
    for width in plane_widths(bits):
        field = codes if width == 8 else (codes >> shift) & ((1 << width) - 1)
        parts.append(_pack_plane(field, width))
        shift += width
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def unpack(packed: Tensor, bits: int, n: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """The ``n`` codes of each row of ``packed`` (uint8 [..., packed_size(bits, n)]), [..., n] of the integer ``dtype``."""
    codes, shift = None, 0
    for plane, width in zip(planes(packed, bits, n), plane_widths(bits), strict=True):
        field = _unpack_plane(plane.to(dtype), width, n)
        codes = field if codes is None else codes | (field << shift)
        shift += width
    assert codes is not None
    return codes


def planes(packed: Tensor, bits: int, n: int) -> tuple[Tensor, ...]:
    """Views of the planes of ``packed``, widest first, each uint8 [..., ceil(n * width / 8)]."""
    if packed.dtype != torch.uint8:
        raise TypeError(f"packed must be uint8, got {packed.dtype}")
    sizes = plane_bytes(bits, n)
    if packed.dim() == 0 or packed.shape[-1] != sum(sizes):
        raise ValueError(f"{n} codes of {bits} bits take {sum(sizes)} bytes a row, got packed of shape {tuple(packed.shape)}")
    return packed.split(sizes, dim=-1)


def _pack_plane(field: Tensor, width: int) -> Tensor:
    per_byte = 8 // width
    if per_byte == 1:
        return field.clone(memory_format=torch.contiguous_format)  # never the caller's memory
    n = field.shape[-1]
    if n % per_byte:
        field = torch.nn.functional.pad(field, (0, -n % per_byte))
    field = field.unflatten(-1, (-1, per_byte))
    packed = field[..., 0].clone()
    for i in range(1, per_byte):
        packed |= field[..., i] << (i * width)
    return packed


def _unpack_plane(plane: Tensor, width: int, n: int) -> Tensor:
    per_byte = 8 // width
    if per_byte == 1:
        return plane.clone(memory_format=torch.contiguous_format)
    mask = (1 << width) - 1
    fields = torch.stack([(plane >> (i * width)) & mask for i in range(per_byte)], dim=-1)
    return fields.flatten(-2)[..., :n].contiguous()


# ---- arithmetic without unpacking ------------------------------------------------------------------------------
#
# A byte holds several fields. Adding bytes would carry from one field into the next, so the top bit of each field is
# left out of the addition and put back with xor (Warren, Hacker's Delight, 2-18). The carry out of a plane goes into
# the lowest bit of the next, narrower plane.


def packed_add(a: Tensor, b: Tensor, bits: int) -> Tensor:
    """Packed codes of ``(x + y) mod 2**bits``, for ``a`` and ``b`` that are x and y packed: uint8 [..., bytes] that broadcast."""
    return _chain(a, b, bits, _add_plane)


def packed_sub(a: Tensor, b: Tensor, bits: int) -> Tensor:
    """Packed codes of ``(x - y) mod 2**bits``, for ``a`` and ``b`` that are x and y packed: uint8 [..., bytes] that broadcast."""
    return _chain(a, b, bits, _sub_plane)


def packed_and(a: Tensor, b: Tensor) -> Tensor:
    """Packed codes of the bitwise and of packed ``a`` and ``b`` (uint8 [..., bytes]); the same for every width."""
    return a & b


def packed_or(a: Tensor, b: Tensor) -> Tensor:
    """Packed codes of the bitwise or of packed ``a`` and ``b`` (uint8 [..., bytes]); the same for every width."""
    return a | b


def packed_xor(a: Tensor, b: Tensor) -> Tensor:
    """Packed codes of the bitwise exclusive or of packed ``a`` and ``b`` (uint8 [..., bytes]); the same for every width."""
    return a ^ b


def _repeat(field: int, width: int) -> int:
    """A byte with ``field`` in every field of ``width`` bits."""
    return sum(field << i for i in range(0, 8, width))


def _add_plane(a: Tensor, b: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Sum and carry out (in the lowest bit of each field)."""
    top = _repeat(1 << (width - 1), width)
    rest = 0xFF ^ top
    total = ((a & rest) + (b & rest)) ^ ((a ^ b) & top)
    carry = ((a & b) | ((a | b) & ~total)) & top
    return total, carry >> (width - 1)


def _sub_plane(a: Tensor, b: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Difference and borrow (in the lowest bit of each field)."""
    top = _repeat(1 << (width - 1), width)
    rest = 0xFF ^ top
    difference = ((a | top) - (b & rest)) ^ ((a ^ ~b) & top)
    borrow = ((~a & b) | (~(a ^ b) & difference)) & top
    return difference, borrow >> (width - 1)


def _chain(a: Tensor, b: Tensor, bits: int, op: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]) -> Tensor:
    for packed in (a, b):
        if packed.dtype != torch.uint8:
            raise TypeError(f"packed must be uint8, got {packed.dtype}")
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(f"rows must have as many bytes, got {a.shape[-1]} and {b.shape[-1]}")
    widths = plane_widths(bits)
    sizes = _plane_sizes(bits, a.shape[-1])
    done: list[Tensor] = []
    carry: Tensor | None = None
    for x, y, width, size in zip(a.split(sizes, -1), b.split(sizes, -1), widths, sizes, strict=True):
        result, out = op(x, y, width)
        if carry is not None:
            carry = _narrow(carry, widths[len(done) - 1], width, size)
            result, carry_out_bit = op(result, carry, width)
            out = out | carry_out_bit
        done.append(result)
        carry = out
    return torch.cat(done, dim=-1)


def _plane_sizes(bits: int, row_bytes: int) -> list[int]:
    """Bytes of each plane from the bytes of the row: every plane grows with n, so their sum tells each of them."""
    if len(plane_widths(bits)) == 1:
        return [row_bytes]
    n = row_bytes * 8 // bits
    while packed_size(bits, n) > row_bytes:
        n -= 1
    if packed_size(bits, n) != row_bytes:
        raise ValueError(f"no number of {bits}-bit codes takes {row_bytes} bytes a row")
    return list(plane_bytes(bits, n))


def _narrow(flags: Tensor, wide: int, width: int, size: int) -> Tensor:
    """Move one flag a field from fields of ``wide`` bits to fields of ``width`` bits: ``size`` bytes a row."""
    while wide > width:
        half = wide // 2
        if flags.shape[-1] % 2:
            flags = torch.nn.functional.pad(flags, (0, 1))
        keep = 1
        # Fields of `wide` bits hold a flag in bit 0; squeeze each byte's flags into its low nibble, `half` bits apart.
        if wide == 4:  # bits 0 and 4 -> 0 and 2
            flags = (flags & keep) | ((flags >> 2) & 0b100)
        else:  # bits 0, 2, 4 and 6 -> 0, 1, 2 and 3
            flags = (flags | (flags >> 1)) & 0b00110011
            flags = (flags | (flags >> 2)) & 0b00001111
        flags = flags[..., 0::2] | (flags[..., 1::2] << 4)
        wide = half
    return flags[..., :size]
