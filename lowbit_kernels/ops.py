"""The operators: schema, shape rule (fake) and autograd rule of each. No backend is imported here.

Every weight is passed as ``packed, scale, zero_point, outer`` beside the canonical spelling of its scheme
(:meth:`lowbit.scheme.Scheme.__str__`) and the name of its layout. ``M`` is looked at when the operator runs, so a
dynamic batch needs no recompilation.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from lowbit.packing import packed_size
from lowbit.scheme import Scheme

from .registry import Call, run

__all__: list[str] = []

_WEIGHT = "Tensor packed, Tensor scale, Tensor? zero_point, Tensor? outer"
_SCHEMAS = (
    f"linear(Tensor x, {_WEIGHT}, Tensor? bias, str scheme, str layout) -> Tensor",
    f"quantized_linear(Tensor x, {_WEIGHT}, Tensor? bias, str scheme, str layout, str activation, Tensor? input_scale) -> Tensor",
    f"grouped_linear(Tensor x, {_WEIGHT}, Tensor? bias, str scheme, str layout) -> Tensor",
    f"embedding(Tensor indices, {_WEIGHT}, str scheme, str layout, SymInt k, ScalarType dtype) -> Tensor",
    f"dequantize({_WEIGHT}, str scheme, str layout, SymInt k, ScalarType dtype) -> Tensor",
    "quantize(Tensor w, str scheme, str method) -> (Tensor, Tensor, Tensor, Tensor)",
)

LIBRARY = torch.library.Library("lowbit", "DEF")
for _schema in _SCHEMAS:
    LIBRARY.define(_schema)

_parse = Scheme.parse


@functools.lru_cache(maxsize=32)
def _arch(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def call_for(op: str, scheme: Scheme, layout: str, device: torch.device, dtype: torch.dtype, m: int, n: int, k: int) -> Call:
    """The :class:`Call` that a kernel is selected by; ``dtype`` is that of x, or of the result where there is no x."""
    return Call(op, device.type, _arch(device), layout, scheme, dtype, m, n, k)


def _check_weight(scheme: Scheme, packed: Tensor, scale: Tensor, zero_point: Tensor | None, outer: Tensor | None, k: int) -> None:
    if packed.dtype != torch.uint8 or packed.shape[-1] != packed_size(scheme.bits, k):
        raise ValueError(
            f"a {scheme} weight with K={k} has uint8 rows of {packed_size(scheme.bits, k)} bytes, "
            f"got {packed.dtype} {tuple(packed.shape)}"
        )
    want = (*packed.shape[:-1], scheme.groups(k) if k else 0)
    for name, tensor, dtype in (("scale", scale, scheme.scale_dtype), ("zero_point", zero_point, scheme.zero_point_dtype)):
        if (tensor is None) != (dtype is None):
            raise ValueError(f"a {scheme} weight has {'no' if dtype is None else 'a'} {name}")
        if tensor is not None and (tensor.dtype != dtype or tuple(tensor.shape) != want):
            raise ValueError(f"{name} of a {scheme} weight must be {dtype} {want}, got {tensor.dtype} {tuple(tensor.shape)}")
    if (outer is not None) != scheme.outer:
        raise ValueError(f"a {scheme} weight has {'an' if scheme.outer else 'no'} outer scale")


def _check_x(x: Tensor) -> None:
    if not x.dtype.is_floating_point or x.dtype.itemsize < 2:
        raise TypeError(f"x must be float16, bfloat16, float32 or float64, got {x.dtype}")
    if x.dim() == 0:
        raise ValueError("x must have at least one dimension")


def _check_bias(bias: Tensor | None, shape: tuple[int, ...]) -> None:
    if bias is not None and tuple(bias.shape) != shape:
        raise ValueError(f"bias must have shape {shape}, got {tuple(bias.shape)}")


# ---- linear ----------------------------------------------------------------------------------------------------


def _linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    outer: Tensor | None,
    bias: Tensor | None,
    scheme: str,
    layout: str,
) -> Tensor:
    how, n, k = _parse(scheme), packed.shape[-2], x.shape[-1]
    _check_x(x)
    _check_weight(how, packed, scale, zero_point, outer, k)
    _check_bias(bias, (n,))
    call = call_for("linear", how, layout, x.device, x.dtype, math.prod(x.shape[:-1]), n, k)
    return run(call, x, packed, scale, zero_point, outer, bias, how)


def _quantized_linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    outer: Tensor | None,
    bias: Tensor | None,
    scheme: str,
    layout: str,
    activation: str,
    input_scale: Tensor | None,
) -> Tensor:
    how, n, k = _parse(scheme), packed.shape[-2], x.shape[-1]
    _check_x(x)
    _check_weight(how, packed, scale, zero_point, outer, k)
    _check_bias(bias, (n,))
    call = call_for("quantized_linear", how, layout, x.device, x.dtype, math.prod(x.shape[:-1]), n, k)
    return run(call, x, packed, scale, zero_point, outer, bias, how, _parse(activation), input_scale)


def _grouped_linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    outer: Tensor | None,
    bias: Tensor | None,
    scheme: str,
    layout: str,
) -> Tensor:
    how, k = _parse(scheme), x.shape[-1]
    _check_x(x)
    if x.dim() != 3 or packed.dim() != 3 or x.shape[0] != packed.shape[0]:
        raise ValueError(f"x must be [E, M, K] and the weight [E, N, K], got {tuple(x.shape)} and {tuple(packed.shape)}")
    _check_weight(how, packed, scale, zero_point, outer, k)
    _check_bias(bias, tuple(packed.shape[:-1]))
    call = call_for("grouped_linear", how, layout, x.device, x.dtype, x.shape[1], packed.shape[-2], k)
    return run(call, x, packed, scale, zero_point, outer, bias, how)


def _embedding(
    indices: Tensor,
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    outer: Tensor | None,
    scheme: str,
    layout: str,
    k: int,
    dtype: torch.dtype,
) -> Tensor:
    how = _parse(scheme)
    _check_weight(how, packed, scale, zero_point, outer, k)
    call = call_for("embedding", how, layout, packed.device, dtype, indices.numel(), packed.shape[0], k)
    return run(call, indices, packed, scale, zero_point, outer, how, k, dtype)


def _dequantize(
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    outer: Tensor | None,
    scheme: str,
    layout: str,
    k: int,
    dtype: torch.dtype,
) -> Tensor:
    how = _parse(scheme)
    _check_weight(how, packed, scale, zero_point, outer, k)
    call = call_for("dequantize", how, layout, packed.device, dtype, 0, math.prod(packed.shape[:-1]), k)
    return run(call, packed, scale, zero_point, outer, how, k, dtype)


def _quantize(w: Tensor, scheme: str, method: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not w.dtype.is_floating_point or w.dim() < 2:
        raise ValueError(f"w must be a floating point tensor [..., N, K], got {w.dtype} {tuple(w.shape)}")
    how = _parse(scheme)
    call = call_for("quantize", how, "canonical", w.device, w.dtype, 0, math.prod(w.shape[:-1]), w.shape[-1])
    packed, scale, zero_point, outer = run(call, w, how, method)
    absent = functools.partial(torch.empty, 0, dtype=torch.uint8, device=w.device)
    return packed, scale, absent() if zero_point is None else zero_point, absent() if outer is None else outer


for _name, _function in (
    ("linear", _linear),
    ("quantized_linear", _quantized_linear),
    ("grouped_linear", _grouped_linear),
    ("embedding", _embedding),
    ("dequantize", _dequantize),
    ("quantize", _quantize),
):
    LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")


# ---- fakes -----------------------------------------------------------------------------------------------------


def _fake_linear(x: Tensor, packed: Tensor, *rest: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], packed.shape[-2]))


def _fake_embedding(indices: Tensor, packed: Tensor, *rest: Any) -> Tensor:
    *_, k, dtype = rest
    return packed.new_empty((*indices.shape, k), dtype=dtype)


def _fake_dequantize(packed: Tensor, *rest: Any) -> Tensor:
    *_, k, dtype = rest
    return packed.new_empty((*packed.shape[:-1], k), dtype=dtype)


def _fake_quantize(w: Tensor, scheme: str, method: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    how, lead, k = _parse(scheme), w.shape[:-1], w.shape[-1]
    scale = w.new_empty((*lead, how.groups(k) if k else 0), dtype=how.scale_dtype)
    zero, absent = how.zero_point_dtype, (0,)
    return (
        w.new_empty((*lead, packed_size(how.bits, k)), dtype=torch.uint8),
        scale,
        w.new_empty(absent, dtype=torch.uint8) if zero is None else torch.empty_like(scale, dtype=zero),
        w.new_empty(w.shape[:-2], dtype=torch.float32) if how.outer else w.new_empty(absent, dtype=torch.uint8),
    )


for _name, _fake in (
    ("linear", _fake_linear),
    ("quantized_linear", _fake_linear),
    ("grouped_linear", _fake_linear),
    ("embedding", _fake_embedding),
    ("dequantize", _fake_dequantize),
    ("quantize", _fake_quantize),
):
    torch.library.register_fake(f"lowbit::{_name}", _fake, lib=LIBRARY)


# ---- autograd --------------------------------------------------------------------------------------------------
#
# Gradients reach x and the bias. The codes have none; a scale that asks for one is told so.


def _setup_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, packed, scale, zero_point, outer, _bias, scheme, layout = inputs[:8]
    ctx.save_for_backward(packed, scale, zero_point, outer)
    ctx.scheme, ctx.layout, ctx.k, ctx.dtype = scheme, layout, x.shape[-1], x.dtype


def _backward_linear(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    if any(ctx.needs_input_grad[1:5]):
        raise RuntimeError("the scales of a quantized weight have no gradient: call requires_grad_(False) on them")
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        weight = torch.ops.lowbit.dequantize(*ctx.saved_tensors, ctx.scheme, ctx.layout, ctx.k, ctx.dtype)
        grad_x = grad @ weight
    if ctx.needs_input_grad[5]:  # [N], or [E, N] where x is [E, M, K]
        experts = ctx.saved_tensors[0].shape[:-2]
        grad_bias = grad.reshape(*experts, -1, grad.shape[-1]).sum(-2)
    return (grad_x, None, None, None, None, grad_bias, *([None] * (len(ctx.needs_input_grad) - 6)))


for _name in ("linear", "quantized_linear", "grouped_linear"):
    # quantized_linear: the rounding of x passes gradients as if it were the identity (straight through).
    torch.library.register_autograd(f"lowbit::{_name}", _backward_linear, setup_context=_setup_linear, lib=LIBRARY)
