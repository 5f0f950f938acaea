"""Layers to measure: quantized as a user would, of any size at once, in copies that leave no cache warm."""

from __future__ import annotations

import torch
from torch import nn

from lowbit import QLinear, QTensor, quantize_
from lowbit.recipe import Recipe

from .cold_cache import copies_of

__all__ = ["BenchLayer"]

_ROWS = 256  # of a weight are drawn; the others repeat them, since speed does not depend on it and quantizing does


class BenchLayer:
    """A quantized layer [n, k] whose output is about as large as its input.

    ``layout``: of its bytes; ``"default"`` leaves it to the layer. Raises ``ValueError`` where ``recipe`` leaves such a layer
    as it is, or there is no such layout.
    """

    def __init__(
        self, recipe: Recipe, n: int, k: int, device: torch.device, dtype: torch.dtype = torch.bfloat16, layout: str = "default"
    ) -> None:
        rows = _ROWS if n % _ROWS == 0 else n
        small = nn.Sequential(nn.Linear(k, rows, bias=False, device=device, dtype=dtype))
        nn.init.normal_(small[0].weight, std=k**-0.5)
        quantize_(small, recipe)
        if not isinstance(small[0], QLinear):
            raise ValueError(f"recipe {recipe.name!r} leaves a linear layer as it is")
        self._activation, self._input_scale = small[0].activation, small[0].input_scale
        weight = small[0].weight.canonical()
        zero = None if weight.zero_point is None else weight.zero_point.repeat(n // rows, 1)
        parts = weight.packed.repeat(n // rows, 1), weight.scale.repeat(n // rows, 1), zero, weight.outer
        weight = QTensor(*parts, weight.scheme, (n, k), weight.dtype)
        self.layer = self._module(weight if layout == "default" else weight.to_layout(layout))

    def _module(self, weight: QTensor) -> QLinear:
        return QLinear(weight, None, self._activation, self._input_scale)

    @property
    def nbytes(self) -> int:
        return self.layer.weight.nbytes

    def copies(self, cold: bool = True) -> list[QLinear]:
        """As many copies of the layer, at addresses of their own, as leave the last-level cache cold; or one."""
        weight = self.layer.weight
        return [self._module(weight.clone()) for _ in range(copies_of(self.nbytes, weight.device, cold))]
