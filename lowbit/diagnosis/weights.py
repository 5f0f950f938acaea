"""The weight of one layer beside the float one: its noise, group by group, and what is broken in it."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..grid import Scales, divisor, grouped, scale_values
from ..tensor import QTensor
from .faults import identify_fault
from .report import Finding
from .sqnr import decibels

__all__ = ["WeightFigures", "compare_weights", "check_stored"]

_WORSE = 4.0  # times the noise that it should have (6 dB), from where on a group or a weight is looked into
_OFF = 1.5  # times the right scale, from where on one is told from rounding
_EXPLAINS = 0.8  # of a group's noise that the right scale has to take away, or the right zero point
_STEPS = 1.5  # of the grid, by which all of a group are off where its zero point is wrong
_FEW = 8  # weights of a group that tell too little: methods that look at data move them far
_FAR = 12.0  # dB below what the scheme gives: no rounding of this weight, whatever the method


class WeightFigures(NamedTuple):
    """Fields as in :class:`~lowbit.diagnosis.report.LayerFigures`; ``repaired``: the weight, float32, with the scales and zero
    points put right that the findings call wrong, where they do: data can tell whether it gives better outputs."""

    weight_db: float | None
    expected_db: float | None
    zero_groups: int
    clipped: float
    findings: tuple[Finding, ...]
    repaired: Tensor | None = None


def check_stored(name: str, weight: QTensor) -> WeightFigures:
    """What can be told of ``weight`` [N, K] alone."""
    finding = _not_finite(name, weight, weight.canonical().dequantize(torch.float32))
    return WeightFigures(None, None, 0, 0.0, () if finding is None else (finding,))


def compare_weights(name: str, weight: QTensor, before: Tensor, rtn: QTensor) -> WeightFigures:
    """Compare the ``weight`` [N, K] with the float one ``before``, and with that rounded to nearest, ``rtn``."""
    weight, rtn = weight.canonical(), rtn.canonical()
    before = before.to(weight.device, torch.float32)
    dense = weight.dequantize(torch.float32)
    bad = _not_finite(name, weight, dense)
    if bad is not None:
        return WeightFigures(-math.inf, _db(before, rtn.dequantize(torch.float32)), 0, 0.0, (bad,))
    rounded = rtn.dequantize(torch.float32)
    weight_db, expected_db = _db(before, dense), _db(before, rounded)
    groups = _Groups(weight, before, dense, rounded)
    findings, repaired = groups.findings(name)
    if groups.median_db < groups.expected_median_db - 10 * math.log10(_WORSE):
        # Not a few groups: something that went wrong with the whole.
        found = identify_fault(weight, before, lambda candidate: _db(before, candidate), expected_db - 10 * math.log10(_WORSE))
        if found is not None:
            repaired = None
            findings = [
                Finding(
                    "codes", name,
                    f"{found[0]}: undoing that brings its weight from {weight_db:.1f} to {found[1]:.1f} dB, where rounding to "
                    f"nearest gives {expected_db:.1f}",
                    "Look at what packed, converted or loaded this weight",
                )
            ]  # fmt: skip
        elif weight_db < min(expected_db - _FAR, 1.0):
            findings.append(_strange(name, weight_db, expected_db))
    return WeightFigures(weight_db, expected_db, groups.zeros, _clipped(weight, before), tuple(findings), repaired)


def _not_finite(name: str, weight: QTensor, dense: Tensor) -> Finding | None:
    count = int((~torch.isfinite(dense)).sum())
    if not count:
        return None
    return Finding(
        "overflow", name, f"{count:,} of {dense.numel():,} weights are NaN or infinite as stored",
        f"Scales in {weight.scheme.scale} overflowed, or the file is damaged: quantize with scale='bf16' or 'fp32'",
    )  # fmt: skip


def _strange(name: str, weight_db: float, expected_db: float) -> Finding:
    return Finding(
        "codes", name,
        f"its weight is no rounding of the float one: {weight_db:.1f} dB, where rounding to nearest gives {expected_db:.1f}",
        "Look at which file it came from; awq, smoothquant and rotation change weights on purpose: say rewritten=True, or "
        "compare with the float model that lowbit.rewrite_ gave before it was quantized",
    )  # fmt: skip


class _Groups:
    """Sums over each group of a weight, in float64: [N, G]."""

    def __init__(self, weight: QTensor, before: Tensor, dense: Tensor, rounded: Tensor) -> None:
        size = weight.scheme.group(weight.shape[1])
        w, q, r = (grouped(x.double(), size) for x in (before, dense, rounded))
        self.energy, self.quantized_energy = w.square().sum(-1), q.square().sum(-1)
        self.noise, self.usual = (w - q).square().sum(-1), (w - r).square().sum(-1)
        dot = (w * q).sum(-1)
        self.gain = dot / torch.where(self.quantized_energy > 0, self.quantized_energy, torch.inf)
        count = grouped(torch.ones_like(before[:1], dtype=torch.float64), size).sum(-1)
        self.shift = (w - q).sum(-1) / count  # what all weights of a group are off by
        self.level = self.shift.square() * count  # of the noise
        self.has_many = (count >= _FEW).expand_as(self.shift)
        self.step = scale_values(weight.scheme, Scales(weight.scale, None, weight.outer)).double()
        self.zero = (
            (self.quantized_energy == 0) & (self.energy > 0) & (r.square().sum(-1) > 0) & (self.has_many | (self.step == 0))
        )
        self.has_zero_point, self.size, self.dense = weight.zero_point is not None, size, dense
        self.left = self.energy - self.gain * dot  # of the noise, under the scale that suits these codes best

    @property
    def zeros(self) -> int:
        return int(((self.quantized_energy == 0) & (self.energy > 0)).sum())

    @property
    def _share(self) -> Tensor:
        """Noise over energy of the groups that are not zeros."""
        live = self.energy > 0
        return self.noise[live] / self.energy[live]

    @property
    def median_db(self) -> float:
        """Of a group in the middle, so that a few broken ones do not show."""
        return decibels(1.0, float(self._share.median())) if bool((self.energy > 0).any()) else math.inf

    @property
    def expected_median_db(self) -> float:
        live = self.energy > 0
        return decibels(1.0, float((self.usual[live] / self.energy[live]).median())) if bool(live.any()) else math.inf

    def findings(self, name: str) -> tuple[list[Finding], Tensor | None]:
        """Groups that were lost, and those whose noise another scale or zero point would take away, which rounding does not
        leave; and the weight with those put right, where there are any."""
        found = []
        if bool(self.zero.any()):
            n, g = self.zero.nonzero()[0].tolist()
            description = f"{int(self.zero.sum())} of {self.zero.numel()} groups mean zeros and should not"
            description += f", the first is group {g} of row {n}"
            remedy = "Their scales were lost, or underflowed in a narrow format: quantize with scale='bf16' or 'fp32'"
            found.append(Finding("zero groups", name, description, remedy))
        scale, point = self._misfits()
        for kind, bad in (("scale", scale), ("zero point", point)):
            if not bool(bad.any()):
                continue
            n, g = bad.nonzero()[0].tolist()
            gain = float(self.gain[n, g])
            if kind == "zero point":
                deviation = f"its weights are all off by {abs(float(self.shift[n, g] / self.step[n, g])):.2g} steps"
            else:
                deviation = f"it is {1 / gain:.3g} times what suits its codes" if gain > 0 else "its codes want the other sign"
            description = (
                f"the {kind} of {int(bad.sum())} of {bad.numel()} groups is wrong, the first is group {g} of row {n}: {deviation}"
            )
            found.append(Finding(kind, name, description, f"Look at what wrote or sliced the {kind}s"))
        if not bool((scale | point).any()):
            return found, None
        gains, shifts = torch.where(scale, self.gain, 1.0)[..., None], torch.where(point, self.shift, 0.0)[..., None]
        repaired = (grouped(self.dense.double(), self.size) * gains + shifts).flatten(-2)
        return found, repaired[:, : self.dense.shape[1]].float()

    def _misfits(self) -> tuple[Tensor, Tensor]:
        """bool [N, G]: groups with a wrong scale, and with a wrong zero point."""
        middle = float(self._share.median()) if self._share.numel() else 0.0
        noisy = (
            (self.noise > _WORSE * torch.maximum(self.usual, middle * self.energy)) & (self.quantized_energy > 0) & self.has_many
        )
        scale = noisy & (self.left < (1 - _EXPLAINS) * self.noise)
        scale &= (self.gain <= 0) | (self.gain > _OFF) | (self.gain < 1 / _OFF)
        point = noisy & ~scale & (self.level > _EXPLAINS * self.noise) & (self.shift.abs() > _STEPS * self.step)
        return scale, point & self.has_zero_point


def _db(before: Tensor, after: Tensor) -> float:
    w = before.double()
    return decibels(float(w.square().sum()), float((after.double() - w).square().sum()))


def _clipped(weight: QTensor, before: Tensor) -> float:
    """The share of weights beyond the range of their group by half a step or more."""
    scheme, fmt = weight.scheme, weight.scheme.fmt
    size = scheme.group(weight.shape[1])
    scale = scale_values(scheme, Scales(weight.scale, None, weight.outer))[..., None]
    zero = 0.0 if weight.zero_point is None else weight.zero_point.float()[..., None]
    numbers = fmt.numbers
    below, above = (numbers[1] - numbers[0]) / 2, (numbers[-1] - numbers[-2]) / 2
    number = grouped(before, size) / divisor(scale) + zero
    return int(((number > fmt.max + above) | (number < fmt.min - below)).sum()) / max(before.numel(), 1)
