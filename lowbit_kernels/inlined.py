"""Products in plain PyTorch, for compilers that should see through them: :func:`inline`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from lowbit.decoding import INTEGERS
from lowbit.grid import Scales, scale_values, to_values
from lowbit.packing import unpack
from lowbit.scales import rounded_tokens
from lowbit.scheme import Scheme

from .layouts import LAYOUTS, Parts

__all__ = ["active", "dequantize", "embedding", "inline", "linear", "quantized_linear"]

_ACTIVE = False  # a global instead of a context variable: torch.compile guards its value


@contextlib.contextmanager
def inline() -> Iterator[None]:
    """Within the block quantized layers are plain PyTorch to ``torch.compile``, and not one opaque operator each.

    The compiler can then fuse the unpacking of a weight with what stands around it, which its own backends may need; lowbit's
    kernels do not run, no trace is kept, and each weight is rounded once to the dtype of x. A layer that is called without
    being compiled takes memory for its whole weight. Calls outside of the block compile anew, with the operators. It holds
    for all threads. Layers whose activations take a scale a token stay operators: such a scale is checked where it is chosen,
    which no compiler sees through.
    """
    global _ACTIVE
    before, _ACTIVE = _ACTIVE, True
    try:
        yield
    finally:
        _ACTIVE = before


def active() -> bool:
    """Whether :func:`inline` is open."""
    return _ACTIVE


def dequantize(
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    outer: Tensor | None,
    scheme: Scheme,
    layout: str,
    k: int,
    dtype: torch.dtype,
) -> Tensor:
    """The weight [..., N, K] as ``dtype``: each number computed in float32 and rounded once."""
    parts = LAYOUTS[layout].restore(Parts(packed, scale, zero_point), scheme, k)
    codes = unpack(parts.packed, scheme.bits, k, torch.int32)  # ONNX has no shifts of smaller integers
    scales = Scales(parts.scale, parts.zero_point, outer)
    decoding = scheme.fmt.decoding
    if decoding.kind != INTEGERS or decoding.factor != 1 or k % scheme.group(k):
        return to_values(codes, scheme, scales, dtype)  # by a table lookup
    if decoding.flip:
        codes = (codes ^ decoding.flip) - decoding.flip
    values = codes.unflatten(-1, (-1, scheme.group(k))).to(torch.float32)
    if scales.zero_point is not None:
        values = values - scales.zero_point[..., None].to(torch.float32)
    return (values * scale_values(scheme, scales)[..., None]).flatten(-2).to(dtype)


def linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    outer: Tensor | None,
    bias: Tensor | None,
    scheme: Scheme,
    layout: str,
    k: int,
) -> Tensor:
    """``x @ W.T + bias`` with the weight dequantized to the dtype of ``x``. K is given, since x may have symbolic sizes."""
    weight = dequantize(packed, scale, zero_point, outer, scheme, layout, k, x.dtype)
    return torch.nn.functional.linear(x, weight, bias)


def embedding(
    indices: Tensor,
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    outer: Tensor | None,
    scheme: Scheme,
    layout: str,
    k: int,
    dtype: torch.dtype,
) -> Tensor:
    """The rows ``indices`` [...] of a weight [N, K], dequantized: [..., K] as ``dtype``."""
    parts = LAYOUTS[layout].restore(Parts(packed, scale, zero_point), scheme, k)
    flat = indices.reshape(-1)
    zero = None if parts.zero_point is None else parts.zero_point.index_select(0, flat)
    rows = Parts(parts.packed.index_select(0, flat), parts.scale.index_select(0, flat), zero)
    return dequantize(*rows, outer, scheme, "canonical", k, dtype).reshape(*indices.shape, k)


def quantized_linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    outer: Tensor | None,
    bias: Tensor | None,
    scheme: Scheme,
    layout: str,
    k: int,
    activation: Scheme,
    input_scale: Tensor,
) -> Tensor:
    """:func:`linear` with ``x`` rounded to ``activation`` under ``input_scale`` first, and products in float32."""
    rounded = rounded_tokens(x.to(torch.float32), activation, input_scale)
    shift = None if bias is None else bias.to(torch.float32)
    return linear(rounded, packed, scale, zero_point, outer, shift, scheme, layout, k).to(x.dtype)
