"""The one formula: ``w ~ (decode(codes) - zero_point) * scale * outer``, in both directions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .formats import Format, get_format
from .scheme import PLAIN_SCALES, Scheme

__all__ = ["Scales", "decode", "divisor", "encode", "grouped", "rounded", "scale_values", "to_codes", "to_values"]


class Scales(NamedTuple):
    """What stands beside the codes of a weight [..., N, K], as it is stored.

    ``scale`` [..., N, G]: bf16, fp16 or fp32, or uint8 codes of the scale's format. ``zero_point`` [..., N, G]: uint8
    or the dtype of the scale, or None. ``outer`` [...]: float32, one for each matrix, or None.
    """

    scale: Tensor
    zero_point: Tensor | None = None
    outer: Tensor | None = None

    def where(self, chosen: Tensor, other: Scales) -> Scales:
        """These where ``chosen`` [..., N, G] is True, those of ``other`` elsewhere; the outer scale is the same for both."""
        zero = None
        if self.zero_point is not None and other.zero_point is not None:
            zero = torch.where(chosen, self.zero_point, other.zero_point)
        return Scales(torch.where(chosen, self.scale, other.scale), zero, self.outer)


def grouped(x: Tensor, group: int) -> Tensor:
    """``x`` [..., K] as [..., G, group], a short last group filled up with zeros."""
    k = x.shape[-1]
    if k % group:
        x = torch.nn.functional.pad(x, (0, -k % group))
    return x.unflatten(-1, (-(-k // group), group))


def scale_values(scheme: Scheme, scales: Scales, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers that the scales stand for, ``scale * outer``, rounded to float32; [..., N, G] as ``dtype``."""
    if scheme.scale in PLAIN_SCALES:
        value = scales.scale.to(torch.float32)
    else:
        value = get_format(scheme.scale).decode(scales.scale)
    if scales.outer is not None:
        value = value * scales.outer[..., None, None]
    return value.to(dtype)


def divisor(scale: Tensor) -> Tensor:
    """What numbers are divided by to be rounded: a group of zeros (or one that underflowed) has scale 0 and means 0 whatever
    its codes, and infinity makes them those of 0."""
    return torch.where(scale == 0, torch.inf, scale)


def encode(x: Tensor, fmt: Format, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """Codes (uint8) of the numbers nearest to ``x`` (float32 or float64, finite) under scales and zero points of its shape."""
    x = x / divisor(scale)
    if zero_point is not None:
        x += zero_point.to(x.dtype)
    return fmt.nearest(x)


def decode(codes: Tensor, fmt: Format, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """The numbers that ``codes`` stand for under scales and zero points of their shape, in the dtype of ``scale``."""
    x = fmt.decode(codes, scale.dtype)
    if zero_point is not None:
        x = x - zero_point.to(scale.dtype)
    return x * scale


def rounded(x: Tensor, fmt: Format, scale: Tensor, over: Tensor, zero_point: Tensor | None) -> Tensor:
    """:func:`decode` of :func:`encode`, in few operations for loops; ``over`` is :func:`divisor` of ``scale``, and all have
    the dtype of ``x``."""
    if zero_point is None:
        return fmt.round(x / over).mul_(scale)
    return fmt.round((x / over).add_(zero_point)).sub_(zero_point).mul_(scale)


def to_codes(w: Tensor, scheme: Scheme, scales: Scales) -> Tensor:
    """Round ``w`` [..., N, K] (float32 or float64, finite) to codes, uint8 [..., N, K], with the scales held."""
    k = w.shape[-1]
    if k == 0:
        return torch.zeros(w.shape, dtype=torch.uint8, device=w.device)
    zero = None if scales.zero_point is None else scales.zero_point[..., None]
    scale = scale_values(scheme, scales, w.dtype)[..., None]
    return encode(grouped(w, scheme.group(k)), scheme.fmt, scale, zero).flatten(-2)[..., :k]


def to_values(codes: Tensor, scheme: Scheme, scales: Scales, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight [..., N, K] that ``codes`` [..., N, K] stand for, computed in float32 (float64 if asked for)."""
    k = codes.shape[-1]
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    if k == 0:
        return torch.zeros(codes.shape, dtype=dtype, device=codes.device)
    zero = None if scales.zero_point is None else scales.zero_point[..., None]
    scale = scale_values(scheme, scales, compute)[..., None]
    return decode(grouped(codes, scheme.group(k)), scheme.fmt, scale, zero).flatten(-2)[..., :k].to(dtype)
