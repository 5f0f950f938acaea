"""Rows for the CUDA library of csrc: ``linear`` from the layout mma_fragment for any M, and from canonical bytes for up to eight
rows of x.

The library is loaded when a call first asks for it; importing this module touches neither it nor the driver.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowbit.decoding import FLOATS, INTEGERS
from lowbit.scheme import Scheme

from .build import CUDA
from .prepared_call import Product, SchemeBound, direct, prepared
from .registry import ALL_PLAIN_SCALES, Call, Kernel, register

__all__ = [
    "available",
    "dequant_gemm",
    "kind_of",
    "linear",
    "mixed_gemm",
    "skinny_gemm",
    "split_int8_gemv",
    "FAMILIES",
]


def available() -> str | None:
    """Why the CUDA library cannot run here, with the remedy; None if it can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA: install one with CUDA from https://pytorch.org"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device: install NVIDIA's driver, and check with nvidia-smi that it sees one"
    return CUDA.missing()


@SchemeBound
def linear(scheme: Scheme) -> Product:
    """``x @ W.T + bias`` for at most eight rows of ``x`` from canonical bytes: fp32 sums of the exact weights, rounded once."""
    multiply, args = direct(torch.ops.lowbit_cuda.linear.default), (scheme.bits, scheme.fmt.signed, scheme.group_size)

    def product(
        x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, outer: Tensor | None, bias: Tensor | None, scheme: Scheme
    ) -> Tensor:
        return multiply(x, packed, scale, zero, bias, *args)

    return product


def kind_of(scheme: Scheme) -> int:
    """The decoding of a weight in one integer, as ``PackedFormat`` of csrc reads it: each argument costs host time."""
    found, bits, is_e8m0 = scheme.fmt.decoding, scheme.bits, scheme.scale == "e8m0"
    # Bits of a float's exponent, 0 for integers, -1 for a table; and log2 of the inverse of an integer's step.
    exponent = {INTEGERS: 0, FLOATS: bits - 1 - found.mantissa}.get(found.kind, -1)
    powers = round(-math.log2(found.factor)) if found.kind == INTEGERS else 0
    fields = bits | (exponent + 1) << 4 | scheme.fmt.signed << 8 | is_e8m0 << 9 | powers << 10
    return int(fields | (scheme.group_size + 1) << 16)


@SchemeBound
def split_int8_gemv(scheme: Scheme) -> Product:
    """``x @ W.T + bias`` for one or two rows of ``x`` and a weight in mma_fragment: integers times int8 limbs of ``x``."""
    ops = torch.ops.lowbit_cuda
    of = ops.split_int8_gemv.default, ops.split_int8_gemv_prepare.default, ops.prepared_linear.default
    return prepared(*of, kind_of(scheme))


@SchemeBound
def skinny_gemm(scheme: Scheme) -> Product:
    """``x @ W.T + bias`` for at most sixteen rows of ``x`` and a weight in mma_fragment, on the 16-bit tensor cores."""
    ops = torch.ops.lowbit_cuda
    of = ops.skinny_gemm.default, ops.skinny_gemm_prepare.default, ops.prepared_linear.default
    return prepared(*of, kind_of(scheme))


@SchemeBound
def mixed_gemm(scheme: Scheme) -> Product:
    """``x @ W.T + bias`` for many rows of ``x`` and a weight in mma_fragment, on Hopper's 16-bit tensor cores (wgmma)."""
    multiply, args = direct(torch.ops.lowbit_cuda.mixed_gemm.default), (scheme.format, scheme.scale, scheme.group_size)

    def product(
        x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, outer: Tensor | None, bias: Tensor | None, scheme: Scheme
    ) -> Tensor:
        if x.shape[-1] % 8:  # TMA needs rows aligned to 16 bytes; columns beyond K are multiplied by zeros
            x = torch.nn.functional.pad(x, (0, -x.shape[-1] % 8))
        return multiply(x, packed, scale, zero, outer, bias, *args)

    return product


_CHUNK = 1 << 25  # bytes of a dequantized chunk, which stays in the L2 cache of large GPUs


