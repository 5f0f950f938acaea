"""Rows of the CUDA library for products with the experts that rows of x chose: ``experts_linear`` from the layout mma_fragment.

A weight [E, N, K] with whole tiles of 16 rows an expert is one of E N rows. Each row of x is multiplied by itself, for as many
rows as there are experts at most. The host waits for nothing, so that a CUDA graph may capture it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.scheme import Scheme

from .cuda import FAMILIES, kind_of
from .prepared_call import Product, SchemeBound, direct
from .registry import Kernel, register

__all__ = ["skinny_gemm"]


@SchemeBound
def skinny_gemm(scheme: Scheme) -> Product:
    """Rows of ``x`` times experts on the 16-bit tensor cores."""
    multiply, kind = direct(torch.ops.lowbit_cuda.experts_skinny_gemm.default), kind_of(scheme)

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
        units, scales, zeros, shift = (None if part is None else part.flatten(0, 1) for part in (packed, scale, zero, bias))
        return multiply(x, units, scales, zeros, outer, shift, experts, packed.shape[0], kind)

    return product


for _suffix, _fields, _ in FAMILIES:
    register(
        Kernel(
            f"cuda_experts_skinny_gemm{_suffix}",
            "experts_linear",
            skinny_gemm,
            "exact",
            m=(1, 1),
            arch=80,
            multiples=(16, 1),
            tiles=((1, 16, 512),),
            **_fields,
        )
    )
