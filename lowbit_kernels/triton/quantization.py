"""Rows that round to nearest: quantization of weights, and of activations with a scale a token."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from lowbit.catalog import cached
from lowbit.decoding import FLOATS
from lowbit.formats import FORMATS, FormatSet, get_format
from lowbit.packing import packed_size
from lowbit.scales import outer_scale
from lowbit.scheme import PLAIN_SCALES, Scheme

from .. import reference
from ..registry import Call, Kernel, register
from .encodings import Encoding, encoding, steps_of
from .linear import ON_A_CPU, compiles
from .operands import on_device

__all__ = ["quantize", "round_rows"]

_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})
_WORDS = 2048  # words of eight values in a block at most
_MAX_COLUMNS = 1 << 18  # columns of a group at most: its blocks are unrolled in the kernel
_MAX_GROUPS = 65535  # groups of a row at most: the second axis of a grid
_ELEMENTS = 4096  # elements of a block where rows are short


def quantize(w: Tensor, scheme: Scheme, method: str) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Packed codes, scales, zero points and outer scale of ``w`` [..., N, K], the same bytes as the reference's.

    Raises ``ValueError``, as the reference does, for weights that are not finite and for scales that their format cannot hold.
    """
    *lead, n, k = w.shape
    rows, outer = w.reshape(-1, k), None
    if scheme.outer:
        low, high = torch.aminmax(w.reshape(math.prod(lead), n * k), dim=1)
        outer = outer_scale(torch.maximum(-low, high).abs().float(), scheme)
    packed, scale, zero, refused = _quantized(rows, scheme, method, None, outer, n)
    # With fp32 scales the reference does not check them either, and waiting for the device would break a CUDA graph.
    if scheme.scale != "fp32" and bool(refused):
        found = reference.quantize(w, scheme, method)  # raises what is wrong
        if bool(torch.isfinite(w).all()):  # nothing wrong: a scale of subnormal values became 0
            return found
        raise ValueError("a weight that is quantized must be finite, and this one holds NaN or infinity: remove them first")
    shape = (*lead, n, scale.shape[-1])
    return (
        packed.view(*lead, n, -1), scale.view(shape), None if zero is None else zero.view(shape),
        None if outer is None else outer.reshape(lead),
    )  # fmt: skip


def round_rows(x: Tensor, activation: Scheme, fixed: Tensor | None) -> tuple[Tensor, Tensor]:
    """8-bit codes [M, K] of ``x`` [M, K] and their scales [M], float32, NaN for a row that is not finite; ``fixed``: a static
    scale.
    """
    given = None if fixed is None else fixed.reshape(1).to(torch.float32)
    codes, scale, _, _ = _quantized(x, activation, "absmax", given, None, 1)
    return codes, scale.view(-1)


