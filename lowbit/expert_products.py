"""Products of rows with the matrices that they are for: of tokens with the experts that they chose, of which no other is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from lowbit_kernels.ops import call_for
from lowbit_kernels.registry import NoKernelError, select

from .qtensor import QTensor
from .tensor_ops import _transpose
from .tensor_products import _Untrained, product
from .tensor_table import ATEN, FUNCTIONS, implements

__all__ = ["ATEN", "FUNCTIONS", "batched_linear", "experts_linear", "grouped_linear", "has_experts_kernel"]

aten = torch.ops.aten


def has_experts_kernel(weight: QTensor, x: Tensor, rows: int) -> bool:
    """Whether :func:`experts_linear` has a kernel for ``weight`` [E, N, K] or its transpose and so many ``rows``, which waits for
    no device and has no gradient."""
    if torch.is_grad_enabled() and (x.requires_grad or weight._trains):
        return False
    experts, n, k = weight._stored_shape
    if is_compiling():  # a layout is chosen where its kernels are
        return weight.byte_layout == "mma_fragment" and n % 16 == 0 and rows <= experts
    call = call_for("experts_linear", weight.scheme, weight.byte_layout, x.device, x.dtype, -(-rows // max(experts, 1)), n, k)
    try:
        return not select(call).name.startswith("reference")
    except NoKernelError:
        return False


def experts_linear(x: Tensor, weight: QTensor, experts: Tensor, bias: Tensor | None = None) -> Tensor:
    """Row i of the result [S, N]: row ``i // (S / len(x))`` of ``x`` times the matrix of expert ``experts[i]`` in ``weight``
    [E, N, K] or its transpose, plus its ``bias`` [E, N].

    ``experts`` [S] is int64 on the device of ``x``; an index that is none of 0 .. E - 1 gives a row of zeros.
    """
    parts = (weight.packed, weight.scale, weight.zero_point, weight._outer)
    return torch.ops.lowbit.experts_linear(x, *parts, bias, weight.scheme_str, weight.byte_layout, experts)


def grouped_linear(x: Tensor, weight: QTensor, ends: Sequence[int], bias: Tensor | None = None) -> Tensor:
    """``x`` [S, K], sorted by expert, times the matrix [N, K] of each row's expert in ``weight`` [E, N, K] or its transpose:
    [S, N].

    ``ends`` [E]: behind the last row of each expert; rows behind them all become 0. ``bias`` [E, N].
    """
    n, k = weight._stored_shape[-2:]
    if x.dim() != 2 or x.shape[1] != k:
        raise ValueError(f"x must be [S, {k}], got shape {tuple(x.shape)}")
    if len(ends) != weight.shape[0]:
        raise ValueError(f"there are {weight.shape[0]} experts, and the ends of {len(ends)}")
    if weight._trains and torch.is_grad_enabled():
        x = _Untrained.apply(x, weight)  # type: ignore[no-untyped-call]
    matrices, found, start = weight.matrices(), [], 0
    for expert, end in enumerate(ends):
        if end > start:
            found.append(product(x[start:end], matrices[expert], None if bias is None else bias[expert]))
            start = end
    if start < x.shape[0] or not found:
        found.append(x.new_zeros(x.shape[0] - start, n))
    return found[0] if len(found) == 1 else torch.cat(found)


def batched_linear(x: Tensor, weight: QTensor, transposed: bool) -> Tensor:
    """``x`` [E, M, K] times each matrix [N, K] of ``weight`` [E, N, K]; ``transposed``: ``x`` [E, M, N] times its transpose.

    One matrix at a time is multiplied, and none whose rows of x are all 0 (those of tokens that chose another expert).
    """
    n, k = weight._stored_shape[-2:]
    if x.shape[-1] != (n if transposed else k):
        raise ValueError(f"x must end in {n if transposed else k} features, got shape {tuple(x.shape)}")
    if x.shape[0] != weight.shape[0]:
        raise ValueError(f"x must be {weight.shape[0]} matrices, one for each of the weight, got shape {tuple(x.shape)}")
    y = x.new_zeros(*x.shape[:-1], k if transposed else n)
    for expert, matrix in enumerate(weight.matrices()):
        rows = x[expert].any(-1).nonzero()[:, 0]
        if len(rows):
            chosen = x[expert] if len(rows) == x.shape[1] else x[expert, rows]
            y[expert, rows] = chosen @ matrix.dequantize(x.dtype) if transposed else product(chosen, matrix)
    return y


def _one_by_one(x: Tensor) -> bool:
    """Whether a loop may look at the numbers of ``x``: there are some, and no device has to be waited for."""
    return type(x) is Tensor and x.device.type == "cpu" and not is_compiling()


@implements(ATEN, aten.bmm.default)
def _bmm(a: Tensor, b: Tensor) -> Tensor:
    if isinstance(b, QTensor) and not isinstance(a, QTensor):
        if _one_by_one(a):
            return batched_linear(a, _transpose(b, -1, -2), False) if b.transposed else batched_linear(a, b, True)
        return _grouped(a, _transpose(b, -1, -2)) if b.transposed else a @ b.dequantize(a.dtype)
    if isinstance(a, QTensor) and not isinstance(b, QTensor):
        return _bmm(b.transpose(-1, -2), _transpose(a, -1, -2)).transpose(-1, -2)
    raise NotImplementedError("a product of two QTensors: dequantize one of them")


def _grouped(x: Tensor, weight: QTensor) -> Tensor:
    if x.shape[-1] != weight._stored_shape[-1]:
        raise ValueError(f"x must end in {weight._stored_shape[-1]} features, got shape {tuple(x.shape)}")
    parts = (weight.packed, weight.scale, weight.zero_point, weight.outer)
    return torch.ops.lowbit.grouped_linear(x, *parts, None, str(weight.scheme), weight.byte_layout)


def _grouped_mm(
    mat_a: Tensor, mat_b: Tensor, *, offs: Tensor | None = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> Any:
    """``torch.nn.functional.grouped_mm`` of rows and experts ``mat_b`` [E, K, N]; ``offs``: behind the last row of each."""
    if not isinstance(mat_b, QTensor) or isinstance(mat_a, QTensor) or offs is None or mat_a.dim() != 2:
        return NotImplemented
    if mat_b.transposed:
        y = grouped_linear(mat_a, mat_b, offs.tolist())
    else:
        *pieces, left = mat_a.tensor_split(offs.tolist())
        found = [piece @ matrix.dequantize(piece.dtype) for piece, matrix in zip(pieces, mat_b.matrices(), strict=True)]
        y = torch.cat([*found, left.new_zeros(len(left), mat_b.shape[-1])])
    return y if out_dtype is None else y.to(out_dtype)


for _function in (getattr(torch.nn.functional, "grouped_mm", None), getattr(torch, "_grouped_mm", None)):
    if _function is not None:  # torch 2.8 has the second, 2.10 the first
        FUNCTIONS[_function] = _grouped_mm
