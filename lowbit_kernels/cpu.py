"""Rows for what csrc compiles for the CPU: linear for up to eight rows of x, from the canonical packing.

The library is loaded when a call first asks for it. It takes a format and the format of the scales as tables of
numbers, so it runs every format, those that are added at run time too. Where the processor has integer dot products,
weights of other widths than four and eight bits whose numbers are small integers times a power of two are multiplied with
digits of x.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lowbit.formats import FORMATS, Format
from lowbit.scheme import PLAIN_SCALES, Scheme

from .bound import Bound, Product
from .build import CPU
from .registry import Kernel, register

__all__ = ["available", "digits_linear", "linear"]


def available() -> str | None:
    """Why the C++ library cannot run here, with the remedy; None if it can."""
    return CPU.missing()


_tables: dict[str, tuple[Format, Tensor]] = {}


def _values(name: str) -> Tensor:
    """The numbers of a format, float32 [2**bits]. Kept by name, because hashing 256 numbers takes as long as a small
    layer; a name that came to mean another format is looked up anew."""
    known = _tables.get(name)
    if known is None or known[0] is not FORMATS[name]:
        with torch.inference_mode(False), torch.no_grad():
            known = _tables[name] = (FORMATS[name], torch.tensor(FORMATS[name].values, dtype=torch.float32))
    return known[1]


@Bound
def linear(scheme: Scheme) -> Product:
    """``x @ W.T + bias`` for at most eight rows of ``x``: exact integers times x in float32, rounded once at the end."""
    return _product(torch.ops.lowbit_cpu.linear.default, scheme)


@Bound
def digits_linear(scheme: Scheme) -> Product:
    """``x @ W.T + bias`` for one or two rows of ``x``: exact integers times the digits of ``x``."""
    return _product(torch.ops.lowbit_cpu.digits_linear.default, scheme)


def _product(multiply: Callable[..., Tensor], scheme: Scheme) -> Product:
    scales = None if scheme.scale in PLAIN_SCALES else _of_a_byte(_values(scheme.scale))
    how = (_values(scheme.format), scales, scheme.group_size)

    def product(
        x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, outer: Tensor | None, bias: Tensor | None, scheme: Scheme
    ) -> Tensor:
        return multiply(x, packed, scale, zero, outer, bias, *how)

    return product


def _digits_available() -> str | None:
    """Why this processor cannot multiply digits, with the remedy; None if it can."""
    if (missing := CPU.missing()) is not None:
        return missing
    if torch.ops.lowbit_cpu.takes_digits(_values("int8")):
        return None
    return "the processor has no AVX-512 with VBMI and VNNI: cpu_gemv takes every processor"


def _are_of_a_byte(values: tuple[float, ...]) -> bool:
    """Whether numbers are integers times a power of two, the largest less than 256 above the least."""
    if not all(map(math.isfinite, values)):
        return False
    scaled = next(([v * 2**log for v in values] for log in range(9) if all((v * 2**log).is_integer() for v in values)), None)
    return scaled is not None and max(scaled) - min(scaled) <= 255


def _of_a_byte(values: Tensor) -> Tensor:
    """A number for each byte: scales take one each, however few bits their codes have."""
    return torch.nn.functional.pad(values, (0, 256 - values.numel())) if values.numel() < 256 else values


register(
    Kernel(
        "cpu_digits",
        "linear",
        digits_linear,
        "exact digits",
        devices=frozenset({"cpu"}),
        zero_points=frozenset({"none", "int"}),
        groups=lambda size: None if size in (-1, 16, 32) or size % 64 == 0 else "takes 16, 32, multiples of 64, or the whole row",
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        m=(1, 2),
        # Codes of four and eight bits become floats as quickly.
        formats=frozenset(
            name for name, fmt in FORMATS.items() if fmt.bits not in (4, 8) and _are_of_a_byte(tuple(map(float, fmt.values)))
        ),
        tiles=((2, 4, 64),),
        available=_digits_available,
    )
)
register(
    Kernel(
        "cpu_gemv",
        "linear",
        linear,
        "exact",
        devices=frozenset({"cpu"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        m=(1, 8),
        tiles=((8, 8, 32),),
        available=available,
    )
)
