"""The examination of a quantized model: weights first, then runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from ..calibration.blocks import children
from ..calibration.data import Calibration, CalibrationLike
from ..calibration.eval_mode import eval_mode
from ..layers import Layer, find_layers
from ..quantized_module import QuantizedModule
from ..recipe import block_counts
from ..tensor import QTensor
from ..torch_state import isolated
from ..transforms import Transform
from .report import Diagnosis, Finding, LayerFigures
from .runs import Overflow, Pair, Runs
from .structure import biases, matched, parameters, ties
from .weights import WeightFigures, check_stored, compare_weights

__all__ = ["doctor"]

_WORSE = 6.0  # dB below rounding to nearest: no method is as bad on a layer's own inputs
_WORSE_STATIC = 12.0  # where one scale for all inputs was found on other data
_ARITHMETIC = 25.0  # dB: bf16 keeps about 50
Progress = Callable[[str, int, int], None]


@isolated()
def doctor(
    quantized: nn.Module,
    original: nn.Module,
    data: CalibrationLike | None = None,
    *,
    compared: int = 4,
    rewritten: bool | None = None,
    progress: Progress | None = None,
) -> Diagnosis:
    """Tell what a method lost from what is broken: the ``quantized`` model beside the ``original`` float one.

    Each weight is compared with the float one and with that rounded to nearest under the same scheme, as a whole and group
    by group; where it is far off, mistakes that happen are undone one at a time (nibbles in the other order, zero points off
    by one, scales transposed, rows permuted, ...) until one explains it. Biases, ties and all that is not quantized are compared
    too. With data both models run: each layer is given the float model's inputs, so that its own error stands beside what
    rounding to nearest gives, and the error that has come together in the model beside that.

    Args:
        data: as ``calibration`` of :func:`lowbit.quantize_`; None to look at the weights alone.
        compared: batches of it, taken evenly from all of them.
        rewritten: that the float model was changed to an equivalent one before it was rounded (awq, smoothquant, rotation); None:
            what the plan of the quantized model says, where it carries one. Weights and what passes between layers are then
            not those of ``original``: what stands by itself is looked at, and what the model gives in the end.
        progress: called with (what is being done, done, in all).

    Both models stay as they are.
    Raises ``ValueError`` for models that are not two versions of one, and for a float model that gives NaN on the data.
    """
    if type(compared) is not int or compared < 1:
        raise ValueError(f"compared must be a number of batches from 1 on, got {compared!r}")
    layers = matched(quantized, original)
    rewritten = _was_rewritten(quantized, original) if rewritten is None else rewritten
    batches = [] if data is None else Calibration.of(data).batches(original)
    chosen = torch.linspace(0, len(batches) - 1, min(compared, len(batches)), dtype=torch.float64).round().long().tolist()
    total = len(layers) + len(chosen)
    weights: list[WeightFigures] = []
    pairs: list[Pair] = []
    for layer, was in layers:
        if progress is not None:
            progress(f"weight of {layer.name}", len(weights), total)
        weight, before = layer.weight, was.weight.detach()
        assert isinstance(weight, QTensor)
        assert isinstance(layer.module, QuantizedModule)
        rtn = None if rewritten else QTensor.quantize(before.to(weight.device, torch.float32), weight.scheme)
        weights.append(check_stored(layer.name, weight) if rtn is None else compare_weights(layer.name, weight, before, rtn))
        pairs.append(Pair(layer.name, was.module, layer.module, rtn, weights[-1].repaired))
    runs = Runs(original, quantized, pairs, () if rewritten else _blocks(original))
    with eval_mode(original), eval_mode(quantized):
        for i, number in enumerate(chosen):
            if progress is not None:
                progress("running both models", len(layers) + i, total)
            runs.add(batches[number])
    modified_parameters = [] if rewritten else list(parameters(quantized, original))
    findings = [*biases(layers, rewritten), *modified_parameters]
    findings += [] if rewritten else ties(quantized, original)
    if runs.overflow is not None:
        findings.append(_overflow(runs.overflow))
    known_layers = {finding.layer for finding in findings if finding.kind != "parameter"}
    for figures, pair in zip(weights, pairs, strict=True):
        found = [finding for finding in figures.findings if finding.kind not in _doubtful(pair, bool(modified_parameters))]
        findings += found
        if not found and not modified_parameters and pair.name not in known_layers and (bad := _outputs(pair)) is not None:
            findings.append(bad)
    blocks = tuple((name, ratio.decibels) for name, ratio in runs.blocks.items() if ratio.decibels is not None)
    figures_of = tuple(
        _figures(layer, weight, pair, rewritten) for (layer, _), weight, pair in zip(layers, weights, pairs, strict=True)
    )
    return Diagnosis(figures_of, tuple(findings), blocks, runs.kl, runs.agreement, rewritten)


def _was_rewritten(model: nn.Module, original: nn.Module) -> bool:
    plan = getattr(getattr(model, "hf_quantizer", None), "plan", None)
    quantized_parameters, float_parameters = (
        any(isinstance(module, Transform) for module in m.modules()) for m in (model, original)
    )
    return (quantized_parameters and not float_parameters) or (plan is not None and bool(plan.recipe.rewrites))


def _doubtful(pair: Pair, rewritten: bool) -> tuple[str, ...]:
    """Kinds of findings on a weight that are none: all that compare it with another, in a model that was rewritten; and groups
    that a method moved far on purpose, which data tells from mistakes, since putting them right makes the outputs worse."""
    if rewritten:
        return "codes", "scale", "zero point"
    isolated_db, repaired = pair.isolated.decibels, pair.repaired.decibels
    return ("scale", "zero point") if isolated_db is not None and repaired is not None and repaired < isolated_db else ()


def _blocks(model: nn.Module) -> Sequence[str]:
    stacks = block_counts(name for layer in find_layers(model) for name in layer.names)
    return [path for name in stacks for path in children(model, name)]


def _overflow(found: Overflow) -> Finding:
    top = torch.finfo(found.dtype).max
    dtype = str(found.dtype).removeprefix("torch.")
    reach = f"the float model's reach {found.largest:.3g}"
    reach += f", and {dtype} ends at {top:.5g}" if found.largest > top else f", which {dtype} can hold"
    return Finding(
        "overflow", found.name,
        f"{found.bad:,} of {found.total:,} of its outputs are NaN or infinite in the quantized model, where {reach}",
        "Run it in bfloat16 or float32" if found.largest > top else "Look at its inputs and at its scales",
    )  # fmt: skip


def _outputs(pair: Pair) -> Finding | None:
    isolated_db, expected, arithmetic = pair.isolated.decibels, pair.expected.decibels, pair.arithmetic.decibels
    if arithmetic is not None and arithmetic < _ARITHMETIC:
        return Finding(
            "arithmetic", pair.name,
            f"its outputs are not the product of its inputs and the numbers that its weight stands for ({arithmetic:.1f} dB)",
            "A kernel is wrong, or memory was overwritten: lowbit.explain says which one ran",
        )  # fmt: skip
    if isolated_db is None or expected is None or isolated_db == math.inf:
        return None
    static = getattr(pair.quantized, "input_scale", None) is not None
    if isolated_db < expected - (_WORSE_STATIC if static else _WORSE):
        return Finding(
            "outputs", pair.name,
            f"its outputs on the float model's inputs stand at {isolated_db:.1f} dB, where rounding to nearest gives "
            f"{expected:.1f}",
            "Look at its weight" + (" and at the scale of its inputs, which calibration found" if static else ""),
        )  # fmt: skip
    return None


def _figures(layer: Layer, weight: WeightFigures, pair: Pair, rewritten: bool) -> LayerFigures:
    n, k = layer.weight.shape
    assert isinstance(layer.weight, QTensor)
    outlier = channel = dead = None
    if pair.absmax is not None and pair.absmax.numel():
        dead = int((pair.absmax == 0).sum())
        middle, top = float(pair.absmax.median()), float(pair.absmax.max())
        outlier, channel = (top / middle, int(pair.absmax.argmax())) if middle > 0 else (None, None)
    return LayerFigures(
        layer.name, str(layer.weight.scheme), (int(n), int(k)), weight.weight_db, weight.expected_db, weight.zero_groups,
        weight.clipped, pair.isolated.decibels, pair.expected.decibels, None if rewritten else pair.in_model.decibels,
        outlier, channel, dead, pair.rows,
    )  # fmt: skip
