"""Plans as values: what becomes of each layer of a model, and what is known of it once that is done."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import asdict, dataclass, field
from typing import Any

from .layer_config import LayerConfig
from .layer_groups import elided, grouped
from .recipe import Recipe
from .rewrites.rescale_record import Rescaled

__all__ = ["LayerPlan", "Plan"]


@dataclass(frozen=True)
class LayerPlan:
    """One layer of a plan.

    ``config`` is None for a layer that stays as it is, and ``reason`` says why. ``kernels`` and ``refusals`` map the
    rows of an input (1, 16, 512) to the kernel that will run and to (kernel, why it refused) of each before it; ``layout``
    is the arrangement of the bytes that they read.

    What is known when it was carried out, and no part of the plan: ``loss``, the squared error of the layer's outputs over
    their square on calibration data (tr(E G E^T) / tr(W G W^T), G the mean of x x^T, E against W also where a rounder aimed at
    more), ``notes``, and what ``rewrites`` did to the layer's input.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    config: LayerConfig | None
    reason: str
    bytes_before: int
    bytes_after: int
    bits_per_weight: float
    names: tuple[str, ...] = ()
    tied_to: str | None = None
    kernels: dict[int, str] = field(default_factory=dict)
    refusals: dict[int, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    layout: str = "canonical"
    loss: float | None = field(default=None, compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)
    rewrites: tuple[Rescaled, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Plan:
    """What becomes of each layer of a model, in the order of its modules; ``notes`` on how it was carried out, and the ``rows``
    (and ``tokens``, where they are that) of the data that was looked at: ``calibration``, None for none."""

    recipe: Recipe
    layers: tuple[LayerPlan, ...]
    notes: tuple[str, ...] = field(default=(), compare=False)
    calibration: dict[str, int] | None = field(default=None, compare=False)

    @property
    def quantized(self) -> tuple[LayerPlan, ...]:
        """The layers that are quantized."""
        return tuple(layer for layer in self.layers if layer.config is not None)

    @property
    def skipped(self) -> tuple[LayerPlan, ...]:
        """The layers that stay as they are, each with its reason."""
        return tuple(layer for layer in self.layers if layer.config is None)

    @property
    def bytes_before(self) -> int:
        """Bytes of the weights of all these layers; a tied weight counts once."""
        return sum(layer.bytes_before for layer in self.layers if layer.tied_to is None)

    @property
    def bytes_after(self) -> int:
        return sum(layer.bytes_after for layer in self.layers if layer.tied_to is None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        layers = []
        for layer in self.layers:
            entry = asdict(layer)
            entry["config"] = None if layer.config is None else layer.config.to_dict()
            layers.append(entry)
        return {
            "recipe": self.recipe.to_dict(),
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "layers": layers,
            "notes": list(self.notes),
            "calibration": self.calibration,
        }

    def summary(self, width: int = 80) -> str:
        """Like layers as one, in lines of ``width`` characters: ``str(plan)`` has a line for each layer."""
        lines = []
        for name, group in grouped(self.layers, lambda layer: layer.name, _alike):
            layer, count = group[0], f"{len(group)} x " if len(group) > 1 else ""
            shape = count + " x ".join(map(str, layer.shape))
            lines.append(f"{elided(name, width - len(shape) - 2):{width - len(shape) - 2}}  {shape}")
            if layer.config is None:
                lines.append(elided(f"    stays {layer.dtype}: {layer.reason}", width))
                continue
            before, after = (sum(getattr(one, field) for one in group) for field in ("bytes_before", "bytes_after"))
            lines.append(
                elided(f"    {layer.config}, {layer.bits_per_weight:.2f} bits, {_size(before)} -> {_size(after)}", width)
            )
            losses = [one.loss for one in group if one.loss is not None]
            if losses:
                lines.append(elided(f"    loss {min(losses):.1e} to {max(losses):.1e}", width))
            for kernel in dict.fromkeys(layer.kernels.values()):
                at = ", ".join(str(m) for m, other in layer.kernels.items() if other == kernel)
                lines.append(elided(f"    M = {at}: {kernel}", width))
        return "\n".join([*lines, *self._ending()])

    def __str__(self) -> str:
        width = max((len(layer.name) for layer in self.layers), default=0)
        lines = []
        for layer in self.layers:
            shape = "x".join(map(str, layer.shape))
            if layer.config is None:
                lines.append(f"{layer.name:{width}}  {shape:>12}  stays {layer.dtype}: {layer.reason}")
                continue
            kernels = " ".join(f"M={m}:{kernel}" for m, kernel in layer.kernels.items())
            tied = f" ({layer.reason})" if layer.reason else ""
            tied += "" if layer.loss is None else f", loss {layer.loss:.2e}"
            tied += "".join(f"; {note}" for note in (*map(str, layer.rewrites), *layer.notes))
            if layer.layout != "canonical":
                kernels += f" from {layer.layout}"
            lines.append(
                f"{layer.name:{width}}  {shape:>12}  {layer.config}, {layer.bits_per_weight:.2f} bits, "
                f"{layer.bytes_before:,} -> {layer.bytes_after:,} bytes, {kernels}{tied}"
            )
        return "\n".join([*lines, *self._ending()])

    def _ending(self) -> list[str]:
        lines = []
        if self.recipe.rewrites:
            lines.append(f"rewritten before: {', '.join(map(str, self.recipe.rewrites))}")
        lines += self.notes
        ratio = self.bytes_before / max(self.bytes_after, 1)
        lines.append(
            f"{len(self.quantized)} of {len(self.layers)} layers quantized, "
            f"{self.bytes_before:,} -> {self.bytes_after:,} bytes ({ratio:.2f} times smaller)"
        )
        return lines


def _alike(layer: LayerPlan) -> Hashable:
    """What layers of one line of a summary have in common."""
    return layer.shape, layer.dtype, str(layer.config), layer.reason, tuple(layer.kernels.items()), layer.layout


def _size(size: int) -> str:
    for unit, of in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= of:
            return f"{size / of:.1f} {unit}"
    return f"{size} bytes"
