"""The ``mma_fragment`` layout: sixteen rows at a time, so that what a lane of a warp loads is its operand of the tensor cores.

A weight [N, K] is cut into units of 16 rows and 512 columns (256 where a code has more than four bits), the units of 16 rows in
order along K. A unit holds its codes, then the scales of its groups, then their zero points, and is padded to 16 bytes.

Codes are stored in runs of steps of 32 columns, the fewest steps whose codes fill whole bytes: ``8 / gcd(8, bits)`` of them in
``bits / gcd(8, bits)`` blocks of 512 bytes. The code at ``row`` and ``column`` of each step is in the 16 bytes of lane ``4 (row %
8) + column % 8 / 2`` of the blocks, there in word ``row / 8 + 2 (column % 32 / 16)``, there in byte ``column % 16 / 8 + 2 (column
% 2)``. So two fields 16 bits apart are a register of operand A of ``mma.m16n8k16`` and ``wgmma.m64nNk16`` on 16-bit floats with
columns in their order, and a masked word is a register of ``m16n8k32`` on 8-bit integers with the columns of a step in another
order, the same for every row, to which x is permuted.

A width that divides eight fills the byte of its one block step by step, from the lowest bit on. For other widths the byte of each
block holds a whole code (3 bits: two), used in place, and the remaining bits of these bytes compose the codes of the other steps:
their highest bits where they are used, the others above them.

6-bit floats are never used by the byte. Their bits are stored in words where bfloat16 has them: one AND extracts two values from
the codes of even bytes, and a rotation and an AND (or, where there is no room, one shift for the signs and one for the
magnitudes) two from odd bytes.

Scales and zero points are stored group by group, in the order of rows 0, 8, 1, 9, ... 7, 15: a lane's two rows side by side.
Where groups do not divide a unit, and where the whole row is one group, they stay outside.

Rows and columns beyond the edge are zeros that exist in this layout only. ``packed`` keeps the shape [..., N, bytes] with as many
bytes in a row as the units need, rounded up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.packing import pack_unchecked, packed_size, unpack
from lowbit.scheme import Scheme

__all__ = ["ROWS", "Unit", "arrange", "restore", "sizes"]

ROWS = 16


class Unit(NamedTuple):
    """The structure of a unit. ``groups``: groups of a row in it, 0 where scales stay outside."""

    columns: int
    groups: int
    code_bytes: int
    scale_bytes: int
    zero_bytes: int

    @staticmethod
    def of(scheme: Scheme) -> Unit:
        columns = 512 if scheme.bits <= 4 else 256
        inside = scheme.group_size > 0 and columns % scheme.group_size == 0
        groups = columns // scheme.group_size if inside else 0
        zero = scheme.zero_point_dtype
        return Unit(
            columns,
            groups,
            ROWS * columns * scheme.bits // 8,
            ROWS * groups * scheme.scale_dtype.itemsize,
            0 if zero is None else ROWS * groups * zero.itemsize,
        )

    @property
    def nbytes(self) -> int:
        used = self.code_bytes + self.scale_bytes + self.zero_bytes
        return -(-used // 16) * 16


def _units(scheme: Scheme, n: int, k: int) -> tuple[int, int]:
    """Tiles along N and units along K."""
    return -(-n // ROWS), -(-k // Unit.of(scheme).columns)


def sizes(scheme: Scheme, n: int, k: int) -> tuple[int, int]:
    """The last dimensions of ``packed`` and ``scale`` of a weight [n, k] in this layout."""
    unit = Unit.of(scheme)
    total = math.prod(_units(scheme, n, k)) * unit.nbytes
    return -(-total // max(n, 1)), 0 if unit.groups or not k else scheme.groups(k)


# For each block of a run, the step that each bit of a byte belongs to, highest bit first; the bits of a code come highest first,
# too.
_BYTES = {
    1: ("76543210",),
    2: ("33221100",),
    3: ("33444000", "77555111", "73666222"),
    4: ("11110000",),
    5: ("33300000", "66611111", "77722222", "33744444", "66755555"),
    6: ("33000000", "33111111", "33222222"),
    7: ("70000000", "71111111", "72222222", "73333333", "74444444", "75555555", "76666666"),
    8: ("00000000",),
}
# 6-bit floats: place of the sign and of the lowest bit in a word, of the first and of the second byte's code.
_FLOATS = {"fp6_e2m3": ((15, 4), (9, 10)), "fp6_e3m2": ((15, 5), (20, 10))}


class _Piece(NamedTuple):
    """``width`` bits, from ``low`` on, of the code of ``step`` and ``byte``: in ``block`` from bit ``place`` of a word on."""

    step: int
    byte: int
    low: int
    width: int
    block: int
    place: int


def _run(bits: int) -> tuple[int, int]:
    """Steps and blocks of a run."""
    return 8 // math.gcd(8, bits), bits // math.gcd(8, bits)


def _bits_in_bytes(bits: int) -> Iterator[_Piece]:
    """Each bit of the codes of a run by itself."""
    left = dict.fromkeys(range(_run(bits)[0]), bits)
    for block, picture in enumerate(_BYTES[bits]):
        for i, step in enumerate(map(int, picture)):
            left[step] -= 1
            yield from (_Piece(step, byte, left[step], 1, block, 8 * byte + 7 - i) for byte in range(4))


def _bits_in_words(name: str) -> Iterator[_Piece]:
    """The same for a 6-bit float: three steps in place, the fourth's bits are the lowest four of each half of the three words."""
    for step, byte, bit in itertools.product(range(4), range(4), range(6)):
        sign, low = _FLOATS[name][byte % 2]
        place = ((sign if bit == 5 else low + bit) + byte // 2 * 16) % 32
        if step < 3:
            yield _Piece(step, byte, bit, 1, step, place)
        else:
            yield _Piece(step, byte, bit, 1, place % 16 // 4 - 1, place // 16 * 16 + place % 4)


def _joined(bits: Iterable[_Piece]) -> tuple[_Piece, ...]:
    """Merges bits into pieces, none across bytes."""
    found: list[_Piece] = []
    for bit in sorted(bits):
        last = found[-1] if found else None
        if last and bit.place % 8 and bit == last._replace(low=last.low + last.width, width=1, place=last.place + last.width):
            found[-1] = last._replace(width=last.width + 1)
        else:
            found.append(bit)
    return tuple(found)


# Computed at import: a compiler that traces a layout reads the tables, and would otherwise trace their computation.
_OF_BYTES = {bits: _joined(_bits_in_bytes(bits)) for bits in _BYTES}
_OF_WORDS = {name: _joined(_bits_in_words(name)) for name in _FLOATS}


def _pieces(scheme: Scheme) -> tuple[_Piece, ...]:
    """The pieces of a format; a float may have a map of its own."""
    return _OF_WORDS[scheme.format] if scheme.format in _OF_WORDS else _OF_BYTES[scheme.bits]


def _bytes_of_codes(codes: Tensor, scheme: Scheme) -> Tensor:
    """Codes [units, 16, columns] as the bytes [units, bytes] of units."""
    steps, blocks = _run(scheme.bits)
    # row / 8, row % 8, run, step, word / 2, byte % 2, lane % 4, byte / 2
    spread = codes.reshape(-1, 2, 8, codes.shape[-1] // (32 * steps), steps, 2, 2, 4, 2)
    moved = spread.permute(4, 8, 6, 0, 3, 2, 7, 5, 1).flatten(1, 2)
    out = codes.new_zeros(moved.shape[2], moved.shape[3], blocks, *moved.shape[4:], 4)
    for piece in _pieces(scheme):
        part = (moved[piece.step, piece.byte] >> piece.low) & ((1 << piece.width) - 1)
        out[:, :, piece.block, ..., piece.place // 8] |= part << piece.place % 8
    return out.reshape(codes.shape[0], -1)


def _codes_of_bytes(held: Tensor, scheme: Scheme, columns: int) -> Tensor:
    """The inverse of :func:`_bytes_of_codes`."""
    steps, blocks = _run(scheme.bits)
    runs = columns // (32 * steps)
    spread = held.reshape(-1, runs, blocks, 8, 4, 2, 2, 4)
    codes = held.new_zeros(steps, 4, spread.shape[0], runs, 8, 4, 2, 2)
    for piece in _pieces(scheme):
        part = (spread[:, :, piece.block, ..., piece.place // 8] >> piece.place % 8) & ((1 << piece.width) - 1)
        codes[piece.step, piece.byte] |= part << piece.low
    # byte / 2, byte % 2, unit, run, row % 8, lane % 4, word / 2, row / 8
    apart = codes.unflatten(1, (2, 2))
    return apart.permute(3, 8, 5, 4, 0, 7, 2, 6, 1).reshape(-1, ROWS, columns)


def _cut(part: Tensor, tiles: int, units: int, columns: int) -> Tensor:
    """[N, C] padded with zeros and cut into [tiles * units, 16, columns]."""
    padded = torch.nn.functional.pad(part, (0, units * columns - part.shape[-1], 0, tiles * ROWS - part.shape[-2]))
    return padded.reshape(-1, ROWS, units, columns).transpose(1, 2).reshape(-1, ROWS, columns)


def _join(cut: Tensor, units: int, n: int, columns: int) -> Tensor:
    """The inverse of :func:`_cut`."""
    rows = cut.reshape(-1, units, ROWS, cut.shape[-1]).transpose(1, 2).reshape(-1, units * cut.shape[-1])
    return rows[:n, :columns]


def _bytes_by_group(cut: Tensor, groups: int) -> Tensor:
    """[units, 16, groups * itemsize] bytes as [units, bytes], groups first and rows in the order 0, 8, 1, 9, ..."""
    return cut.reshape(-1, 2, 8, groups, cut.shape[-1] // groups).permute(0, 3, 2, 1, 4).reshape(cut.shape[0], -1)


def _bytes_by_row(flat: Tensor, groups: int) -> Tensor:
    """The inverse of :func:`_bytes_by_group`."""
    spread = flat.reshape(flat.shape[0], groups, 8, 2, flat.shape[-1] // (ROWS * groups))
    return spread.permute(0, 3, 2, 1, 4).reshape(flat.shape[0], ROWS, -1)


def _spans(n: int, k: int, device: torch.device) -> Iterator[slice]:
    """Slices of whole tiles: unpacking a weight takes many times its bytes."""
    weights = 1 << 20 if device.type == "cpu" else 1 << 24
    step = max(1, weights // (ROWS * max(k, 1))) * ROWS
    return (slice(start, min(start + step, n)) for start in range(0, n, step))


def _matrix_bytes(packed: Tensor, inner: list[Tensor], scheme: Scheme, k: int) -> Tensor:
    """The units [units, bytes] of canonical rows; ``inner``: their scales and zero points, where units hold them."""
    unit, n = Unit.of(scheme), packed.shape[0]
    tiles, units = _units(scheme, n, k)
    codes = _cut(unpack(packed, scheme.bits, k), tiles, units, unit.columns)
    pieces = [_bytes_of_codes(codes, scheme)]
    for part in inner:
        size = unit.groups * part.element_size()
        raw = part.contiguous().view(-1).view(torch.uint8).view(n, -1)  # strides of a dimension of 1 may be any
        pieces.append(_bytes_by_group(_cut(raw, tiles, units, size), unit.groups))
    body = torch.cat(pieces, dim=-1)
    return torch.nn.functional.pad(body, (0, unit.nbytes - body.shape[-1]))


def arrange(
    packed: Tensor, scale: Tensor, zero_point: Tensor | None, scheme: Scheme, k: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Canonical parts in this layout: (packed, scale, zero_point)."""
    *lead, n, _ = packed.shape
    experts, unit = math.prod(lead), Unit.of(scheme)
    row_bytes, _ = sizes(scheme, n, k)
    inner = [scale, *([] if zero_point is None else [zero_point])] if unit.groups else []
    codes = packed.reshape(experts, n, packed.shape[-1])
    scales = [part.reshape(experts, n, part.shape[-1]) for part in inner]
    out = torch.zeros(experts, n * row_bytes, dtype=torch.uint8, device=packed.device)
    bytes_of_row = -(-k // unit.columns) * unit.nbytes // ROWS
    for e in range(experts):
        for rows in _spans(n, k, packed.device) if k else ():
            body = _matrix_bytes(codes[e, rows], [part[e, rows] for part in scales], scheme, k).flatten()
            start = rows.start * bytes_of_row
            out[e, start : start + body.numel()] = body
    packed = out.reshape(*lead, n, row_bytes)
    if not unit.groups:
        return packed, scale, zero_point
    return packed, scale.new_empty(*lead, n, 0), None if zero_point is None else zero_point.new_empty(*lead, n, 0)


def _matrix_parts(body: Tensor, scheme: Scheme, n: int, k: int) -> list[Tensor]:
    """The inverse of :func:`_matrix_bytes`: packed rows, and the bytes of scales and zero points where units hold them."""
    unit = Unit.of(scheme)
    units = -(-k // unit.columns)
    at = unit.code_bytes
    codes = _codes_of_bytes(body[:, :at], scheme, unit.columns)
    parts = [pack_unchecked(_join(codes, units, n, k), scheme.bits)]
    for size in (unit.scale_bytes, unit.zero_bytes):
        if size:
            raw = _bytes_by_row(body[:, at : at + size], unit.groups)
            parts.append(_join(raw, units, n, scheme.groups(k) * (size // (ROWS * unit.groups))).contiguous())
            at += size
    return parts


def restore(
    packed: Tensor, scale: Tensor, zero_point: Tensor | None, scheme: Scheme, k: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The canonical parts of what :func:`arrange` made."""
    *lead, n, row_bytes = packed.shape
    experts, unit = math.prod(lead), Unit.of(scheme)
    groups = scheme.groups(k) if k else 0
    canonical = packed.new_empty(experts, n, packed_size(scheme.bits, k))
    inner = [scale, *([] if zero_point is None else [zero_point])] if unit.groups or not k else []
    restored = [part.new_empty(experts, n, groups) for part in inner]
    units = -(-k // unit.columns)
    body = packed.reshape(experts, n * row_bytes)
    for e in range(experts):
        for rows in _spans(n, k, packed.device) if k else ():
            count = -(-(rows.stop - rows.start) // ROWS) * units
            start = rows.start // ROWS * units * unit.nbytes
            held = body[e, start : start + count * unit.nbytes].reshape(count, unit.nbytes)
            codes, *parts = _matrix_parts(held, scheme, rows.stop - rows.start, k)
            canonical[e, rows] = codes
            for part, found in zip(restored, parts, strict=True):
                part[e, rows] = found.view(part.dtype)
    canonical = canonical.reshape(*lead, n, canonical.shape[-1])
    if not inner:
        return canonical, scale, zero_point
    scale, *zero = [part.reshape(*lead, n, groups) for part in restored]
    return canonical, scale, zero[0] if zero else None
