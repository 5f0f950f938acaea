"""Rows for op ``linear``: integer weights of any width in the canonical layout."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import os

import torch
from torch import Tensor

from lowbit.scheme import Scheme

from ..registry import ALL_PLAIN_SCALES, Kernel, register

_FORMATS = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 9))
_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})

# (M, N, K) of a block, its warps and its stages, for every M up to the number before it. Blocks are narrow in N, since
# there are only N / 32 or N / 64 of them to spread over the processors; measured on an H200 at N = K = 4096.
_TILES: tuple[tuple[int | None, tuple[int, int, int], int, int], ...] = (
    (16, (16, 32, 256), 4, 4),
    (64, (32, 64, 128), 4, 4),
    (None, (128, 64, 64), 4, 4),
)
# fp32 products run on the ordinary cores, so a block holds what fits their registers.
_FP32_TILES: tuple[tuple[int | None, tuple[int, int, int], int, int], ...] = (
    (16, (16, 32, 64), 4, 2),
    (None, (64, 64, 32), 4, 2),
)


def _tile(m: int, dtype: torch.dtype, widest_k: int) -> tuple[tuple[int, int, int], int, int]:
    """The tile for ``m`` rows of x, no more than ``widest_k`` wide in K, its warps and its stages."""
    for most, (block_m, block_n, block_k), warps, stages in _FP32_TILES if dtype == torch.float32 else _TILES:
        # Triton 3.6 on Hopper computes wrong products of interleaved codes in blocks as small as 32 x 16: take wider ones.
        if (most is None or m <= most) and block_n * min(block_k, widest_k) > 32 * 16:
            return (block_m, block_n, min(block_k, widest_k)), warps, stages
    raise AssertionError("the last tile takes any M")


def linear(
    x: Tensor, packed: Tensor, scale: Tensor, zero_point: Tensor | None, outer: Tensor | None, bias: Tensor | None, scheme: Scheme
) -> Tensor:
    """``x @ W.T + bias``: ``x`` [..., K] with any strides and at least one row, the weight [N, K] canonical."""
    from .gemm import integer_gemm

    *lead, k = x.shape
    n = packed.shape[0]
    rows = x.reshape(-1, k)
    m = rows.shape[0]
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    if not k or not n:
        return (y.zero_() if bias is None else y.copy_(bias)).reshape(*lead, n)
    packed, scale = _rows_contiguous(packed), _rows_contiguous(scale)
    zero_point = None if zero_point is None else _rows_contiguous(zero_point)
    whole = scheme.group(k) >= k
    # A block lies within a group: the largest power of two that divides it.
    widest_k = 256 if whole else scheme.group_size & -scheme.group_size
    (block_m, block_n, block_k), warps, stages = _tile(m, x.dtype, widest_k)
    grid = (-(-m // block_m) * -(-n // block_n),)
    on_device = contextlib.nullcontext() if x.device.type == "cpu" else torch.accelerator.device_index(x.device.index)
    with on_device:
        integer_gemm[grid](
            rows,
            packed,
            scale,
            scale if zero_point is None else zero_point,
            scale if bias is None else bias.contiguous(),
            y,
            m,
            n,
            k,
            rows.stride(0),
            rows.stride(1),
            packed.stride(0),
            scale.stride(0),
            0 if zero_point is None else zero_point.stride(0),
            BITS=scheme.bits,
            SIGNED=zero_point is None,
            GROUP=0 if whole else scheme.group_size,
            HAS_ZERO=zero_point is not None,
            HAS_BIAS=bias is not None,
            EVEN_K=k % block_k == 0,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            num_warps=warps,
            num_stages=stages,
            enable_fp_fusion=True,  # a fused multiply-add rounds once less; Triton warns where nobody chooses
        )
    return y.reshape(*lead, n)


def interpreted(
    x: Tensor, packed: Tensor, scale: Tensor, zero_point: Tensor | None, outer: Tensor | None, bias: Tensor | None, scheme: Scheme
) -> Tensor:
    """:func:`linear` in Triton's interpreter, which multiplies the raw bits of bf16: here bf16 is widened, which is
    exact, and the result rounded to it by torch."""

    def wide(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype == torch.bfloat16 else tensor

    y = linear(wide(x), packed, wide(scale), zero_point, outer, None if bias is None else wide(bias), scheme)
    return y.to(x.dtype)


def _rows_contiguous(tensor: Tensor) -> Tensor:
    """``tensor`` [N, C] with its columns side by side; a slice of rows or columns is taken as it is."""
    return tensor if tensor.stride(1) == 1 or tensor.shape[1] == 1 else tensor.contiguous()


# ---- rows ------------------------------------------------------------------------------------------------------


def _groups(size: int) -> str | None:
    return None if size == -1 or size % 16 == 0 else "takes -1 (the whole row) and multiples of 16"


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def _compiles() -> str | None:
    if not _installed():
        return "triton is not installed: pip install triton"
    return "TRITON_INTERPRET=1 turns Triton's compiler off: unset it before Python starts" if _interpreted() else None


def _interprets() -> str | None:
    if not _installed():
        return "triton is not installed: pip install triton"
    if not _interpreted():
        return "on a CPU Triton runs only in its interpreter: set TRITON_INTERPRET=1 before Python starts"
    return None


_INTEGER = Kernel(
    "triton_linear",
    "linear",
    linear,
    "exact",
    devices=frozenset({"cuda", "xpu"}),
    formats=_FORMATS,
    zero_points=frozenset({"none", "int"}),
    scales=ALL_PLAIN_SCALES,
    groups=_groups,
    dtypes=_DTYPES,
    m=(1, None),
    available=_compiles,
    tiles=tuple(tile for _, tile, _, _ in (*_TILES, *_FP32_TILES)),
)

register(_INTEGER)
register(
    dataclasses.replace(
        _INTEGER,
        name="triton_linear_interpreted",
        run=interpreted,
        devices=frozenset({"cpu"}),
        available=_interprets,
        on_request=True,
    )
)
