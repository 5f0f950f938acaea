"""Rounding a layer and putting what came of it in the layer's place."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from .embedding import QEmbedding
from .expert_rounding import RoundedExpert, join_experts, round_expert, round_experts
from .layer_config import LayerConfig
from .layers import Layer, replace_module
from .linear import QLinear
from .module_attributes import transfer_attributes
from .placement.hooks import attach_hook, detach_hook
from .plans import LayerPlan
from .quantized_module import QuantizedModule
from .rewrites.rescale_record import Rescaled
from .rounding import RoundedWeight, round_weight, static_scale
from .statistics import Statistics
from .tensor import QTensor, check_weight
from .torch_state import isolated

__all__ = [
    "CompletedLayer",
    "RewriteOnly",
    "Progress",
    "Replacement",
    "quantized_layer",
    "replace_layers",
]

Progress = Callable[[LayerPlan, int, int], None]
InputStatistics = Statistics | Sequence[Statistics | None] | None
"""Of what a layer reads, or of what each of its experts does; None for an expert, or a layer, that nothing reached."""

UNREACHED = "no calibration data reached it: rounded without"
NO_STATISTICS = "no statistics are taken of what single parameters read: rounded without"
NO_STATIC_SCALE = "no calibration data reached it: its input's scales are found as it comes"

_LOG = logging.getLogger("lowbit")


class CompletedLayer(NamedTuple):
    """What is known of a layer that an earlier run replaced."""

    loss: float | None
    notes: tuple[str, ...]
    rewrites: tuple[Rescaled, ...] = ()


class Replacement:
    """Carries out ``entries``, each for the layer at its place in ``layers``, which is emptied as it goes.

    Making one checks every weight, before the first is changed; :meth:`apply` replaces one. ``entries`` then says what
    was done. Arguments as those of :func:`lowbit.quantize_`; ``trim`` is called when large tensors have been let go.
    """

    def __init__(
        self,
        model: nn.Module,
        entries: Sequence[LayerPlan],
        layers: list[Layer],
        device: str | torch.device | None = None,
        keep_on_device: bool = False,
        progress: Progress | None = None,
        trim: Callable[[], None] = lambda: None,
    ) -> None:
        self.entries = list(entries)
        self._model, self._layers, self._progress = model, layers, progress
        self._device, self._keep, self._trim = device, keep_on_device, trim
        self._rounded_weights: dict[int, QTensor] = {}  # by the identity that a weight which several layers read had here
        self._keys = [layer.identity for layer in layers]
        counts = Counter(key for key, entry in zip(self._keys, entries, strict=True) if entry.config is not None)
        self._shared = {key for key, count in counts.items() if count > 1}
        self._total = sum(entry.config is not None for entry in entries)
        self._count = 0

    def check(self) -> None:
        """Raises ``ValueError`` that names a weight without numbers, or with numbers that are not finite."""
        for entry, layer in zip(self.entries, self._layers, strict=True):
            if entry.config is None:
                continue
            values = layer.values
            if values.is_meta:
                raise ValueError(f"{entry.name} is on the meta device and has no values: load the model first")
            check_weight(values, _named(layer))

    def apply(self, i: int, statistics: InputStatistics = None, calibrated: bool = False) -> None:
        """Replace the layer at place ``i``, if anything is to become of it: :meth:`round` and :meth:`place`."""
        if self.entries[i].config is None:
            self._layers[i] = None  # type: ignore[call-overload]  # the float weight goes with it
        else:
            self.place(i, self.round(i, statistics, calibrated))

    def apply_all(self) -> None:
        """:meth:`apply` every entry, without data."""
        for i in range(len(self.entries)):
            self.apply(i)

    def round(self, i: int, statistics: InputStatistics = None, calibrated: bool = False) -> RoundedWeight:
        """What becomes of the layer at place ``i``, which stays as it is until :meth:`place`.

        ``statistics`` of its inputs; ``calibrated``: that there is data, so that a layer without statistics was not reached.
        """
        entry, layer = self.entries[i], self._layers[i]
        assert entry.config is not None
        if self._keys[i] in self._rounded_weights:
            rounded = RoundedWeight(self._rounded_weights[self._keys[i]])
        else:
            rounded = self._round(entry, layer, entry.config, statistics)
            if calibrated and statistics is None and layer.kind != "embedding":
                rounded = rounded._replace(notes=(*rounded.notes, NO_STATISTICS if layer.is_parameter else UNREACHED))
        if entry.config.activation_scale != "static":
            return rounded
        if not isinstance(statistics, Statistics):
            return rounded._replace(notes=(*rounded.notes, NO_STATIC_SCALE))
        return rounded._replace(input_scale=static_scale(statistics, entry.config))

    def round_expert(self, i: int, expert: int, statistics: Statistics | None) -> RoundedExpert:
        """What becomes of one matrix of the experts at place ``i``; :meth:`join` puts those of all together."""
        entry, layer = self.entries[i], self._layers[i]
        config = entry.config
        assert config is not None
        with self._naming(entry):
            matrix = layer.values.detach()[expert]
            check_weight(matrix, _named(layer))
            rounded = round_expert(self._on_device(matrix), config, statistics, getattr(torch, entry.dtype))
        if rounded.weight.device != matrix.device and not self._keep:
            return rounded._replace(weight=moved(rounded.weight, matrix.device))
        return rounded

    def join(self, i: int, experts: Sequence[RoundedExpert]) -> RoundedWeight:
        """What becomes of the experts at place ``i``, of whose matrices these are all."""
        config = self.entries[i].config
        assert config is not None
        return join_experts(experts, config, calibrated=True)

    def place(self, i: int, rounded: RoundedWeight) -> None:
        """Put what :meth:`round` gave in place of the layer, whose float weight goes."""
        entry, key = self.entries[i], self._keys[i]
        layer, self._layers[i] = self._layers[i], None  # type: ignore[call-overload]
        assert entry.config is not None
        weight = self._rounded_weights.get(key, rounded.weight)
        if weight.device != layer.home and not self._keep:  # another process rounded it
            weight = moved(weight, layer.home)
        hook = detach_hook(layer.module, layer.attribute)
        if layer.is_parameter:
            parameter = _put(layer, weight)
            attach_hook(layer.module, hook, layer.attribute)
        else:
            replacement = quantized_layer(layer, weight, entry.config, rounded.input_scale)
            parameter = replacement.weight
            replace_module(self._model, layer.names, replacement)
            attach_hook(replacement, hook)
        if key in self._shared:
            self._rounded_weights[key] = parameter  # so that the next layer shares these very parameters
        entry_now = self.entries[i]
        self._finish(i, CompletedLayer(rounded.loss, (*entry_now.notes, *rounded.notes), entry_now.rewrites))

    @property
    def quantizes(self) -> bool:
        """Whether layers are replaced by rounded ones."""
        return True

    def note(self, i: int, rewrites: tuple[Rescaled, ...], notes: tuple[str, ...]) -> None:
        """What was done to the layer at place ``i`` before it is rounded."""
        self.entries[i] = dataclasses.replace(self.entries[i], rewrites=rewrites, notes=notes)

    def mark_completed(self, i: int, completed: CompletedLayer) -> None:
        """The layer at place ``i`` has been replaced already."""
        self._layers[i] = None  # type: ignore[call-overload]
        self._finish(i, completed)

    def _finish(self, i: int, completed: CompletedLayer) -> None:
        self._count += 1
        self.entries[i] = dataclasses.replace(
            self.entries[i], loss=completed.loss, notes=completed.notes, rewrites=completed.rewrites
        )
        entry = self.entries[i]
        _LOG.debug("%s: %s, loss %s (%d of %d)", entry.name, entry.config, entry.loss, self._count, self._total)
        if self._progress is not None:
            self._progress(entry, self._count, self._total)

    def _round(self, entry: LayerPlan, layer: Layer, config: LayerConfig, statistics: InputStatistics) -> RoundedWeight:
        weight = layer.values.detach()
        check_weight(weight, _named(layer))  # it may have come since the others were checked
        origin, dtype = weight.device, getattr(torch, entry.dtype)
        weight = self._on_device(weight)
        with self._naming(entry):
            if isinstance(statistics, Sequence):
                rounded = round_experts(weight, config, statistics, dtype, calibrated=True)
            elif weight.dim() > 2 and config.rounder != "rtn":
                rounded = round_experts(weight, config, None, dtype)
            else:
                rounded = round_weight(weight, config, statistics, dtype)
        if isinstance(statistics, Statistics):
            self._trim()
            dense = rounded.weight.dequantize(torch.promote_types(weight.dtype, torch.float32))
            rounded = rounded._replace(loss=statistics.to(weight.device).output_error(weight, dense))
        if rounded.weight.device != origin and not self._keep:
            return rounded._replace(weight=moved(rounded.weight, origin))
        return rounded

    def _on_device(self, weight: Tensor) -> Tensor:
        return weight if self._device is None else weight.to(self._device)

    @contextlib.contextmanager
    def _naming(self, entry: LayerPlan) -> Iterator[None]:
        """Errors within the block name the layer of ``entry``."""
        try:
            yield
        except ValueError as error:
            raise ValueError(f"{entry.name}: {error} ({self._count} of {self._total} layers are quantized)") from error


class RewriteOnly(Replacement):
    """Leaves every layer the float layer that it is: for a model that is only rewritten."""

    @property
    def quantizes(self) -> bool:
        return False

    def apply(self, i: int, statistics: InputStatistics = None, calibrated: bool = False) -> None:
        entry = self.entries[i]
        if entry.config is not None:
            self._finish(i, CompletedLayer(None, entry.notes, entry.rewrites))


@isolated()
def replace_layers(model: nn.Module, entries: Sequence[LayerPlan], layers: list[Layer]) -> None:
    """Carry out ``entries``, each for the layer at its place in ``layers``, which is emptied, without data."""
    replacement = Replacement(model, entries, layers)
    replacement.check()
    replacement.apply_all()


def moved(weight: QTensor, device: torch.device | str) -> QTensor:
    """``weight`` on ``device``."""
    rounded = weight.to(device)
    assert isinstance(rounded, QTensor)
    return rounded


def _named(layer: Layer) -> str:
    return layer.name if layer.is_parameter else f"{layer.name}.weight"


def _put(layer: Layer, weight: QTensor) -> QTensor:
    """Give the module of ``layer``, which stays, ``weight`` as its parameter."""
    if not isinstance(weight, nn.Parameter):
        stored = weight.transpose(-1, -2) if layer.transposed else weight
        weight = cast(QTensor, nn.Parameter(stored, requires_grad=False))
        if layer.kind == "experts":
            weight.read_by("linear")
    layer.module._parameters[layer.attribute] = cast(nn.Parameter, weight)
    return weight


def quantized_layer(layer: Layer, weight: QTensor, config: LayerConfig, input_scale: Tensor | None = None) -> QuantizedModule:
    """The module that takes the place of ``layer``, with all that it carries."""
    module: QuantizedModule
    if isinstance(layer.module, nn.Embedding):
        module = QEmbedding(weight, getattr(layer.module, "padding_idx", None))
    else:
        # The very parameter: another layer may read it, and an optimizer may hold it.
        bias = layer.module._parameters.get("bias")
        scale = None if input_scale is None else input_scale.to(weight.device)
        module = QLinear(weight, bias, config.activation, scale, layer.module._modules.get("transform"))
    transfer_attributes(layer.module, module)
    return module
