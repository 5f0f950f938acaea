"""Operators on tokens that are quantized once and multiplied several times: meaning, fakes and checks.

Quantized tokens are ``codes`` [..., bytes] and scales [..., groups] under an activation scheme without zero points.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lowbit.packing import packed_size
from lowbit.scheme import Scheme

from .ops import _check_weight, _like, _likes, call_for, detach_view, on_one_device
from .registry import run
from .rules import Rule, refused
from .schemas import Operator

__all__ = ["OPERATORS"]


def _activation(scheme_str: str) -> Scheme:
    activation = Scheme.parse(scheme_str)
    if activation.zero_point != "none" or activation.outer:
        raise ValueError(f"tokens are rounded without zero points and outer scales here, got {activation}")
    return activation


def _rms_norm_quantize(x: Tensor, weight: Tensor | None, eps: float, activation: str) -> tuple[Tensor, Tensor]:
    spec = _activation(activation)
    if not x.dtype.is_floating_point or x.dtype.itemsize < 2 or x.dim() == 0:
        raise ValueError(f"x must be a floating point tensor [..., K], got {x.dtype} {tuple(x.shape)}")
    if weight is not None and (weight.shape != x.shape[-1:] or weight.device != x.device):
        raise ValueError(f"the norm's weight must be [{x.shape[-1]}] on {x.device}, got {tuple(weight.shape)} on {weight.device}")
    if not eps > 0:
        raise ValueError(f"eps must be above 0, got {eps}: a token of zeros would have no norm")
    call = call_for("rms_norm_quantize", spec, "canonical", x.device, x.dtype, math.prod(x.shape[:-1]), 0, x.shape[-1])
    return run(call, x, weight, eps, spec)


def _codes_linear(
    codes: Tensor, x_scale: Tensor, packed: Tensor, scale: Tensor, zero_point: Tensor | None, outer: Tensor | None,
    bias: Tensor | None, scheme: str, layout: str, activation: str, k: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    spec, rounded = Scheme.parse(scheme), _activation(activation)
    want = (*codes.shape[:-1], rounded.groups(k) if k else 0)
    if codes.dtype != torch.uint8 or codes.dim() == 0 or codes.shape[-1] != packed_size(rounded.bits, k):
        raise ValueError(f"tokens of {rounded} with K={k} have uint8 rows of {packed_size(rounded.bits, k)} bytes, "
                         f"got {codes.dtype} {tuple(codes.shape)}")  # fmt: skip
    if x_scale.dtype != rounded.scale_dtype or tuple(x_scale.shape) != want:
        raise ValueError(f"scales of tokens of {rounded} must be {rounded.scale_dtype} {want}, got {_like(x_scale)}")
    _check_weight(spec, layout, k, _like(packed), _like(scale), *_likes(zero_point, outer))
    if codes.device != packed.device or x_scale.device != packed.device:
        raise ValueError(f"tokens are on {codes.device} and the weight on {packed.device}: move one of them")
    if bias is not None and (tuple(bias.shape) != tuple(packed.shape[:-1]) or bias.dtype != dtype):
        raise ValueError(f"bias must be {dtype} {tuple(packed.shape[:-1])}, got {_like(bias)}")
    rows = math.prod(codes.shape[:-1])
    call = call_for("codes_linear", spec, layout, codes.device, dtype, rows, packed.shape[-2], k, rounded)
    return detach_view(run(call, codes, x_scale, packed, scale, zero_point, outer, bias, spec, rounded, k, dtype))


def _fake_rms_norm_quantize(x: Tensor, weight: Tensor | None, eps: float, activation: str) -> tuple[Tensor, Tensor]:
    spec, lead, k = Scheme.parse(activation), x.shape[:-1], x.shape[-1]
    codes = x.new_empty((*lead, packed_size(spec.bits, k)), dtype=torch.uint8)
    return codes, x.new_empty((*lead, spec.groups(k) if k else 0), dtype=spec.scale_dtype)


def _fake_codes_linear(codes: Tensor, x_scale: Tensor, packed: Tensor, *rest: Any) -> Tensor:
    on_one_device(packed, codes, x_scale, *rest)
    return codes.new_empty((*codes.shape[:-1], packed.shape[-2]), dtype=rest[-1])


# ---- autograd: codes have no gradient, so that it reaches the bias alone --------------------------------------------

_BIAS = 6
_NONE = "rounded tokens and the scales of a quantized weight have no gradient: give x in floats"


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.scales, ctx.shape = [i for i in (1, 3, 5) if inputs[i] is not None], output.shape


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad[1:]
    if any(needs[i] for i in ctx.scales):
        raise RuntimeError(_NONE)
    found: list[Tensor | None] = [None] * len(needs)
    if needs[_BIAS]:
        found[_BIAS] = grad.sum_to_size(grad.shape[-1:])
    return tuple(found)


def _jvp(ctx: Any, *tangents: Any) -> Tensor:
    if any(tangents[i] is not None for i in ctx.scales):
        raise RuntimeError(_NONE)
    return tangents[_BIAS].expand(ctx.shape)


OPERATORS: dict[str, Operator] = {
    "rms_norm_quantize": Operator(
        _rms_norm_quantize,
        _fake_rms_norm_quantize,
        refused("rounded tokens have no gradient: give the norm and the layers behind it floats"),
    ),
    "codes_linear": Operator(_codes_linear, _fake_codes_linear, Rule(_setup, _backward, _jvp)),
}
