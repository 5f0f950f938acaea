"""Every layer tried under every scheme, one at a time: the measurement behind mixed precision."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..calibration.activation_store import ActivationStore
from ..calibration.calibrator import Calibrator
from ..calibration.data import Batch, Calibration, CalibrationLike
from ..calibration.data_checks import data_notes
from ..calibration.eval_mode import eval_mode
from ..calibration.offload import BlockOffload
from ..calibration.ranks import Ranks
from ..layer_config import LayerConfig
from ..layers import Layer, replace_module, tied_groups
from ..planning import FilterFn, planned
from ..plans import LayerPlan
from ..recipe import Recipe
from ..replacement import InputStatistics, Replacement
from ..torch_state import isolated
from .logits import divergences
from .sensitivities import Cost, LayerCosts, Sensitivity, named_targets

__all__ = ["sensitivity"]

Progress = Callable[[str, int, int], None]


@isolated()
def sensitivity(
    model: nn.Module,
    data: CalibrationLike,
    schemes: Any = ("int3", "int4"),
    *,
    compared: int = 8,
    layers: Sequence[str] = ("*",),
    filter_fn: FilterFn | None = None,
    progress: Progress | None = None,
) -> Sensitivity:
    """What each layer of the float ``model`` loses under each of ``schemes``, with all other layers left as they are.

    The model runs once, block by block, for the statistics of each layer's inputs: the scheme's rounder looks at them, and the
    error of the outputs follows from them. Then each layer is quantized alone under each scheme, the model runs on a part of
    the data, and the layer is put back: as many runs as there are layers times schemes.

    Args:
        data: as ``calibration`` of :func:`lowbit.quantize_`.
        schemes: names (``"int3"``, ``"gptq(int3, damping=0.02)"``), schemes and layer configs; or a mapping from names to them.
        compared: batches of the data, taken evenly from all of them, on which predictions are compared; 0 leaves the KL out, for
            models without logits and for want of time.
        layers: patterns of the layers to try; with ``"*"`` embeddings and the head are left alone, as in recipes.
        filter_fn: as for :func:`lowbit.quantize_`.
        progress: called with (what is being done, done, in all).

    The model ends as it was. Beside it all the layers are kept in memory under all the schemes, packed, and the logits of
    one batch. Raises ``ValueError`` for schemes that name none or several rules, data and patterns that will not do, and
    in a ``torch.distributed`` group.
    """
    if type(compared) is not int or compared < 0:
        raise ValueError(f"compared must be a number of batches, 0 or more, got {compared!r}")
    if Ranks().count > 1:
        raise ValueError("sensitivity works in one process: call it outside of a torch.distributed group")
    configs = named_targets(schemes)
    plans = {}
    for name, config in configs.items():
        recipe = Recipe.of(dict.fromkeys(layers, config))
        plans[name], found = planned(model, recipe, filter_fn, None, has_data=True)
    trials = _TrialReplacement(model, {name: plan.layers for name, plan in plans.items()}, found, progress)
    given = Calibration.of(data)
    batches = given.batches(model)
    remarked = list(dict.fromkeys(n for plan in plans.values() for n in data_notes(given, batches, plan.recipe, plan.layers)))
    plan_layers = copy.copy(found)
    calibrator = Calibrator(
        model, next(iter(plans.values())).layers, plan_layers, batches, trials, BlockOffload(model), ActivationStore()
    )
    calibrator.run()
    tokens = 0
    if compared:
        chosen = torch.linspace(0, len(batches) - 1, min(compared, len(batches)), dtype=torch.float64).round().long().tolist()
        with eval_mode(model):
            tokens = trials.compare([batches[i] for i in chosen])
    return Sensitivity(configs, trials.costs(), tokens, (*remarked, *calibrator.notes))


_LayerWeight = nn.Module | nn.Parameter


class _TrialReplacement(Replacement):
    """Rounds each layer under every scheme, and leaves it in its place."""

    def __init__(
        self, model: nn.Module, plans: Mapping[str, Sequence[LayerPlan]], layers: Sequence[Layer], progress: Progress | None
    ) -> None:
        super().__init__(model, next(iter(plans.values())), list(layers))
        self._plans, self._report_progress = plans, progress
        self._groups = {i: group for group in tied_groups(self._layers) for i in group}
        self._places = [i for i, entry in enumerate(self.entries) if entry.config is not None]
        self._tried: dict[int, dict[str, _Trial]] = {}  # by the first layer of those that share a weight
        for name in plans:
            Replacement(model, plans[name], self._layers).check()

    def _group(self, i: int) -> list[int]:
        return self._groups.get(i, [i])

    def apply(self, i: int, statistics: InputStatistics = None, calibrated: bool = False) -> None:
        """Try the layer at place ``i``, if anything is to become of it."""
        group = self._group(i)
        if self.entries[i].config is None or group[0] in self._tried:
            return
        if self._report_progress is not None:
            self._report_progress(f"rounding {self.entries[i].name}", len(self._tried), len(self._places))
        self._tried[group[0]] = {name: self._try(name, i, statistics, calibrated) for name in self._plans}

    def _try(self, name: str, i: int, statistics: InputStatistics, calibrated: bool) -> _Trial:
        order = [i, *(j for j in self._group(i) if j != i)]  # the one with data decides
        layers = [self._layers[j] for j in order]
        replacement = Replacement(self._model, [self._plans[name][j] for j in order], list(layers))
        floats = [_current_weight(self._model, layer) for layer in layers]
        try:
            replacement.apply(0, statistics, calibrated)
            for place in range(1, len(order)):
                replacement.apply(place)
            tried = [_current_weight(self._model, layer) for layer in layers]
        finally:
            _put(self._model, layers, floats)
        return _Trial(layers, floats, tried, replacement.entries[0].loss)

    def compare(self, batches: Sequence[Batch]) -> int:
        """Find the divergence of each trial; gives the tokens that were compared."""
        trials = [(i, name, trial) for i, tried in self._tried.items() for name, trial in tried.items()]

        def on_progress(done: int, total: int) -> None:
            if self._report_progress is not None:
                i, name, _ = trials[(done - 1) % len(trials)]
                self._report_progress(f"{self.entries[i].name} as {name}", done, total)

        changes = [lambda trial=trial: trial.within(self._model) for _, _, trial in trials]
        found, tokens = divergences(self._model, batches, changes, on_progress)
        for (_, _, trial), kl in zip(trials, found, strict=True):
            trial.kl = kl
        return tokens

    def costs(self) -> tuple[LayerCosts, ...]:
        """Of every layer, in the order of the model."""
        found = []
        for i in sorted(self._tried):
            *lead, n, k = self.entries[i].shape
            matrices = math.prod(lead)
            names = tuple(name for j in self._group(i) for name in self.entries[j].names)
            costs = {
                name: Cost(matrices * _bits(self._target(name, i), n, k), t.error, t.kl) for name, t in self._tried[i].items()
            }
            found.append(LayerCosts(names, (matrices * n, k), costs))
        return tuple(found)

    def _target(self, name: str, i: int) -> LayerConfig:
        config = self._plans[name][i].config
        assert config is not None
        return config


class _Trial:
    """What is ``tried`` in the places of ``layers``, which hold ``floats``, and what it costs."""

    def __init__(
        self, layers: Sequence[Layer], floats: Sequence[_LayerWeight], tried: Sequence[_LayerWeight], error: float | None
    ) -> None:
        self._layers, self._floats, self._tried = layers, floats, tried
        self.error, self.kl = error, None

    kl: float | None

    @contextlib.contextmanager
    def within(self, model: nn.Module) -> Iterator[None]:
        """Within the block the model is quantized here."""
        try:
            _put(model, self._layers, self._tried)
            yield
        finally:
            _put(model, self._layers, self._floats)


def _current_weight(model: nn.Module, layer: Layer) -> _LayerWeight:
    """The module of ``layer`` as it is in ``model``, or its parameter, where that is quantized in a module that stays."""
    if layer.is_parameter:
        return layer.module.get_parameter(layer.attribute)
    return model.get_submodule(layer.name)


def _put(model: nn.Module, layers: Sequence[Layer], originals: Sequence[_LayerWeight]) -> None:
    for layer, current in zip(layers, originals, strict=True):
        if isinstance(current, nn.Module):
            replace_module(model, layer.names, current)
        else:
            layer.module._parameters[layer.attribute] = current


def _bits(config: LayerConfig, n: int, k: int) -> int:
    """Stored bits of a weight [n, k]."""
    return n * config.weight.row_bits(k) + (32 if config.weight.outer else 0)
