"""Rows of the CUDA library for products with the experts that rows of x chose: ``experts_linear`` from the layout mma_fragment.

A weight [E, N, K] with whole tiles of 16 rows an expert is one of E N rows. A few rows are multiplied one by one, each with its
expert; more are sorted by expert on the device, and blocks of rows of one expert are multiplied at once. The host waits for
nothing, so that a CUDA graph may capture it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.scheme import Scheme

from .cuda import FAMILIES, contracts_of_mixed_gemm, hopper_only, kind_of
from .prepared_call import Product, SchemeBound, direct
from .registry import Kernel, register

__all__ = ["mixed_gemm", "skinny_gemm"]

ONE_BY_ONE = 16  # rows up to which each is a block's own; above, rows of one expert share reading it
SKINNY_ROWS = 8  # rows of an expert in a block of skinny_gemm


def _as_one(packed: Tensor, *parts: Tensor | None) -> tuple[Tensor | None, ...]:
    """[E, N, ...] of each as [E N, ...]."""
    return tuple(None if part is None else part.flatten(0, 1) for part in (packed, *parts))


@SchemeBound
def skinny_gemm(scheme: Scheme) -> Product:
    """Rows of ``x`` times experts on the 16-bit tensor cores, at most eight rows of an expert in a block."""
    multiply, sort = (
        direct(torch.ops.lowbit_cuda.experts_skinny_gemm.default),
        direct(torch.ops.lowbit_cuda.sort_by_expert.default),
    )
    kind = kind_of(scheme)

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
        number, n, rows = packed.shape[0], packed.shape[1], len(experts)
        new, order, segments = x.new_empty, None, None
        if rows > ONE_BY_ONE:
            order, segments = sort(experts.contiguous(), number, SKINNY_ROWS)
            new = x.new_zeros  # rows of no expert stay 0
        y = new(rows, n)
        units, scales, zeros, biases = _as_one(packed, scale, zero, bias)
        multiply(y, x, units, scales, zeros, outer, biases, experts.contiguous(), segments, order, number, kind)
        return y

    return product


@SchemeBound
def mixed_gemm(scheme: Scheme) -> Product:
    """Many rows of ``x`` times experts on Hopper's 16-bit tensor cores (wgmma), 64 to 256 rows of an expert in a block."""
    multiply, sort = (
        direct(torch.ops.lowbit_cuda.experts_mixed_gemm.default),
        direct(torch.ops.lowbit_cuda.sort_by_expert.default),
    )
    args = (scheme.format, scheme.scale, scheme.group_size)

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
        number, n, rows = packed.shape[0], packed.shape[1], len(experts)
        mean = -(-rows // number)
        columns = 64 if mean <= 64 or x.dtype == torch.float16 else 128 if mean < 1024 else 256
        order, segments = sort(experts.contiguous(), number, columns)
        share = rows // len(x)
        x = x.index_select(0, order if share == 1 else order // share)
        if x.shape[-1] % 8:  # TMA needs rows aligned to 16 bytes; columns beyond K are multiplied by zeros
            x = torch.nn.functional.pad(x, (0, -x.shape[-1] % 8))
        y = x.new_zeros(rows, n)  # rows of no expert stay 0
        units, scales, zeros, biases = _as_one(packed, scale, zero, bias)
        multiply(y, x, units, scales, zeros, outer, biases, experts.contiguous(), segments, order, number, *args, columns)
        return y

    return product


for _suffix, _fields, _is_plain in FAMILIES:
    for _end, _contract, _rows in contracts_of_mixed_gemm(SKINNY_ROWS + 1, _is_plain):
        register(
            Kernel(
                f"cuda_experts_mixed_gemm{_suffix}{_end}",
                "experts_linear",
                mixed_gemm,
                _contract,
                m=_rows,
                arch=90,
                predicate=hopper_only,
                multiples=(16, 1),
                tiles=((64, 128, 512), (128, 128, 64), (256, 128, 512)),
                **_fields,
            )
        )
    register(
        Kernel(
            f"cuda_experts_skinny_gemm{_suffix}",
            "experts_linear",
            skinny_gemm,
            "exact",
            m=(1, None),
            arch=80,
            multiples=(16, 1),
            tiles=((1, 16, 512), (8, 16, 512)),
            **_fields,
        )
    )
