"""Rows for the CPU library of csrc: products for few rows of x, from the canonical packing.

The library is loaded when a call first asks for it. It receives formats and scale formats as tables of values, so it runs every
format, also those that are added at run time. With AVX2 or AVX-512, weights whose values are small integers times a power of two
run on split-int8 kernels.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from lowbit.decoding import INTEGERS
from lowbit.formats import FORMATS, Format, FormatSet
from lowbit.scheme import PLAIN_SCALES, Scheme

from .build import CPU
from .prepared_call import Product, SchemeBound, direct, prepared
from .registry import Call, Kernel, register

_ROWS = 64  # rows of x that a kernel takes in one call

__all__ = [
    "GEMV",
    "SPLIT_INT8",
    "SPLIT_INT8X2",
    "are_integers",
    "are_small_integers",
    "available",
    "split_int8",
    "int8_activations",
    "byte_table",
    "split_int8_gemv",
    "linear",
    "number_table",
    "refuse_activation",
    "quantized_linear",
    "operator_args",
    "split_int8x2_gemv",
]


def available() -> str | None:
    """Why the C++ library cannot run here, with the remedy; None if it can."""
    return CPU.missing()


_tables: dict[str, tuple[Format, Tensor]] = {}


def number_table(name: str) -> Tensor:
    """The values of a format, float32 [2**bits]. Cached by name, since hashing 256 values takes as long as a small layer; the
    cache is cleared where a name comes to mean another format.
    """
    known = _tables.get(name)
    if known is None or known[0] is not FORMATS[name]:
        with torch.inference_mode(False), torch.no_grad():
            known = _tables[name] = (FORMATS[name], torch.tensor(FORMATS[name].values, dtype=torch.float32))
    return known[1]


def byte_table(name: str) -> Tensor:
    """The values of a scale format by byte, float32 [256]; a scale takes a byte, however few bits its code has."""
    values = number_table(name)
    return torch.nn.functional.pad(values, (0, 256 - values.numel())) if values.numel() < 256 else values


@SchemeBound
def linear(scheme: Scheme) -> Product:
    """``x @ W.T + bias`` for few rows of ``x``: fp32 sums of the exact weights, rounded once."""
    multiply, args = direct(torch.ops.lowbit_cpu.linear.default), operator_args(scheme)

    def product(
        x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, outer: Tensor | None, bias: Tensor | None, scheme: Scheme
    ) -> Tensor:
        return multiply(x, packed, scale, zero, outer, bias, *args)

    return product


@SchemeBound
def split_int8_gemv(scheme: Scheme) -> Product:
    """``x @ W.T + bias`` for few rows of ``x`` by three int8 limbs of ``x``."""
    return split_int8(scheme, 3)


@SchemeBound
def split_int8x2_gemv(scheme: Scheme) -> Product:
    """``x @ W.T + bias`` for few rows of ``x`` by two int8 limbs of ``x``."""
    return split_int8(scheme, 2)


def operator_args(scheme: Scheme) -> tuple[Tensor, Tensor | None, int]:
    """Arguments of the operators that follow from a scheme: values of codes, values of coded scales or None, group size."""
    scales = None if scheme.scale in PLAIN_SCALES else byte_table(scheme.scale)
    return number_table(scheme.format), scales, scheme.group_size


def split_int8(scheme: Scheme, limbs: int, interleaved: bool = False) -> Product:
    """The product by ``limbs`` limbs of ``x``, of canonical or interleaved weights."""
    ops = torch.ops.lowbit_cpu
    linear, check, launch = ops.split_int8_gemv.default, ops.split_int8_gemv_prepare.default, ops.prepared_linear.default
    return prepared(linear, check, launch, *operator_args(scheme), limbs, interleaved=interleaved)


def _split_int8_available() -> str | None:
    """Why this processor has no split-int8 kernels, with the remedy; None if it has."""
    if (missing := CPU.missing()) is not None:
        return missing
    if torch.ops.lowbit_cpu.supports_split_int8(number_table("int8"), False):
        return None
    if (forced := os.environ.get("LOWBIT_CPU", "")) not in ("", "avx512", "avx2"):
        return f"LOWBIT_CPU={forced} leaves AVX2 out: cpu_gemv takes every instruction set"
    return "the processor has no AVX2: cpu_gemv takes every processor"


def _columns_per_lane(bits: int) -> int:
    """Columns that one int32 lane sums in a step: a step is as wide as four bytes of the widest plane for each lane."""
    return 4 * (8 >> (bits.bit_length() - 1))


def are_small_integers(fmt: Format) -> bool:
    """Whether values are integers of a byte times a power of two whose sums fit in int32: |code| summed over a lane is at most
    512, times 22 bits of x. Tables only up to six bits and 127.
    """
    values = tuple(map(float, fmt.values))
    if fmt.bits < 2 or not all(map(math.isfinite, values)):
        return False
    scaled = next(([v * 2**log for v in values] for log in range(9) if all((v * 2**log).is_integer() for v in values)), None)
    if scaled is None or max(map(abs, scaled)) * _columns_per_lane(fmt.bits) > 512:
        return False
    return (fmt.bits <= 6 and max(scaled) - min(scaled) <= 127) or are_integers(fmt)


def are_integers(fmt: Format) -> bool:
    """Whether values are those of two's complement or unsigned codes, times 1 to 2**-8."""
    return fmt.decoding.kind == INTEGERS and 2**-8 <= fmt.decoding.factor <= 1


