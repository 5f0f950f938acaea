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
    """[E, N, C] padded with zeros and cut into [E * tiles * units, 16, columns]."""
    padded = torch.nn.functional.pad(part, (0, units * columns - part.shape[-1], 0, tiles * ROWS - part.shape[-2]))
    return padded.reshape(-1, ROWS, units, columns).transpose(1, 2).reshape(-1, ROWS, columns)


def _join(cut: Tensor, units: int, n: int, columns: int, experts: int) -> Tensor:
    """The inverse of :func:`_cut`."""
    rows = cut.reshape(-1, units, ROWS, cut.shape[-1]).transpose(1, 2).reshape(experts, -1, units * cut.shape[-1])
    return rows[:, :n, :columns]


def _bytes_by_group(cut: Tensor, groups: int) -> Tensor:
    """[units, 16, groups * itemsize] bytes as [units, bytes], groups first and rows in the order 0, 8, 1, 9, ..."""
    return cut.reshape(-1, 2, 8, groups, cut.shape[-1] // groups).permute(0, 3, 2, 1, 4).reshape(cut.shape[0], -1)


def _bytes_by_row(flat: Tensor, groups: int) -> Tensor:
    """The inverse of :func:`_bytes_by_group`."""
    spread = flat.reshape(flat.shape[0], groups, 8, 2, flat.shape[-1] // (ROWS * groups))
    return spread.permute(0, 3, 2, 1, 4).reshape(flat.shape[0], ROWS, -1)


def arrange(
    packed: Tensor, scale: Tensor, zero_point: Tensor | None, scheme: Scheme, k: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Canonical parts in this layout: (packed, scale, zero_point)."""
    *lead, n, _ = packed.shape
    experts, unit = math.prod(lead), Unit.of(scheme)
    tiles, units = _units(scheme, n, k)
    row_bytes, _ = sizes(scheme, n, k)
    inner = [scale, *([] if zero_point is None else [zero_point])] if unit.groups else []
    count = experts * tiles * units
    out = torch.zeros(experts, n * row_bytes, dtype=torch.uint8, device=packed.device)
    if count:
        codes = _cut(unpack(packed, scheme.bits, k).reshape(experts, n, k), tiles, units, unit.columns)
        pieces, shift = [], 0
        for width in plane_widths(scheme.bits):
            pieces.append(_plane((codes >> shift) & ((1 << width) - 1), width))
            shift += width
        for part in inner:
            size = unit.groups * part.element_size()
            raw = part.contiguous().view(torch.uint8).reshape(experts, n, -1)
            pieces.append(_bytes_by_group(_cut(raw, tiles, units, size), unit.groups))
        body = torch.cat(pieces, dim=-1)
        body = torch.nn.functional.pad(body, (0, unit.nbytes - body.shape[-1])).reshape(experts, -1)
        out[:, : body.shape[-1]] = body
    packed = out.reshape(*lead, n, row_bytes)
    if not unit.groups:
        return packed, scale, zero_point
    return packed, scale.new_empty(*lead, n, 0), None if zero_point is None else zero_point.new_empty(*lead, n, 0)


def restore(
    packed: Tensor, scale: Tensor, zero_point: Tensor | None, scheme: Scheme, k: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The canonical parts of what :func:`arrange` made."""
    *lead, n, row_bytes = packed.shape
    experts, unit = math.prod(lead), Unit.of(scheme)
    tiles, units = _units(scheme, n, k)
    groups = scheme.groups(k) if k else 0
    if not experts * tiles * units:
        zero = zero_point if zero_point is None else zero_point.new_empty(*lead, n, groups)
        return packed.new_empty(*lead, n, packed_size(scheme.bits, k)), scale.new_empty(*lead, n, groups), zero
    used = tiles * units * unit.nbytes
    body = packed.reshape(experts, n * row_bytes)[:, :used].reshape(experts * tiles * units, unit.nbytes)
    at, codes = 0, None
    for shift, (width, size) in enumerate(zip(plane_widths(scheme.bits), unit.plane_bytes, strict=True)):
        low = sum(plane_widths(scheme.bits)[:shift])
        field = _codes(body[:, at : at + size], width, unit.columns)
        codes = field if codes is None else codes | (field << low)
        at += size
    assert codes is not None
    rows = _join(codes, units, n, k, experts).reshape(*lead, n, k)
    canonical = pack_unchecked(rows, scheme.bits)
    if not unit.groups:
        return canonical, scale, zero_point
    restored: list[Tensor | None] = []
    for part, size in ((scale, unit.scale_bytes), (zero_point, unit.zero_bytes)):
        if part is None:
            restored.append(None)
            continue
        raw = _bytes_by_row(body[:, at : at + size], unit.groups)
        at += size
        joined = _join(raw, units, n, groups * part.element_size(), experts).contiguous()
        restored.append(joined.view(part.dtype).reshape(*lead, n, groups))
    new_scale, new_zero = restored
    assert new_scale is not None
    return canonical, new_scale, new_zero
