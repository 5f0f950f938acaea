"""Every scheme a second time, in numpy: what lowbit is compared with. It imports neither lowbit nor torch.

Numbers are rounded by their exponent (a multiple of the quantum of their binade) instead of by a table, bytes are
assembled from sign, exponent and significand, and scales are rounded by ml_dtypes' casts. Everything is computed in the
dtype of the weight: float32 to be compared bit for bit, float64 to be compared as arithmetic.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import ml_dtypes
import numpy as np
from scipy.stats import norm

SCALES = {
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "fp32": np.float32,
    "fp8_e4m3fn": ml_dtypes.float8_e4m3fn,
}


class FloatSpec(NamedTuple):
    """Sign, exponent and mantissa bits; the largest finite number as its standard prints it."""

    exponent: int
    mantissa: int
    bias: int
    largest: float


# The bias and the largest number of each: OCP MX v1.0 tables 2 to 5 and OCP OFP8 v1.0 table 2.
FLOATS = {
    "fp4_e2m1": FloatSpec(2, 1, 1, 6.0),
    "fp5_e2m2": FloatSpec(2, 2, 1, 7.0),
    "fp6_e2m3": FloatSpec(2, 3, 1, 7.5),
    "fp6_e3m2": FloatSpec(3, 2, 3, 28.0),
    "fp8_e4m3fn": FloatSpec(4, 3, 7, 448.0),
    "fp8_e5m2": FloatSpec(5, 2, 15, 57344.0),
}


def float_spec(name: str) -> FloatSpec:
    """What the name of a float says: ``fp7_e3m3`` has no infinity and no NaN, as OCP's of 4 and 6 bits; with 8 bits the top
    exponent means them, and behind ``fn`` the code of all ones is the only NaN."""
    found = re.fullmatch(r"fp(\d)_e(\d)m(\d)(fn)?", name)
    if found is None:
        raise _unknown(name)
    bits, exponent, mantissa = (int(part) for part in found.groups()[:3])
    bias, whole = 2 ** (exponent - 1) - 1, 2 ** (mantissa + 1)
    top, largest = 2**exponent - 1, whole - 1
    if found[4]:
        largest = whole - 2
    elif bits == 8:
        top -= 1
    return FloatSpec(exponent, mantissa, bias, float(np.ldexp(largest, top - bias - mantissa)))


def nf4_levels() -> np.ndarray:
    """QLoRA, appendix E: 8 quantiles of the normal distribution above zero, 7 below, zero, over the largest."""
    offset = (1 - 1 / 32 + 1 - 1 / 30) / 2
    above, below = norm.ppf(np.linspace(offset, 0.5, 9)[:-1]), -norm.ppf(np.linspace(offset, 0.5, 8)[:-1])
    levels = np.sort(np.concatenate((above, below, [0.0])))
    return levels / levels.max()


# ---- elements: (numbers, codes) nearest to x -----------------------------------------------------------------------


def round_float(x: np.ndarray, spec: FloatSpec) -> tuple[np.ndarray, np.ndarray]:
    """Numbers and codes of the float nearest to ``x``, ties to the even significand, saturating, -0 kept."""
    lowest = 1 - spec.bias
    exponent = np.maximum(np.frexp(x)[1] - 1, lowest)
    quantum = np.ldexp(np.ones_like(x), exponent - spec.mantissa)
    size = np.minimum(np.rint(np.abs(x) / quantum) * quantum, spec.largest).astype(x.dtype)
    exponent = np.where(size == 0, lowest, np.maximum(np.frexp(size)[1] - 1, lowest))
    significand = np.ldexp(size, spec.mantissa - exponent).astype(np.int64)
    code = significand + ((exponent - lowest).astype(np.int64) << spec.mantissa)  # the hidden bit adds one to the exponent
    return np.copysign(size, x), code | (np.signbit(x).astype(np.int64) << (spec.exponent + spec.mantissa))


def round_integer(x: np.ndarray, low: int, high: int, bits: int, unit: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Multiples of ``unit`` nearest to ``x``, two's complement codes."""
    whole = np.clip(np.rint(x / unit), low, high)
    return (whole * unit).astype(x.dtype), whole.astype(np.int64) & ((1 << bits) - 1)