def _defer_to(bf16_dot_from: Callable[[int], int], dequant_above: dict[str, int]) -> Callable[[Call], str | None]:
    """The ``defer_to`` of split-int8 rows: to dot products of bfloat16 from ``bf16_dot_from(bits)`` rows of x on, where the
    processor has them; to the dequantizing GEMM above ``dequant_above[instruction set]`` rows of float32.
    """

    def row(call: Call) -> str | None:
        instructions = torch.ops.lowbit_cpu.instructions()
        if call.dtype == torch.bfloat16 and torch.ops.lowbit_cpu.has_bf16_dot():
            return "cpu_bf16_dot_gemm" if call.m >= bf16_dot_from(call.scheme.bits) else None
        if call.m > (dequant_above[instructions] if call.dtype == torch.float32 or instructions == "portable" else _ROWS):
            return "cpu_dequant_gemm"
        return None

    return row


def _bf16_dot_crossover(bits: int) -> int:
    """Rows of bfloat16 x from which dot products of bfloat16 are faster than limbs, as measured."""
    return {8: 12, 4: 14, 3: 24, 2: 24}.get(bits, 15)


SPLIT_INT8 = Kernel(
    "cpu_split_int8x3_gemv",
    "linear",
    split_int8_gemv,
    "split-int8 (3 limbs)",
    devices=frozenset({"cpu"}),
    zero_points=frozenset({"none", "int"}),
    dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    m=(1, _ROWS),
    defer_to=_defer_to(_bf16_dot_crossover, {"avx512": 64, "avx2": 32}),
    formats=FormatSet(are_small_integers),
    groups=lambda size: None if size == -1 or size % 16 == 0 else "takes multiples of 16, or the whole row",
    tiles=((4, 4, 128), (2, 8, 256)),
    available=_split_int8_available,
)
SPLIT_INT8X2 = replace(
    SPLIT_INT8,
    name="cpu_split_int8x2_gemv",
    run=split_int8x2_gemv,
    contract="split-int8 (2 limbs)",
    dtypes=frozenset({torch.bfloat16, torch.float16}),
)
register(SPLIT_INT8X2)
register(SPLIT_INT8)


@SchemeBound
def quantized_linear(scheme: Scheme) -> Product:
    """``x @ W.T + bias`` with rows of ``x`` rounded to int8: exact integer sums, one limb."""
    return int8_activations(scheme)


def int8_activations(scheme: Scheme, interleaved: bool = False) -> Product:
    """The product of :func:`quantized_linear`, of canonical or interleaved weights."""
    multiply = split_int8(scheme, 1, interleaved)

    def product(
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
        given = None if input_scale is None else input_scale.float()
        return multiply(x, packed, scale, zero_point, outer, bias, scheme, given)

    return product


def refuse_activation(call: Call) -> str | None:
    return None if str(call.activation) == "int8:row:fp32" else f"activation: takes int8:row:fp32, got {call.activation}"


def _defer_panels(call: Call) -> str | None:
    """The row with dequantized or int8 panels, faster for more than 16 rows of x."""
    if call.m <= 16:
        return None
    return "cpu_w8a8_dot_gemm" if CPU.missing() is None and torch.ops.lowbit_cpu.has_int8_dot() else "cpu_w8a8_gemm"


register(
    replace(
        SPLIT_INT8,
        name="cpu_a8_gemv",
        op="quantized_linear",
        run=quantized_linear,
        contract="exact",
        m=(1, None),
        defer_to=_defer_panels,
        predicate=refuse_activation,
    )
)
GEMV = Kernel(
    "cpu_gemv",
    "linear",
    linear,
    "exact",
    devices=frozenset({"cpu"}),
    dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    m=(1, _ROWS),
    defer_to=_defer_to(lambda bits: 3, {"avx512": 32, "avx2": 24, "portable": 8}),
    tiles=((8, 8, 32),),
    available=available,
)
register(GEMV)
