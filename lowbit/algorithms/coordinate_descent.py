"""Descent: codes and scales that are on the grid already are moved, one at a time, to where the layer's output errs least.

Coordinate descent on codes is that of Behdin et al., "QuantEase: Optimization-based Quantization for Language Models", 2023;
the scale of a group follows as the least-squares solution for its codes, rounded to the format it is stored in.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..grid import Scales, divisor, scale_values, to_values
from ..scales import nearest_scale
from ..scheme import Scheme

__all__ = ["descend"]

_BLOCK = 128  # columns that move one by one before the others hear of it in one matrix product


def descend(weight: Tensor, scheme: Scheme, gram: Tensor, codes: Tensor, scales: Scales, passes: int) -> tuple[Tensor, Scales]:
    """Codes and scales of ``weight`` [N, K] with no larger tr(E G E^T), for G = ``gram`` [K, K], positive definite.

    Each pass goes over the columns once: every code becomes the one nearest to the best number for it, with all others held
    (exact, since the loss is a parabola in each), and every group's scale (and float zero point) the best for its codes.
    ``weight`` and ``gram`` share a dtype and device. Work is N K^2 multiplications and as many again each pass; twice as many for
    a scheme without groups.
    """
    if not passes:
        return codes, scales
    codes = codes.T.contiguous()  # a column is a contiguous row here, as everywhere below
    scale, zero = scales.scale.clone(), None if scales.zero_point is None else scales.zero_point.clone()
    scales = Scales(scale, zero, scales.outer)
    group = scheme.group(weight.shape[1])
    error = to_values(codes.T, scheme, scales, weight.dtype).sub_(weight)
    slope = gram @ error.T  # [K, N]: half the derivative of the loss by each value
    del error
    for left in reversed(range(passes)):
        for g, start in enumerate(range(0, len(codes), group)):
            stop = min(start + group, len(codes))
            of_group = Scales(scale[:, g : g + 1], None if zero is None else zero[:, g : g + 1], scales.outer)
            inner, within = gram[start:stop, start:stop], slope[start:stop].clone()
            changes = torch.empty_like(within)
            for a in range(0, stop - start, _BLOCK):
                b = min(a + _BLOCK, stop - start)
                codes[start + a : start + b], changes[a:b] = _move_codes(
                    codes[start + a : start + b], within[a:b], inner[a:b, a:b], scheme, of_group
                )
                within.addmm_(inner[:, a:b], changes[a:b])
            found, change = _refitted(codes[start:stop], within, inner, scheme, of_group)
            ahead = 0 if left else stop  # those before it are not looked at again
            slope[ahead:].addmm_(gram[ahead:, start:stop], changes.add_(change))
            scale[:, g : g + 1] = found.scale
            if zero is not None and found.zero_point is not None:
                zero[:, g : g + 1] = found.zero_point
    return codes.T.contiguous(), scales


def _move_codes(codes: Tensor, slope: Tensor, gram: Tensor, scheme: Scheme, scales: Scales) -> tuple[Tensor, Tensor]:
    """The codes [B, N] of columns of one group, each moved in turn, and by how much their values changed.

    In units of the group's scale, where the zero point cancels: a number moves to the one nearest to where its parabola is
    least, which lies slope / curvature away.
    """
    scale = scale_values(scheme, scales, slope.dtype)[:, 0]
    before = scheme.fmt.decode(codes, slope.dtype)
    away = slope / gram.diagonal()[:, None] / divisor(scale)
    share = (gram / gram.diagonal()[:, None]).T.contiguous()
    advanced = []
    for was, step, push in zip(before, away, share, strict=True):
        advanced.append(scheme.fmt.round(was - step))
        away.addr_(push, advanced[-1] - was)
    numbers = torch.stack(advanced)
    return scheme.fmt.nearest(numbers), (numbers - before) * scale


def _refitted(codes: Tensor, slope: Tensor, gram: Tensor, scheme: Scheme, scales: Scales) -> tuple[Scales, Tensor]:
    """The scales [N, 1] of one group that are best for its codes [B, N], and by how much its values changed.

    As they are where the ones found are no better once they are rounded, or are no finite numbers of the same sign. An integer
    zero point stays; a float one is solved for together with the scale. A scale of 0 stays, since zeros are to stay zeros.
    """
    old = scale_values(scheme, scales, slope.dtype)[:, 0]
    numbers = scheme.fmt.decode(codes, slope.dtype)
    if scheme.zero_point == "float":
        assert scales.zero_point is not None
        was = scales.zero_point[:, 0].to(slope.dtype)
        by_scale, by_offset = _best_line(numbers, slope, gram)
        target = old + by_scale
        point = ((old * was - by_offset) / target).to(scales.zero_point.dtype)
        found = _stored(target, old, point, scheme, scales)
        now = point.to(slope.dtype)
    else:
        if scales.zero_point is not None:
            numbers = numbers - scales.zero_point[:, 0].to(slope.dtype)
        steepness, curvature = -(slope * numbers).sum(0), ((gram @ numbers) * numbers).sum(0)
        found = _stored(old + steepness / curvature, old, None, scheme, scales)
        was = now = torch.zeros_like(old)
    new = scale_values(scheme, found, slope.dtype)[:, 0]
    change = (numbers - now) * new - (numbers - was) * old
    gain = -2 * (slope * change).sum(0) - ((gram @ change) * change).sum(0)
    better = (gain > 0) & torch.isfinite(new) & (new != 0) & (old != 0)
    return found.where(better[:, None], scales), torch.where(better, change, 0.0)


def _best_line(numbers: Tensor, slope: Tensor, gram: Tensor) -> tuple[Tensor, Tensor]:
    """How much of ``numbers`` [B, N] and of a constant to add to each row's values, for the least loss: [N] and [N]."""
    weighted, ones = gram @ numbers, gram.sum(0)
    a, b, c = (weighted * numbers).sum(0), weighted.sum(0), ones.sum()
    p, q = -(slope * numbers).sum(0), -slope.sum(0)
    determinant = a * c - b * b
    return (p * c - q * b) / determinant, (a * q - b * p) / determinant


def _stored(target: Tensor, old: Tensor, zero_point: Tensor | None, scheme: Scheme, scales: Scales) -> Scales:
    """Scales ``target`` [N] in their own format; zeros, which a comparison then turns down, where their sign is not that of
    ``old`` [N]."""
    target = torch.where(target.sign() == old.sign(), target, torch.zeros_like(target))
    if scales.outer is not None:
        target = target / scales.outer
    stored = nearest_scale(target, scheme)
    zero = scales.zero_point if zero_point is None else zero_point[:, None]
    return Scales(stored[:, None], zero, scales.outer)
