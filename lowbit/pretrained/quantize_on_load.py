"""Quantizing a model while it is loaded: each weight as soon as it stands in its module."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..layers import Layer, replace_module, tied_groups
from ..planning import planned
from ..plans import LayerPlan
from ..recipe import block_counts
from ..replacement import quantized_layer, replace_layers
from ..rounding import round_weight
from .default_exclusions import apply_fp32_modules
from .float_folder import check_codes, check_load
from .loading_report import Report, missing_report_error, with_load_report
from .parallel import Rounding, is_shared, read_unsharded
from .ties import keep_ties, tie_outline

__all__ = ["QuantizeOnLoad"]

NEW = "new in this model, with random numbers: no file has its weights"


class QuantizeOnLoad:
    """Plans what becomes of ``model``, which is on the meta device, and waits for its weights.

    torch tells of every parameter that a module is given; one that transformers loaded and the plan has is quantized
    there and then, and its float module goes. Weights that several layers read wait until :meth:`finish`, when they are
    tied, and so do those that no file had.

    A layer that no file has, because it is new in this class of model (a head for classification), stays float. Raises
    ``ValueError`` for a recipe that matches nothing, for files that are quantized already, and while loading for a weight with
    NaN or infinity; :class:`~lowbit.CheckpointError` with the names for tensors that the ``files`` lack or have otherwise.
    """

    def __init__(self, model: Any, recipe: Any, device_map: Any, files: Sequence[str] | None = None) -> None:
        if recipe is None:
            raise ValueError("quantization_config says nothing of how to quantize: give lowbit.Config with a recipe")
        if recipe.rewrites:
            name = recipe.rewrites[0].name
            raise ValueError(f"{name} rewrites a model that is loaded, and this one only arrives: load it, then call quantize_")
        if files:
            check_codes(files, model)
        apply_fp32_modules(model, model.config.dtype)
        tie_outline(model)  # a plan has to see the ties
        self._model, self._files = model, files
        self.plan, layers = planned(model, recipe, None, _device(device_map))
        shared = {i for group in tied_groups(layers) for i in group}
        self._pending: dict[tuple[int, str], tuple[LayerPlan, Layer]] = {}
        self._deferred: list[tuple[LayerPlan, Layer]] = []
        for i, (entry, layer) in enumerate(zip(self.plan.layers, layers, strict=True)):
            if entry.config is None:
                continue
            if i in shared:
                self._deferred.append((entry, layer))
            else:
                self._pending[id(layer.module), layer.attribute] = entry, layer
        places = zip(self.plan.layers, layers, strict=True)
        self._bytes = {_named(layer): entry.bits_per_weight / 8 for entry, layer in places if entry.config is not None}
        self._quantized_modules: list[nn.Module] = []
        self._read_handles: list[Any] = []
        self.conversion: Rounding | None = None
        if is_shared(model):
            self._outline()
        self._absent: frozenset[str] | None = None
        self._listen()
        self._kind = type(model)
        model.__class__ = with_load_report(self._kind, self._on_report)

    def _outline(self) -> None:
        """Put quantized layers without numbers in place, which processes then share; each is read whole, rounded and cut."""
        if self._deferred:
            names = " and ".join(entry.name for entry, _ in self._deferred)
            raise ValueError(
                f"{names} share one weight, which cannot be quantized while processes share the model: quantize it first "
                "(lowbit quantize), and load that folder"
            )
        entries = {}
        for entry, layer in self._pending.values():
            assert entry.config is not None
            if layer.is_parameter:
                raise ValueError(
                    f"{entry.name} is a parameter of its own, which cannot be quantized while processes share the model: "
                    "quantize it first (lowbit quantize), and load that folder"
                )
            module = quantized_layer(layer, round_weight(layer.weight, entry.config).weight, entry.config)
            module._is_hf_initialized = True
            replace_module(self._model, layer.names, module)
            self._quantized_modules.append(module)
            entries[f"{entry.name}.weight"] = entry
        self._pending = {}
        self.conversion = Rounding(entries)
        self._read_handles = read_unsharded((module, "weight") for module in self._quantized_modules)

    def is_quantized_here(self, name: str) -> bool:
        return self.conversion is not None and name in self.conversion.entries

    def _on_report(self, model: Any, report: Report) -> None:
        try:
            self._absent = check_load(report, model, self._files)
        except BaseException:
            self._stop_listening()
            raise

    def _listen(self) -> None:
        listener = weakref.ref(self)

        def on_parameter(module: nn.Module, name: str, parameter: Any) -> Any:
            return None if (loader := listener()) is None else loader._on_parameter(module, name, parameter)

        hook = register_module_parameter_registration_hook(on_parameter)
        self._stop_listening = weakref.finalize(self, hook.remove)  # where something else fails

    def _on_parameter(self, module: nn.Module, name: str, parameter: Any) -> Any:
        """What the ``module`` is to be given for ``parameter``; None for that itself."""
        if (id(module), name) not in self._pending or not getattr(parameter, "_is_hf_initialized", False):
            return None
        entry, layer = self._pending.pop((id(module), name))
        module._parameters[name] = parameter
        self._replace([(entry, layer)])
        if layer.is_parameter:
            return module._parameters[name]
        replacement = self._model.get_submodule(entry.name)
        replacement._is_hf_initialized = True
        self._quantized_modules.append(replacement)
        return None

    def _replace(self, found: list[tuple[LayerPlan, Layer]]) -> None:
        try:
            replace_layers(self._model, [entry for entry, _ in found], [layer for _, layer in found])
        except BaseException:
            self._stop_listening()  # a load that fails does not come to finish()
            raise

    def conversions(self) -> list[Any]:
        return []

    def keeps_dtype(self, converter: Any) -> bool:
        return False

    def element_size(self, name: str) -> float | None:
        return self._bytes.get(name)

    def finish(self, model: Any) -> None:
        """Quantize what had to wait."""
        self._stop_listening()
        for handle in self._read_handles:
            handle.remove()
        model.__class__ = self._kind
        if self._absent is None and self._files:
            raise missing_report_error()
        self._skip_new_layers()
        deferred = [*self._deferred, *self._pending.values()]
        for entry, layer in deferred:
            if layer.values.is_meta:
                raise ValueError(
                    f"{entry.name} was sent to disk by device_map before it could be quantized: "
                    "quantize the model first (lowbit quantize), and load that folder"
                )
        self._replace(deferred)
        for module in self._quantized_modules:
            bias = module._parameters.get("bias")
            if bias is not None and not bias.is_meta and not getattr(bias, "_is_hf_initialized", False):
                nn.init.zeros_(bias)  # no file had it, and transformers left it to the module that is gone
        keep_ties(model)
        self._deferred, self._pending = [], {}

    def _skip_new_layers(self) -> None:
        """What no file has is random: a layer of it stays as it is, unless the recipe names it."""
        entries = list(self.plan.layers)
        counts = block_counts(name for entry in entries for name in entry.names)
        for key, (entry, layer) in list(self._pending.items()):
            named = [name if layer.is_parameter else f"{name}.weight" for name in entry.names]
            if layer.weight.is_meta or not any(name in (self._absent or ()) for name in named):
                continue
            rule = self.plan.recipe.rule_for(entry.names, counts)
            if rule is not None and not rule.catch_all:
                raise ValueError(
                    f"{entry.name} has random numbers, because no file has its weights, and pattern {rule} would quantize them: "
                    "train it first, or leave it out of the recipe"
                )
            skipped_entry = replace(
                entry, config=None, reason=NEW, bytes_after=entry.bytes_before, bits_per_weight=8.0 * layer.weight.element_size(),
                kernels={}, refusals={}, layout="canonical",
            )  # fmt: skip
            entries[entries.index(entry)] = skipped_entry
            del self._pending[key]
        self.plan = replace(self.plan, layers=tuple(entries))


def _named(layer: Layer) -> str:
    return layer.name if layer.is_parameter else f"{layer.name}.weight"


def _device(device_map: Any) -> torch.device:
    """Where most of the model will be, to tell its kernels."""
    places = list(device_map.values()) if isinstance(device_map, dict) else [device_map]
    for place in places:
        if isinstance(place, int) or (isinstance(place, (str, torch.device)) and str(place).partition(":")[0] in ("cuda", "cpu")):
            return torch.device(place)
    chosen = isinstance(device_map, str) and torch.cuda.is_available()  # "auto" and its like
    return torch.device("cuda" if chosen else "cpu")
