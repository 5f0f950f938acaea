"""Rows for many rows of x on the CPU: a panel of the weight that fits the cache is dequantized, then multiplied by torch or by
the processor's own dot products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from lowbit.grid import Scales, to_codes
from lowbit.scales import token_scales
from lowbit.scheme import PLAIN_SCALES, Scheme

from .cpu import available, operator_args, refuse_activation
from .interleaved import ROWS
from .prepared_call import Product, SchemeBound, direct
from .registry import Kernel, register

__all__ = ["dequantize", "bf16_dot_gemm", "embedding", "int8_dot_gemm", "int8_mm", "dequant_gemm"]

_FEW = 16  # up to so many columns integer products are exact in fp32 too
_PANEL = 1 << 21  # weights in a panel: 4 MiB in 16 bits, so that the fixed cost of a product is small beside it
_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})

Fill = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], None]


def _fill(scheme: Scheme, interleaved: bool = False) -> Fill:
    """``fill(out, packed, scale, zero_point, outer)`` dequantizes a weight into ``out`` [N, K]."""
    args, operator = operator_args(scheme), torch.ops.lowbit_cpu.dequantize.default

    def fill(out: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, outer: Tensor | None) -> None:
        operator(out, packed, scale, zero, outer, *args, interleaved=interleaved)

    return fill


def _row_blocks(rows: int, k: int) -> Iterator[slice]:
    step = max(_PANEL // max(k, 1) // ROWS * ROWS, ROWS)
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


@SchemeBound
def dequant_gemm(scheme: Scheme) -> Product:
    """``x @ W.T + bias`` with the weight dequantized to the dtype of ``x``, one panel of rows at a time."""
    return dequant_gemm_product(scheme)


def dequant_gemm_product(scheme: Scheme, interleaved: bool = False) -> Product:
    """The product of :func:`dequant_gemm`, of canonical or interleaved weights."""
    fill = _fill(scheme, interleaved)

    def product(
        x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, outer: Tensor | None, bias: Tensor | None, scheme: Scheme
    ) -> Tensor:
        n, k = packed.shape[0], x.shape[-1]
        y = x.new_empty((*x.shape[:-1], n))
        if k == 0 or y.numel() == 0:
            return y.copy_(torch.zeros((), dtype=x.dtype) if bias is None else bias)
        panels = list(_row_blocks(n, k))
        flat, out, room = x.reshape(-1, k), y.view(-1, n), x.new_empty(panels[0].stop, k)
        for rows in panels:
            panel = room[: rows.stop - rows.start]
            fill(panel, packed[rows], scale[rows], None if zero is None else zero[rows], outer)
            part = torch.nn.functional.linear(flat, panel, None if bias is None else bias[rows])
            if len(panels) == 1:
                return part.view(y.shape)
            out[:, rows] = part
        return y

    return product


@SchemeBound
def bf16_dot_gemm(scheme: Scheme) -> Product:
    """``x @ W.T + bias`` with the weight dequantized to bfloat16, a panel at a time, on bfloat16 dot products."""
    return bf16_dot_product(scheme)


def bf16_dot_product(scheme: Scheme, interleaved: bool = False) -> Product:
    """The product of :func:`bf16_dot_gemm`, of canonical or interleaved weights."""
    args, operator = operator_args(scheme), direct(torch.ops.lowbit_cpu.bf16_dot_gemm.default)

    def product(
        x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, outer: Tensor | None, bias: Tensor | None, scheme: Scheme
    ) -> Tensor:
        return operator(x, packed, scale, zero, outer, bias, *args, interleaved)

    return product


def bf16_dot_available() -> str | None:
    """Why this processor has no bfloat16 dot products, with the remedy; None if it has."""
    if (missing := available()) is not None or torch.ops.lowbit_cpu.has_bf16_dot():
        return missing
    return "the processor has no AVX-512 with BF16, or LOWBIT_CPU leaves it out: cpu_dequant_gemm takes every processor"


def dequantize(
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    outer: Tensor | None,
    scheme: Scheme,
    k: int,
    dtype: torch.dtype,
    interleaved: bool = False,
) -> Tensor:
    """The weight [..., N, K] as ``dtype``: computed in float32 and rounded once."""
    out = torch.empty(*packed.shape[:-1], k, dtype=dtype)
    if out.numel() == 0:
        return out
    fill, lead = _fill(scheme, interleaved), packed.shape[:-2]
    flat = [
        None if part is None else part.reshape(-1, *part.shape[len(lead) :]) for part in (out, packed, scale, zero_point, outer)
    ]
    for e in range(math.prod(lead)):
        fill(*(None if part is None else part[e] for part in flat))  # type: ignore[arg-type]
    return out


def embedding(
    indices: Tensor,
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    outer: Tensor | None,
    scheme: Scheme,
    k: int,
    dtype: torch.dtype,
) -> Tensor:
    """Rows ``indices`` (any shape) of the weight [N, K]; only those are unpacked."""
    flat = checked_indices(indices, packed.shape[0])
    rows = dequantize(packed[flat], scale[flat], None if zero_point is None else zero_point[flat], outer, scheme, k, dtype)
    return rows.reshape(*indices.shape, k)


def checked_indices(indices: Tensor, rows: int) -> Tensor:
    """``indices`` [I]. Raises ``IndexError`` for one outside ``rows``."""
    flat = indices.reshape(-1)
    if flat.numel():
        low, high = (int(v) for v in torch.aminmax(flat))
        if low < 0 or high >= rows:
            raise IndexError(f"embedding indices must be 0..{rows - 1}, got {low}..{high}")
    return flat


def int8_mm(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    outer: Tensor | None,
    bias: Tensor | None,
    scheme: Scheme,
    activation: Scheme,
    input_scale: Tensor | None,
) -> Tensor:
    """``x @ W.T + bias`` with rows of ``x`` rounded to int8 and int8 weights with one scale a row: torch's integer product."""
    rows = x.reshape(-1, x.shape[-1]).float()
    scale_of = token_scales(rows[:, None], activation).scale[:, 0]  # NaN where a row of x has no codes
    if input_scale is not None:
        scale_of = torch.where(scale_of.isnan(), scale_of, input_scale.float().reshape(1, 1))
    codes = to_codes(rows, activation, Scales(scale_of)).view(torch.int8)
    weight = packed.view(torch.int8).t()
    few = weight.shape[0] < _FEW  # torch mistakes a matrix of one row for one of one column
    y = codes.float() @ weight.float() if few else torch._int_mm(codes, weight).float()
    y = y.mul_(scale_of).mul_(scale.float().t())
    if bias is not None:
        y += bias.float()
    return y.to(x.dtype).reshape(*x.shape[:-1], packed.shape[0])


