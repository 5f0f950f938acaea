"""The ``interleaved`` layout: 32 rows together, four bytes of each in turn, so that a vector register holds the same columns of
all of them. Then each lane accumulates one row, a group's scales are contiguous, and memory is read sequentially.

A weight [N, K] is cut into blocks of 32 rows, and a block into units of ``4 f`` columns, where f fields of the narrowest plane
of the codes make a byte. A unit holds four bytes of that plane for each row, and r times four bytes of a plane r times as
wide; word by word, each word for all 32 rows. Byte p of a word is of columns ``f p`` to ``f p + f - 1`` of the unit: field i
of the narrowest plane of column ``f p + i``, and field j of word w of a wider one of column ``f p + w f / r + j``.

Scales and zero points of a block are stored [G, 32].

Weights whose rows do not fill whole blocks, or whose columns do not fill whole units, stay canonical.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.packing import plane_widths
from lowbit.scheme import Scheme

__all__ = ["ROWS", "arrange", "columns_of_unit", "restore", "rows", "takes"]

ROWS, _BYTES = 32, 4


def columns_of_unit(bits: int) -> int:
    """Columns of a unit of codes of so many bits."""
    return _BYTES * 8 // (bits & -bits)


def takes(scheme: Scheme, n: int, k: int) -> str | None:
    """Why a weight [n, k] stays canonical; None where it is arranged."""
    columns = columns_of_unit(scheme.bits)
    if n == 0 or n % ROWS:
        return f"N: takes multiples of {ROWS}, got {n}"
    return None if k and k % columns == 0 else f"K: takes multiples of {columns}, got {k}"


def _widths(bits: int) -> list[tuple[int, int]]:
    """(bytes of a row in a unit, words of those) for each plane, widest first."""
    return [(_BYTES * width // (bits & -bits), width // (bits & -bits)) for width in plane_widths(bits)]


def _words(packed: Tensor, scheme: Scheme, k: int) -> list[Tensor]:
    """Each plane of canonical rows [..., R, bytes] as [..., R, units, words, 4]."""
    units, first, found = k // columns_of_unit(scheme.bits), 0, []
    for size, words in _widths(scheme.bits):
        plane = packed[..., first : first + units * size]
        found.append(plane.unflatten(-1, (units, _BYTES, words)).transpose(-1, -2))
        first += units * size
    return found


def _rows(words: Tensor, scheme: Scheme) -> Tensor:
    """Canonical rows [..., R, bytes] of [..., R, units, words of all planes, 4]."""
    apart = words.split([count for _, count in _widths(scheme.bits)], -2)
    return torch.cat([plane.transpose(-1, -2).flatten(-3) for plane in apart], -1)


def _transpose_blocks(numbers: Tensor) -> Tensor:
    """[..., N, G] with blocks of 32 rows stored as [N / 32, G, 32], in the same shape."""
    return _flat(numbers.unflatten(-2, (-1, ROWS)).transpose(-1, -2)).view(numbers.shape)


def _transpose_blocks_back(numbers: Tensor) -> Tensor:
    return _flat(numbers.reshape(*numbers.shape[:-2], -1, numbers.shape[-1], ROWS).transpose(-1, -2)).view(numbers.shape)


def _flat(numbers: Tensor) -> Tensor:
    """Contiguous, with the usual strides: those of a dimension of size 1 may be any, which no view of another dtype takes."""
    return numbers.contiguous().view(-1)


def arrange(packed: Tensor, scale: Tensor, zero: Tensor | None, scheme: Scheme, k: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Canonical parts in this layout; the shapes stay."""
    if takes(scheme, packed.shape[-2], k) is not None:
        return packed, scale, zero
    words = _words(packed.unflatten(-2, (-1, ROWS)), scheme, k)  # [..., blocks, 32, units, words, 4] of each plane
    whole = _as_integers(words[0] if len(words) == 1 else torch.cat(words, -2))
    together = _as_bytes(whole.movedim(-3, -1)).view(packed.shape)
    return together, _transpose_blocks(scale), None if zero is None else _transpose_blocks(zero)


def restore(packed: Tensor, scale: Tensor, zero: Tensor | None, scheme: Scheme, k: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Parts of this layout as canonical ones."""
    if takes(scheme, packed.shape[-2], k) is not None:
        return packed, scale, zero
    words = _blocks(packed, scheme, k)
    if torch.compiler.is_compiling():  # int64 arithmetic instead of views: Inductor would end a kernel where bytes become
        # integers, and ONNX has no such view
        words = words.movedim(-2, -4)
    else:
        whole = _as_integers(words).movedim(-1, -3)
        words = _as_bytes(whole).view(*whole.shape, _BYTES)
    canonical = _rows(words, scheme).reshape(packed.shape)
    return canonical, _transpose_blocks_back(scale), None if zero is None else _transpose_blocks_back(zero)


def _as_integers(words: Tensor) -> Tensor:
    """Words [..., 4] as integers [...]: torch moves them four times as fast as bytes."""
    flat = _flat(words)
    return (flat if flat.storage_offset() % _BYTES == 0 else flat.clone()).view(torch.int32).view(words.shape[:-1])


def _as_bytes(words: Tensor) -> Tensor:
    return _flat(words).view(torch.uint8)


def _blocks(packed: Tensor, scheme: Scheme, k: int) -> Tensor:
    """[..., N, bytes] as [..., N / 32, units, words, 32, 4]."""
    words = scheme.bits // (scheme.bits & -scheme.bits)
    return packed.reshape(*packed.shape[:-2], -1, k // columns_of_unit(scheme.bits), words, ROWS, _BYTES)


def rows(
    indices: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, scheme: Scheme, k: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Canonical parts of rows ``indices`` [I] of a weight [N, K]."""
    if takes(scheme, packed.shape[0], k) is not None:
        return packed[indices], scale[indices], None if zero is None else zero[indices]
    block, row = indices // ROWS, indices % ROWS

    def numbers(all_of: Tensor) -> Tensor:
        return all_of.reshape(-1, all_of.shape[-1], ROWS)[block, :, row]

    words = _blocks(packed, scheme, k)[block, :, :, row]
    return _rows(words, scheme), numbers(scale), None if zero is None else numbers(zero)
