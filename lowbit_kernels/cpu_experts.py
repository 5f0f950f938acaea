"""Rows of the CPU library for products with the experts that rows of x chose: ``experts_linear`` from the layout interleaved.

All chosen experts are multiplied in one parallel region, one row of x at a time: for as many rows as there are experts at most.
More rows are products of each expert with its rows, by the rows of ``linear``.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lowbit.scheme import Scheme

from .cpu import operator_args
from .cpu_interleaved import FEW, FEW_X2
from .prepared_call import Product, SchemeBound, direct
from .registry import register

__all__ = ["split_int8_gemv", "split_int8x2_gemv"]


def _product_by(scheme: Scheme, limbs: int) -> Product:
    multiply, args = direct(torch.ops.lowbit_cpu.experts_linear.default), operator_args(scheme)

    def product(
        x: Tensor,
        packed: Tensor,
        scale: Tensor,
        zero: Tensor | None,
        outer: Tensor | None,
        bias: Tensor | None,
        scheme: Scheme,
        experts: Tensor,
    ) -> Tensor:
        of_rows = (None if part is None else part.flatten(0, 1) for part in (packed, scale, zero))
        shift = None if bias is None else bias.flatten()
        return multiply(x, *of_rows, outer, shift, experts, *args, limbs, packed.shape[0])

    return product


@SchemeBound
def split_int8_gemv(scheme: Scheme) -> Product:
    """Rows of ``x`` times experts by three int8 limbs of ``x``."""
    return _product_by(scheme, 3)


@SchemeBound
def split_int8x2_gemv(scheme: Scheme) -> Product:
    """Rows of ``x`` times experts by two int8 limbs of ``x``."""
    return _product_by(scheme, 2)


for _row, _run in ((FEW_X2, split_int8x2_gemv), (FEW, split_int8_gemv)):
    _name = _row.name.replace("cpu_", "cpu_experts_", 1)
    register(replace(_row, name=_name, op="experts_linear", run=_run, m=(1, 1), defer_to=lambda call: None))
