"""Rows for the layout ``interleaved``, the fastest for one row of x: split-int8 for integers and 4-bit formats, with AVX2 or
AVX-512. Rows that read canonical bytes get blocks of 32 rows converted back as they go.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lowbit.formats import Format, FormatSet
from lowbit.scheme import Scheme

from .cpu import SPLIT_INT8, are_integers, are_small_integers, available, int8_activations, refuse_activation, split_int8
from .cpu_dequant_gemm import bf16_dot_available, bf16_dot_product, checked_indices, dequant_gemm_product
from .cpu_dequant_gemm import dequantize as dequantize_rows
from .interleaved import ROWS, rows
from .prepared_call import Product, SchemeBound
from .registry import Call, Kernel, register

__all__ = [
    "FEW",
    "FEW_X2",
    "dequantize",
    "split_int8_gemv",
    "bf16_dot_gemm",
    "embedding",
    "dequant_gemm",
    "quantized_linear",
    "split_int8x2_gemv",
]


@SchemeBound
def split_int8_gemv(scheme: Scheme) -> Product:
    """``x @ W.T + bias`` for few rows of ``x`` by three int8 limbs of ``x``."""
    return split_int8(scheme, 3, interleaved=True)


@SchemeBound
def split_int8x2_gemv(scheme: Scheme) -> Product:
    """``x @ W.T + bias`` for few rows of ``x`` by two int8 limbs of ``x``."""
    return split_int8(scheme, 2, interleaved=True)


@SchemeBound
def quantized_linear(scheme: Scheme) -> Product:
    """``x @ W.T + bias`` with rows of ``x`` rounded to int8: exact integer sums, one limb."""
    return int8_activations(scheme, interleaved=True)


@SchemeBound
def bf16_dot_gemm(scheme: Scheme) -> Product:
    """``x @ W.T + bias`` with the weight dequantized to bfloat16, a panel at a time, on bfloat16 dot products."""
    return bf16_dot_product(scheme, interleaved=True)


@SchemeBound
def dequant_gemm(scheme: Scheme) -> Product:
    """``x @ W.T + bias`` with the weight dequantized to the dtype of ``x``, one panel of rows at a time."""
    return dequant_gemm_product(scheme, interleaved=True)


def dequantize(
    packed: Tensor, scale: Tensor, zero_point: Tensor | None, outer: Tensor | None, scheme: Scheme, k: int, dtype: torch.dtype
) -> Tensor:
    """The weight [..., N, K] as ``dtype``: computed in float32 and rounded once."""
    return dequantize_rows(packed, scale, zero_point, outer, scheme, k, dtype, interleaved=True)


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
    """Rows ``indices`` (any shape) of the weight [N, K]; only their blocks are read."""
    flat = checked_indices(indices, packed.shape[0])
    few, scales, zeros = rows(flat, packed, scale, zero_point, scheme, k)
    return dequantize_rows(few, scales, zeros, outer, scheme, k, dtype).reshape(*indices.shape, k)


def _groups(size: int) -> str | None:
    """Smaller groups are faster from canonical rows."""
    return None if size == -1 or size % 32 == 0 else "takes multiples of 32, or the whole row"


def _defer_to(call: Call) -> str | None:
    """The row of bfloat16 dot products from as many rows of x as it is faster."""
    return "cpu_interleaved_bf16_dot_gemm" if call.m >= 32 and call.dtype == torch.bfloat16 else None


def _is_interleaved(fmt: Format) -> bool:
    return are_small_integers(fmt) and (fmt.bits == 4 or are_integers(fmt))


_FORMATS = FormatSet(_is_interleaved)
FEW = replace(
    SPLIT_INT8,
    name="cpu_interleaved_split_int8x3_gemv",
    run=split_int8_gemv,
    layout="interleaved",
    formats=_FORMATS,
    groups=_groups,
    defer_to=_defer_to,
    multiples=(ROWS, 32),
    tiles=((4, ROWS, 32), (2, ROWS, 512)),
)
_MANY = Kernel(
    "cpu_interleaved_dequant_gemm",
    "linear",
    dequant_gemm,
    "weights rounded once",
    devices=frozenset({"cpu"}),
    layout="interleaved",
    formats=_FORMATS,
    zero_points=SPLIT_INT8.zero_points,
    groups=_groups,
    dtypes=SPLIT_INT8.dtypes,
    m=(1, None),
    multiples=(ROWS, 32),
    tiles=((16, ROWS, 32),),
    available=available,
)
FEW_X2 = replace(
    FEW,
    name="cpu_interleaved_split_int8x2_gemv",
    run=split_int8x2_gemv,
    contract="split-int8 (2 limbs)",
    dtypes=frozenset({torch.bfloat16, torch.float16}),
)
for _row in (
    FEW_X2,
    FEW,
    replace(
        FEW,
        name="cpu_interleaved_a8_gemv",
        op="quantized_linear",
        run=quantized_linear,
        contract="exact",
        m=(1, None),
        # int8 stays canonical: torch's own int8 product reads that, and is faster for many rows of x.
        formats=FormatSet(lambda fmt: _is_interleaved(fmt) and fmt.name != "int8"),
        defer_to=lambda call: None,
        predicate=refuse_activation,
    ),
    replace(
        _MANY,
        name="cpu_interleaved_bf16_dot_gemm",
        run=bf16_dot_gemm,
        dtypes=frozenset({torch.bfloat16}),
        available=bf16_dot_available,
    ),
    _MANY,
    replace(_MANY, name="cpu_interleaved_dequantize", op="dequantize", run=dequantize, m=(0, None), tiles=()),
    replace(_MANY, name="cpu_interleaved_embedding", op="embedding", run=embedding, m=(0, None), tiles=()),
):
    register(_row)