@SchemeBound
def int8_dot_gemm(scheme: Scheme) -> Product:
    """``x @ W.T + bias`` with rows of ``x`` rounded to int8 and int8 weights with one scale a row, on int8 dot products."""
    args, operator = operator_args(scheme), direct(torch.ops.lowbit_cpu.int8_dot_gemm.default)

    def product(
        x: Tensor,
        packed: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        outer: Tensor | None,
        bias: Tensor | None,
        scheme: Scheme,
        activation: Scheme,
        input_scale: Tensor | None,
    ) -> Tensor:
        return operator(x, packed, scale, bias, args[0], None if input_scale is None else input_scale.float())

    return product


def int8_dot_available() -> str | None:
    """Why this processor has no int8 dot products, with the remedy; None if it has."""
    if (missing := available()) is not None or torch.ops.lowbit_cpu.has_int8_dot():
        return missing
    return "the processor has no AVX-512 with VNNI, or LOWBIT_CPU leaves it out: cpu_w8a8_gemm takes every processor"


_W8A8 = Kernel(
    "cpu_w8a8_gemm",
    "quantized_linear",
    int8_mm,
    "exact",
    devices=frozenset({"cpu"}),
    formats=frozenset({"int8"}),
    scales=frozenset(PLAIN_SCALES),
    groups=lambda size: None if size == -1 else "takes the whole row",
    dtypes=_DTYPES,
    m=(17, None),
    predicate=refuse_activation,
    tiles=((17, 16, 32),),
    available=available,
)
register(
    replace(
        _W8A8,
        name="cpu_w8a8_dot_gemm",
        run=int8_dot_gemm,
        m=(1, None),
        tiles=((12, 32, 64), (384, 64, 2048)),
        available=int8_dot_available,
    )
)
register(_W8A8)
register(
    Kernel(
        "cpu_bf16_dot_gemm",
        "linear",
        bf16_dot_gemm,
        "weights rounded once",
        devices=frozenset({"cpu"}),
        dtypes=frozenset({torch.bfloat16}),
        m=(1, None),
        tiles=((6, 4, 32), (24, 32, 1024)),
        available=bf16_dot_available,
    )
)
for _name, _op, _run in (
    ("cpu_dequant_gemm", "linear", dequant_gemm),
    ("cpu_dequantize", "dequantize", dequantize),
    ("cpu_embedding", "embedding", embedding),
):
    register(
        Kernel(
            _name,
            _op,
            _run,
            "weights rounded once",
            devices=frozenset({"cpu"}),
            dtypes=_DTYPES,
            m=(1 if _op == "linear" else 0, None),
            tiles=((16, 16, 32),) if _op == "linear" else (),
            available=available,
        )
    )
