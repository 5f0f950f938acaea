"""quantize_: a model's layers, in place, to a recipe; it returns the plan that it carried out."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .calibration.data import Batch, Calibration, CalibrationLike, amount
from .calibration.data_checks import data_notes
from .calibration.eval_mode import leave_inference_mode
from .checkpoint.hf_config import is_pretrained
from .environment import usable_device
from .layers import Layer
from .placement.hooks import is_offloaded
from .planning import FilterFn, planned
from .plans import Plan
from .recipe import Recipe, RecipeLike
from .replacement import Progress, Replacement, RewriteOnly
from .rewrite import Rewrite
from .tensor import QTensor
from .torch_state import isolated
from .transforms import Transform

__all__ = ["blockwise", "quantize_", "rewrite_", "rewritten"]

_LOG = logging.getLogger("lowbit")


def quantize_(
    model: nn.Module,
    recipe: RecipeLike,
    *,
    calibration: CalibrationLike | None = None,
    filter_fn: FilterFn | None = None,
    device: str | torch.device | None = None,
    keep_on_device: bool = False,
    progress: Progress | None = None,
) -> Plan:
    """Quantize the layers of ``model`` in place and return the :class:`~lowbit.plans.Plan` that was carried out.

    Args:
        recipe: what a factory such as ``int4_weight_only()`` returns, a :class:`~lowbit.Scheme`, a
            :class:`~lowbit.Recipe`, the name of one, a YAML file, or a dict from name patterns (glob, or ``re:`` and a
            regular expression) to any of these or None; the first pattern that matches wins. Without a pattern that
            names them, embeddings, heads and what transformers keeps in float32 stay as they are.
        calibration: data that rounders and static activation scales look at: a text file, a list of strings, token ids or
            batches; or a :class:`~lowbit.Calibration`, which says how much of it. The model is then quantized block by
            block, each on what the quantized ones before it give, and the plan says the loss of each layer.
        filter_fn: ``filter_fn(module, name) -> bool``, asked for each layer that would be quantized.
        device: where each layer's weight is moved to be quantized, one at a time, and with data where each block runs, one
            at a time; its own device by default.
        keep_on_device: leave the quantized weights on ``device``, instead of moving them back.
        progress: called with (layer, layers done, layers in all) after each layer.

    In a ``torch.distributed`` group (``torchrun``; ``init_process_group("gloo")``) every process calls this with the same
    arguments: with data each runs its share of the batches and rounds its share of the layers, and all end with the same
    model, which one of them saves.

    The bytes depend neither on what the program has set for torch (:mod:`lowbit.torch_state`) nor on the mode of ``model``, which
    runs in evaluation mode, without autocast, and with random numbers of its own.

    Every weight is checked before the first is changed. Peak memory stays under the model and twice its largest layer; with
    data it is the model, the statistics of a block (8 K^2 bytes for each tensor that its layers read), what the rounder
    takes for one layer, and the inputs of one block; where a rounder is ``asymmetric``, also a float copy of that block and
    the inputs of it, and 16 K^2 bytes for what some of its layers read. Raises ``ValueError`` for a pattern that matches
    nothing, a call that changes nothing, weights with NaN or infinity, a recipe that needs data where none is given, and data
    on which the model gives NaN or infinity: layers that were quantized before it came to that stay quantized.
    """
    recipe = Recipe.of(recipe)
    plan = _carried_out(model, recipe, Replacement, calibration, filter_fn, device, keep_on_device, progress)
    for module in model.modules():  # one of transformers' may stand within another library's, which saves by it
        attach = _attachment(module)
        if attach is not None and any(isinstance(parameter, QTensor) for parameter in module.parameters()):
            attach(module, plan)
    return plan


def _attachment(module: nn.Module) -> Callable[[Any, Plan], None] | None:
    """What lets a model of a library, whose ``save_pretrained`` asks a quantizer, be saved by it; None for other modules."""
    if is_pretrained(module):
        from .pretrained.quantizer import attach

        return attach
    home = sys.modules.get("diffusers.models.modeling_utils")
    if home is not None and isinstance(module, home.ModelMixin):
        from .diffusion.quantizer import attach as attach_diffusers

        return attach_diffusers
    return None


def rewrite_(
    model: nn.Module,
    recipe: RecipeLike,
    *,
    calibration: CalibrationLike | None = None,
    filter_fn: FilterFn | None = None,
    device: str | torch.device | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Carry out the rewrites of a recipe alone: ``model`` stays a float model that gives the same, and is easier to quantize.

    ``recipe``, ``calibration``, ``filter_fn``, ``device`` and ``progress`` are as those of :func:`quantize_`, and so are the
    errors; what the layers would become says how they are rewritten. Returns the plan that was carried out, in which
    ``layer.rewrites`` say what was done to each. Raises ``ValueError`` for a recipe without rewrites.
    """
    recipe = Recipe.of(recipe)
    if not recipe.rewrites:
        raise ValueError(f"the recipe {recipe.name!r} has no rewrites: give one, such as lowbit.awq('int4')")
    plan = _carried_out(model, recipe, RewriteOnly, calibration, filter_fn, device, False, progress)
    if is_pretrained(model) and any(isinstance(module, Transform) for module in model.modules()):
        from .pretrained.quantizer import attach  # only a header of lowbit's says what was inserted

        attach(model, plan)
    return plan


