"""Fusing: layers that read one tensor multiply it in one call, as if they were one layer.

At batch 1 a small layer costs mostly its launch, and three small ones (query, key, value) cost three. Their weights are laid
one behind the other; each keeps its module, its name and its rows, so that a model looks and saves as before. The first of
them to be called with a tensor multiplies it by all, and the others hand out their part when they are called with the very
same tensor. One that is called with another multiplies it by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from lowbit_kernels.layouts import LAYOUTS

from .ambient import isolated
from .linear import QLinear
from .tensor import QTensor
from .tensor_ops import row_range

__all__ = ["Fused", "fuse_"]

_PARTS = ("packed", "scale", "zero_point")


@isolated()
def fuse_(model: nn.Module, *args: Any, **kwargs: Any) -> list[tuple[str, ...]]:
    """Fuse the quantized linear layers of ``model`` that read the same tensors; returns their names, group by group.

    ``model(*args, **kwargs)`` is run once to see which those are: layers that are called once each with one tensor. They are
    fused where they have one scheme, activation scheme and device, and either all or none a bias; schemes whose weights have a
    scale as a whole (``outer``) and numbers of rows that a layout cannot put side by side are left as they are. Layers of
    different layouts become canonical. Moving the model or exchanging a weight takes a group apart again.
    """
    names: dict[QLinear, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, QLinear):
            names.setdefault(module, name)
    with _reading(names) as read:
        model(*args, **kwargs)
    found = []
    for layers in _groups(read):
        Fused(layers)
        found.append(tuple(names[layer] for layer in layers))
    return found


@contextlib.contextmanager
def _reading(layers: dict[QLinear, str]) -> Iterator[dict[QLinear, list[Tensor]]]:
    """What each layer reads while the block runs. A tensor that changes between two readers is as good as two."""
    read: dict[QLinear, list[Tensor]] = {}
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def note(layer: QLinear, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs["x"]
        same, before = seen.setdefault(id(x), (x, x.clone()))  # held, so that no other tensor takes its id
        read.setdefault(layer, []).append(same if torch.equal(before, x) else x.clone())

    with contextlib.ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.register_forward_pre_hook(note, with_kwargs=True).remove)
        yield read


def _groups(read: dict[QLinear, list[Tensor]]) -> list[list[QLinear]]:
    """Layers that can be fused, in the order in which they were called."""
    groups: dict[Any, list[QLinear]] = {}
    for layer, tensors in read.items():
        if len(tensors) == 1 and _may_be_fused(layer):
            groups.setdefault((id(tensors[0]), *_kind(layer)), []).append(layer)
    return [layers for layers in groups.values() if len(layers) > 1]


def _may_be_fused(layer: QLinear) -> bool:
    plain = layer.transform is None and layer.weight.outer is None and layer.fused is None and not layer._forward_hooks
    return plain and layer.out_features % LAYOUTS[layer.weight.byte_layout].rows == 0


def _kind(layer: QLinear) -> tuple[Any, ...]:
    static = None if layer.input_scale is None else float(layer.input_scale)
    weight = layer.weight
    what = weight.spelling, layer.in_features, weight.dtype, weight.device
    return *what, layer.bias is None, str(layer.activation), static


class Fused:
    """Layers whose weights lie one behind the other; ``whole`` is the layer that they are together."""

    def __init__(self, layers: list[QLinear]) -> None:
        first, sizes = layers[0], [layer.out_features for layer in layers]
        layout = first.weight.byte_layout if len({layer.weight.byte_layout for layer in layers}) == 1 else "canonical"
        weights = [layer.weight._arranged(layout) for layer in layers]
        parts: dict[str, Tensor | None] = {name: _joined([getattr(weight, name) for weight in weights]) for name in _PARTS}
        shape, bias = (sum(sizes), first.in_features), _joined([layer.bias for layer in layers])
        what = (None, first.scheme, shape, first.weight.dtype, layout)
        weight = QTensor(parts["packed"], parts["scale"], parts["zero_point"], *what).to_layout(layout)
        self.whole = QLinear(weight, bias, first.activation, first.input_scale)
        self.whole.train(first.training)
        self._layers, self._sizes = [ref(layer) for layer in layers], sizes
        self._x: Tensor | None = None
        self._version: int | None = None  # of x, which tells whether it was changed; tensors of inference mode have none
        self._ready: dict[int, Tensor] = {}
        start = 0
        for i, (layer, size) in enumerate(zip(layers, sizes, strict=True)):
            rows = slice(start, start + size)
            layer.weight._take(row_range(self.whole.weight, rows.start, rows.stop))
            layer.weight.keeps_layout = True
            layer.fused, layer._place = self, i
            start += size

    def part(self, place: int, x: Tensor) -> Tensor:
        """The product of ``x`` and the layer at ``place``."""
        version = None if is_compiling() or x.is_inference() else x._version
        if self._x is x and self._version == version and place in self._ready:
            y = self._ready.pop(place)
            if not self._ready:
                self._x = None
            return y
        self._x, self._version = x, version
        self._ready = dict(enumerate(self.whole(x).split(self._sizes, -1)))
        return self._ready.pop(place)

    def take_apart(self) -> None:
        """Each layer is by itself again; its rows stay where they are."""
        for layer in filter(None, (layer() for layer in self._layers)):
            layer.fused = None
            layer.weight.keeps_layout = False


def _joined(parts: list[Any]) -> nn.Parameter | None:
    if parts[0] is None:
        return None
    return nn.Parameter(torch.cat([part.detach() for part in parts]), requires_grad=False)
