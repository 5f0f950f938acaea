"""The operator ``experts_linear``: rows of x times the matrices of the experts that they chose. Meaning, fake and checks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit.scheme import Scheme

from . import epilogues
from .gradients import CONSTANT, past_epilogue
from .ops import _check_weight, _check_x, _like, _likes, call_for, on_one_device
from .registry import Call, run
from .rules import Rule, save
from .schemas import Operator

__all__ = ["OPERATORS", "experts_call"]

_X, _BIAS, _EXPERTS = 0, 5, 8  # places among the arguments


def experts_call(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    outer: Tensor | None,
    bias: Tensor | None,
    experts: Tensor,
    scheme: Scheme,
    layout: str,
    epilogue: str = "none",
) -> Call:
    """The :class:`Call` of such a product, checked. Its M is the mean number of rows of an expert, rounded up."""
    if x.dim() != 2 or packed.dim() != 3:
        raise ValueError(f"x must be [rows, K] and the weight [E, N, K], got {tuple(x.shape)} and {tuple(packed.shape)}")
    if experts.dim() != 1 or experts.dtype != torch.int64 or experts.device != x.device:
        raise ValueError(f"experts must be int64 [rows] on {x.device}, got {_like(experts)} on {experts.device}")
    rows, of_x = len(experts), len(x)
    if (rows % of_x if of_x else rows) or (of_x and not rows):
        raise ValueError(f"there must be as many experts for each row of x, got {rows} for {of_x} rows")
    _check_x(_like(x), None if bias is None else _like(bias), _like(packed))
    _check_weight(scheme, layout, x.shape[-1], _like(packed), _like(scale), *_likes(zero_point, outer))
    epilogues.epilogue(epilogue)
    mean, n, k = -(-rows // max(packed.shape[0], 1)), packed.shape[-2], x.shape[-1]
    return call_for("experts_linear", scheme, layout, x.device, x.dtype, mean, n, k, epilogue=epilogue)


def _experts_linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    outer: Tensor | None,
    bias: Tensor | None,
    scheme: str,
    layout: str,
    experts: Tensor,
    epilogue: str = "none",
) -> Tensor:
    spec, weight = Scheme.parse(scheme), (packed, scale, zero_point, outer)
    return run(experts_call(x, *weight, bias, experts, spec, layout, epilogue), x, *weight, bias, spec, experts)


def _fake(x: Tensor, packed: Tensor, *rest: Any) -> Tensor:
    if x.device != packed.device:
        raise ValueError(f"x is on {x.device} and the weight on {packed.device}: move one of them")
    on_one_device(packed, *rest)
    return x.new_empty((rest[6].shape[0], packed.shape[-2]))


# ---- gradients -------------------------------------------------------------------------------------------------


def _product(*args: Any) -> Tensor:
    return torch.ops.lowbit.experts_linear(*args)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, packed, scale, zero_point, outer, bias, scheme, layout, experts, epilogue = inputs
    save(ctx, packed, scale, zero_point, outer, experts, *([] if epilogue == "none" else [x, bias, experts]))
    ctx.scheme, ctx.layout, ctx.activation, ctx.epilogue, ctx.x = scheme, layout, (), epilogue, (x.shape, x.dtype)
    ctx.constant = [i for i, value in enumerate(inputs) if isinstance(value, Tensor) and i not in (_X, _BIAS, _EXPERTS)]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad[1:]
    if any(needs[i] for i in ctx.constant):
        raise RuntimeError(CONSTANT)
    packed, scale, zero_point, outer, experts, *pre_epilogue = ctx.saved_tensors
    weight = packed, scale, zero_point, outer
    grad = past_epilogue(_product, ctx, weight, pre_epilogue, grad)
    (count, k), dtype = ctx.x
    rows, biases = grad.new_zeros(len(experts), k), []
    for e in range(packed.shape[0]):  # without a look at the choices, which transforms of torch.func forbid
        of_expert = torch.where((experts == e)[:, None], grad, 0)
        if needs[_X]:
            matrix = (None if part is None else part[e] for part in weight)
            rows = rows + of_expert @ torch.ops.lowbit.dequantize(*matrix, ctx.scheme, ctx.layout, k, dtype)
        biases.append(of_expert.sum(0))
    found: list[Tensor | None] = [None] * len(needs)
    if needs[_X]:
        found[_X] = rows.view(count, len(experts) // max(count, 1), k).sum(1)
    if needs[_BIAS]:
        found[_BIAS] = torch.stack(biases)
    return tuple(found)


def _jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
    if any(tangents[i] is not None for i in ctx.constant):
        raise RuntimeError(CONSTANT)
    packed, scale, zero_point, outer, experts, *pre_epilogue = ctx.saved_tensors
    weight, (shape, dtype) = (packed, scale, zero_point, outer), ctx.x
    of_x, of_bias = tangents[_X], tangents[_BIAS]
    if of_x is None:
        of_x = torch.zeros(shape, dtype=dtype, device=experts.device)
    found = _product(of_x, *weight, of_bias, ctx.scheme, ctx.layout, experts)
    return past_epilogue(_product, ctx, weight, pre_epilogue, found)


OPERATORS: dict[str, Operator] = {"experts_linear": Operator(_experts_linear, _fake, Rule(_setup, _backward, _jvp))}
