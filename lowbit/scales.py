"""Choosing scales and zero points, and rounding them to the format they are stored in."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .formats import format_named
from .grid import Scales, grouped, scale_values, to_codes, to_values
from .scheme import PLAIN_SCALES, Scheme

__all__ = ["choose", "round_scale"]

METHODS = ("range", "mse")


def choose(w: Tensor, scheme: Scheme, method: str = "range", outer: Tensor | None = None) -> Scales:
    """Scales for ``w`` [..., N, K] (float32 or float64, finite).

    ``method``: ``"range"`` covers the largest value of each group (absmax without a zero point, min-max with one,
    OCP's floor rule for e8m0 scales); ``"mse"`` tries smaller ranges and keeps the one with the least squared error.
    ``outer`` [...]: a tensor-wide scale that was chosen before (for rows that are quantized in chunks).
    Raises ``ValueError`` where a scale's own format cannot hold it.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    if scheme.outer and outer is None:
        outer = outer_scale(w.abs().flatten(-2).amax(-1) if w.numel() else w.new_zeros(w.shape[:-2]), scheme)
    x = grouped(w, scheme.group(w.shape[-1]))
    if method == "range":
        return _from_range(x, scheme, outer, 1.0)
    return _least_error(w, x, scheme, outer)


def outer_scale(absmax: Tensor, scheme: Scheme) -> Tensor:
    """The float32 scale above the groups of matrices with largest magnitudes ``absmax`` [...].

    It maps the largest group scale to the largest number of the scale's format (NVIDIA's two-level rule for NVFP4).
    With a zero point that is the scale of a group that reaches from -absmax to absmax.
    """
    largest = scheme.fmt.symmetric_max if scheme.zero_point == "none" else scheme.fmt.max / 2
    outer = _over(absmax, largest * format_named(scheme.scale).max).to(torch.float32)
    if absmax.dtype != torch.float32:
        _check_finite(outer, absmax, "fp32")
    return outer


def round_scale(value: Tensor, scheme: Scheme) -> Tensor:
    """Scales ``value`` (positive, any shape) rounded to nearest in the form they are stored in.

    Raises ``ValueError`` where bf16, fp16 or fp32 overflows, or fp16 would turn the scale of normal float32 weights to
    zero.
    """
    stored = _rounded(value, scheme)
    if scheme.scale in PLAIN_SCALES and not (stored.dtype == value.dtype == torch.float32):
        _check_finite(stored, value, scheme.scale)
    if stored.dtype == torch.float16:
        lost = (stored == 0) & (value * scheme.fmt.max >= torch.finfo(torch.float32).tiny)
        if bool(lost.any()):
            raise ValueError(f"scale {float(value[lost].min()):.3g} underflows in fp16: use scale='bf16' or 'fp32'")
    return stored


def _rounded(value: Tensor, scheme: Scheme) -> Tensor:
    if scheme.scale in PLAIN_SCALES:
        return value.to(scheme.scale_dtype)
    return format_named(scheme.scale).nearest(value)


def _check_finite(stored: Tensor, value: Tensor, where: str) -> None:
    if stored.numel() and not bool(torch.isfinite(stored.amax())):
        if not bool(torch.isfinite(value.amax())):
            raise ValueError("a weight that is quantized must be finite, and this one holds NaN or infinity: remove them first")
        remedy = "scale the weights down" if where == "fp32" else "use scale='fp32' (or 'bf16' for fp16)"
        raise ValueError(f"scale {float(value.max()):.3g} does not fit {where}: {remedy}")


def _over(x: Tensor, number: float) -> Tensor:
    """``x / number`` to the same bits on every device: CUDA multiplies by the reciprocal of a plain number instead."""
    return x / torch.full((), number, dtype=x.dtype, device=x.device)


def _power_of_two(absmax: Tensor, largest: float) -> Tensor:
    """Codes of 2^(floor(log2 absmax) - floor(log2 largest)) in the e8m0 format; the smallest for a group of zeros.

    OCP Microscaling v1.0, section 6.3: the largest power of two not above the largest magnitude, over the largest
    power of two of the element format. Numbers that end up above the format's largest saturate.
    """
    emax = math.frexp(largest)[1] - 1
    exponent = torch.frexp(absmax).exponent - 1 - emax
    return torch.where(absmax == 0, -127, exponent).clamp(-127, 127).add(127).to(torch.uint8)


def _from_range(x: Tensor, scheme: Scheme, outer: Tensor | None, shrink: float) -> Scales:
    """Scales from the extremes of grouped ``x`` [..., N, G, group], the range shrunk by a factor.

    Only the whole range is checked: a smaller one that underflows is a bad candidate and no error.
    """
    fmt, round_to = scheme.fmt, round_scale if shrink == 1 else _rounded
    low, high = torch.aminmax(x, dim=-1)
    low, high = low.clamp(max=0) * shrink, high.clamp(min=0) * shrink
    if scheme.zero_point == "none":
        absmax = torch.maximum(low.abs(), high.abs())  # abs: the scale of a group of zeros is 0 and not -0
        if scheme.scale == "e8m0":
            return Scales(_power_of_two(absmax, fmt.symmetric_max), None, outer)
        value = _over(absmax, fmt.symmetric_max)
    else:
        value = _over(high, fmt.max) - _over(low, fmt.max)  # the difference of the two could overflow
        if scheme.scale == "e8m0":
            return _with_zero_point(_power_of_two(high / 2 - low / 2, fmt.max / 2), low, scheme, outer)
    if outer is not None:
        above = outer[..., None, None].to(value.dtype)
        value = value / torch.where(above == 0, 1.0, above)
    stored = round_to(value, scheme)
    if scheme.zero_point == "none":
        return Scales(stored, None, outer)
    return _with_zero_point(stored, low, scheme, outer)


def _with_zero_point(stored: Tensor, low: Tensor, scheme: Scheme, outer: Tensor | None) -> Scales:
    scale = scale_values(scheme, Scales(stored, None, outer), low.dtype)
    zero = low.abs() / torch.where(scale == 0, torch.inf, scale)  # a group that underflowed is a group of zeros
    if scheme.zero_point == "int":
        zero = zero.round().clamp(0, scheme.fmt.max)
    assert scheme.zero_point_dtype is not None
    return Scales(stored, zero.to(scheme.zero_point_dtype), outer)


def _least_error(w: Tensor, x: Tensor, scheme: Scheme, outer: Tensor | None) -> Scales:
    best: Scales | None = None
    least: Tensor | None = None
    group = scheme.group(w.shape[-1])
    for shrink in torch.linspace(1.0, 0.4, 25).tolist():
        scales = _from_range(x, scheme, outer, shrink)
        error = grouped(to_values(to_codes(w, scheme, scales), scheme, scales, w.dtype) - w, group).square().sum(-1)
        if best is None or least is None:
            best, least = scales, error
            continue
        better = error < least
        zero = (
            None
            if scales.zero_point is None or best.zero_point is None
            else torch.where(better, scales.zero_point, best.zero_point)
        )
        best = Scales(torch.where(better, scales.scale, best.scale), zero, outer)
        least = torch.where(better, error, least)
    assert best is not None
    return best
