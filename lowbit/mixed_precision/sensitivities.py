"""What each layer loses under each scheme: a table that is printed, kept as JSON, and read back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..layer_config import LayerConfig
from ..recipe import Recipe

__all__ = ["COSTS", "Cost", "LayerCosts", "Sensitivity", "cost_of", "named_targets", "as_recipe_value"]

COSTS = ("kl", "error")
_FORMAT = 1


@dataclass(frozen=True)
class Cost:
    """What a layer loses under one scheme.

    Attributes:
        bits: stored bits of all its weights, scales and zero points among them; a whole number.
        error: the squared error of its outputs over their square on the data, tr(E G E^T) / tr(W G W^T) for G the mean of
            x x^T; None where no data reached it.
        kl: the mean of KL(float || model) in nats a predicted token, with this layer alone quantized; None where it was not
            measured.
    """

    bits: int
    error: float | None = None
    kl: float | None = None


@dataclass(frozen=True)
class LayerCosts:
    """One weight [N, K] under every ``name`` of the layers that read it, and what it costs under each scheme."""

    names: tuple[str, ...]
    shape: tuple[int, int]
    costs: Mapping[str, Cost]

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def weights(self) -> int:
        """How many numbers it holds."""
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True)
class Sensitivity:
    """What each layer of a model loses under each scheme.

    Attributes:
        configs: what a layer becomes under the scheme of each name.
        layers: in the order of the model.
        tokens: predicted tokens that ``kl`` is the mean of; 0 where it was not measured.
        notes: what to know of how it was measured.
    """

    configs: Mapping[str, LayerConfig]
    layers: tuple[LayerCosts, ...]
    tokens: int = 0
    notes: tuple[str, ...] = ()

    @property
    def by(self) -> str:
        """The finest cost that was measured: ``"kl"``, else ``"error"``."""
        return "kl" if self.tokens else "error"

    def bits_per_weight(self, mapping: Mapping[str, Any]) -> float:
        """Stored bits a weight under ``mapping`` from names of layers to names of schemes, as ``allocate`` gives it."""
        chosen = [layer.costs[self._scheme_of(layer, mapping)].bits for layer in self.layers]
        return sum(chosen) / sum(layer.weights for layer in self.layers)

    def total(self, mapping: Mapping[str, Any], by: str | None = None) -> float:
        """The sum of the costs under ``mapping``: what the model is expected to lose where losses add up."""
        return sum(cost_of(layer, self._scheme_of(layer, mapping), by or self.by) for layer in self.layers)

    def _scheme_of(self, layer: LayerCosts, mapping: Mapping[str, Any]) -> str:
        found = next((mapping[name] for name in layer.names if name in mapping), None)
        for name, config in self.configs.items():
            if found in (name, config) or found == config.to_dict():
                return name
        raise ValueError(f"{layer.name} becomes {found!r:.80}, which was not measured; there are {', '.join(self.configs)}")

    # ---- to and from plain data ------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, as :meth:`from_dict` reads it."""
        return {
            "format": _FORMAT,
            "schemes": {name: config.to_dict() for name, config in self.configs.items()},
            "tokens": self.tokens,
            "notes": list(self.notes),
            "layers": [
                {
                    "names": list(layer.names),
                    "shape": list(layer.shape),
                    "costs": {name: {"bits": c.bits, "error": c.error, "kl": c.kl} for name, c in layer.costs.items()},
                }
                for layer in self.layers
            ],
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Sensitivity:
        """What :meth:`to_dict` gave. Raises ``ValueError`` for anything else."""
        try:
            if data["format"] != _FORMAT:
                raise ValueError(f"the format is {data['format']!r:.20} and this version reads {_FORMAT}: measure it again")
            configs = {str(name): LayerConfig.of(config) for name, config in data["schemes"].items()}
            layers = tuple(_layer(entry, configs) for entry in data["layers"])
            return Sensitivity(configs, layers, int(data["tokens"]), tuple(map(str, data["notes"])))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this is not what Sensitivity.to_dict gives ({type(error).__name__}: {error})") from None

    def __str__(self) -> str:
        width = max(len(layer.name) for layer in self.layers)
        shapes = {layer.name: "x".join(map(str, layer.shape)) for layer in self.layers}
        wide = max(map(len, shapes.values()))
        columns = [max(len(name), 28 if self.tokens else 17) for name in self.configs]
        head = "  ".join(f"{name:>{column}}" for name, column in zip(self.configs, columns, strict=True))
        lines = [f"{'layer':{width}}  {'':{wide}}  {head}"]
        for layer in self.layers:
            cells = (f"{_cell(layer, name):>{column}}" for name, column in zip(self.configs, columns, strict=True))
            lines.append(f"{layer.name:{width}}  {shapes[layer.name]:>{wide}}  {'  '.join(cells)}")
        measured = f", with KL in nats over {self.tokens:,} predicted tokens" if self.tokens else ""
        return "\n".join([*lines, f"bits a weight and the squared error of the outputs over their square{measured}", *self.notes])


def cost_of(layer: LayerCosts, scheme: str, by: str) -> float:
    """The cost of ``layer`` under ``scheme``; ``ValueError`` where it was not measured."""
    if by not in COSTS:
        raise ValueError(f"by must be one of {', '.join(COSTS)}, got {by!r}")
    found = getattr(layer.costs[scheme], by)
    if found is None or not math.isfinite(found):
        reason = "the model gives no finite logits with it" if found is not None else "it was not measured"
        raise ValueError(f"{layer.name} has no {by} under {scheme} ({reason}): choose by {' or '.join({*COSTS} - {by})}")
    return float(found)


def named_targets(schemes: Any) -> dict[str, LayerConfig]:
    """Layer configs by name, from a mapping of names to them, or from a list of names, schemes and layer configs.

    Raises ``ValueError`` for none, two of one name, a recipe of several rules and a layer config that has no name: give it a
    name, as in ``{"my name": config}``.
    """
    if isinstance(schemes, Mapping):
        found = {str(name): LayerConfig.of(value) for name, value in schemes.items()}
    else:
        found = {}
        for value in [schemes] if isinstance(schemes, str) else schemes:
            config = _single_config(Recipe.parse(value), value) if isinstance(value, str) else LayerConfig.of(value)
            name = value if isinstance(value, str) else _short_name(config)
            if name in found:
                raise ValueError(f"{name} stands twice among the schemes")
            found[name] = config
    if not found:
        raise ValueError("no scheme to try: give some, as in ['int3', 'int4']")
    return found


def as_recipe_value(name: str, config: LayerConfig) -> Any:
    """``name`` where it is a name of ``config``, else the fields of ``config``: what stands in a mapping for quantize_."""
    return name if _meaning(name) == config else config.to_dict()


def _meaning(name: str) -> LayerConfig | None:
    try:
        return Recipe.of({"*": name}).rules[0].config
    except (ValueError, TypeError):
        return None


def _single_config(recipe: Recipe, name: str) -> LayerConfig:
    """The one layer config of a recipe for every layer."""
    rule = recipe.rules[0]
    if recipe.rewrites:
        rewrites = ", ".join(map(str, recipe.rewrites))
        raise ValueError(
            f"{name}: {rewrites} changes the whole model and not one layer: measure the rounding alone, and put the rewrite "
            "before the mapping that comes of it, as in lowbit.awq(mapping)"
        )
    if len(recipe.rules) > 1 or not rule.catch_all or rule.blocks is not None or rule.config is None:
        raise ValueError(f"{name} has rules of its own for layers: give schemes, or roundings of them such as gptq(int3)")
    return rule.config


def _short_name(config: LayerConfig) -> str:
    settings = ", ".join([str(config.weight), *(f"{name}={value}" for name, value in config.options)])
    name = str(config.weight) if config.rounder == "rtn" else f"{config.rounder}({settings})"
    if _meaning(name) != config:
        raise ValueError(f"{config} has no short name: give it a name, as in {{'my name': config}}")
    return name


def _layer(entry: Mapping[str, Any], configs: Mapping[str, LayerConfig]) -> LayerCosts:
    costs = {str(name): Cost(int(c["bits"]), c["error"], c["kl"]) for name, c in entry["costs"].items()}
    if costs.keys() != configs.keys():
        raise ValueError(f"{entry['names']} has costs of {', '.join(costs)} and the schemes are {', '.join(configs)}")
    n, k = entry["shape"]
    return LayerCosts(tuple(map(str, entry["names"])), (int(n), int(k)), costs)


def _cell(layer: LayerCosts, name: str) -> str:
    cost = layer.costs[name]
    error = "no data" if cost.error is None else f"{cost.error:.2e}"
    kl = "" if cost.kl is None else f" {cost.kl:.2e}"
    return f"{cost.bits / layer.weights:.2f} {error}{kl}"
