"""What products mean on a QTensor: they run through the lowbit operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from lowbit_kernels.ops import own
from lowbit_kernels.shortcut import signature

from .tensor import QTensor, _with_rows
from .tensor_ops import ATEN, _on, _t, _transpose

__all__ = ["ATEN", "FUNCTIONS"]

aten = torch.ops.aten
FUNCTIONS: dict[Any, Callable[..., Any]] = {}


def linear(x: Tensor, weight: QTensor, bias: Tensor | None = None) -> Tensor:
    """``x @ W.T + bias`` for a stored weight [N, K]."""
    _check_k(x, weight)
    return torch.ops.lowbit.linear(
        x, weight.packed, weight.scale, weight.zero_point, weight.outer, bias, str(weight.scheme), weight.byte_layout
    )


def _check_k(x: Tensor, weight: QTensor) -> None:
    # The operators know K from x alone, and a row of one column less may take as many bytes.
    if x.dim() == 0 or x.shape[-1] != weight._stored_shape[-1]:
        raise ValueError(f"x must end in K={weight._stored_shape[-1]}, got shape {tuple(x.shape)}")


def _without_dispatcher(x: Tensor, weight: QTensor, bias: Tensor | None) -> Tensor | None:
    """The product by a kernel that was selected before; None where the operator has to be called."""
    if weight.transposed or (known := signature(x, weight.scale, bias)) is None:
        return None
    parts = (weight.packed, weight.scale, weight.zero_point, weight.outer)
    run = weight._shortcuts.get(known)
    if run is None:
        if weight.dim() != 2:
            return None
        what = ("linear", weight.byte_layout, weight._stored_shape[-1], weight.scheme, None)
        run = weight._shortcuts.find(known, *what, x, parts, bias)
        if run is None:
            return None
    y = run(x, *parts, bias, weight.scheme)
    return own(y) if y._is_view() else y


@_on(FUNCTIONS, torch.nn.functional.linear)
def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not isinstance(weight, QTensor) or isinstance(input, QTensor):
        return NotImplemented
    if not is_compiling() and (y := _without_dispatcher(input, weight, bias)) is not None:
        return y
    if weight.dim() > 2:
        raise ValueError(f"linear takes a weight [N, K], got {tuple(weight.shape)}: index it, or use bmm")
    if weight.transposed:
        return torch.nn.functional.linear(input, weight.dequantize(input.dtype), bias)
    _check_k(input, weight)
    rows = _with_rows(weight)
    y = torch.ops.lowbit.linear(input, *rows, weight.outer, bias, str(weight.scheme), weight.byte_layout)
    return y if weight.dim() > 1 else y[..., 0]


@_on(FUNCTIONS, torch.matmul, Tensor.matmul, Tensor.__matmul__)
def _matmul(a: Tensor, b: Tensor) -> Any:
    # torch would repeat the matrix for each of a batch whose strides it cannot fold.
    if isinstance(b, QTensor) and not isinstance(a, QTensor) and b.dim() == 2 and a.dim() > 2:
        return torch.nn.functional.linear(a, b.t())
    if isinstance(a, QTensor) and not isinstance(b, QTensor) and a.dim() == 2 and b.dim() > 2:
        return torch.nn.functional.linear(b.transpose(-1, -2), a).transpose(-1, -2)
    return NotImplemented


@_on(FUNCTIONS, torch.nn.functional.embedding)
def _embedding(input: Tensor, weight: Tensor, padding_idx: Any = None, max_norm: Any = None, *rest: Any, **options: Any) -> Any:
    if not isinstance(weight, QTensor):
        return NotImplemented
    if max_norm is not None or weight.transposed or weight.dim() != 2:
        raise ValueError("an embedding takes a QTensor [N, K] that is not transposed, and no max_norm: dequantize first")
    parts = (weight.packed, weight.scale, weight.zero_point, weight.outer)
    return torch.ops.lowbit.embedding(input, *parts, str(weight.scheme), weight.byte_layout, weight.shape[-1], weight.dtype)


@_on(ATEN, aten.mm.default)
def _mm(a: Tensor, b: Tensor) -> Tensor:
    if isinstance(b, QTensor) and not isinstance(a, QTensor):
        return linear(a, _t(b)) if b.transposed else a @ b.dequantize(a.dtype)
    if isinstance(a, QTensor) and not isinstance(b, QTensor):
        return a.dequantize(b.dtype) @ b if a.transposed else linear(b.t(), a).t()
    raise NotImplementedError("a product of two QTensors: dequantize one of them")


@_on(ATEN, aten.addmm.default)
def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if isinstance(b, QTensor) and b.transposed and beta == alpha == 1 and bias.dim() == 1 and not isinstance(a, QTensor):
        return linear(a, _t(b), bias)
    product = _mm(a, b) if alpha == 1 else alpha * _mm(a, b)
    return product if beta == 0 else beta * bias + product  # beta 0 ignores even a NaN in bias, as torch does


@_on(ATEN, aten.mv.default)
def _mv(a: Tensor, b: Tensor) -> Tensor:
    return _mm(a, b[:, None])[:, 0]


@_on(ATEN, aten.bmm.default)
def _bmm(a: Tensor, b: Tensor) -> Tensor:
    if isinstance(b, QTensor) and not isinstance(a, QTensor):
        return _grouped(a, _transpose(b, -1, -2)) if b.transposed else a @ b.dequantize(a.dtype)
    if isinstance(a, QTensor) and not isinstance(b, QTensor):
        return a.dequantize(b.dtype) @ b if a.transposed else _grouped(b.transpose(-1, -2), a).transpose(-1, -2)
    raise NotImplementedError("a product of two QTensors: dequantize one of them")


def _grouped(x: Tensor, weight: QTensor) -> Tensor:
    _check_k(x, weight)
    parts = (weight.packed, weight.scale, weight.zero_point, weight.outer)
    return torch.ops.lowbit.grouped_linear(x, *parts, None, str(weight.scheme), weight.byte_layout)
