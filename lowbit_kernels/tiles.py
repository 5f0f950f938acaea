"""The ``tiles`` layout: sixteen rows at a time, so that what a lane of a warp reads is its operand of the tensor cores.

A weight [N, K] is cut into units of 16 rows and 512 columns (256 where a code has more than four bits), the units of 16
rows one behind the other along K. A unit holds its codes plane by plane, as the canonical packing does (a width that is
no power of two is a sum of such widths), then the scales of its groups, then their zero points, and ends on 16 bytes.

Within a plane of ``w`` bits, 512 bytes hold 16 rows and ``8 / w`` steps of 32 columns. The code of ``row`` and ``column``
is in the 16 bytes of lane ``4 (row % 8) + column % 8 / 2``, there in word ``row / 8 + 2 (column % 32 / 16)``, there in byte
``column % 16 / 8 + 2 (column % 2)``, and there in the ``(step % (8 / w))``-th field of ``w`` bits, ``step = column / 32``.
So two fields 16 bits apart are a register of operand A of ``mma.m16n8k16`` and ``wgmma.m64nNk16`` on 16-bit floats with
the columns in their own order, and a word of the plane, masked, is one of ``m16n8k32`` on 8-bit integers with the columns
of a step in another order, the same for every row, which x then has too.

Scales and zero points lie group by group, in the order of rows 0, 8, 1, 9, ... 7, 15: a lane's two rows side by side.
Where groups do not divide a unit, and where the whole row is one, they stay as they are.

Rows and columns beyond the edge are zeros that exist in this layout alone. ``packed`` keeps the shape [..., N, bytes] with
as many bytes a row as the units need, rounded up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.packing import pack_unchecked, packed_size, plane_widths, unpack
from lowbit.scheme import Scheme

__all__ = ["ROWS", "Unit", "arrange", "restore", "sizes"]

ROWS = 16
_LANES = 32


class Unit(NamedTuple):
    """What one unit of a scheme holds. ``groups``: groups of a row in it, 0 where scales stay outside."""

    columns: int
    groups: int
    plane_bytes: tuple[int, ...]
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
            tuple(ROWS * columns * width // 8 for width in plane_widths(scheme.bits)),
            ROWS * groups * scheme.scale_dtype.itemsize,
            0 if zero is None else ROWS * groups * zero.itemsize,
        )

    @property
    def nbytes(self) -> int:
        used = sum(self.plane_bytes) + self.scale_bytes + self.zero_bytes
        return -(-used // 16) * 16


def _units(scheme: Scheme, n: int, k: int) -> tuple[int, int]:
    """Tiles along N and units along K."""
    return -(-n // ROWS), -(-k // Unit.of(scheme).columns)


def sizes(scheme: Scheme, n: int, k: int) -> tuple[int, int]:
    """The last dimensions of ``packed`` and ``scale`` of a weight [n, k] in this layout."""
    unit = Unit.of(scheme)
    total = math.prod(_units(scheme, n, k)) * unit.nbytes
    return -(-total // max(n, 1)), 0 if unit.groups or not k else scheme.groups(k)


def _plane(codes: Tensor, width: int) -> Tensor:
    """Fields of ``width`` bits [units, 16, columns] as the bytes of a plane [units, bytes]."""
    fields = 8 // width
    # row / 8, row % 8, chunk, field, word / 2, byte % 2, lane % 4, byte / 2
    spread = codes.reshape(-1, 2, 8, codes.shape[-1] // (32 * fields), fields, 2, 2, 4, 2)
    moved = spread.permute(0, 3, 2, 7, 5, 1, 8, 6, 4)
    return pack_unchecked(moved.reshape(codes.shape[0], -1), width)


def _codes(plane: Tensor, width: int, columns: int) -> Tensor:
    """The inverse of :func:`_plane`."""
    fields = 8 // width
    flat = unpack(plane, width, ROWS * columns)
    # chunk, row % 8, lane % 4, word / 2, row / 8, byte / 2, byte % 2, field
    moved = flat.reshape(-1, columns // (32 * fields), 8, 4, 2, 2, 2, 2, fields)
    return moved.permute(0, 5, 2, 1, 8, 4, 7, 3, 6).reshape(-1, ROWS, columns)


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
    """Some rows at a time, whole tiles of them: a weight takes many times its bytes while it is unpacked."""
    weights = 1 << 20 if device.type == "cpu" else 1 << 24
    step = max(1, weights // (ROWS * max(k, 1))) * ROWS
    return (slice(start, min(start + step, n)) for start in range(0, n, step))


def _matrix_bytes(packed: Tensor, inner: list[Tensor], scheme: Scheme, k: int) -> Tensor:
    """The units [units, bytes] of canonical rows; ``inner``: their scales and zero points, where units hold them."""
    unit, n = Unit.of(scheme), packed.shape[0]
    tiles, units = _units(scheme, n, k)
    codes = _cut(unpack(packed, scheme.bits, k), tiles, units, unit.columns)
    pieces, shift = [], 0
    for width in plane_widths(scheme.bits):
        pieces.append(_plane((codes >> shift) & ((1 << width) - 1), width))
        shift += width
    for part in inner:
        size = unit.groups * part.element_size()
        raw = part.contiguous().view(torch.uint8)
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
    at, low, codes = 0, 0, torch.zeros((), dtype=torch.uint8, device=body.device)
    for width, size in zip(plane_widths(scheme.bits), unit.plane_bytes, strict=True):
        codes = codes | (_codes(body[:, at : at + size], width, unit.columns) << low)
        at, low = at + size, low + width
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