def _quantized(
    x: Tensor, scheme: Scheme, method: str, fixed: Tensor | None, outer: Tensor | None, n: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Codes, scales and zero points of ``x`` [R, K], and a flag [1] where the reference might refuse it; ``n`` rows share a
    tensor scale.
    """
    from .quantize import quantize as kernel

    x = x if x.stride(1) == 1 else x.contiguous()
    (r, k), device, groups = x.shape, x.device, scheme.groups(x.shape[1])
    packed = torch.empty(r, packed_size(scheme.bits, k), dtype=torch.uint8, device=device)
    scale = torch.empty(r, groups, dtype=scheme.scale_dtype, device=device)
    zero = None if scheme.zero_point_dtype is None else torch.empty_like(scale, dtype=scheme.zero_point_dtype)
    # The flag is cleared only where it is read: clearing is a launch of its own.
    refused = (torch.empty if scheme.scale == "fp32" else torch.zeros)(1, dtype=torch.int32, device=device)
    config = quantize_config(r, k, scheme.group(k) if groups > 1 else 0)
    with on_device(device):
        kernel[-(-r // config["ROWS"]), groups](
            x, scale if fixed is None else fixed, refused if outer is None else outer, *steps_of(scheme.format, device),
            packed, _as_bits(scale), _as_bits(scale if zero is None else zero), refused,
            r, n, k, x.stride(0), packed.stride(0), groups,
            **constants(scheme, method), GROUP=scheme.group_size if groups > 1 else 0, IS_FIXED=fixed is not None,
            ALIGNED=k % 8 == 0 and packed.stride(0) % 4 == 0, enable_fp_fusion=False, **config,
        )  # fmt: skip
    return packed, scale, zero, refused


def _as_bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def quantize_config(r: int, k: int, group: int) -> dict[str, int]:
    """Rows, words and warps of a block; ``group``: 0, the whole row."""
    limit = _power_above(-(-(group or k) // 8))
    words = min(limit, _WORDS)
    rows = max(1, min(_ELEMENTS // (8 * words), _power_above(r)))
    return {"ROWS": rows, "WORDS": words, "STEPS": limit // words, "num_warps": max(1, min(16, rows * words // 128))}


def _power_above(size: int) -> int:
    return 1 << (size - 1).bit_length()


@cached(maxsize=256)
def constants(scheme: Scheme, method: str = "range") -> dict[str, Any]:
    """The compile-time constants that the kernel takes from the scheme and from how scales are chosen."""
    dec, fmt = encoding(scheme.format), scheme.fmt
    assert dec is not None, "the row refuses such a format"
    scale, as_number = Encoding(FLOATS), None
    if scheme.scale not in (*PLAIN_SCALES, "e8m0"):
        found, as_number = encoding(scheme.scale), get_format(scheme.scale).decoding
        assert found is not None
        scale = found
    symmetric = scheme.zero_point == "none"
    even = fmt.symmetric_max if symmetric else fmt.max
    reach = scheme.reach if symmetric and method == "range" else even
    power_of = fmt.symmetric_max if symmetric else fmt.max / 2
    return {
        "BITS": scheme.bits, **dec.constants,
        "SCALE": scheme.scale if scheme.scale in (*PLAIN_SCALES, "e8m0") else "codes",
        "SCALE_MANTISSA": scale.mantissa, "SCALE_FIRST": scale.first, "SCALE_HIGH": scale.high,
        "SCALE_SPECIAL": 0 if as_number is None else as_number.special,
        "SCALE_FACTOR": 1.0 if as_number is None else as_number.factor,
        "EMAX": math.frexp(power_of)[1] - 1, "EVEN": even, "REACH": reach,
        "ZERO": {"none": 0, "int": 1, "float": 2}[scheme.zero_point], "HAS_OUTER": scheme.outer,
    }  # fmt: skip


# ---- rows --------------------------------------------------------------------------------------------------------


def _groups(size: int) -> str | None:
    fits = size == -1 or (size % 8 == 0 and size <= 8 * _WORDS)
    return None if fits else f"takes -1 (the whole row) and multiples of 8 up to {8 * _WORDS}"


def _refusal(call: Call) -> str | None:
    """Methods, formats and scales that plug-ins may have added, and rows that are too long."""
    if call.method not in (None, "range", "absmax"):
        return f"method: takes range and absmax, got {call.method}"
    if call.scheme.groups(call.k) > _MAX_GROUPS or call.scheme.group(call.k) > _MAX_COLUMNS:
        return f"K: takes {_MAX_GROUPS} groups, and {_MAX_COLUMNS} columns in one, got {call.k}"
    if encoding(call.scheme.format) is None:
        return f"format: takes integers, floats and short tables, got {call.scheme.format}"
    if (name := call.scheme.scale) in (*PLAIN_SCALES, "e8m0"):
        return None
    dec = encoding(name)
    fits = dec is not None and dec.kind == FLOATS and FORMATS[name].bits == 8
    return None if fits else f"scale: takes plain ones, e8m0 and floats of eight bits, got {name}"


_QUANTIZE = Kernel(
    "triton_quantize",
    "quantize",
    quantize,
    "round to nearest",
    devices=frozenset({"cuda", "xpu"}),
    formats=FormatSet(lambda fmt: encoding(fmt.name) is not None),
    groups=_groups,
    dtypes=_DTYPES,
    available=compiles,
    predicate=_refusal,
)


def _interpreted(w: Tensor, scheme: Scheme, method: str) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """:func:`quantize` in the interpreter: 16-bit values are widened first, which is exact."""
    return quantize(w.float(), scheme, method)


register(_QUANTIZE)
register(dataclasses.replace(_QUANTIZE, name="triton_quantize_interpreted", run=_interpreted, **ON_A_CPU))
