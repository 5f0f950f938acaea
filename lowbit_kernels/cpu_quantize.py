"""Rounding to nearest and packing on the CPU, for integers with scales in a float type: the same bytes as the reference."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lowbit.formats import FormatSet
from lowbit.packing import packed_size
from lowbit.scales import choose
from lowbit.scheme import PLAIN_SCALES, Scheme

from .cpu import available
from .registry import Call, Kernel, register

__all__ = ["quantize"]


def quantize(w: Tensor, scheme: Scheme, method: str) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Packed codes, scales and zero points of ``w`` [..., N, K], rounded to nearest.

    Raises ``ValueError``, as the reference does, for weights that are not finite and for scales that their format cannot hold.
    """
    *lead, n, k = w.shape
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
        scheme.reach if method == "range" else None,
    )
    if not good:
        _refuse(w.reshape(-1, n, k), scheme, method)
    return packed, scale, zero, None


def _refuse(w: Tensor, scheme: Scheme, method: str) -> None:
    """Raises what is wrong with ``w`` [E, N, K]: choosing scales checks it, but for fp32 scales, which hold any value."""
    for matrix in w:
        for rows in matrix.split(max(1, (1 << 20) // w.shape[-1])):
            choose(rows.float(), scheme, method)
    raise ValueError("a weight that is quantized must be finite, and this one holds NaN or infinity: remove them first")


def _predicate(call: Call) -> str | None:
    return None if call.method in (None, "range", "absmax") else f"method: takes range and absmax, got {call.method}"


register(
    Kernel(
        "cpu_quantize",
        "quantize",
        quantize,
        "round to nearest",
        devices=frozenset({"cpu"}),
        formats=FormatSet(lambda fmt: fmt.step == 1 and fmt.nan is None and fmt.bits > 1),
        zero_points=frozenset({"none", "int"}),
        scales=frozenset(PLAIN_SCALES),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        predicate=_predicate,
        available=available,
    )
)
