"""What sharding asks of a QTensor: room for some rows, and collectives, which move its parts one by one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lowbit_kernels.layouts import LAYOUTS

from .qtensor import QTensor
from .tensor_ops import _alias, _rebuilt
from .tensor_products import Activation, product
from .tensor_table import ATEN, implements

__all__ = ["sharded_product"]

aten = torch.ops.aten


@implements(ATEN, aten.new_zeros.default)
def _new_zeros(q: QTensor, size: Sequence[int], **options: Any) -> Tensor:
    """A QTensor of as many columns, of which codes and scales are 0 and ``outer`` is that of ``q``; floats of any other size."""
    if len(size) != 2 or q.dim() != 2 or q.transposed or size[1] != q.shape[1] or options.get("dtype") not in (None, q.dtype):
        return torch.zeros(size, **{"dtype": q.dtype, "device": q.device, **options})
    like = q if size[0] % LAYOUTS[q.byte_layout].rows == 0 else q.canonical()
    device = options.get("device")
    parts = {
        name: part.to(device) if name == "outer" else part.new_zeros((size[0], *part.shape[1:]), device=device)
        for name, part in like._parts().items()
    }
    return _rebuilt(q, parts, (size[0], size[1]), layout=like.byte_layout)


@implements(ATEN, aten.as_strided.default)
def _as_strided(q: QTensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> QTensor:
    if tuple(size) != tuple(q.shape) or tuple(stride) != tuple(q.stride()) or storage_offset:
        raise ValueError(f"a QTensor keeps its shape {tuple(q.shape)}, got {tuple(size)} with strides {tuple(stride)}")
    return _alias(q)


@implements(ATEN, aten.constant_pad_nd.default)
def _padded(q: QTensor, pad: Sequence[int], value: float = 0) -> Tensor:
    if any(pad):
        raise ValueError(
            f"a QTensor {tuple(q.shape)} of {q.scheme_str} cannot be padded by {list(pad)}: its rows and columns have to "
            "divide evenly among the processes; leave this layer whole, or dequantize it"
        )
    return _alias(q)


# ---- products ----------------------------------------------------------------------------------------------------


def sharded_product(x: Any, weight: Any, bias: Any, activation: Activation | None, input_scale: Tensor | None) -> Any:
    """``x`` [..., K] times a DTensor ``weight`` [N, K] over a QTensor: each process multiplies by its rows or columns.

    ``x`` is rounded to ``activation`` first. The result is shared as its last dimension where processes share rows, a partial sum
    where they share columns, and as ``x`` is otherwise.
    Raises ``ValueError`` where ``x`` is rounded and processes share columns: a token's scale is that of all its columns.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh, placements = weight.device_mesh, weight.placements
    if activation is not None and any(placement.is_shard(1) for placement in placements):
        raise ValueError(
            f"x is rounded to {activation.scheme_str} with a scale for all columns of a token, and the weight's columns are "
            f"shared "
            f"by processes ({placements}): shard this layer by rows (ColwiseParallel), or quantize it for float activations"
        )
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [Replicate()] * len(placements), run_check=False)
    last = x.dim() - 1
    wanted, gradients, given = [], [], []
    for weight_placement, x_placement in zip(placements, x.placements, strict=True):
        unsharded = x_placement if x_placement.is_shard() and x_placement.dim != last else Replicate()
        wanted.append(Replicate() if weight_placement.is_shard(0) else Shard(last) if weight_placement.is_shard(1) else unsharded)
        gradients.append(Partial() if weight_placement.is_shard(0) else wanted[-1])
        given.append(Shard(last) if weight_placement.is_shard(0) else Partial() if weight_placement.is_shard(1) else unsharded)
    sums = any(placement.is_partial() for placement in given)
    rows = [placement if placement.is_shard(0) else Replicate() for placement in placements]
    inner = None if bias is None or sums else bias.redistribute(mesh, rows).to_local() if isinstance(bias, DTensor) else bias
    x = x.redistribute(mesh, wanted).to_local(grad_placements=gradients)
    y = DTensor.from_local(product(x, weight._local_tensor, inner, activation, input_scale), mesh, given, run_check=False)
    return y if bias is None or not sums else y + bias


# ---- collectives -------------------------------------------------------------------------------------------------


def _by_parts(func: Any) -> Any:
    """A collective whose first argument lists the tensors of this process: run for each part, with the parts of all others."""

    def collective(*args: Any, **kwargs: Any) -> Any:
        names = list(_found(args)[0]._parts())
        result: Any = None
        for name in names:
            sent: dict[int, Tensor] = {id(q): q._parts()[name].contiguous() for q in _found(args)}
            result = func(*tree_map_only(QTensor, partial(_given, sent), args), **kwargs)
            written = [(q._parts()[name], sent[id(q)]) for q in _found(args[:1])]
            has_copies = any(part is not target_part for part, target_part in written)
            if (name != names[-1] or has_copies) and not _in_order(func, args, kwargs, sent):
                _work(result).wait()
            for part, target_part in written if has_copies else ():
                part.copy_(target_part)
        for q in _found(args[:1]):
            q._after_write()
        return (args[0], result[1]) if isinstance(result, tuple) else result

    return collective


def _in_order(func: Any, args: Any, kwargs: Any, sent: dict[int, Tensor]) -> bool:
    """Whether what comes next waits by itself: calls of a GPU that are not asynchronous stand in its stream, without a work."""
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    return named.get("async_op") is False and any(part.is_cuda for part in sent.values())


def _given(sent: dict[int, Tensor], q: QTensor) -> Tensor:
    return sent[id(q)]


def _found(value: Any) -> list[QTensor]:
    if isinstance(value, QTensor):
        return [value]
    return [q for item in value for q in _found(item)] if isinstance(value, (list, tuple)) else []


def _work(result: Any) -> Any:
    return result[1] if isinstance(result, tuple) else result


def _gathered(q: QTensor, group_size: int, group_name: str) -> QTensor:
    """The rows of all processes, whose ``outer`` is the same: what DTensor does to replicate a weight that they share."""
    if q.dim() != 2 or q.transposed or q.flat:
        raise ValueError(f"rows of a matrix [N, K] are gathered, got {q!r}: gather q.dequantize()")
    like = q if q.shape[0] % LAYOUTS[q.byte_layout].rows == 0 else q.canonical()
    gather = torch.ops._c10d_functional.all_gather_into_tensor.default
    parts = {
        name: part if name == "outer" else gather(part.contiguous(), group_size, group_name)
        for name, part in like._parts().items()
    }
    return _rebuilt(like, parts, (q.shape[0] * group_size, q.shape[1]), layout=like.byte_layout)


def _waited(q: QTensor) -> QTensor:
    for part in q._parts().values():
        torch.ops._c10d_functional.wait_tensor(part)
    return q


if torch.distributed.is_available():
    from torch.distributed import _functional_collectives

    ATEN[torch.ops._c10d_functional.all_gather_into_tensor.default] = _gathered
    ATEN[torch.ops._c10d_functional.wait_tensor.default] = _waited
    if hasattr(_functional_collectives, "_wrap_tensor_autograd"):  # torch 2.13: what waits once its result is read
        ATEN[torch.ops._c10d_functional._wrap_tensor_autograd.default] = _waited
    for _name in ("broadcast_", "scatter_", "allgather_", "gather_", "send", "recv_"):
        _func = getattr(torch.ops.c10d, _name).default
        ATEN[_func] = _by_parts(_func)
