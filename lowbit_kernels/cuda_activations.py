"""Rows for 8-bit x and 8- or 4-bit weights on CUDA: x is quantized row by row, then codes are multiplied on the tensor cores.

For few rows of x one kernel quantizes and multiplies, wherever that is faster, with the same codes. All read canonical bytes:
rows of 8-bit codes are what wgmma reads from shared memory, and for 4-bit weights the codes of x are stored in the order in which
a word of weights is unpacked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.scheme import Scheme

from .cuda import available
from .registry import ALL_PLAIN_SCALES, Call, Kernel, register

__all__ = ["w8a8_linear"]

_MOST_COLUMNS = 8 * ((1 << 17) - 128)  # eight blocks split a row, and each int32 sum has fewer than 2^17 products of int8


def w8a8_linear(
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
    """``x @ W.T + bias`` with ``x`` rounded to int8 (e4m3 where the weight is); a scale a row or ``input_scale`` for all."""
    if bias is not None:
        bias = bias.to(x.dtype)
    if input_scale is not None:
        input_scale = input_scale.to(torch.float32)
    return torch.ops.lowbit_cuda.w8a8_linear.default(x, packed, scale, bias, input_scale, scheme.format, scheme.group_size)


def _refusal(call: Call) -> str | None:
    if call.arch != 90:
        return f"arch: takes 90, got {call.arch}"
    wanted = Scheme("fp8_e4m3fn" if call.scheme.format == "fp8_e4m3fn" else "int8", scale="fp32")
    if call.activation != wanted:
        return f"activation: takes {wanted}, got {call.activation}"
    return None if 1 <= call.k <= _MOST_COLUMNS else f"K: takes 1..{_MOST_COLUMNS}, got {call.k}"


def _the_row(size: int) -> str | None:
    return None if size == -1 else "takes the row"


def _steps(size: int) -> str | None:
    return None if size in (-1, 32, 64) or size % 128 == 0 else "takes 32, 64, multiples of 128 and the row"


for _format, _activation, _groups, _contract in (
    ("int8", "int8", _the_row, "exact"),
    ("fp8_e4m3fn", "fp8_e4m3fn", _the_row, "fp8 sums"),
    ("int4", "int8", _steps, "exact"),
):
    register(
        Kernel(
            f"cuda_w{4 if _format == 'int4' else 8}a8_gemm_{_format}",
            "quantized_linear",
            w8a8_linear,
            _contract,
            devices=frozenset({"cuda"}),
            formats=frozenset({_format}),
            zero_points=frozenset({"none"}),
            scales=ALL_PLAIN_SCALES,
            groups=_groups,
            dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32}),
            m=(1, None),
            arch=90,
            available=available,
            predicate=_refusal,
            tiles=((16, 128, 128), (128, 128, 128), (256, 128, 128)),
        )
    )
