"""What an examination finds: figures of each layer, findings, and the verdict."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from .sqnr import format_db

__all__ = ["Diagnosis", "Finding", "LayerFigures"]

_NOISE = 0.05  # dB that two ways of adding up the same numbers may differ by


@dataclass(frozen=True)
class Finding:
    """Something that no method does, and what to do about it.

    Attributes:
        kind: ``"bias"``, ``"scale"``, ``"zero point"``, ``"zero groups"``, ``"codes"``, ``"arithmetic"``, ``"outputs"``,
            ``"overflow"``,
            ``"tie"`` or ``"parameter"``.
        layer: where.
        description: what is wrong, with the figures that say so.
        remedy: what to look at.
    """

    kind: str
    layer: str
    description: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.layer}: {self.description}. {self.remedy}"


@dataclass(frozen=True)
class LayerFigures:
    """One quantized layer. Signal over noise is in dB; what needs data is None without it.

    Attributes:
        weight_db: of its weight, against the float one.
            None where a rewrite changed the weights before they were rounded, as for all figures up to ``model_db``.
        expected_db: of the float weight rounded to nearest under the same scheme. Methods that look at data may lie below it
            here, and above it in ``output_db``.
        output_db: of its outputs on the float model's own inputs: this layer's error alone.
        expected_output_db: of the same with the float weight rounded to nearest.
        model_db: of its outputs in the quantized model: the errors of all layers before it as well.
        zero_groups: groups that mean zeros, where the float weight's are not zeros.
        clipped: the share of weights that lie beyond the numbers that their group can stand for, by half a step or more.
        outlier: the largest input of any channel over the median of the largest of all channels.
        outlier_channel: which channel that is.
        dead_channels: input channels that were 0 in every row.
        rows: rows of inputs that were looked at.
    """

    name: str
    scheme: str
    shape: tuple[int, int]
    weight_db: float | None
    expected_db: float | None
    zero_groups: int
    clipped: float
    output_db: float | None = None
    expected_output_db: float | None = None
    model_db: float | None = None
    outlier: float | None = None
    outlier_channel: int | None = None
    dead_channels: int | None = None
    rows: int = 0


@dataclass(frozen=True)
class Diagnosis:
    """What :func:`lowbit.doctor` found.

    Attributes:
        layers: the figures of each quantized layer.
        findings: what is broken; empty for a clean bill.
        blocks: signal over noise of the outputs of each block in the quantized model, in dB, in the order in which they run.
        kl: the mean of KL(float || quantized) in nats a token; None without data, and for a model without logits.
        agreement: the share of tokens for which both models hold the same next one the likeliest.
        rewritten: whether the model was changed to an equivalent one before it was rounded, so that what it gives in the end is
            all that can be compared.
    """

    layers: tuple[LayerFigures, ...]
    findings: tuple[Finding, ...]
    blocks: tuple[tuple[str, float], ...] = ()
    kl: float | None = None
    agreement: float | None = None
    rewritten: bool = False

    @property
    def verdict(self) -> str:
        """``"bug"`` where something is broken; ``"method"`` where nothing is, and the method is worse than rounding to nearest
        (:attr:`rtn_gap_db` below 0); else ``"clean"``: what was lost is then the method's."""
        if self.findings:
            return "bug"
        return "clean" if self.rtn_gap_db is None or self.rtn_gap_db > -_NOISE else "method"

    @property
    def rtn_gap_db(self) -> float | None:
        """The median over layers of how far outputs lie above those of the weight rounded to nearest, in dB; None without data.

        The median, since methods that make up for the errors of earlier layers err more in some on the float model's inputs.
        """
        lags = [found for layer in self.layers if (found := _rtn_gap_db(layer)) is not None]
        return statistics.median(lags) if lags else None

    @property
    def worse_than_rtn(self) -> tuple[LayerFigures, ...]:
        """The layers whose outputs err more than those of the weight rounded to nearest, by 1 dB and more; the worst first."""
        found = [
            (rtn_gap_db, i)
            for i, layer in enumerate(self.layers)
            if (rtn_gap_db := _rtn_gap_db(layer)) is not None and rtn_gap_db <= -1
        ]
        return tuple(self.layers[i] for _, i in sorted(found))

    @property
    def jump(self) -> tuple[str, float] | None:
        """The block at which the error grows most, and by how many dB; None with fewer than two blocks."""
        steps = [(name, before - after) for (_, before), (name, after) in pairwise(self.blocks) if math.isfinite(before)]
        return max(steps, key=lambda step: step[1], default=None)

    @property
    def worst(self) -> tuple[LayerFigures, ...]:
        """The three layers that err most: in their outputs where there is data, else in their weights."""
        known = [layer for layer in self.layers if layer.weight_db is not None]
        return tuple(sorted(known, key=_layer_db)[:3])

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; None for decibels that are not finite."""

        def finite(value: Any) -> Any:
            return None if isinstance(value, float) and not math.isfinite(value) else value

        return {
            "verdict": self.verdict,
            "summary": self.summary,
            "rewritten": self.rewritten,
            "rtn_gap_db": finite(self.rtn_gap_db),
            "worse_than_rtn": [layer.name for layer in self.worse_than_rtn],
            "kl": finite(self.kl),
            "agreement": self.agreement,
            "findings": [asdict(finding) for finding in self.findings],
            "blocks": [{"name": name, "model_db": finite(value)} for name, value in self.blocks],
            "layers": [{name: finite(value) for name, value in asdict(layer).items()} for layer in self.layers],
        }

    @property
    def summary(self) -> str:
        """The verdict in a sentence or two."""
        lost_db = "" if self.kl is None else f" (KL {self.kl:.4f} nats, {100 * (self.agreement or 0):.1f} % the same next token)"
        if self.findings:
            count = len(self.findings)
            return f"a bug: {count} thing{'s are' if count > 1 else ' is'} broken that no method breaks{lost_db}."
        if self.rewritten:
            return f"nothing is broken that can be told: a rewrite changed the weights before they were rounded{lost_db}."
        names = ", ".join(f"{f.name} ({format_db(_layer_db(f))} dB)" for f in self.worst)
        rtn_gap_db = [found for layer in self.layers if (found := _rtn_gap_db(layer)) is not None]
        if self.verdict == "method":
            worse = ", ".join(f"{f.name} ({_rtn_gap_db(f):+.1f} dB)" for f in self.worse_than_rtn[:3])
            more = f" and {len(self.worse_than_rtn) - 3} more" if len(self.worse_than_rtn) > 3 else ""
            return (
                f"the method is worse than rounding to nearest on this data{lost_db}: outputs stand at {self.rtn_gap_db:+.1f} "
                f"dB beside it "
                f"in the median layer{f', worst in {worse}{more}' if worse else ''}. Calibrate on more data of the kind that the "
                "model is used on, or round to nearest."
            )
        beside = (
            f"; against rounding to nearest its outputs stand at {min(rtn_gap_db):+.1f} to {max(rtn_gap_db):+.1f} dB"
            if rtn_gap_db
            else ""
        )
        return (
            f"clean: every layer errs as its scheme makes it, and what was lost is the method's{lost_db}{beside}. "
            f"Most is lost in {names}."
        )

    def __str__(self) -> str:
        width = max(len(layer.name) for layer in self.layers)
        data = any(layer.rows for layer in self.layers)
        head = f"{'layer':{width}}  weight dB (expected)"
        head += "  outputs dB (expected)  in the model  outliers  dead" if data else ""
        lines = [f"{head}  clipped %  zero groups"]
        for f in self.layers:
            line = f"{f.name:{width}}  {_pair(f.weight_db, f.expected_db):>20}"
            if data:
                outlier = "" if f.outlier is None else f"{f.outlier:.0f}x"
                dead = "no data" if f.dead_channels is None else str(f.dead_channels)
                line += f"  {_pair(f.output_db, f.expected_output_db):>21}  {format_db(f.model_db):>12}  {outlier:>8}  {dead:>4}"
            lines.append(f"{line}  {100 * f.clipped:>9.2f}  {f.zero_groups:>11}")
        if self.jump is not None:
            lines.append(f"the error grows most in {self.jump[0]}: {self.jump[1]:.1f} dB")
        lines += [str(finding) for finding in self.findings]
        return "\n".join([*lines, f"verdict: {self.summary}"])


def _rtn_gap_db(layer: LayerFigures) -> float | None:
    """How far the outputs of a layer lie above those of its weight rounded to nearest, in dB; None without data, and for a weight
    that was rounded to nearest."""
    if layer.output_db is None or layer.expected_output_db is None or layer.weight_db == layer.expected_db:
        return None
    found = layer.output_db - layer.expected_output_db
    return found if math.isfinite(found) else None


def _layer_db(layer: LayerFigures) -> float:
    """The error of a layer alone, in dB."""
    found = layer.weight_db if layer.output_db is None else layer.output_db
    return math.inf if found is None else found


def _pair(value: float | None, expected: float | None) -> str:
    return "" if value is None else f"{format_db(value)} ({format_db(expected)})"
