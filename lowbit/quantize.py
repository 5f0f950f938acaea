"""quantize_: a model's layers, in place, to a recipe; it returns the plan that it carried out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .algorithms import ROUNDERS
from .checkpoint.skeleton import is_pretrained
from .embedding import QEmbedding
from .layers import Layer, replace_module
from .linear import QLinear
from .planning import NO_PATTERN, FilterFn, LayerPlan, Plan, resolve
from .recipe import Recipe
from .target import Target
from .tensor import QTensor, check_weight
from .weight import QuantizedModule

__all__ = ["planned", "quantize_", "replace_layers"]

Progress = Callable[[LayerPlan, int, int], None]


def quantize_(
    model: nn.Module,
    what: Any,
    *,
    filter_fn: FilterFn | None = None,
    device: str | torch.device | None = None,
    keep_on_device: bool = False,
    progress: Progress | None = None,
) -> Plan:
    """Quantize the layers of ``model`` in place and return the :class:`~lowbit.planning.Plan` that was carried out.

    Args:
        what: what a factory such as ``int4_weight_only()`` returns, a :class:`~lowbit.Scheme`, a
            :class:`~lowbit.Recipe`, the name of one, a YAML file, or a dict from name patterns (glob, or ``re:`` and a
            regular expression) to any of these or None; the first pattern that matches wins. Without a pattern that
            names them, embeddings and the head stay as they are.
        filter_fn: ``filter_fn(module, name) -> bool``, asked for each layer that would be quantized.
        device: where each layer's weight is moved to be quantized, one at a time; its own device by default.
        keep_on_device: leave the quantized weights on ``device``, instead of moving them back.
        progress: called with (layer, layers done, layers in all) after each layer.

    Every weight is checked before the first is changed. Peak memory stays under the model and twice its largest layer.
    Raises ``ValueError`` for a pattern that matches nothing, a call that changes nothing, and weights with NaN or infinity.
    """
    carried, layers = planned(model, Recipe.of(what), filter_fn, device)
    replace_layers(model, carried.layers, layers, device, keep_on_device, progress)
    if is_pretrained(model):
        from .pretrained.quantizer import attach

        attach(model, carried)
    return carried


def planned(
    model: nn.Module, recipe: Recipe, filter_fn: FilterFn | None, device: str | torch.device | None
) -> tuple[Plan, list[Layer]]:
    """A plan that changes something, and the layer that each of its entries speaks of."""
    carried, layers = resolve(model, recipe, filter_fn, device)
    if not carried.changed:
        raise ValueError(f"nothing would change in {len(carried.kept)} layers ({_why_kept(carried)})")
    return carried, layers


@torch.inference_mode(False)  # parameters made in that mode could never meet autograd again
def replace_layers(
    model: nn.Module,
    entries: Sequence[LayerPlan],
    layers: list[Layer],
    device: str | torch.device | None = None,
    keep_on_device: bool = False,
    progress: Progress | None = None,
) -> None:
    """Carry out ``entries``, each for the layer at its place in ``layers``, which is emptied. Arguments as above."""
    _check(entries, layers)
    done: dict[int, QTensor] = {}  # by the identity of a weight that several layers read
    shared = _shared_weights(entries, layers)
    total = sum(entry.target is not None for entry in entries)
    count = 0
    for i, entry in enumerate(entries):
        layer, layers[i] = layers[i], None  # type: ignore[call-overload]  # the float weight goes as soon as it is replaced
        if entry.target is None:
            continue
        key = id(layer.module._parameters["weight"])
        quantized = done.get(key)
        if quantized is None:
            try:
                quantized = _round(layer, entry.target, device, keep_on_device)
            except ValueError as error:
                raise ValueError(f"{entry.name}: {error} ({count} of {total} layers are quantized)") from error
            if key in shared:
                done[key] = quantized
        replacement = _replacement(layer, quantized, entry.target)
        if key in shared:
            done[key] = replacement.weight  # so that the next layer shares these very parameters
        replace_module(model, layer.names, replacement)
        count += 1
        if progress is not None:
            progress(entry, count, total)


def _why_kept(carried: Plan) -> str:
    """The reasons, with a layer for each; those of layers that a pattern matched come first."""
    names: dict[str, list[str]] = {}
    for layer in sorted(carried.kept, key=lambda layer: layer.reason == NO_PATTERN):
        names.setdefault(layer.reason, []).append(layer.name)
    lines = [f"{found[0]}{f' and {len(found) - 1} more' if found[1:] else ''}: {why}" for why, found in names.items()]
    return "; ".join(lines[:5])


def _check(entries: Sequence[LayerPlan], layers: list[Layer]) -> None:
    for entry, layer in zip(entries, layers, strict=True):
        if entry.target is None:
            continue
        if layer.weight.device.type == "meta":
            raise ValueError(f"{entry.name} is on the meta device and has no values: load the model first")
        check_weight(layer.weight, f"{entry.name}.weight")


def _shared_weights(entries: Sequence[LayerPlan], layers: list[Layer]) -> set[int]:
    pairs = zip(entries, layers, strict=True)
    counts = Counter(id(layer.module._parameters["weight"]) for entry, layer in pairs if entry.target is not None)
    return {key for key, count in counts.items() if count > 1}


def _round(layer: Layer, target: Target, device: str | torch.device | None, keep_on_device: bool) -> QTensor:
    weight = layer.weight.detach()
    origin = weight.device
    if device is not None:
        weight = weight.to(device)
    if target.rounder == "rtn":  # the operator does this in chunks of rows, in a fused kernel where there is one
        quantized = QTensor.quantize(weight, target.weight, method=target.scales)
    else:
        compute = weight if weight.dtype == torch.float64 else weight.float()
        rounded = ROUNDERS[target.rounder].round(compute, target.weight, None)
        quantized = QTensor.from_codes(rounded.codes, rounded.scales, target.weight, weight.dtype)
    if quantized.device != origin and not keep_on_device:
        moved = quantized.to(origin)
        assert isinstance(moved, QTensor)
        return moved
    return quantized


def _replacement(layer: Layer, weight: QTensor, target: Target) -> QuantizedModule:
    module: QuantizedModule
    if isinstance(layer.module, nn.Embedding):
        module = QEmbedding(weight, layer.module.padding_idx)
    else:
        # The very parameter: another layer may read it, and an optimizer may hold it.
        module = QLinear(weight, layer.module._parameters.get("bias"), target.activation)
    return module.train(layer.module.training)