def round_levels(x: np.ndarray, levels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The nearest of ``levels``, coded by their order."""
    code = np.abs(x[..., None] - levels).argmin(-1)
    return levels[code].astype(x.dtype), code


def element(name: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers and codes of format ``name`` nearest to ``x``."""
    if name.startswith("fp"):
        return round_float(x, FLOATS.get(name) or float_spec(name))
    if name == "mxint8":
        return round_integer(x, -127, 127, 8, 1 / 64)
    if name == "ternary":
        value, _ = round_integer(x, -1, 1, 2)
        return value, np.where(value == 0, 0, np.where(value > 0, 1, 3))
    if name == "nf4":
        return round_levels(x, nf4_levels())
    if name == "int1":  # by its sign: distances to -1 and 1 would round to a tie near zero
        return np.where(x > 0, 1, -1).astype(x.dtype), (x > 0).astype(np.int64)
    signed, bits = name.startswith("int"), integer_bits(name)
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    return round_integer(x, low, high, bits)


def largest(name: str) -> float:
    """The largest m such that -m and m are both numbers of the format; of an unsigned one its largest."""
    if name.startswith("fp"):
        return (FLOATS.get(name) or float_spec(name)).largest
    special = {"mxint8": 127 / 64, "ternary": 1.0, "nf4": 1.0, "int1": 1.0}
    if name in special:
        return special[name]
    bits = integer_bits(name)
    return float((1 << bits) - 1 if name.startswith("u") else (1 << (bits - 1)) - 1)


def integer_bits(name: str) -> int:
    """The bits of ``int4`` and ``uint4``."""
    found = re.fullmatch(r"u?int([1-8])", name)
    if found is None:
        raise _unknown(name)
    return int(found[1])


def _unknown(name: str) -> ValueError:
    return ValueError(
        f"the name {name!r} says nothing of its numbers: `element` and `largest` of tests/support/oracle.py have to"
    )


# ---- schemes -------------------------------------------------------------------------------------------------------


class Quantized(NamedTuple):
    """``codes`` and ``values`` [N, K]; ``scale`` [N, G] as stored (uint8 for 8-bit scales); the rest or None."""

    codes: np.ndarray
    scale: np.ndarray
    zero_point: np.ndarray | None
    outer: np.ndarray | None
    values: np.ndarray


def groups_of(w: np.ndarray, group: int) -> np.ndarray:
    n, k = w.shape
    padded = np.zeros((n, -(-k // group) * group), w.dtype)
    padded[:, :k] = w
    return padded.reshape(n, -1, group)


def quantize(w: np.ndarray, name: str, group_size: int, zero_point: str, scale: str, outer: bool) -> Quantized:
    """``w`` [N, K] by the rules that lowbit/scales.py documents."""
    n, k = w.shape
    x = groups_of(w, k if group_size == -1 else group_size)
    dtype, top, above, zero = w.dtype.type, dtype_of(w, largest(name)), None, None
    if zero_point == "none":
        extent = np.abs(x).max(-1)
        low = np.zeros_like(extent)
    else:
        low, high = np.minimum(x.min(-1), 0), np.maximum(x.max(-1), 0)
    if scale == "e8m0":  # OCP MX v1.0, 6.3: the power of two of the largest number over that of the format
        power = np.frexp(extent)[1] - 1 - int(np.floor(np.log2(float(top))))
        power = np.where(extent == 0, -127, np.clip(power, -127, 127))
        stored, value = (power + 127).astype(np.uint8), np.ldexp(np.ones_like(extent), power)
    else:
        wanted = signed_scale(x, extent, name, top) if zero_point == "none" else high / top - low / top
        if outer:  # NVIDIA's rule: the largest group scale becomes the largest number of e4m3
            above = np.float32(np.abs(w).max() / dtype_of(w, float(top) * 448.0))
            wanted = wanted / (dtype(above) if above else dtype(1))
        stored = wanted.astype(SCALES[scale])
        value = stored.astype(np.float32)
        value = (value * above if outer else value).astype(dtype)
        stored = stored.view(np.uint8) if stored.itemsize == 1 else stored
    t = x / np.where(value == 0, dtype(np.inf), value)[..., None]
    if zero_point == "int":
        zero = np.clip(np.rint(-low / np.where(value == 0, dtype(np.inf), value)), 0, top)
        t = t + zero[..., None]
    numbers, codes = element(name, t)
    if zero is not None:
        numbers = numbers - zero[..., None]
    values = numbers * value[..., None]
    return Quantized(codes.reshape(n, -1)[:, :k].astype(np.uint8), stored, zero, above, values.reshape(n, -1)[:, :k])


def signed_scale(x: np.ndarray, extent: np.ndarray, name: str, top: np.floating) -> np.ndarray:
    """What the value of largest magnitude of each group [N, G] of ``x`` is over the lowest integer; the largest magnitude over
    ``top`` where the group reaches as far the other way, and in formats that are symmetric."""
    if not name.startswith("int") or name == "int1":
        return extent / top
    first = np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)[..., 0]
    both_ways = x.max(-1) == -x.min(-1)
    return np.where(both_ways, extent / top, first / dtype_of(x, -float(top) - 1))


def dtype_of(w: np.ndarray, number: float) -> np.floating:
    return w.dtype.type(number)


def sqnr(w: np.ndarray, values: np.ndarray) -> float:
    """Signal to quantization noise in decibels."""
    w, values = w.astype(np.float64), values.astype(np.float64)
    return float(10 * np.log10(np.square(w).sum() / np.square(w - values).sum()))
