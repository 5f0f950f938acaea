"""Rows for what csrc compiles for CUDA: linear for up to eight rows of x, from tiles and from canonical bytes.

The library is loaded when a call first asks for it; importing this file touches neither it nor the driver.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.scheme import Scheme

from .build import CUDA
from .registry import ALL_PLAIN_SCALES, Kernel, register

__all__ = ["available", "digits_linear", "linear"]


def available() -> str | None:
    """Why the CUDA library cannot run here, with the remedy; None if it can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA: install one with CUDA from https://pytorch.org"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device: install NVIDIA's driver, and check with nvidia-smi that it sees one"
    return CUDA.missing()


def linear(
    x: Tensor, packed: Tensor, scale: Tensor, zero_point: Tensor | None, outer: Tensor | None, bias: Tensor | None, scheme: Scheme
) -> Tensor:
    """``x @ W.T + bias`` for at most eight rows of ``x``: exact integers times x in float32, rounded once at the end."""
    if bias is not None:
        bias = bias.to(x.dtype)
    return torch.ops.lowbit_cuda.linear(x, packed, scale, zero_point, bias, scheme.bits, scheme.fmt.signed, scheme.group_size)


def digits_linear(
    x: Tensor, packed: Tensor, scale: Tensor, zero_point: Tensor | None, outer: Tensor | None, bias: Tensor | None, scheme: Scheme
) -> Tensor:
    """``x @ W.T + bias`` for at most eight rows of ``x`` and a weight in tiles: integers times the digits of ``x``."""
    if bias is not None:
        bias = bias.to(x.dtype)
    return torch.ops.lowbit_cuda.digits_linear(x, packed, scale, zero_point, bias, scheme.bits, scheme.group_size)


def _tile_groups(size: int) -> str | None:
    return None if size in (-1, 32, 64, 128) else "takes 32, 64, 128 and the row"


register(
    Kernel(
        "cuda_tiles_digits",
        "linear",
        digits_linear,
        "exact digits",
        devices=frozenset({"cuda"}),
        layout="tiles",
        formats=frozenset({"int4", "uint4", "int8", "uint8"}),
        zero_points=frozenset({"none", "int"}),
        scales=ALL_PLAIN_SCALES,
        groups=_tile_groups,
        dtypes=frozenset({torch.float16, torch.bfloat16}),
        m=(1, 8),
        arch=80,
        available=available,
        tiles=((2, 16, 256), (4, 16, 512)),
    )
)
register(
    Kernel(
        "cuda_gemv",
        "linear",
        linear,
        "exact",
        devices=frozenset({"cuda"}),
        formats=frozenset({"int4", "uint4", "int8", "uint8"}),
        zero_points=frozenset({"none", "int"}),
        scales=ALL_PLAIN_SCALES,
        dtypes=frozenset({torch.float16, torch.bfloat16}),
        m=(1, 8),
        arch=80,
        available=available,
        tiles=((2, 4, 32), (4, 2, 1024)),
    )
)
