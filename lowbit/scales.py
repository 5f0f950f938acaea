"""Choosing scales and zero points, and rounding them to the format they are stored in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from .formats import constant, get_format
from .grid import Scales, divisor, grouped, rounded, scale_values, to_codes, to_values
from .scheme import PLAIN_SCALES, Scheme

__all__ = [
    "choose",
    "least_cost",
    "nearest_scale",
    "outer_of",
    "round_scale",
    "rounding_error",
    "rounded_tokens",
    "squared",
    "token_scales",
]

METHODS = ("range", "absmax", "mse")
_SHRINKS = torch.linspace(1.0, 0.4, 25, dtype=torch.float32, device="cpu").tolist()
_POWERS = (1.0, 2.0, 0.5)  # of the range, for scales that are powers of two: the floor rule's, and the ones beside it
_ENDS = torch.linspace(1.0, 0.4, 8, dtype=torch.float32, device="cpu").tolist()
_TURNED = torch.linspace(0.95, 0.55, 9, dtype=torch.float32, device="cpu").tolist()  # scales of the other sign

_AT_ONCE = {"cpu": 1 << 18}  # numbers that several ranges are tried on in one operation: what a core's cache holds
_MANY = 1 << 25  # on any other device, where each operation has a price of its own


class _Candidate(NamedTuple):
    """A range to try: what its ends are multiplied by. Without a zero point, whether the largest magnitude becomes that of the
    largest number that has an opposite (``is_even``), and whether the value that has it becomes negative (``sign`` 1), positive
    (-1), or stays what it is, under a positive scale (0)."""

    low: float | Tensor = 1.0
    high: float | Tensor = 1.0
    is_even: bool = False
    sign: int = 1


_WHOLE, _POSITIVE = _Candidate(), _Candidate(is_even=True, sign=0)


def choose(w: Tensor, scheme: Scheme, method: str = "range", outer: Tensor | None = None) -> Scales:
    """Scales for ``w`` [..., N, K] (float32 or float64, finite).

    ``method``:

    * ``"range"``: the largest value of each group sets its scale. With a zero point the range is that from the least to the
      largest value. Without one the value of largest magnitude becomes the lowest integer (:attr:`Scheme.reach`), which makes
      the scale negative where that value is positive: all codes are used, and of the values at the other end those within an
      integer of the largest are rounded down to the last one there is. In a group that reaches equally far both ways (as of
      -a, 0 and a), and in formats that have an opposite for every number, as ``"absmax"``. OCP's floor rule for e8m0 scales.
    * ``"absmax"``: without a zero point the largest magnitude becomes the largest number that has an opposite, and scales are
      positive; what activations are rounded with.
    * ``"mse"``: ``"range"``, or the one among other ranges, and signs of the scale, that has the least squared error.

    ``outer`` [...]: a tensor-wide scale that was chosen before (for rows that are quantized in chunks).
    Raises ``ValueError`` where a scale's own format cannot hold it.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    if method == "mse":
        return least_cost(w, scheme, squared, outer)
    outer = outer_of(w, scheme) if outer is None else outer
    extremes = torch.aminmax(grouped(w, scheme.group(w.shape[-1])), dim=-1)
    return _from_range(extremes, scheme, outer, _POSITIVE if method == "absmax" else _WHOLE, True)


def squared(error: Tensor) -> Tensor:
    """The squared error of each group, ``error`` [..., group]."""
    return error.square().sum(-1)


def least_cost(
    w: Tensor, scheme: Scheme, cost: Callable[[Tensor], Tensor], outer: Tensor | None = None, ends: bool = False
) -> Scales:
    """Scales for ``w`` [..., N, K] under which rounding to nearest costs least, among ranges of other widths.

    ``cost`` takes the errors of rounding within several ranges, grouped [C, ..., N, G, group] (zeros where the last group is
    short), which it may write to, and gives [C, ..., N, G]. The whole range comes first, and wins where nothing is cheaper.
    ``ends``: with a zero point, the two ends of the range move apart from each other. ``outer`` and errors as for
    :func:`choose`.
    """
    outer = outer_of(w, scheme) if outer is None else outer
    k = w.shape[-1]
    x = grouped(w, scheme.group(k))
    extremes = torch.aminmax(x, dim=-1)
    best = _from_range(extremes, scheme, outer, _WHOLE, True)  # which alone may raise
    least: Tensor | None = None
    for candidates in _batches(_candidates(scheme, ends), x):
        scales = _from_range(extremes, scheme, outer, candidates, False)
        found = cost(rounding_error(x, k, scheme, scales))
        found, place = torch.where(found == found, found, torch.inf).min(0, keepdim=True)  # of several the first
        zero = None if scales.zero_point is None else scales.zero_point.gather(0, place)[0]
        cheapest = Scales(scales.scale.gather(0, place)[0], zero, outer)
        if least is not None:
            better = found[0] < least
            cheapest, found = cheapest.where(better, best), torch.where(better, found, least)
        best, least = cheapest, found[0]
    return best


