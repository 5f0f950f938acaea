"""A step of a few tokens through decoder layers on a CPU in one call: split-int8 products and everything between them.

Each product is a row of :mod:`.cpu` or :mod:`.cpu_interleaved`. Everything between is rounded to the dtype of ``x`` where torch's
modules round, so a step differs from them only in the order of fp32 sums in norms and attention. :func:`reference_step` is the
same in torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lowbit.scheme import Scheme

from .cpu import available as library_available
from .cpu import operator_args
from .prepared_call import direct
from .registry import Kernel

__all__ = ["LARGEST_HEAD", "Layer", "Product", "available", "prepared", "reference_step", "steps"]

LARGEST_HEAD = 256
# Row name: (limbs of x, whether it reads interleaved weights).
_ROWS = {
    "cpu_split_int8x2_gemv": (2, False),
    "cpu_split_int8x3_gemv": (3, False),
    "cpu_a8_gemv": (1, False),
    "cpu_interleaved_split_int8x2_gemv": (2, True),
    "cpu_interleaved_split_int8x3_gemv": (3, True),
    "cpu_interleaved_a8_gemv": (1, True),
}


def available() -> str | None:
    """Why the C++ library has no decoder step, with the remedy; None if it has."""
    if (missing := library_available()) is not None:
        return missing
    return (
        None if hasattr(torch.ops.lowbit_cpu, "decoder_steps") else "the C++ library is older than this package: build it again"
    )


@dataclass(frozen=True)
class Product:
    """The parts of a weight [N, K], its ``bias`` and the static scale of its ``x``."""

    packed: Tensor
    scale: Tensor
    zero_point: Tensor | None
    outer: Tensor | None
    bias: Tensor | None
    scheme: Scheme
    k: int
    input_scale: Tensor | None = None


@dataclass(frozen=True)
class Layer:
    """Seven products (query, key, value, output, gate, up, down), norm weights (before attention, before the MLP and, where heads
    have norms, of query and key heads) with their ``eps``, the numbers of heads, and the factor of the scores.
    """

    products: tuple[Product, ...]
    norms: tuple[Tensor, ...]
    eps: tuple[float, ...]
    heads: int
    key_heads: int
    head_size: int
    scaling: float


def prepared(layer: Layer, kernels: Sequence[Kernel]) -> tuple[Tensor, ...] | None:
    """``layer`` checked once, for :func:`steps`, together with the tensors that must stay alive.

    None where one of ``kernels``, which the products run on, is not split-int8, or a weight would have to be copied.
    """
    made = []
    for product, kernel in zip(layer.products, kernels, strict=True):
        if kernel.name not in _ROWS:
            return None
        limbs, interleaved = _ROWS[kernel.name]
        parts = (product.packed, product.scale, product.zero_point, product.outer, product.bias)
        x = torch.empty(0, product.k, dtype=layer.norms[0].dtype)
        made.append(
            torch.ops.lowbit_cpu.split_int8_gemv_prepare(
                x, *parts, *operator_args(product.scheme), limbs, product.input_scale, interleaved
            )
        )
        if not made[-1].numel():
            return None
    whole = torch.ops.lowbit_cpu.decoder_prepared(
        made, layer.norms, layer.eps, layer.heads, layer.key_heads, layer.head_size, layer.scaling
    )
    return *made, whole


def steps(
    x: Tensor,
    layers: Sequence[Tensor],
    turns: tuple[Tensor, Tensor],
    keys: list[Tensor],
    values: list[Tensor],
    past: int,
    places: int,
    mask: Tensor | None,
) -> Tensor | str:
    """``x`` [B, T, K] through ``layers``; or the reason why not: values without limbs (NaN, infinity), or tensors that do not
    fit.

    ``turns``: cosines and sines [B or 1, T, D]. ``keys``, ``values``: caches [B, H, P, D] of each layer; those of ``x`` are
    written from position ``past`` on, and attention reads the first ``places`` as ``mask`` [B or 1, 1, T or 1, places] allows.
    """
    y: Tensor = direct(torch.ops.lowbit_cpu.decoder_steps.default)(x, list(layers), *turns, keys, values, past, places, mask)
    if (dimensions := y.dim()) == 3:
        return y
    return "x has no limbs" if dimensions == 1 else "shapes or dtypes of a cache, a mask or position_embeddings"


# ---- the same in torch ---------------------------------------------------------------------------------------------


def reference_step(
    x: Tensor,
    layer: Layer,
    weights: Sequence[Tensor],
    turns: tuple[Tensor, Tensor],
    kept: tuple[Tensor, Tensor],
    past: int,
    places: int,
    mask: Tensor | None,
) -> Tensor:
    """:func:`steps` of one layer in the dtype of ``x`` with dequantized ``weights`` [N, K]."""
    biases = [None if product.bias is None else product.bias.to(x.dtype) for product in layer.products]
    norms = [norm.to(x.dtype) for norm in layer.norms]
    batch, tokens, _ = x.shape

    def multiplied(i: int, of: Tensor) -> Tensor:
        return F.linear(of, weights[i], biases[i])

    def normed(i: int, of: Tensor) -> Tensor:
        wide = of if of.dtype == torch.float64 else of.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + layer.eps[i])).to(of.dtype) * norms[i]

    def headed(i: int, of: Tensor, norm: int | None) -> Tensor:
        y = multiplied(i, of).view(batch, tokens, -1, layer.head_size)
        return (y if norm is None or norm >= len(norms) else normed(norm, y)).transpose(1, 2)

    def turned(of: Tensor) -> Tensor:
        cos, sin = (turn.unsqueeze(1) for turn in turns)
        first, second = of.chunk(2, -1)
        return of * cos + torch.cat((-second, first), -1) * sin

    h = normed(0, x)
    q, k, v = turned(headed(0, h, 2)), turned(headed(1, h, 3)), headed(2, h, None)
    for of, new in zip(kept, (k, v), strict=True):
        of[:, :, past : past + tokens] = new
    keys, values = (of[:, :, :places].repeat_interleave(layer.heads // layer.key_heads, 1) for of in kept)
    y = F.scaled_dot_product_attention(q, keys, values, mask, scale=layer.scaling)
    x = x + multiplied(3, y.transpose(1, 2).reshape(batch, tokens, -1))
    h = normed(1, x)
    return x + multiplied(6, F.silu(multiplied(4, h)) * multiplied(5, h))
