"""Rows for products with all experts of a layer, [E, M, K] times [E, N, K], of which few are chosen: the rows of ``linear`` for
few rows of x, expert by expert."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from torch import Tensor

from lowbit.scheme import Scheme

from .cpu import GEMV, SPLIT_INT8, SPLIT_INT8X2
from .cpu_interleaved import FEW, FEW_X2
from .prepared_call import Product, SchemeBound
from .registry import register

__all__ = ["expert_by_expert"]


def expert_by_expert(run: SchemeBound) -> SchemeBound:
    """The product of ``x`` [E, M, K] with each expert's matrix by ``run``, for rows of x that are not all 0: those of tokens that
    chose another expert are, and become the bias. Of an expert that no token chose no weight is read."""

    @SchemeBound
    def grouped(scheme: Scheme) -> Product:
        multiply = run.make(scheme)

        def product(
            x: Tensor,
            packed: Tensor,
            scale: Tensor,
            zero: Tensor | None,
            outer: Tensor | None,
            bias: Tensor | None,
            scheme: Scheme,
        ) -> Tensor:
            y = x.new_zeros(*x.shape[:-1], packed.shape[-2])
            if bias is not None:
                y += bias.view(len(bias), *[1] * (x.dim() - 2), bias.shape[-1])
            chosen = x.any(-1)
            for e in chosen.flatten(1).any(-1).nonzero()[:, 0].tolist():
                parts = (None if part is None else part[e] for part in (zero, outer, bias))
                y[e, chosen[e]] = multiply(x[e, chosen[e]], packed[e], scale[e], *parts, scheme)
            return y

        return product

    return grouped


for _row in (FEW_X2, FEW, SPLIT_INT8X2, SPLIT_INT8, GEMV):
    _name = _row.name.replace("cpu_", "cpu_grouped_", 1)
    _run = expert_by_expert(cast(SchemeBound, _row.run))
    register(replace(_row, name=_name, op="grouped_linear", run=_run, defer_to=lambda call: None))
