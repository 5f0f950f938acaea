"""A model's decoder layers as one: where all of them step, a model's loop over them is one call.

The models whose layers :mod:`.structure` knows go through ``self.layers[:n]`` once in a forward call and pass each layer the same
arguments. Their list gets a class of its own that answers such a slice with one :class:`DecoderStack`, which steps through all
layers at once or calls them one by one.
"""

from __future__ import annotations

from itertools import repeat
from typing import Any

from torch import nn
from torch.compiler import is_dynamo_compiling

from .step import NAME, DecoderStep
from .structure import loops_over_layers

__all__ = ["DecoderStack", "fuse_stacks_"]

_NAME = "_lowbit_stack"


def fuse_stacks_(model: nn.Module) -> None:
    """Lists of decoder layers of ``model`` all of which step, in a module that goes through them as known models do."""
    for module in list(model.modules()):
        layers: Any = module._modules.get("layers")
        if not isinstance(layers, nn.ModuleList) or not loops_over_layers(module):
            continue
        steps: list[Any] = [layer.__dict__.get(NAME) for layer in layers]
        kinds = set(getattr(getattr(module, "config", None), "layer_types", None) or [""])
        if len(steps) > 1 and all(steps) and len(kinds) == 1:  # which choose the mask of each layer
            if type(layers) is nn.ModuleList:
                layers.__class__ = _Layers
            object.__setattr__(layers, _NAME, DecoderStack(list(layers), steps))


class _Layers(nn.ModuleList):
    """A list of layers that is gone through as one where it is sliced as a whole."""

    _lowbit_stack: DecoderStack | None = None

    def __getitem__(self, idx: Any) -> Any:
        if type(idx) is slice and not is_dynamo_compiling():
            if (stack := self._lowbit_stack) is not None and stack.is_whole(self, idx):
                return (stack,)
            return nn.ModuleList(list(self._modules.values())[idx])
        return super().__getitem__(idx)

    def _get_name(self) -> str:
        return "ModuleList"

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {name: value for name, value in self.__dict__.items() if name != _NAME}
        return _new_list, (), state  # copies run their layers


def _new_list() -> nn.ModuleList:
    return nn.ModuleList.__new__(nn.ModuleList)


class DecoderStack:
    """All layers of a list, called as one of them is."""

    def __init__(self, layers: list[nn.Module], steps: list[DecoderStep]) -> None:
        self._layers, self._steps = layers, steps
        self._kinds, self._dicts = list(map(type, layers)), [layer.__dict__ for layer in layers]
        self._hooks = [hooks for layer in layers for hooks in (layer._forward_hooks, layer._forward_pre_hooks)]
        self._step = DecoderStep(layers, [part for step in steps for part in step.parts])

    def is_whole(self, layers: nn.ModuleList, index: slice) -> bool:
        """Whether ``index`` takes all of ``layers``, and those are the ones that were found."""
        is_full = index.start in (None, 0) and index.step in (None, 1)
        is_full = is_full and (index.stop is None or (type(index.stop) is int and index.stop >= len(self._layers)))
        return is_full and list(layers._modules.values()) == self._layers

    def __call__(self, hidden_states: Any, **named: Any) -> Any:
        y = self._step(hidden_states, named) if self._has_no_hooks() else None
        if y is None:
            y = hidden_states
            for layer in self._layers:
                y = layer(y, **named)
        return y

    def _has_no_hooks(self) -> bool:
        """Whether nobody looks at what one of the layers makes."""
        if any(self._hooks) or any(map(dict.__contains__, self._dicts, repeat("forward"))):
            return False
        return list(map(type, self._layers)) == self._kinds and list(map(dict.get, self._dicts, repeat(NAME))) == self._steps
