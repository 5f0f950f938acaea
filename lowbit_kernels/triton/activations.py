"""Rows for 8-bit x and 8-bit weights: x is quantized with a scale a token, then codes are multiplied."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from lowbit.decoding import FLOATS
from lowbit.scheme import Scheme

from ..epilogues import EPILOGUES
from ..registry import ALL_PLAIN_SCALES, Call, Kernel, register
from .blocks import block
from .linear import ON_A_CPU, compiles
from .operands import launch_options, on_device, supports_pdl
from .quantization import round_rows

__all__ = ["ROWS", "codes_product", "w8a8_linear"]

_MAX_COLUMNS = (1 << 17) - 1  # int32 holds sums of fewer than 2**17 products of int8


def w8a8_linear(
    x: Tensor, packed: Tensor, scale: Tensor, zero_point: Tensor | None, outer: Tensor | None, bias: Tensor | None,
    scheme: Scheme, activation: Scheme, input_scale: Tensor | None, epilogue: str = "none",
) -> Tensor:  # fmt: skip
    """``x @ W.T + bias`` with ``x`` rounded to the format of the weight; a scale a token, or ``input_scale`` for all. After the
    function ``epilogue``."""
    codes, scales = round_rows(x.reshape(-1, x.shape[-1]), activation, input_scale)
    y = codes_product(codes, scales, packed, scale, bias, scheme, x.dtype, epilogue)
    return y.reshape(*x.shape[:-1], packed.shape[0])


def codes_product(
    codes: Tensor, scales: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None, scheme: Scheme, dtype: torch.dtype,
    epilogue: str = "none",
) -> Tensor:  # fmt: skip
    """``(codes * scales) @ W.T + bias``: ``codes`` [M, K] of the format of the weight, ``scales`` [M], or [1] for all tokens."""
    from .w8a8_gemm import w8a8_gemm

    (m, k), n = codes.shape, packed.shape[0]
    y = torch.empty(m, n, dtype=dtype, device=codes.device)
    if not y.numel():
        return y
    dec = scheme.fmt.decoding
    packed = packed if packed.stride(1) == 1 else packed.contiguous()
    config = dict(block("w8a8_gemm", codes.device, scheme, dtype, m, n, k))
    with on_device(codes.device):
        w8a8_gemm[(-(-m // config["BLOCK_M"]) * -(-n // config["BLOCK_N"]),)](
            codes, scales, packed, scale, y if bias is None else bias.contiguous(), y, m, n, k,
            codes.stride(0), packed.stride(0), scale.stride(0),
            IS_FLOAT=dec.kind == FLOATS, MANTISSA=dec.mantissa, SPECIAL=dec.special, FACTOR=dec.factor,
            HAS_BIAS=bias is not None, EPILOGUE=epilogue, ONE_SCALE=scales.numel() == 1, EVEN=k % config["BLOCK_K"] == 0,
            PDL=supports_pdl(codes.device), **config, **launch_options(codes.device),
        )  # fmt: skip
    return y


def _refusal(call: Call) -> str | None:
    wanted = Scheme(call.scheme.format, scale="fp32")
    if call.activation != wanted:
        return f"activation: takes {wanted}, got {call.activation}"
    return None if 1 <= call.k <= _MAX_COLUMNS else f"K: takes 1..{_MAX_COLUMNS}, got {call.k}"


def _the_row(size: int) -> str | None:
    return None if size == -1 else "takes the row"


def _interpreted(
    x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, outer: Tensor | None, bias: Tensor | None,
    scheme: Scheme, activation: Scheme, input_scale: Tensor | None, **more: str,
) -> Tensor:  # fmt: skip
    """:func:`w8a8_linear` in the interpreter: bfloat16 is widened, which is exact, and torch rounds the result."""
    wide = None if bias is None else bias.float()
    y = w8a8_linear(x.float(), packed, scale.float(), zero, outer, wide, scheme, activation, input_scale, **more)
    return y.to(x.dtype)


ROWS = tuple(
    Kernel(
        f"triton_w8a8_gemm_{_format}",
        "quantized_linear",
        w8a8_linear,
        "exact",
        devices=frozenset({"cuda", "xpu"}),
        formats=frozenset({_format}),
        zero_points=frozenset({"none"}),
        scales=ALL_PLAIN_SCALES,
        groups=_the_row,
        dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32}),
        m=(1, None),
        available=compiles,
        predicate=_refusal,
        epilogues=EPILOGUES.builtin_names(),
        tiles=((16, 32, 256), (64, 64, 128), (128, 128, 128)),
    )
    for _format in ("int8", "fp8_e4m3fn")
)
for _row in ROWS:
    register(_row)
    _few: dict[str, Any] = {"m": (1, 17), "tiles": _row.tiles[:1]}
    register(dataclasses.replace(_row, name=f"{_row.name}_interpreted", run=_interpreted, **_few, **ON_A_CPU))