@isolated()
def _carried_out(
    model: nn.Module,
    recipe: Recipe,
    kind: type[Replacement],
    calibration: CalibrationLike | None,
    filter_fn: FilterFn | None,
    device: str | torch.device | None,
    keep_on_device: bool,
    progress: Progress | None,
) -> Plan:
    plan, layers = planned(model, recipe, filter_fn, device, has_data=calibration is not None)
    leave_inference_mode(model)
    if recipe.rewrites:
        _refuse_offloaded(recipe, plan, layers)
    replacement = kind(model, plan.layers, layers, device, keep_on_device, progress)
    replacement.check()
    batches, remarked = [], []
    if calibration is not None:
        data = Calibration.of(calibration)
        batches = data.batches(model)
        remarked = data_notes(data, batches, recipe, plan.layers)
    notes = remarked + rewritten(model, recipe, batches)
    if len(notes) > len(remarked):  # layers may be others now: ties undone, norms without a weight
        plan, layers = planned(model, recipe, filter_fn, device, has_data=calibration is not None)
        replacement = kind(model, plan.layers, layers, device, keep_on_device, progress)
    if calibration is None:
        replacement.apply_all()
    else:
        from .calibration.activation_store import ActivationStore
        from .calibration.calibrator import Calibrator
        from .calibration.offload import BlockOffload, DeviceOffload

        where = None if device is None else usable_device(device)
        offload = BlockOffload(model) if where is None else DeviceOffload(model, where, keep_on_device)
        calibrator = Calibrator(model, plan.layers, layers, batches, replacement, offload, ActivationStore(), blockwise(recipe))
        calibrator.run()
        notes += calibrator.notes
    given, notes = amount(batches) if batches else None, [*plan.notes, *notes]
    done = dataclasses.replace(plan, layers=tuple(replacement.entries), notes=tuple(notes), calibration=given)
    for note in notes:
        _LOG.info("%s", note)
    _LOG.info("%s", str(done).rpartition("\n")[2])
    return done


def _refuse_offloaded(recipe: Recipe, plan: Plan, layers: Sequence[Layer]) -> None:
    """A rewrite changes weights where they are, and an offloaded one is elsewhere."""
    found = [entry.name for entry, layer in zip(plan.layers, layers, strict=True) if is_offloaded(layer.module)]
    if found:
        raise ValueError(
            f"the rewrite {recipe.rewrites[0].name} changes weights in memory, and accelerate's hooks keep {len(found)} layers "
            f"elsewhere ({found[0]}): take them off (accelerate.hooks.remove_hook_from_submodules), quantize, and offload "
            "or dispatch the model again"
        )


def rewritten(model: nn.Module, recipe: Recipe, batches: Sequence[Batch]) -> list[str]:
    """Carry out those rewrites of ``recipe`` that change the whole float ``model``; what there is to say of each."""
    notes: list[str] = []
    for rewrite in recipe.rewrites:
        if rewrite.method.kind == "model":
            notes += [f"{rewrite}: {note}" for note in rewrite.method.run(model, batches, **dict(rewrite.options))] or [
                str(rewrite)
            ]
    return notes


def blockwise(recipe: Recipe) -> tuple[Rewrite, ...]:
    """Those rewrites of ``recipe`` that are carried out block by block, on statistics."""
    return tuple(rewrite for rewrite in recipe.rewrites if rewrite.method.kind == "block")
