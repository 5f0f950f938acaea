"""What writes into a QTensor mean: floats are rounded to nearest under its scheme, codes are copied.

A group whose values a write does not change keeps its codes and scale, so that writing back what :meth:`QTensor.dequantize` gave
changes nothing. A slice writes through to the tensor that it is a slice of, or raises where both would need another scale.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .packing import pack_unchecked, unpack
from .qtensor import QTensor
from .tensor_ops import _same_kind
from .tensor_table import ATEN, implements

__all__ = ["set_data", "follow_gradients", "write"]

aten = torch.ops.aten


@implements(ATEN, aten.copy_.default)
def _copy_into(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(target, QTensor):
        assert isinstance(source, QTensor)
        return target.copy_(source.dequantize(target.dtype), non_blocking=non_blocking)
    follow_gradients(target, source)
    if not isinstance(source, QTensor):
        write(target, source.expand(target.shape))
        return target
    _same_kind([target, source], "copy_")
    if target.shape != source.shape:
        raise ValueError(f"copy_ needs equal shapes, got {tuple(target.shape)} and {tuple(source.shape)}")
    _put(target, source)
    return target


def follow_gradients(target: QTensor, *written: Any) -> None:
    """Let products with ``target`` raise in backward where one of ``written`` waits for a gradient: codes hand none back."""
    if torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in written):
        for q in (target, target._base):
            if isinstance(q, QTensor):
                q._trains = True


def write(target: QTensor, values: Tensor) -> None:
    """Round the float ``values``, of the shape of ``target``, into it. Raises ``ValueError`` for NaN and infinity."""
    _put(target, rounded(target, values))


def rounded(like: QTensor, values: Tensor) -> QTensor:
    """``values`` rounded to nearest under the scheme of ``like``; groups that are equal to those of ``like`` are those."""
    if values.shape != like.shape:
        raise ValueError(f"the values must have the shape {tuple(like.shape)}, got {tuple(values.shape)}")
    stored = values.detach().to(like.device)
    stored = stored if stored.dtype.is_floating_point and stored.dtype.itemsize > 1 else stored.to(like.dtype)
    stored = stored.transpose(-1, -2) if like.transposed else stored
    if stored.dim() < 2:
        raise ValueError(f"values are rounded into matrices [..., N, K], got {tuple(values.shape)}: write into q[i : i + 1]")
    old, new = _upright(like), QTensor.quantize(stored, like.scheme)
    unchanged = _unchanged(old, stored)
    if like.outer is None or bool(unchanged.all()):
        new = _mixed(old, new, unchanged)
    parts = (new.packed, new.scale, new.zero_point, new.outer)
    return QTensor(*parts, like.scheme, new._stored_shape, like.dtype, transposed=like.transposed)


def _upright(q: QTensor) -> QTensor:
    """``q`` as it is stored, in canonical bytes."""
    q = q.canonical()
    return QTensor(q.packed, q.scale, q.zero_point, q.outer, q.scheme, q._stored_shape, q.dtype)


def _unchanged(old: QTensor, values: Tensor) -> Tensor:
    """[..., N, G]: the groups of which every value is as it was."""
    same, k = old.dequantize(values.dtype) == values, values.shape[-1]
    group = k if old.scheme.group_size == -1 else old.scheme.group_size
    padded = torch.nn.functional.pad(same, (0, -k % group), value=True)
    return padded.unflatten(-1, (-1, group)).all(-1)


def _mixed(old: QTensor, new: QTensor, unchanged: Tensor) -> QTensor:
    """``old`` where ``unchanged`` says so, by groups, and ``new`` elsewhere."""
    k, bits = old._stored_shape[-1], old.scheme.bits
    group = k if old.scheme.group_size == -1 else old.scheme.group_size
    wide = unchanged.repeat_interleave(group, -1)[..., :k]
    codes = torch.where(wide, unpack(old.packed, bits, k), unpack(new.packed, bits, k))
    scale = torch.where(unchanged, old.scale, new.scale)
    zero = None if old.zero_point is None else torch.where(unchanged, old.zero_point, new.zero_point)  # type: ignore[arg-type]
    return QTensor(pack_unchecked(codes, bits), scale, zero, old.outer, old.scheme, old._stored_shape, old.dtype)


@torch.no_grad()
def _put(target: QTensor, source: QTensor) -> None:
    """Copy what ``source``, of the same shape, scheme and orientation, stands for into the parts of ``target``."""
    if target.numel() == 0:
        return
    for name in target._shared:
        own_part, source_part = getattr(target, name), getattr(source, name)
        if own_part is not None and not torch.equal(own_part, source_part.to(own_part.device)):
            raise ValueError(
                f"the {name} of this slice scales values outside it too, and what is written has another: "
                "write all that share it, or dequantize the whole weight, change it and quantize again"
            )
    target._copy_from(source._to_layout(target.byte_layout))
    target._after_write()


def set_data(target: QTensor, value: Tensor) -> None:
    """``target.data = value``: hold what ``value`` is from now on; floats are rounded under the scheme of ``target``.

    They may be more rows or fewer, as when a vocabulary grows: rows that stay as they were keep their codes.
    """
    rows = target.dim() == 2 and not target.transposed and value.shape[1:] == target.shape[1:]
    if value.shape != target.shape and not rows:
        flat = "; FullyShardedDataParallel (FSDP1) sets such: use torch.distributed.fsdp.fully_shard (FSDP2)"
        raise ValueError(
            f"the data of a QTensor {tuple(target.shape)} must have its shape, or more or fewer rows, got {tuple(value.shape)}"
            f"{flat if value.dim() == 1 else ''}"
        )
    if isinstance(value, QTensor):
        new = value.detach()
    else:
        fitting = rounded(target, value) if value.shape == target.shape else _with_other_rows(target, value.detach())
        new = fitting.to(value.device, value.dtype)
    assert isinstance(new, QTensor)
    target._notify_fused()
    readers, pins, trains = target.readers, target.pins_layout, target._trains
    new = new._to_layout(target.byte_layout) if pins else new
    same_kind = (new.dtype, new.device, new.shape) == (target.dtype, target.device, target.shape)
    if same_kind and new.stride() == target.stride():
        target._become(new)
    else:
        named: Any = torch.nn.Parameter(new, target.requires_grad) if isinstance(target, torch.nn.Parameter) else new
        torch.utils.swap_tensors(target, named)
    target.readers, target.pins_layout, target._trains = readers, pins, trains
    target.relayout_()


def _with_other_rows(target: QTensor, values: Tensor) -> QTensor:
    """``values`` [N', K] under the scheme of ``target`` [N, K]; where one scale stands above all rows they are rounded anew."""
    n = min(len(target), len(values))
    if target.outer is not None:
        return QTensor.quantize(values, target.scheme)
    first: Any = _upright(target)[:n]
    unchanged: Any = rounded(first, values[:n])
    if n < len(values):
        unchanged = torch.cat([unchanged, QTensor.quantize(values[n:].to(unchanged.device), target.scheme).to(unchanged.dtype)])
    assert isinstance(unchanged, QTensor)
    return unchanged
