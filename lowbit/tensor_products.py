"""What products mean on a QTensor: they run through the lowbit operators."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import profiler as _profiler
from torch.compiler import is_compiling

from lowbit_kernels import inlined
from lowbit_kernels.fast_dispatch import observed, signature
from lowbit_kernels.ops import detach_view

from .qtensor import QTensor, _with_rows
from .scheme import Scheme
from .tensor_ops import _t
from .tensor_table import ATEN, FUNCTIONS, implements

__all__ = ["ATEN", "FUNCTIONS", "Activation", "product"]

aten = torch.ops.aten


class Activation(NamedTuple):
    """The scheme that x is rounded to, and its canonical name, as operators take it."""

    scheme: Scheme
    scheme_str: str


def product(
    x: Tensor,
    weight: QTensor,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    input_scale: Tensor | None = None,
) -> Tensor:
    """``x @ weight.T + bias`` for a weight [N, K]; ``x`` is rounded to ``activation`` first, with a scale a token, or with
    ``input_scale``."""
    if not is_compiling() and (y := _without_dispatcher(x, weight, bias, activation, input_scale)) is not None:
        return y
    k = weight.shape[-1]
    if x.dim() == 0 or x.shape[-1] != k:  # the operators know K from x alone, and K - 1 columns may take as many bytes
        raise ValueError(f"x must end in {k} features, got shape {tuple(x.shape)}")
    parts = (weight.packed, weight.scale, weight.zero_point, weight._outer)
    if weight._trains and torch.is_grad_enabled():
        x = _Untrained.apply(x, weight)  # type: ignore[no-untyped-call]
    if inlined.active() and activation is None:
        return inlined.linear(x, *parts, bias, weight.scheme, weight.byte_layout, k)
    if inlined.active() and activation is not None and input_scale is not None:
        return inlined.quantized_linear(x, *parts, bias, weight.scheme, weight.byte_layout, k, activation.scheme, input_scale)
    if activation is None:
        return torch.ops.lowbit.linear(x, *parts, bias, weight.scheme_str, weight.byte_layout)
    settings = (weight.scheme_str, weight.byte_layout, activation.scheme_str)
    return torch.ops.lowbit.quantized_linear(x, *parts, bias, *settings, input_scale)


class _Untrained(torch.autograd.Function):
    """Passes x on, and raises in backward: for a weight that asks for a gradient, which codes have none of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QTensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise RuntimeError(
            "a quantized weight has no gradient: call requires_grad_(False) on it and train adapters, or dequantize it first"
        )


def _without_dispatcher(
    x: Tensor, weight: QTensor, bias: Tensor | None, activation: Activation | None, input_scale: Tensor | None
) -> Tensor | None:
    """The product by a kernel that was selected before; None where the operator has to be called."""
    if observed() or _profiler._is_profiler_enabled or (known := signature(x, weight._trains, bias)) is None or inlined.active():
        return None
    parts = (weight.packed, weight.scale, weight.zero_point, weight._outer)
    key = known if activation is None else (known, activation.scheme_str)
    run = weight._dispatch.get(key)
    if run is None:
        if len(weight._stored_shape) != 2 or weight.transposed:
            return None
        op, rounds = ("linear", None) if activation is None else ("quantized_linear", activation.scheme)
        run = weight._dispatch.find(key, op, weight.byte_layout, weight._stored_shape[-1], weight.scheme, rounds, x, parts, bias)
        if run is None:
            return None
    if activation is None:
        y = run(x, *parts, bias, weight.scheme)
    else:
        y = run(x, *parts, bias, weight.scheme, activation.scheme, input_scale)
    return detach_view(y) if y._is_view() else y


@implements(FUNCTIONS, torch.nn.functional.linear)
def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not isinstance(weight, QTensor) or isinstance(input, QTensor):
        return NotImplemented
    dims = len(weight._stored_shape)  # torch's own attributes of a subclass take longer than a small product
    if dims > 2:
        raise ValueError(f"linear takes a weight [N, K], got {tuple(weight.shape)}: index it, or use bmm")
    if weight.transposed or weight.flat:
        return torch.nn.functional.linear(input, weight.dequantize(input.dtype), bias)
    if dims < 2:
        return product(input, _as_matrix(weight), bias)[..., 0]
    return product(input, weight, bias)


def _as_matrix(row: QTensor) -> QTensor:
    parts = _with_rows(row)
    return QTensor(*parts, row.outer, row.scheme, (1, *row._stored_shape), row.dtype, row.byte_layout)


@implements(FUNCTIONS, torch.matmul, Tensor.matmul, Tensor.__matmul__)
def _matmul(a: Tensor, b: Tensor) -> Any:
    # torch would repeat the matrix for each of a batch whose strides it cannot fold.
    if isinstance(b, QTensor) and not isinstance(a, QTensor) and b.dim() == 2 and a.dim() > 2:
        return torch.nn.functional.linear(a, b.t())
    if isinstance(a, QTensor) and not isinstance(b, QTensor) and a.dim() == 2 and b.dim() > 2:
        return torch.nn.functional.linear(b.transpose(-1, -2), a).transpose(-1, -2)
    return NotImplemented


@implements(FUNCTIONS, torch.nn.functional.embedding)
def _embedding(input: Tensor, weight: Tensor, padding_idx: Any = None, max_norm: Any = None, *rest: Any, **options: Any) -> Any:
    if not isinstance(weight, QTensor):
        return NotImplemented
    if max_norm is not None or weight.transposed or weight.dim() != 2:
        raise ValueError("an embedding takes a QTensor [N, K] that is not transposed, and no max_norm: dequantize first")
    parts = (weight.packed, weight.scale, weight.zero_point, weight.outer)
    if inlined.active():
        y = inlined.embedding(input, *parts, weight.scheme, weight.byte_layout, weight.shape[-1], weight.dtype)
    else:
        y = torch.ops.lowbit.embedding(input, *parts, weight.scheme_str, weight.byte_layout, weight.shape[-1], weight.dtype)
    return _Untrained.apply(y, weight) if weight._trains and torch.is_grad_enabled() else y  # type: ignore[no-untyped-call]


@implements(ATEN, aten.mm.default)
def _mm(a: Tensor, b: Tensor) -> Tensor:
    if isinstance(b, QTensor) and not isinstance(a, QTensor):
        return product(a, _t(b)) if b.transposed else a @ b.dequantize(a.dtype)
    if isinstance(a, QTensor) and not isinstance(b, QTensor):
        return a.dequantize(b.dtype) @ b if a.transposed else product(b.t(), a).t()
    raise NotImplementedError("a product of two QTensors: dequantize one of them")


@implements(ATEN, aten.addmm.default)
def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if isinstance(b, QTensor) and b.transposed and beta == alpha == 1 and bias.dim() == 1 and not isinstance(a, QTensor):
        return product(a, _t(b), bias)
    y = _mm(a, b) if alpha == 1 else alpha * _mm(a, b)
    return y if beta == 0 else beta * bias + y  # beta 0 ignores even a NaN in bias, as torch does


@implements(ATEN, aten.mv.default)
def _mv(a: Tensor, b: Tensor) -> Tensor:
    return _mm(a, b[:, None])[:, 0]
