"""What torch's copies, moves and shape operators mean on a QTensor: they follow from bits and group alone."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from lowbit_kernels.layouts import LAYOUTS

from .packing import plane_widths, planes
from .qtensor import QTensor, _assemble
from .tensor_table import ATEN, implements

__all__ = ["row_range"]

aten = torch.ops.aten


# ---- copies and moves ------------------------------------------------------------------------------------------


@implements(ATEN, aten.detach.default, aten.alias.default)
def _alias(q: QTensor) -> QTensor:
    return _over(q, q._apply_to_parts(lambda part: part.detach()))


@implements(ATEN, aten.clone.default)
def _clone(q: QTensor, *, memory_format: Any = None) -> QTensor:
    return q._apply_to_parts(lambda part: part.clone())


@implements(ATEN, aten._to_copy.default)
def _to_copy(
    q: QTensor,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> QTensor:
    if dtype is not None and not (dtype.is_floating_point and dtype.itemsize >= 2):
        raise TypeError(f"the dtype of a QTensor is that of its dequantized weight and must be float, got {dtype}: use codes()")
    where = q.device if device is None else torch.device(device)
    leaves = q.device.type != "cpu" and where.type == "cpu"  # bytes are rearranged on the quicker of two devices
    if leaves and q.readers and not q.pins_layout and q._preferred(where, dtype or q.dtype) != q.byte_layout:
        canonical = q.canonical()
        canonical.readers, q = q.readers, canonical
    moved = q._apply_to_parts(lambda part: part.to(device=device, non_blocking=non_blocking, copy=True), dtype)
    moved.relayout_()
    return moved


@implements(ATEN, aten.empty_like.default)
def _empty_like(q: QTensor, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> QTensor:
    where = q.device if device is None else torch.device(device)
    like = q if where == q.device or q.pins_layout else q.canonical()
    made = like._apply_to_parts(lambda part: torch.empty_like(part, device=device), dtype)
    made.readers = q.readers
    return made


@implements(ATEN, aten.equal.default)
def _equal(a: Tensor, b: Tensor) -> bool:
    if not (isinstance(a, QTensor) and isinstance(b, QTensor)) or a.scheme != b.scheme or a.shape != b.shape:
        return False
    left, right = a.canonical()._parts(), b.canonical()._parts()
    return a.transposed == b.transposed and all(torch.equal(part, right[name]) for name, part in left.items())


# ---- shapes ----------------------------------------------------------------------------------------------------


@implements(ATEN, aten.permute.default)
def _permute(q: QTensor, dims: Sequence[int]) -> QTensor:
    n = q.dim()
    order, same = [_wrap(dim, n) for dim in dims], list(range(n))
    if order == same:
        return _alias(q)
    if order != [*same[:-2], n - 1, n - 2]:
        raise ValueError(f"only the last two dimensions of a QTensor can be swapped, got the order {order}: dequantize first")
    return _over(q, _rebuilt(q, q._parts(), q._stored_shape, not q.transposed, q.byte_layout))


@implements(ATEN, aten.transpose.int)
def _transpose(q: QTensor, dim0: int, dim1: int) -> QTensor:
    order = list(range(q.dim()))
    a, b = _wrap(dim0, q.dim()), _wrap(dim1, q.dim())
    order[a], order[b] = b, a
    return _permute(q, order)


@implements(ATEN, aten.t.default)
def _t(q: QTensor) -> QTensor:
    return _transpose(q, 0, -1)


@implements(ATEN, aten.view.default, aten._unsafe_view.default, aten.expand.default)
def _same_shape(q: QTensor, size: Sequence[int], *, implicit: bool = False) -> QTensor:
    # A product of batches asks for these even where nothing changes.
    if not q.transposed and len(size) == 1 < q.dim() and size[0] in (-1, q.numel()):
        settings = (q.scheme, q._stored_shape, q.dtype, q.byte_layout, False, True)
        return _over(q, QTensor(q.packed, q.scale, q.zero_point, q.outer, *settings))
    if len(size) != q.dim() or any(want not in (-1, got) for want, got in zip(size, q.shape, strict=True)):
        raise ValueError(f"a QTensor keeps its shape {tuple(q.shape)}, got {tuple(size)}: dequantize first")
    return _alias(q)


def _wrap(dim: int, n: int) -> int:
    if not -n <= dim < n:
        raise IndexError(f"dimension must be {-n}..{n - 1}, got {dim}")
    return dim % n


def _stored_dim(q: QTensor, dim: int) -> int:
    """The dimension of what is stored that ``dim`` of ``q`` is."""
    n = q.dim()
    dim = _wrap(dim, n)
    return (2 * n - 3) - dim if q.transposed and dim >= n - 2 else dim


def _index_rows(q: QTensor, dim: int, index: Callable[[Tensor, int], Tensor], transposed: bool | None = None) -> QTensor:
    """Apply ``index(part, dim)`` along a stored dimension other than K, which it may drop. Whole matrices keep their layout."""
    lead = len(q._stored_shape) - 2
    q = q if dim < lead else q.canonical()
    parts = {name: part if name == "outer" and dim >= lead else index(part, dim) for name, part in q._parts().items()}
    return _rebuilt(q, parts, (*parts["packed"].shape[:-1], q._stored_shape[-1]), transposed, q.byte_layout)


def _view_of_rows(q: QTensor, dim: int, index: Callable[[Tensor, int], Tensor], transposed: bool | None = None) -> QTensor:
    """:func:`_index_rows` for an ``index`` that gives views: what is written into its result is written into ``q``, and back."""
    piece = _index_rows(q, dim, index, transposed)
    if q.outer is not None and dim >= len(q._stored_shape) - 2:
        _share(q, piece, ("outer",))
    if q.byte_layout == piece.byte_layout:
        return _over(q, piece)

    def write(base: QTensor, new: QTensor) -> None:
        into = _index_rows(base, dim, index, transposed)._parts()
        for name, part in new._parts().items():
            into[name].copy_(part)

    return _following(q, piece, lambda: _index_rows(q, dim, index, transposed), write)


def _over(q: QTensor, view: QTensor) -> QTensor:
    """``view``, whose parts are views of those of ``q``: copies that follow one follow the other."""
    view._copies = q._copies
    _share(q, view, q._shared)
    if (back := q._write_back) is not None:
        view._write_back = lambda new: back(q)
    return view


def _share(q: QTensor, view: QTensor, names: Iterable[str]) -> None:
    """Note the parts of ``view`` that values of ``q`` outside it are scaled by too: no write exchanges them, unless all of ``q``
    is being written."""
    view._is_fully_written = q._is_fully_written
    view._shared = frozenset() if q._is_fully_written else view._shared.union(names)


def _following(
    q: QTensor, piece: QTensor, recompute: Callable[[], QTensor], write: Callable[[QTensor, QTensor], None]
) -> QTensor:
    """``piece``, which holds copies of bytes of ``q``, as a view of it. ``recompute()`` takes it anew;
    ``write(canonical, piece)`` writes it into ``q`` in canonical bytes."""

    def back(new: QTensor) -> None:
        canonical = q.canonical()
        write(canonical, new)
        if canonical is not q:
            q._copy_from(canonical._to_layout(q.byte_layout))
        q._after_write()

    piece._write_back = back
    q._copies.append((weakref.ref(piece), recompute))
    return piece


def _rebuilt(
    like: QTensor,
    parts: dict[str, Tensor],
    shape: tuple[int, ...],
    transposed: bool | None = None,
    layout: str = "canonical",
    dtype: torch.dtype | None = None,
) -> QTensor:
    is_transposed = like.transposed if transposed is None else transposed
    return _assemble(parts, like.scheme, shape, dtype or like.dtype, layout, is_transposed)


@implements(ATEN, aten.slice.Tensor)
def _slice(q: QTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> QTensor:
    dim = _stored_dim(q, dim)
    size = q._stored_shape[dim]
    start, stop, _ = slice(start, end).indices(size)
    stop = max(start, stop)
    if (start, stop, step) == (0, size, 1):
        return _alias(q)
    if dim < len(q._stored_shape) - 1:
        if step == 1 and dim == 0 and _are_whole_rows(q, start, stop):
            return row_range(q, start, stop)
        return _view_of_rows(q, dim, lambda part, d: part[(slice(None),) * d + (slice(start, stop, step),)])
    piece, group = _slice_k(q.canonical(), start, stop, step), q.scheme.group_size
    cut = group == -1 or start % group or (stop % group and stop != size)
    _share(q, piece, ("outer", *(("scale", "zero_point") if cut else ())))
    if q.byte_layout == "canonical" and len(plane_widths(q.scheme.bits)) == 1 and piece.scheme == q.scheme:
        return _over(q, piece)

    def write(base: QTensor, new: QTensor) -> None:
        _write_k(base, start, stop, new)

    return _following(q, piece, lambda: _slice_k(q.canonical(), start, stop, step), write)


def _are_whole_rows(q: QTensor, start: int, stop: int) -> bool:
    """Whether the rows from ``start`` to ``stop`` lie together in the layout of the matrix ``q``, as a weight of their own."""
    rows = LAYOUTS[q.byte_layout].rows
    aligned = start % rows == stop % rows == q._stored_shape[0] % rows == 0
    return q.byte_layout != "canonical" and len(q._stored_shape) == 2 and aligned and stop > start


def row_range(q: QTensor, start: int, stop: int) -> QTensor:
    """Rows of the matrix ``q`` that lie together in its layout, as a view in that layout."""
    parts = {name: part if name == "outer" else part[start:stop] for name, part in q._parts().items()}
    piece = _rebuilt(q, parts, (stop - start, q._stored_shape[-1]), layout=q.byte_layout)
    _share(q, piece, ("outer",) if q.outer is not None else ())
    return _over(q, piece)


def _write_k(q: QTensor, start: int, stop: int, new: QTensor) -> None:
    """Write ``new``, a slice of columns, into the canonical ``q``."""
    if new.scheme != q.scheme:
        raise ValueError(
            f"columns {start}:{stop} cut a group of {q.scheme.group_size}, whose scale the others share: write whole groups, "
            "or dequantize, change and quantize again"
        )
    k, bits, group = q._stored_shape[-1], q.scheme.bits, q.scheme.group_size
    for plane, piece, width in zip(
        planes(q.packed, bits, k), planes(new.packed, bits, stop - start), plane_widths(bits), strict=True
    ):
        plane[..., start * width // 8 : -(-stop * width // 8)].copy_(piece)
    columns = slice(None) if group == -1 else slice(start // group, -(-stop // group))
    for name in ("scale", "zero_point"):
        part, piece = getattr(q, name), getattr(new, name)
        if part is not None:
            part[..., columns].copy_(piece)
    if q.outer is not None and new.outer is not None:
        q.outer.copy_(new.outer)


def _slice_k(q: QTensor, start: int, stop: int, step: int, group_size: int | None = None) -> QTensor:
    """Columns ``start`` to ``stop`` of the canonical ``q``, with a scale for each ``group_size`` columns, which divides the group
    size of ``q``; by default for as many as ``start`` allows."""
    k, scheme, group = q._stored_shape[-1], q.scheme, q.scheme.group_size
    align = 8 // min(plane_widths(scheme.bits))
    if start == stop:  # nothing lies on the bounds of every byte
        start = stop = 0
    elif step != 1:
        raise ValueError(f"a slice along K must have step 1, got {step}: dequantize first")
    if start % align or (stop % align and stop != k):
        near = f"{start // align * align}:{min(-(-stop // align) * align, k)}"
        raise ValueError(
            f"a slice along K of {scheme.bits}-bit codes must start and end at multiples of {align}, "
            f"got {start}:{stop}; the nearest is {near}"
        )
    pieces = [
        plane[..., start * width // 8 : -(-stop * width // 8)]
        for plane, width in zip(planes(q.packed, scheme.bits, k), plane_widths(scheme.bits), strict=True)
    ]
    packed = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)
    # A slice that starts inside a group keeps its scales by repeating them for a group size that divides both.
    finer = group if group == -1 else math.gcd(group, start) if group_size is None else group_size

    def along(scales: Tensor) -> Tensor:
        if start == stop:
            return scales[..., :0]
        if group == -1:
            return scales
        if finer == group:
            return scales[..., start // group : -(-stop // group)]
        return scales.index_select(-1, torch.arange(start, stop, finer, device=scales.device) // group)

    zero_point = None if q.zero_point is None else along(q.zero_point)
    scheme, shape = scheme.replace(group_size=finer), (*q._stored_shape[:-1], stop - start)
    return QTensor(packed, along(q.scale), zero_point, q.outer, scheme, shape, q.dtype, "canonical", q.transposed)


@implements(ATEN, aten.select.int)
def _select(q: QTensor, dim: int, index: int) -> QTensor:
    stored = _stored_dim(q, dim)
    if stored == len(q._stored_shape) - 1:
        raise ValueError("a column of a QTensor is not on a byte's bounds: dequantize first")
    size = q._stored_shape[stored]
    if not -size <= index < size:
        raise IndexError(f"index {index} is out of range for dimension {dim} of size {size}")
    row = stored == len(q._stored_shape) - 2
    if row and q.outer is not None and q.outer.dim():
        raise ValueError("a row of every matrix would leave each row its own outer scale: dequantize first")
    return _view_of_rows(q, stored, lambda part, d: part.select(d, index), transposed=q.transposed and not row)


@implements(ATEN, aten.unbind.int)
def _unbind(q: QTensor, dim: int = 0) -> tuple[QTensor, ...]:
    return tuple(_select(q, dim, i) for i in range(q.shape[dim]))


@implements(ATEN, aten.index_select.default)
def _index_select(q: QTensor, dim: int, index: Tensor) -> QTensor:
    return _gather(q, dim, lambda part, d: part.index_select(d, index))


@implements(ATEN, aten.index.Tensor)
def _index(q: QTensor, indices: Sequence[Tensor | None]) -> QTensor:
    given = [i for i, index in enumerate(indices) if index is not None]
    index = indices[given[0]]
    if len(given) != 1 or index is None or index.dim() != 1:
        raise ValueError("a QTensor takes one index tensor of one dimension: dequantize first for more")
    return _gather(q, given[0], lambda part, d: part[(slice(None),) * d + (index,)])


def _gather(q: QTensor, dim: int, index: Callable[[Tensor, int], Tensor]) -> QTensor:
    stored = _stored_dim(q, dim)
    if stored == len(q._stored_shape) - 1:
        raise ValueError("columns of a QTensor cannot be gathered: dequantize first")
    return _index_rows(q, stored, index)


@implements(ATEN, aten.split.Tensor)
def _split(q: QTensor, size: int, dim: int = 0) -> tuple[QTensor, ...]:
    length = q.shape[dim]
    if size < 0 or (size == 0 and length):
        raise ValueError(f"split needs pieces of at least 1, got {size}")
    return _pieces(q, dim, [(start, min(start + size, length)) for start in range(0, max(length, 1), max(size, 1))])


@implements(ATEN, aten.split_with_sizes.default)
def _split_with_sizes(q: QTensor, sizes: Sequence[int], dim: int = 0) -> tuple[QTensor, ...]:
    if min(sizes, default=0) < 0 or sum(sizes) != q.shape[dim]:
        raise ValueError(f"split sizes must add up to {q.shape[dim]}, got {list(sizes)}")
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return _pieces(q, dim, [(start, start + size) for start, size in zip(starts, sizes, strict=True)])


def _pieces(q: QTensor, dim: int, ranges: list[tuple[int, int]]) -> tuple[QTensor, ...]:
    """``q`` cut along ``dim``. Pieces of columns that cut groups have one scheme, so that processes can share them."""
    group, stored = q.scheme.group_size, _stored_dim(q, dim)
    if stored < len(q._stored_shape) - 1 or group == -1 or all(start % group == 0 for start, _ in ranges):
        return tuple(_slice(q, dim, start, stop) for start, stop in ranges)
    finer = math.gcd(group, *(start for start, _ in ranges))
    return tuple(_slice_k(q.canonical(), start, stop, 1, finer) for start, stop in ranges)


def _same_kind(tensors: Sequence[Tensor], operation: str) -> list[QTensor]:
    kinds = set()
    for q in tensors:
        if not isinstance(q, QTensor):
            raise TypeError(f"{operation} mixes a QTensor with a float tensor: dequantize it first")
        kinds.add((q.scheme, q.transposed))
    if len(kinds) > 1:
        raise ValueError(
            f"{operation} needs one scheme and orientation, got {', '.join(str(s) for s, _ in kinds)}: requantize first"
        )
    return [q.canonical() for q in tensors]  # type: ignore[attr-defined]


def _common_dtype(tensors: Sequence[QTensor]) -> torch.dtype:
    """The dtype that the float weights of several become together, in any order."""
    return reduce(torch.promote_types, (q.dtype for q in tensors))


def _cat_parts(
    tensors: Sequence[QTensor], join: Callable[[list[Tensor]], Tensor], shared: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    names = tensors[0]._parts()
    return {name: tensors[0]._parts()[name] if name in shared else join([q._parts()[name] for q in tensors]) for name in names}


@implements(ATEN, aten.cat.default)
def _cat(tensors: Sequence[Tensor], dim: int = 0) -> QTensor:
    qs = _same_kind(tensors, "cat")
    first = qs[0]
    stored, last = _stored_dim(first, dim), len(first._stored_shape) - 1
    for q in qs[1:]:
        if len(q._stored_shape) != last + 1 or any(
            a != b for i, (a, b) in enumerate(zip(q._stored_shape, first._stored_shape, strict=True)) if i != stored
        ):
            raise ValueError(f"cat along {dim}: shapes {tuple(first.shape)} and {tuple(q.shape)} do not match")
    shared: tuple[str, ...] = ()
    if first.outer is not None and stored >= last - 1:
        outers = [q.outer for q in qs if q.outer is not None]
        if any(outer is not first.outer and not outer.is_meta and not torch.equal(outer, first.outer) for outer in outers):
            raise ValueError("cat of matrices with different outer scales: requantize the concatenated weight instead")
        shared = ("outer",)
    if stored == last:
        return _cat_k(qs)
    parts = _cat_parts(qs, lambda p: torch.cat(p, dim=stored), shared)
    shape = (*first._stored_shape[:stored], sum(q._stored_shape[stored] for q in qs), *first._stored_shape[stored + 1 :])
    return _rebuilt(first, parts, shape, dtype=_common_dtype(qs))


def _cat_k(qs: list[QTensor]) -> QTensor:
    first = qs[0]
    scheme, align = first.scheme, 8 // min(plane_widths(first.scheme.bits))
    for q in qs[:-1]:
        k = q._stored_shape[-1]
        if scheme.group_size == -1 or k % scheme.group_size or k % align:
            raise ValueError(
                f"cat along K needs whole groups and whole bytes: K={k} with group_size {scheme.group_size} "
                f"and {scheme.bits}-bit codes; dequantize and quantize again"
            )
    rows = [planes(q.packed, scheme.bits, q._stored_shape[-1]) for q in qs]
    packed = torch.cat([plane for column in zip(*rows, strict=True) for plane in column], dim=-1)
    parts = _cat_parts(qs, lambda p: torch.cat(p, dim=-1), shared=("packed", "outer"))
    parts["packed"] = packed
    shape = (*first._stored_shape[:-1], sum(q._stored_shape[-1] for q in qs))
    return _rebuilt(first, parts, shape, dtype=_common_dtype(qs))


@implements(ATEN, aten.stack.default)
def _stack(tensors: Sequence[Tensor], dim: int = 0) -> QTensor:
    qs = _same_kind(tensors, "stack")
    first = qs[0]
    dim = _wrap(dim, first.dim() + 1)
    if dim > first.dim() - 2 or any(q.shape != first.shape for q in qs):
        raise ValueError("stack makes a dimension before the matrices, of tensors of one shape")
    parts = _cat_parts(qs, lambda p: torch.stack(p, dim=dim))
    shape = (*parts["packed"].shape[:-1], first._stored_shape[-1])
    return _rebuilt(first, parts, shape, dtype=_common_dtype(qs))