def rounding_error(x: Tensor, k: int, scheme: Scheme, scales: Scales) -> Tensor:
    """What rounding ``x`` [..., G, group], :func:`grouped` from ``k`` columns, to nearest adds to it; 0 behind the last."""
    scale = scale_values(scheme, scales, x.dtype)[..., None]
    zero = None if scales.zero_point is None else scales.zero_point[..., None].to(x.dtype)
    error = rounded(x, scheme.fmt, scale, divisor(scale), zero).sub_(x)
    if k % x.shape[-1]:
        error[..., -1, k % x.shape[-1] :] = 0.0
    return error


def _batches(candidates: list[_Candidate], x: Tensor) -> Iterator[_Candidate]:
    """``candidates`` in their order, several of a kind as one whose ends are tensors, [C, 1, ...] above the groups of ``x``."""
    count = max(1, _AT_ONCE.get(x.device.type, _MANY) // max(x.numel(), 1))
    shape = (-1, *(1,) * (x.dim() - 1))
    for (is_even, sign), run in groupby(candidates, lambda candidate: candidate[2:]):
        ends = [candidate[:2] for candidate in run]
        for some in (ends[i : i + count] for i in range(0, len(ends), count)):
            low, high = (constant(end, x.dtype, x.device).view(shape) for end in zip(*some, strict=True))
            yield _Candidate(low, high, is_even, sign)


def _candidates(scheme: Scheme, ends: bool) -> list[_Candidate]:
    """The whole range first; the other sign, which is seldom better, in fewer steps."""
    if scheme.scale == "e8m0":
        return [_Candidate(power, power) for power in _POWERS]
    if ends and scheme.zero_point != "none":
        return [_Candidate(low, high) for low in _ENDS for high in _ENDS]
    found = [_Candidate(shrink, shrink) for shrink in _SHRINKS]
    if scheme.reach < 0:
        found += [_Candidate(is_even=True), *(_Candidate(shrink, shrink, sign=-1) for shrink in _TURNED)]
    return found


def outer_of(w: Tensor, scheme: Scheme) -> Tensor | None:
    """The tensor-wide scale [...] of ``w`` [..., N, K]; None where the scheme has none."""
    if not scheme.outer:
        return None
    return outer_scale(w.abs().flatten(-2).amax(-1) if w.numel() else w.new_zeros(w.shape[:-2]), scheme)


def outer_scale(absmax: Tensor, scheme: Scheme) -> Tensor:
    """The float32 scale above the groups of matrices with largest magnitudes ``absmax`` [...].

    It maps the largest group scale that ``"absmax"`` gives to the largest number of the scale's format (NVIDIA's two-level rule
    for NVFP4).
    With a zero point that is the scale of a group that reaches from -absmax to absmax. Raises ``ValueError`` where it is not
    finite.
    """
    largest = scheme.fmt.symmetric_max if scheme.zero_point == "none" else scheme.fmt.max / 2
    outer = _over(absmax, largest * get_format(scheme.scale).max).to(torch.float32)
    _check_finite(outer, absmax, "fp32")
    return outer


def round_scale(value: Tensor, scheme: Scheme) -> Tensor:
    """Scales ``value`` (any shape) rounded to nearest in the form they are stored in.

    Raises ``ValueError`` where bf16, fp16 or fp32 overflows, or fp16 would turn the scale of normal float32 weights to
    zero.
    """
    stored = nearest_scale(value, scheme)
    if scheme.scale in PLAIN_SCALES and not (stored.dtype == value.dtype == torch.float32):
        _check_finite(stored, value, scheme.scale)
    if stored.dtype == torch.float16:
        size = value.abs()
        lost = (stored == 0) & (size * scheme.fmt.max >= torch.finfo(torch.float32).tiny)
        if bool(lost.any()):
            raise ValueError(f"scale {float(size[lost].min()):.3g} underflows in fp16: use scale='bf16' or 'fp32'")
    return stored


def nearest_scale(value: Tensor, scheme: Scheme) -> Tensor:
    """:func:`round_scale` without its checks: a scale may become infinite or 0."""
    if scheme.scale in PLAIN_SCALES:
        return value.to(scheme.scale_dtype)
    return get_format(scheme.scale).nearest(value)


def _check_finite(stored: Tensor, value: Tensor, where: str) -> None:
    if stored.numel() and not bool(torch.isfinite(stored.abs().amax())):
        value = value.abs()
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


def _from_range(
    extremes: tuple[Tensor, Tensor], scheme: Scheme, outer: Tensor | None, candidate: _Candidate, checked: bool
) -> Scales:
    """Scales from the least and the largest values of groups, each [..., N, G], as ``candidate`` says.

    ``checked``: they are what was asked for; another range that underflows is a bad candidate and no error.
    """
    fmt, round_to = scheme.fmt, round_scale if checked else nearest_scale
    low, high = extremes
    low, high = low.clamp(max=0) * candidate.low, high.clamp(min=0) * candidate.high
    if scheme.zero_point == "none":
        if scheme.scale == "e8m0":
            return Scales(_power_of_two(torch.maximum(low.abs(), high.abs()), fmt.symmetric_max), None, outer)
        value = _without_zero_point(low, high, scheme, candidate)
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


def _without_zero_point(low: Tensor, high: Tensor, scheme: Scheme, candidate: _Candidate) -> Tensor:
    """The scale that maps whichever of ``low`` and ``high`` is further from 0 to :attr:`Scheme.reach`; where neither is, the
    positive one that maps them to the ends of what has an opposite."""
    largest = torch.maximum(low.abs(), high.abs())  # abs: the scale of a group of zeros is 0 and not -0
    even = _over(largest, scheme.fmt.symmetric_max)
    if not candidate.sign or scheme.reach >= 0:
        return even
    further = _over(torch.where(high > -low, high, low), scheme.reach)
    value = torch.where(high == -low, even, torch.copysign(even, further) if candidate.is_even else further)
    return value if candidate.sign > 0 else -value


def _with_zero_point(stored: Tensor, low: Tensor, scheme: Scheme, outer: Tensor | None) -> Scales:
    scale = scale_values(scheme, Scales(stored, None, outer), low.dtype)
    zero = low.abs() / torch.where(scale == 0, torch.inf, scale)  # a group that underflowed is a group of zeros
    if scheme.zero_point == "int":
        zero = zero.round().clamp(0, scheme.fmt.max)
    assert scheme.zero_point_dtype is not None
    return Scales(stored, zero.to(scheme.zero_point_dtype), outer)


# ---- tokens --------------------------------------------------------------------------------------------------------


def token_scales(x: Tensor, scheme: Scheme) -> Scales:
    """Scales for tokens ``x`` [..., 1, K] (float32 or float64), each a matrix of one row: what stands in others counts for none.

    They cover the largest value of each group, as the method ``"absmax"`` of :func:`choose` does. One that its format cannot
    hold is held at the largest number that it can: values beyond saturate, as under a fixed scale. A group with NaN or
    infinity has the scale NaN, where the format has one.
    """
    low, high = torch.aminmax(grouped(x, scheme.group(x.shape[-1])), dim=-1)
    finite = torch.isfinite(low) & torch.isfinite(high)
    low, high = torch.where(finite, low.clamp(max=0), 0.0), torch.where(finite, high.clamp(min=0), 0.0)
    fmt, symmetric, outer = scheme.fmt, scheme.zero_point == "none", None
    absmax = torch.maximum(low.abs(), high)
    if scheme.outer:
        matrix_absmax = absmax.flatten(-2).amax(-1) if absmax.numel() else absmax.new_zeros(absmax.shape[:-2])
        outer = outer_scale(matrix_absmax.clamp(max=torch.finfo(torch.float32).max), scheme)
    if scheme.scale == "e8m0":
        reach = (absmax, fmt.symmetric_max) if symmetric else (high / 2 - low / 2, fmt.max / 2)
        stored = _power_of_two(*reach)
    else:
        value = _over(absmax, fmt.symmetric_max) if symmetric else _over(high, fmt.max) - _over(low, fmt.max)
        if outer is not None:
            above = outer[..., None, None].to(value.dtype)
            value = value / torch.where(above == 0, 1.0, above)
        stored = nearest_scale(value, scheme)
    nan: float | None = math.nan
    if scheme.scale in PLAIN_SCALES:
        stored = stored.clamp(max=torch.finfo(stored.dtype).max)
    else:
        nan = get_format(scheme.scale).nan
    found = Scales(stored, None, outer) if symmetric else _with_zero_point(stored, low, scheme, outer)
    return found if nan is None else found._replace(scale=torch.where(finite, stored, nan).to(stored.dtype))


def rounded_tokens(x: Tensor, scheme: Scheme, fixed: Tensor | None = None) -> Tensor:
    """The numbers that tokens ``x`` [..., K] (float32 or float64) are rounded to before a product, in the dtype of ``x``.

    Each token has its own :func:`token_scales`, or all have the one number ``fixed``. NaN and infinity are NaN, since no code
    means either: so is a product with them.
    """
    finite, k = torch.isfinite(x), x.shape[-1]
    tokens = torch.where(finite, x, 0.0)[..., None, :]
    if fixed is None:
        scales = token_scales(tokens, scheme)
    else:
        one = fixed.to(scheme.scale_dtype).reshape((1,) * tokens.dim())
        scales = Scales(one.expand(*tokens.shape[:-1], scheme.groups(k)))
    rounded = to_values(to_codes(tokens, scheme, scales), scheme, scales, x.dtype)[..., 0, :]
    return torch.where(finite, rounded, math.nan)
