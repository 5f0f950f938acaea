"""Rows for tokens that are quantized once and multiplied several times: RMSNorm that ends in codes, and products of codes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from lowbit.scheme import Scheme

from ..registry import Call, Kernel, register
from .activations import ROWS, codes_product
from .encodings import encoding
from .linear import ON_A_CPU, compiles
from .operands import launch_options, on_device, supports_pdl

__all__ = ["codes_linear", "rms_norm_quantize"]

_MAX_COLUMNS = 1 << 15  # of a row that a block can hold: 64 values a thread of sixteen warps


def rms_norm_quantize(x: Tensor, weight: Tensor | None, eps: float, activation: Scheme) -> tuple[Tensor, Tensor]:
    """Codes [..., K] and scales [..., 1] of the RMSNorm of ``x`` [..., K], times ``weight`` [K]."""
    from .norm import rms_norm_quantize as kernel

    k, dec = x.shape[-1], encoding(activation.format)
    assert dec is not None, "the row refuses such a format"
    rows = x.reshape(-1, k)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scale = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    block = 1 << (k - 1).bit_length()
    with on_device(x.device):
        kernel[(rows.shape[0],)](
            rows, rows if weight is None else weight.contiguous(), codes, scale, k, 1 / k, eps, rows.stride(0),
            BITS=8, **dec.constants, REACH=activation.fmt.symmetric_max, HAS_WEIGHT=weight is not None, EVEN=block == k,
            PDL=supports_pdl(x.device), BLOCK=block, num_warps=max(1, min(16, block // 1024)), **launch_options(x.device),
        )  # fmt: skip
    return codes, scale


def codes_linear(
    codes: Tensor, x_scale: Tensor, packed: Tensor, scale: Tensor, zero_point: Tensor | None, outer: Tensor | None,
    bias: Tensor | None, scheme: Scheme, activation: Scheme, k: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """``(codes * x_scale) @ W.T + bias``: ``codes`` [..., K] of the format of the weight, ``x_scale`` [..., 1]."""
    rows = codes.reshape(-1, codes.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    y = codes_product(rows, x_scale.reshape(-1), packed, scale, bias, scheme, dtype)
    return y.reshape(*codes.shape[:-1], packed.shape[0])


def _refusal(call: Call) -> str | None:
    wanted = Scheme(call.scheme.format, scale="fp32")
    if call.scheme != wanted:
        return f"activation: takes {wanted}, got {call.scheme}"
    return None if 1 <= call.k <= _MAX_COLUMNS else f"K: takes 1..{_MAX_COLUMNS}, got {call.k}"


def _norm_interpreted(x: Tensor, weight: Tensor | None, eps: float, activation: Scheme) -> tuple[Tensor, Tensor]:
    """:func:`rms_norm_quantize` in the interpreter: bfloat16 is widened, which is exact."""
    return rms_norm_quantize(x.float(), None if weight is None else weight.float(), eps, activation)


def _codes_interpreted(
    codes: Tensor, x_scale: Tensor, packed: Tensor, scale: Tensor, zero_point: Tensor | None, outer: Tensor | None,
    bias: Tensor | None, scheme: Scheme, activation: Scheme, k: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """:func:`codes_linear` in the interpreter: bfloat16 is widened, and torch rounds the result."""
    wide = None if bias is None else bias.float()
    y = codes_linear(codes, x_scale, packed, scale.float(), zero_point, outer, wide, scheme, activation, k, torch.float32)
    return y.to(dtype)


_NORM = Kernel(
    "triton_rms_norm_quantize",
    "rms_norm_quantize",
    rms_norm_quantize,
    "round to nearest",
    devices=frozenset({"cuda", "xpu"}),
    formats=frozenset({"int8", "fp8_e4m3fn"}),
    dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32}),
    m=(1, None),
    available=compiles,
    predicate=_refusal,
)
register(_NORM)
register(dataclasses.replace(_NORM, name=f"{_NORM.name}_interpreted", run=_norm_interpreted, **ON_A_CPU))

for _row in ROWS:  # the same products of codes, with x quantized before
    _own: dict[str, Any] = {"op": "codes_linear", "run": codes_linear, "epilogues": _NORM.epilogues}
    _codes = dataclasses.replace(_row, name=f"{_row.name}_prequantized", **_own)
    register(_codes)
    _few: dict[str, Any] = {"m": (1, 17), "tiles": _row.tiles[:1]}
    register(dataclasses.replace(_codes, name=f"{_codes.name}_interpreted", run=_codes_interpreted, **_few, **ON_A_CPU))
