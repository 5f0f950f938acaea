"""Rows that dequantize: a canonical weight of any format, some of its rows, or all of it before torch's GEMM."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from lowbit.scheme import Scheme

from ..registry import Kernel, register
from .linear import ON_A_CPU, compiles, groups, widened
from .operands import Parts, on_device


def dequantize(
    packed: Tensor, scale: Tensor, zero_point: Tensor | None, outer: Tensor | None, scheme: Scheme, k: int, dtype: torch.dtype
) -> Tensor:
    """The weight [..., N, K] as ``dtype``: each number computed in float32 and rounded once."""
    out = torch.empty(*packed.shape[:-1], k, dtype=dtype, device=packed.device)
    zero = None if zero_point is None else zero_point.reshape(-1, zero_point.shape[-1])
    if out.numel():
        parts = Parts(packed.reshape(-1, packed.shape[-1]), scale.reshape(-1, scale.shape[-1]), zero, outer, scheme, k)
        _run(parts, None, out.view(-1, k), packed.shape[-2])
    return out


def dequantized_linear(
    x: Tensor, packed: Tensor, scale: Tensor, zero_point: Tensor | None, outer: Tensor | None, bias: Tensor | None, scheme: Scheme
) -> Tensor:
    """``x @ W.T + bias`` for many rows of ``x``: torch's GEMM with the dequantized weight."""
    return torch.nn.functional.linear(x, dequantize(packed, scale, zero_point, outer, scheme, x.shape[-1], x.dtype), bias)


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
    """Rows ``indices`` (any shape) of the weight [N, K]: only those rows are read. Indices out of range are asserted."""
    out = torch.empty(*indices.shape, k, dtype=dtype, device=packed.device)
    if out.numel():
        index = indices.reshape(-1)
        if packed.device.type == "cpu":
            low, high = (int(v) for v in torch.aminmax(index))
            if low < 0 or high >= packed.shape[0]:
                raise IndexError(f"embedding indices must be 0..{packed.shape[0] - 1}, got {low}..{high}")
        else:
            torch._assert_async(((index >= 0) & (index < packed.shape[0])).all())
        _run(Parts(packed, scale, zero_point, outer, scheme, k), index.contiguous(), out.view(-1, k), packed.shape[0])
    return out


def _run(parts: Parts, index: Tensor | None, out: Tensor, n: int) -> None:
    from .dequantize import dequantize as kernel

    count, k = out.shape
    words = 128 if k >= 1024 else 32
    rows = 4 if count >= 1024 else 1
    with on_device(out.device):
        kernel[-(-count // rows), -(-k // (8 * words))](
            *parts.pointers, *parts.tables, out if index is None else index, out, count, n, k, *parts.strides,
            **parts.constants, HAS_INDEX=index is not None, EVEN=parts.constants["ALIGNED"] and k % (8 * words) == 0,
            ROWS=rows, WORDS=words, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip


_DEQUANTIZE = Kernel(
    "triton_dequantize",
    "dequantize",
    dequantize,
    "weights rounded once",
    devices=frozenset({"cuda", "xpu"}),
    groups=groups,
    dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32}),
    available=compiles,
)
_EMBEDDING = dataclasses.replace(_DEQUANTIZE, name="triton_embedding", op="embedding", run=embedding)


_LINEAR = dataclasses.replace(_DEQUANTIZE, name="triton_dequant_gemm", op="linear", run=dequantized_linear, m=(1, None))


def _widened(run: Any, scale_at: int) -> Any:
    """``run`` in the interpreter, which truncates float32 to bfloat16: here torch rounds."""

    def interpreted(*args: Any) -> Tensor:
        head, scale, zero = list(args[:scale_at]), args[scale_at], args[scale_at + 1]
        wide = [None if t is None else t.float() if t.dtype == torch.bfloat16 else t for t in (scale, zero)]
        dtype = args[-1]
        return run(*head, *wide, *args[scale_at + 2 : -1], torch.float32).to(dtype)

    return interpreted


for _row, _at in ((_DEQUANTIZE, 1), (_EMBEDDING, 2)):
    register(_row)
    register(dataclasses.replace(_row, name=f"{_row.name}_interpreted", run=_widened(_row.run, _at), **ON_A_CPU))

register(_LINEAR)
_INTERPRETED: dict[str, Any] = {"name": f"{_LINEAR.name}_interpreted", "run": widened(dequantized_linear), "m": (1, 17)}
register(dataclasses.replace(_LINEAR, **_INTERPRETED, **ON_A_CPU))
