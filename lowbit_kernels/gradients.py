"""The gradients of products.

They reach x and the bias. Codes have none, and scales are not learned: whichever of them asks for a gradient is told so when
gradients are computed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import epilogues
from .rules import Rule, save

__all__ = ["CONSTANT", "of_product", "past_epilogue"]

_X, _BIAS = 0, 5
CONSTANT = "the scales of a quantized weight, and of x, have no gradient: call requires_grad_(False) on them"


def of_product(name: str) -> Rule:
    """The rule of the product ``name`` of x and a weight. The rounding of x, if any, passes gradients as if it were the identity
    (straight-through).
    """
    product = getattr(torch.ops.lowbit, name)
    return Rule(_setup, partial(_backward, product), partial(_jvp, product))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, packed, scale, zero_point, outer, bias, scheme, layout, *activation, epilogue = inputs
    pre_epilogue = [] if epilogue == "none" else [x, bias, *activation[1:]]  # inputs of y before the epilogue
    save(ctx, packed, scale, zero_point, outer, *pre_epilogue)
    ctx.scheme, ctx.layout, ctx.k, ctx.dtype = scheme, layout, x.shape[-1], x.dtype
    ctx.activation, ctx.epilogue, ctx.shape = activation[:1], epilogue, output.shape
    ctx.constant = [i for i, value in enumerate(inputs) if isinstance(value, Tensor) and i not in (_X, _BIAS)]


def _dense(ctx: Any, weight: tuple[Any, ...]) -> Tensor:
    return torch.ops.lowbit.dequantize(*weight, ctx.scheme, ctx.layout, ctx.k, ctx.dtype)


def past_epilogue(product: Any, ctx: Any, weight: tuple[Any, ...], pre_epilogue: list[Any], grad: Tensor) -> Tensor:
    """``grad`` times the derivative of the epilogue, the same in both directions."""
    if not pre_epilogue:
        return grad
    x, bias, *last = pre_epilogue  # what stands behind the layout and the activation: the scale of x, or experts
    y = product(x, *weight, bias, ctx.scheme, ctx.layout, *ctx.activation, *last)
    return epilogues.epilogue(ctx.epilogue).backward(grad, y)


def _backward(product: Any, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad[1:]
    if any(needs[i] for i in ctx.constant):
        raise RuntimeError(CONSTANT)
    packed, scale, zero_point, outer, *pre_epilogue = ctx.saved_tensors
    weight = packed, scale, zero_point, outer
    grad = past_epilogue(product, ctx, weight, pre_epilogue, grad)
    found: list[Tensor | None] = [None] * len(needs)
    if needs[_X]:
        found[_X] = grad @ _dense(ctx, weight)
    if needs[_BIAS]:  # [N], or [E, N] where x is [E, M, K]
        found[_BIAS] = grad.sum(-2) if packed.dim() > 2 else grad.sum_to_size(grad.shape[-1:])
    return tuple(found)


def _jvp(product: Any, ctx: Any, *tangents: Tensor | None) -> Tensor:
    if any(tangents[i] is not None for i in ctx.constant):
        raise RuntimeError(CONSTANT)
    packed, scale, zero_point, outer, *pre_epilogue = ctx.saved_tensors
    weight = packed, scale, zero_point, outer
    x, bias = tangents[_X], tangents[_BIAS]
    of_bias = None if bias is None else bias.unsqueeze(-2) if packed.dim() > 2 else bias
    if x is None:  # only x knows the shape
        assert of_bias is not None
        found = of_bias.expand(ctx.shape)
    else:
        found = x @ _dense(ctx, weight).mT
        found = found if of_bias is None else found + of_bias
    return past_epilogue(product, ctx, weight, pre_epilogue, found)
