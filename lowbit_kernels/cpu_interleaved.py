"""Rows for weights in the layout ``interleaved``, in which one row of x takes least time: by digits of it, where numbers are
integers or those of four bits, on processors with AVX2 or AVX-512. What other rows read, blocks of canonical rows, is restored
as they go."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lowbit.formats import Format, FormatsThat
from lowbit.scheme import Scheme

from .bound import Bound, Product
from .cpu import OF_DIGITS, are_integers, are_small_integers, available, by_digits, by_one_digit, other_activation
from .cpu_panels import by_dots, by_panels, checked_indices, dots_available
from .cpu_panels import dequantize as dequantize_rows
from .interleaved import ROWS, rows
from .registry import Call, Kernel, register

__all__ = ["dequantize", "digits_linear", "dots_linear", "embedding", "panels_linear", "quantized_linear", "two_digits_linear"]


@Bound
def digits_linear(scheme: Scheme) -> Product:
    """``x @ W.T + bias`` for few rows of ``x``: exact integers times three digits of ``x``."""
    return by_digits(scheme, 3, interleaved=True)


@Bound
def two_digits_linear(scheme: Scheme) -> Product:
    """``x @ W.T + bias`` for few rows of ``x``: exact integers times two digits of ``x``."""
    return by_digits(scheme, 2, interleaved=True)


@Bound
def quantized_linear(scheme: Scheme) -> Product:
    """``x @ W.T + bias`` with rows of ``x`` rounded to int8: exact integers times one digit."""
    return by_one_digit(scheme, interleaved=True)


@Bound
def dots_linear(scheme: Scheme) -> Product:
    """``x @ W.T + bias`` with the weight dequantized to bfloat16, on the processor's dot products of it."""
    return by_dots(scheme, interleaved=True)


@Bound
def panels_linear(scheme: Scheme) -> Product:
    """``x @ W.T + bias`` with the weight dequantized to the dtype of ``x``, a panel of rows at a time."""
    return by_panels(scheme, interleaved=True)


def dequantize(
    packed: Tensor, scale: Tensor, zero_point: Tensor | None, outer: Tensor | None, scheme: Scheme, k: int, dtype: torch.dtype
) -> Tensor:
    """The weight [..., N, K] as ``dtype``: each number computed in float32 and rounded once."""
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
    """Rows ``indices`` (any shape) of the weight [N, K]: only those rows are read."""
    flat = checked_indices(indices, packed.shape[0])
    few, scales, zeros = rows(flat, packed, scale, zero_point, scheme, k)
    return dequantize_rows(few, scales, zeros, outer, scheme, k, dtype).reshape(*indices.shape, k)


def _groups(size: int) -> str | None:
    """Smaller ones take less time from canonical rows."""
    return None if size == -1 or size % 32 == 0 else "takes multiples of 32, or the whole row"


def _quicker(call: Call) -> str | None:
    """The row for as many rows of bfloat16 as take less time by dot products of it."""
    return "cpu_interleaved_dots" if call.m >= 32 and call.dtype == torch.bfloat16 else None


def _kept_so(fmt: Format) -> bool:
    return are_small_integers(fmt) and (fmt.bits == 4 or are_integers(fmt))


_FORMATS = FormatsThat(_kept_so)
_FEW = replace(
    OF_DIGITS,
    name="cpu_interleaved_digits",
    run=digits_linear,
    layout="interleaved",
    formats=_FORMATS,
    groups=_groups,
    quicker=_quicker,
    multiples=(ROWS, 32),
    tiles=((4, ROWS, 32), (2, ROWS, 512)),
)
_MANY = Kernel(
    "cpu_interleaved_panels",
    "linear",
    panels_linear,
    "weights rounded once",
    devices=frozenset({"cpu"}),
    layout="interleaved",
    formats=_FORMATS,
    zero_points=OF_DIGITS.zero_points,
    groups=_groups,
    dtypes=OF_DIGITS.dtypes,
    m=(1, None),
    multiples=(ROWS, 32),
    tiles=((16, ROWS, 32),),
    available=available,
)
for _row in (
    replace(
        _FEW,
        name="cpu_interleaved_two_digits",
        run=two_digits_linear,
        contract="two digits",
        dtypes=frozenset({torch.bfloat16, torch.float16}),
    ),
    _FEW,
    replace(
        _FEW,
        name="cpu_interleaved_int8_activations",
        op="quantized_linear",
        run=quantized_linear,
        contract="exact",
        m=(1, None),
        # Torch's own product of int8 takes canonical rows, and less time for many rows of x.
        formats=FormatsThat(lambda fmt: _kept_so(fmt) and fmt.name != "int8"),
        quicker=lambda call: None,
        also=other_activation,
    ),
    replace(_MANY, name="cpu_interleaved_dots", run=dots_linear, dtypes=frozenset({torch.bfloat16}), available=dots_available),
    _MANY,
    replace(_MANY, name="cpu_interleaved_dequantize", op="dequantize", run=dequantize, m=(0, None), tiles=()),
    replace(_MANY, name="cpu_interleaved_embedding", op="embedding", run=embedding, m=(0, None), tiles=()),
):
    register(_row)
