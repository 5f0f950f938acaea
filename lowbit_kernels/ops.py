"""The operators: meaning, shape rule (fake) and autograd rule of each. No backend is imported here.

Every weight is passed as ``packed, scale, zero_point, outer`` beside the canonical name of its scheme
(:meth:`lowbit.scheme.Scheme.__str__`) and the name of its layout. ``M`` is looked at when the operator runs, so a
dynamic batch needs no recompilation.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit.catalog import cached
from lowbit.packing import packed_size
from lowbit.scales import METHODS
from lowbit.scheme import Scheme

from . import epilogues
from .gradients import CONSTANT, of_product
from .layouts import LAYOUTS
from .registry import Call, run
from .rules import refused
from .schemas import Operator

__all__ = ["OPERATORS"]


@functools.lru_cache(maxsize=32)
def _arch(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def call_for(
    op: str,
    scheme: Scheme,
    layout: str,
    device: torch.device,
    dtype: torch.dtype,
    m: int,
    n: int,
    k: int,
    activation: Scheme | None = None,
    method: str | None = None,
    epilogue: str = "none",
) -> Call:
    """The :class:`Call` that a kernel is selected by; ``dtype`` is that of x, or of the result where there is no x."""
    return Call(op, device.type, _arch(device), layout, scheme, dtype, m, n, k, activation, method, epilogue)


# ---- checks ----------------------------------------------------------------------------------------------------
#
# A call is checked once for each signature (dtypes, shapes and devices); a signature that was refused is checked again.


class _Like(NamedTuple):
    """dtype, shape and device of a tensor."""

    dtype: torch.dtype
    shape: torch.Size
    device: torch.device

    def __str__(self) -> str:
        return f"{self.dtype} {tuple(self.shape)}"


def _like(tensor: Tensor) -> _Like:
    return _Like(tensor.dtype, tensor.shape, tensor.device)


def _likes(*tensors: Tensor | None) -> tuple[_Like | None, ...]:
    return tuple(None if tensor is None else _like(tensor) for tensor in tensors)


def _check_weight(
    scheme: Scheme, layout: str, k: int, packed: _Like, scale: _Like, zero_point: _Like | None, outer: _Like | None
) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"no layout named {layout!r}; there are {', '.join(LAYOUTS)}")
    n = packed.shape[-2] if len(packed.shape) > 1 else 0
    row_bytes, groups = LAYOUTS[layout].sizes(scheme, n, k)
    if packed.dtype != torch.uint8 or len(packed.shape) < 2 or packed.shape[-1] != row_bytes:
        where = "" if layout == "canonical" else f" in the layout {layout}"
        raise ValueError(f"packed of a {scheme} weight with K={k}{where} must be uint8 rows of {row_bytes} bytes, got {packed}")
    want = (*packed.shape[:-1], groups)
    for name, part, dtype in (("scale", scale, scheme.scale_dtype), ("zero_point", zero_point, scheme.zero_point_dtype)):
        if (part is None) != (dtype is None):
            raise ValueError(f"a {scheme} weight has {'no' if dtype is None else 'a'} {name}")
        if part is not None and (part.dtype != dtype or tuple(part.shape) != want):
            raise ValueError(f"{name} of a {scheme} weight must be {dtype} {want}, got {part}")
    if (outer is not None) != scheme.outer:
        raise ValueError(f"a {scheme} weight has {'an' if scheme.outer else 'no'} outer scale")
    for part in (scale, zero_point, outer):
        if part is not None and part.device != packed.device:
            raise ValueError(f"the parts of a weight must be on one device, got {packed.device} and {part.device}")


def _check_x(x: _Like, bias: _Like | None, packed: _Like) -> None:
    if not x.dtype.is_floating_point or x.dtype.itemsize < 2:
        raise TypeError(f"x must be float16, bfloat16, float32 or float64, got {x.dtype}")
    if len(x.shape) == 0:
        raise ValueError("x must have at least one dimension")
    if x.device != packed.device:
        raise ValueError(f"x is on {x.device} and the weight on {packed.device}: move one of them")
    if bias is None:
        return
    if tuple(bias.shape) != tuple(packed.shape[:-1]):
        raise ValueError(f"bias must have shape {tuple(packed.shape[:-1])}, got {tuple(bias.shape)}")
    if bias.dtype != x.dtype or bias.device != x.device:
        raise TypeError(f"bias must be {x.dtype} on {x.device} as x is, got {bias.dtype} on {bias.device}")


def _check_input_scale(given: Tensor | None, x: Tensor) -> None:
    if given is None:
        return
    if given.numel() != 1 or not given.dtype.is_floating_point or given.dtype.itemsize < 2:
        raise ValueError(f"input_scale must be one number of a float type, got {_like(given)}")
    if given.device != x.device and (given.dim() or given.device.type != "cpu"):
        raise ValueError(f"x is on {x.device} and input_scale on {given.device}: move one of them")


@cached(maxsize=8192)
def _product(
    op: str,
    scheme: str,
    layout: str,
    x: _Like,
    packed: _Like,
    scale: _Like,
    zero_point: _Like | None,
    outer: _Like | None,
    bias: _Like | None,
    activation: str | None = None,
    epilogue: str = "none",
) -> tuple[Scheme, Call]:
    """The scheme and the :class:`Call` of a product of x [..., K] and a weight [..., N, K] that fit each other."""
    spec = Scheme.parse(scheme)
    _check_x(x, bias, packed)
    _check_weight(spec, layout, x.shape[-1], packed, scale, zero_point, outer)
    rows = x.shape[1:-1] if op == "grouped_linear" else x.shape[:-1]
    rounded = None if activation is None else Scheme.parse(activation)
    epilogues.epilogue(epilogue)
    size = math.prod(rows), packed.shape[-2], x.shape[-1]
    return spec, call_for(op, spec, layout, x.device, x.dtype, *size, rounded, epilogue=epilogue)


def product_call(
    op: str,
    scheme: str,
    layout: str,
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    outer: Tensor | None,
    bias: Tensor | None,
    activation: str | None = None,
) -> Call:
    """The :class:`Call` of a product, checked: raises what the operator ``op`` raises for tensors that do not fit."""
    rest = _likes(zero_point, outer, bias)
    return _product(op, scheme, layout, _like(x), _like(packed), _like(scale), *rest, activation)[1]


def detach_view(y: Tensor) -> Tensor:
    """``y`` as a tensor of its own: autograd forbids in-place changes of views made within an operator."""
    return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y


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
    epilogue: str = "none",
) -> Tensor:
    rest = _likes(zero_point, outer, bias)
    spec, call = _product("linear", scheme, layout, _like(x), _like(packed), _like(scale), *rest, None, epilogue)
    return detach_view(run(call, x, packed, scale, zero_point, outer, bias, spec))


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
    epilogue: str = "none",
) -> Tensor:
    rest = _likes(zero_point, outer, bias)
    spec, call = _product("quantized_linear", scheme, layout, _like(x), _like(packed), _like(scale), *rest, activation, epilogue)
    _check_input_scale(input_scale, x)
    return detach_view(run(call, x, packed, scale, zero_point, outer, bias, spec, call.activation, input_scale))


def _grouped_linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    outer: Tensor | None,
    bias: Tensor | None,
    scheme: str,
    layout: str,
    epilogue: str = "none",
) -> Tensor:
    if x.dim() != 3 or packed.dim() != 3 or x.shape[0] != packed.shape[0]:
        raise ValueError(f"x must be [E, M, K] and the weight [E, N, K], got {tuple(x.shape)} and {tuple(packed.shape)}")
    rest = _likes(zero_point, outer, bias)
    spec, call = _product("grouped_linear", scheme, layout, _like(x), _like(packed), _like(scale), *rest, None, epilogue)
    return detach_view(run(call, x, packed, scale, zero_point, outer, bias, spec))


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
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"indices must be int32 or int64, got {indices.dtype}")
    spec = Scheme.parse(scheme)
    _check_weight(spec, layout, k, _like(packed), _like(scale), *_likes(zero_point, outer))
    call = call_for("embedding", spec, layout, packed.device, dtype, indices.numel(), packed.shape[0], k)
    return run(call, indices, packed, scale, zero_point, outer, spec, k, dtype)


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
    spec = Scheme.parse(scheme)
    _check_weight(spec, layout, k, _like(packed), _like(scale), *_likes(zero_point, outer))
    call = call_for("dequantize", spec, layout, packed.device, dtype, 0, math.prod(packed.shape[:-1]), k)
    return run(call, packed, scale, zero_point, outer, spec, k, dtype)


def _quantize(w: Tensor, scheme: str, method: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not w.dtype.is_floating_point or w.dim() < 2:
        raise ValueError(f"w must be a floating point tensor [..., N, K], got {w.dtype} {tuple(w.shape)}")
    spec = Scheme.parse(scheme)
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    n, k = math.prod(w.shape[:-1]), w.shape[-1]
    call = call_for("quantize", spec, "canonical", w.device, w.dtype, 0, n, k, method=method)
    packed, scale, zero_point, outer = run(call, w, spec, method)
    absent = functools.partial(torch.empty, 0, dtype=torch.uint8, device=w.device)
    return packed, scale, absent() if zero_point is None else zero_point, absent() if outer is None else outer


# ---- fakes -----------------------------------------------------------------------------------------------------


def on_one_device(packed: Tensor, *rest: Any) -> None:
    """Raises where a tensor of ``rest`` is on another device than ``packed``; a tensor of one element may be on the CPU."""
    for part in rest:
        if isinstance(part, Tensor) and part.device != packed.device and (part.dim() or part.device.type != "cpu"):
            raise ValueError(f"the weight is on {packed.device}, and what goes with it on {part.device}: move one of them")


def _fake_linear(x: Tensor, packed: Tensor, *rest: Any) -> Tensor:
    if x.device != packed.device:
        raise ValueError(f"x is on {x.device} and the weight on {packed.device}: move one of them")
    on_one_device(packed, *rest)
    return x.new_empty((*x.shape[:-1], packed.shape[-2]))


def _fake_embedding(indices: Tensor, packed: Tensor, *rest: Any) -> Tensor:
    *_, k, dtype = rest
    on_one_device(packed, indices, *rest)
    return packed.new_empty((*indices.shape, k), dtype=dtype)


def _fake_dequantize(packed: Tensor, *rest: Any) -> Tensor:
    *_, k, dtype = rest
    on_one_device(packed, *rest)
    return packed.new_empty((*packed.shape[:-1], k), dtype=dtype)


def _fake_quantize(w: Tensor, scheme: str, method: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    spec, lead, k = Scheme.parse(scheme), w.shape[:-1], w.shape[-1]
    scale = w.new_empty((*lead, spec.groups(k) if k else 0), dtype=spec.scale_dtype)
    zero, absent = spec.zero_point_dtype, (0,)
    return (
        w.new_empty((*lead, packed_size(spec.bits, k)), dtype=torch.uint8),
        scale,
        w.new_empty(absent, dtype=torch.uint8) if zero is None else torch.empty_like(scale, dtype=zero),
        w.new_empty(w.shape[:-2], dtype=torch.float32) if spec.outer else w.new_empty(absent, dtype=torch.uint8),
    )


OPERATORS: dict[str, Operator] = {
    "linear": Operator(_linear, _fake_linear, of_product("linear")),
    "quantized_linear": Operator(_quantized_linear, _fake_linear, of_product("quantized_linear")),
    "grouped_linear": Operator(_grouped_linear, _fake_linear, of_product("grouped_linear")),
    "embedding": Operator(_embedding, _fake_embedding, refused(CONSTANT)),
    "dequantize": Operator(_dequantize, _fake_dequantize, refused(CONSTANT)),
    "quantize": Operator(_quantize, _fake_quantize, refused("rounding to codes has no gradient: give quantize w.detach()")),
}
