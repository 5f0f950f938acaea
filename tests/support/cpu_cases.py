"""Weights that meet every way through the CPU library, and its products with any instruction set."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.scheme import PLAIN_SCALES, Scheme
from lowbit_kernels import cpu, reference

SCHEMES = (
    Scheme("int8"),
    Scheme("uint8", 48, "int", "fp16"),
    Scheme("int4", 128, scale="fp32"),
    Scheme("uint4", 7, "int"),
    Scheme("uint4", 64, "float"),
    Scheme("fp8_e4m3fn", 32, scale="e8m0"),
    Scheme("fp4_e2m1", 16, scale="fp8_e4m3fn", outer=True),
    Scheme("uint3", 9, "int"),
    Scheme("int2", 64),
    Scheme("uint2", 32, "int"),
    Scheme("int3", 128),
    Scheme("uint5", 40, "int"),
    Scheme("int6", 32),
    Scheme("uint7", 128, "float"),
    Scheme("fp6_e2m3", 32, scale="e8m0"),
    Scheme("fp6_e3m2", 17),
    Scheme("fp8_e5m2", 128),
    Scheme("fp8_e4m3fn", 128),
    Scheme("fp6_e3m2", 32, scale="e8m0"),
    Scheme("nf4", 64),
)
POWERS = tuple(Scheme(name, 32, scale="e8m0") for name in ("fp4_e2m1", "fp8_e5m2", "mxint8", "nf4", "int4", "int6"))
Parts = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def linear(x: Tensor, parts: Parts, scheme: Scheme, instructions: str = "") -> Tensor:
    tables = cpu.number_table(scheme.format), None if scheme.scale in PLAIN_SCALES else cpu.number_table(scheme.scale)
    return torch.ops.lowbit_cpu.linear(x, *parts, None, *tables, scheme.group_size, instructions)


def weight(scheme: Scheme, n: int, k: int) -> tuple[Parts, Tensor]:
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(n + k))
    w[:, ::31] *= 20
    parts = reference.quantize(w, scheme, "range")
    return parts, reference.dequantize(*parts, scheme, k, torch.float64)


def hard_rows(m: int, k: int, dtype: torch.dtype, least: float) -> Tensor:
    """Rows with outliers, of zeros, of numbers that cancel, and near either end of the numbers of a float."""
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m + k))
    x[0, k // 3] = 1000
    for row, change in enumerate((lambda r: r * 0, lambda r: r[:1] * (-1) ** torch.arange(k), lambda r: r * least)):
        if row + 1 < m:
            x[row + 1] = change(x[row + 1])
    x[-1] *= 1 if m < 6 else 2.0**13 if dtype == torch.float16 else 2.0**90
    return x.to(dtype)
