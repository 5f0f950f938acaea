"""Which layer gets which scheme: the least loss within a budget of bits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .knapsack import Option, cheapest
from .sensitivities import Sensitivity, as_recipe_value, cost_of

__all__ = ["allocate"]


def allocate(sensitivity: Sensitivity | Mapping[str, Any], bits: float = 3.5, *, by: str | None = None) -> dict[str, Any]:
    """The schemes of all layers for which the sum of their costs is least, at ``bits`` a weight or fewer on average.

    Args:
        sensitivity: what :func:`lowbit.sensitivity` gave, or its ``to_dict()``.
        bits: stored bits a weight on average over the layers in it, scales and zero points counted.
        by: ``"kl"`` or ``"error"``, the cost to add up; ``"kl"`` where it was measured.

    Returns a mapping from the name of each layer to the name of a scheme (or to the fields of a layer config that has none),
    which :func:`lowbit.quantize_` takes as it is; ``Recipe.of(mapping).to_yaml()`` makes a recipe of it. Exact: no other choice
    within the budget has a smaller sum (:func:`lowbit.mixed_precision.knapsack.cheapest`). That losses of layers add up is
    itself an approximation, and the better one the smaller they are.

    Raises ``ValueError`` for a budget below what the smallest schemes take, and for costs that were not measured.
    """
    found = sensitivity if isinstance(sensitivity, Sensitivity) else Sensitivity.from_dict(sensitivity)
    by = found.by if by is None else by
    if not (isinstance(bits, (int, float)) and math.isfinite(bits) and bits > 0):
        raise ValueError(f"bits must be a positive number of bits a weight, got {bits!r}")
    weights = sum(layer.weights for layer in found.layers)
    names = list(found.configs)
    classes = [[Option(layer.costs[name].bits, cost_of(layer, name, by)) for name in names] for layer in found.layers]
    least = sum(min(option.size for option in options) for options in classes)
    capacity = math.floor(bits * weights + 1e-6)
    if least > capacity:
        raise ValueError(
            f"{bits:g} bits a weight are too few: the smallest of {', '.join(names)} take {least / weights:.4g}; give more "
            "bits, or measure a smaller scheme too"
        )
    choice = cheapest(classes, capacity)
    chosen = [names[i] for i in choice]
    pairs = zip(found.layers, chosen, strict=True)
    return {name: as_recipe_value(scheme, found.configs[scheme]) for layer, scheme in pairs for name in layer.names}