def dequant_gemm(
    x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, outer: Tensor | None, bias: Tensor | None, scheme: Scheme
) -> Tensor:
    """``x @ W.T + bias`` for very many rows of ``x`` and a weight in mma_fragment: torch's GEMM, one dequantized chunk of rows at
    a time.
    """
    (n, k), args = (packed.shape[0], x.shape[-1]), (scheme.format, scheme.scale, scheme.group_size)
    max_rows = max(_CHUNK // (2 * max(k, 1)) // 128, 1) * 128
    dense = x.new_empty(min(n, max_rows), k)
    if n <= max_rows:
        torch.ops.lowbit_cuda.fragment_dequantize(dense, packed, scale, zero, outer, *args)
        return torch.nn.functional.linear(x, dense, bias)
    rows, y = x.reshape(-1, k), x.new_empty(*x.shape[:-1], n)
    columns = y.view(-1, n)
    for first in range(0, n, max_rows):
        part = dense[: n - first]
        torch.ops.lowbit_cuda.fragment_dequantize(part, packed, scale, zero, outer, *args, first)
        out = columns[:, first : first + max_rows]
        if bias is None:
            torch.mm(rows, part.t(), out=out)
        else:
            torch.addmm(bias[first : first + max_rows], rows, part.t(), out=out)
    return y


def _only_hopper(call: Call) -> str | None:
    return (
        None
        if call.arch == 90 and call.k > 0
        else f"takes K > 0 on a device of compute capability 9.0, got K={call.k} on {call.arch}"
    )


def _tile_groups(size: int) -> str | None:
    return None if size in (-1, 32, 64, 128) else "takes 32, 64, 128 and the row"


def _groups_of(only: int) -> Callable[[int], str | None]:
    return lambda size: None if size == only else f"takes {only}"


_INTEGERS = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in (2, 3, 4, 5, 6, 8))
_FP4 = frozenset({"fp4_e2m1"})
_E8M0, _E4M3 = frozenset({"e8m0"}), frozenset({"fp8_e4m3fn", "fp8_e4m3fn+outer"})
for _name, _formats, _scales, _groups, _most in (
    ("cuda_split_int8_gemv_int", _INTEGERS, ALL_PLAIN_SCALES, _tile_groups, 2),
    ("cuda_split_int8_gemv_mxint8", frozenset({"int8", "mxint8"}), _E8M0, _groups_of(32), 2),
    ("cuda_split_int8_gemv_fp4", _FP4, ALL_PLAIN_SCALES, _tile_groups, 1),
    ("cuda_split_int8_gemv_mxfp4", _FP4, _E8M0, _groups_of(32), 1),
    ("cuda_split_int8_gemv_nvfp4", _FP4, _E4M3, _groups_of(16), 1),
):
    register(
        Kernel(
            _name,
            "linear",
            split_int8_gemv,
            "split-int8 (3 limbs)",
            devices=frozenset({"cuda"}),
            layout="mma_fragment",
            formats=_formats,
            zero_points=frozenset({"none", "int"}),
            scales=_scales,
            groups=_groups,
            dtypes=frozenset({torch.float16, torch.bfloat16}),
            m=(1, _most),
            arch=80,
            available=available,
            tiles=((_most, 16, 256), (_most, 16, 512)),
        )
    )
_INTEGERS = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in range(2, 9))
_FLOATS = frozenset({"fp4_e2m1", "fp6_e2m3", "fp6_e3m2", "fp8_e4m3fn", "fp8_e5m2"})
# What skinny_gemm and mixed_gemm take: the end of a row's name, fields of the row, and whether scales are plain numbers.
FAMILIES: tuple[tuple[str, dict[str, Any], bool], ...] = tuple(
    (
        suffix,
        {
            "devices": frozenset({"cuda"}),
            "layout": "mma_fragment",
            "formats": formats,
            "zero_points": frozenset({"none", "int"}),
            "scales": scales,
            "groups": groups,
            "dtypes": frozenset({torch.float16, torch.bfloat16}),
            "available": available,
        },
        scales is ALL_PLAIN_SCALES,
    )
    for suffix, formats, scales, groups in (
        ("", _INTEGERS | _FLOATS | {"nf4"}, ALL_PLAIN_SCALES, _tile_groups),
        ("_mx", _FLOATS | {"int8", "mxint8"}, _E8M0, _groups_of(32)),
        ("_nvfp4", _FP4, _E4M3, _groups_of(16)),
    )
)


# Hopper's rows come first: they are faster from nine rows of x on.
for _suffix, _fields, _is_plain in FAMILIES:
    for _end, _contract, _rows in (
        (("", "exact", (9, 64)), ("_rounded", "weights rounded once", (65, None))) if _is_plain else (("", "exact", (9, None)),)
    ):
        register(
            Kernel(
                f"cuda_mixed_gemm{_suffix}{_end}",
                "linear",
                mixed_gemm,
                _contract,
                m=_rows,
                arch=90,
                predicate=_only_hopper,
                tiles=((16, 128, 512), (32, 128, 256), (64, 128, 256), (128, 128, 64), (256, 128, 512)),
                **_fields,
            )
        )
    register(
        Kernel(
            f"cuda_dequant_gemm{_suffix}",
            "linear",
            dequant_gemm,
            "weights rounded once",
            m=(65, None),
            arch=90,
            tiles=((128, 16, 512), (256, 16, 64)),
            **_fields | {"dtypes": frozenset({torch.bfloat16})},
        )
    )
    register(
        Kernel(
            f"cuda_skinny_gemm{_suffix}",
            "linear",
            skinny_gemm,
            "exact",
            m=(1, 16),
            arch=80,
            tiles=((2, 16, 256), (8, 16, 512), (16, 16, 512)),
            **_fields,
        )
    )
register(
    Kernel(
        "cuda_gemv",
        "linear",
        linear,
        "exact",
        devices=frozenset({"cuda"}),
        formats=frozenset({"int4", "uint4", "int8", "uint8"}),
        zero_points=frozenset({"none", "int"}),
        scales=ALL_PLAIN_SCALES,
        dtypes=frozenset({torch.float16, torch.bfloat16}),
        m=(1, 8),
        arch=80,
        available=available,
        tiles=((2, 4, 32), (4, 2, 1024)),
    )
)
