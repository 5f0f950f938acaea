"""Rounding to nearest and packing on the CPU, for integers with scales in a float type: the same bytes as the reference."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lowbit.formats import FORMATS
from lowbit.packing import packed_size
from lowbit.scheme import PLAIN_SCALES, Scheme

from . import reference
from .cpu import available
from .registry import Kernel, register

__all__ = ["quantize"]


def quantize(w: Tensor, scheme: Scheme, method: str) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Packed codes, scales and zero points of ``w`` [..., N, K], rounded to nearest.

    The reference takes other methods than the whole range, and weights that it refuses with the reason.
    """
    *lead, n, k = w.shape
    if method != "range" or w.numel() == 0:
        return reference.quantize(w, scheme, method)
    fmt, g = scheme.fmt, scheme.groups(k)
    packed = torch.empty(*lead, n, packed_size(scheme.bits, k), dtype=torch.uint8)
    scale = torch.empty(*lead, n, g, dtype=scheme.scale_dtype)
    zero = None if scheme.zero_point == "none" else torch.empty(*lead, n, g, dtype=torch.uint8)
    rows = math.prod(lead) * n
    good = torch.ops.lowbit_cpu.quantize.default(
        w.reshape(rows, k),
        packed.view(rows, -1),
        scale.view(rows, g),
        None if zero is None else zero.view(rows, g),
        scheme.bits,
        scheme.group(k),
        float(fmt.min),
        float(fmt.max),
        float(fmt.symmetric_max),
    )
    return (packed, scale, zero, None) if good else reference.quantize(w, scheme, method)


register(
    Kernel(
        "cpu_quantize",
        "quantize",
        quantize,
        "round to nearest",
        devices=frozenset({"cpu"}),
        formats=frozenset(name for name, fmt in FORMATS.items() if fmt.step == 1 and fmt.nan is None and fmt.bits > 1),
        zero_points=frozenset({"none", "int"}),
        scales=frozenset(PLAIN_SCALES),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        available=available,
    )
)
