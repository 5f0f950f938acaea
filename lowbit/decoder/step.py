"""Decoder layers whose steps of few tokens are one call of :mod:`lowbit_kernels.cpu_decoder`.

A layer that :func:`fuse_layers_` has found gets a class of its own, derived from the one it had, that looks at each call: where
everything is as the step takes it the step runs, else the modules do, as before. Nothing is kept of a call.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from lowbit_kernels import cpu_decoder, inlined, registry, shortcut

from .known import Known, Layout, Part
from .room import Room
from .structure import structure_of

__all__ = ["NAME", "Step", "fuse_layers_"]

NAME = "_lowbit_step"
_FEW = 16  # tokens
_ORDER = ("position_embeddings", "past_key_values", "attention_mask")
_READ = frozenset({*_ORDER, "position_ids", "use_cache", "cache_position"})  # of which known modules do not read the last three
_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})


def fuse_layers_(model: nn.Module) -> None:
    """Decoder layers of ``model`` on a CPU whose structure is known step as one call from now on."""
    for layer in list(model.modules()):
        structure = structure_of(layer) if "self_attn" in layer._modules else ""
        if isinstance(structure, str) or any(linear.weight.packed.device.type != "cpu" for linear in structure.linears):
            continue
        kind: Any = type(layer)
        if NAME not in kind.__dict__:
            layer.__class__ = _stepping(kind)
        object.__setattr__(layer, NAME, Step([layer], [Part(layer, structure)]))


def _new(kind: Any) -> Any:
    return kind.__new__(kind)


@functools.cache
def _stepping(kind: Hashable) -> Any:
    """The class ``kind`` with a forward call that steps where it can."""
    base: Any = kind
    modules = base.forward

    @functools.wraps(modules)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_dynamo_compiling() and len(args) == 1:
            step: Step | None = self._lowbit_step
            if step is not None and step.layers[0] is self and (y := step(args[0], kwargs)) is not None:
                return y
        return modules(self, *args, **kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        state = {name: value for name, value in self.__dict__.items() if name != NAME}
        return _new, (base,), state  # copies run their modules

    made = type(base.__name__, (base,), {"forward": forward, "__reduce_ex__": reduce, "__module__": base.__module__, NAME: None})
    made.__qualname__, made.__doc__ = base.__qualname__, base.__doc__
    return made


class Step:
    """The step of one layer, or of several one behind the other, with nothing of a call."""

    def __init__(self, layers: list[nn.Module], parts: Sequence[Part]) -> None:
        from transformers import cache_utils
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self.layers, self.parts = layers, parts
        self._known = Known(parts)
        self._layout = Layout(self._known)  # exchanged as one, since threads may share a layer
        self._numbers = [part.attention.layer_idx for part in parts]
        self._configs = list({id(part.attention.config): part.attention.config for part in parts}.values())
        self._caches = frozenset({cache_utils.DynamicCache, cache_utils.StaticCache})
        self._growing, self._fixed = cache_utils.DynamicLayer, cache_utils.StaticLayer
        self._functions: Any = ALL_ATTENTION_FUNCTIONS
        self._sdpa = sdpa_attention_forward

    def __call__(self, x: Any, named: dict[str, Any]) -> Tensor | None:
        """What the layers make of ``x``; None where their modules have to run."""
        y = self._tried(x, named)
        # Of several layers that do not step together each says why it does not step by itself.
        if registry.watched.get() and type(x) is Tensor and x.dim() == 3 and (isinstance(y, Tensor) or len(self.layers) == 1):
            self._note(x, None if isinstance(y, Tensor) else y)
        return None if isinstance(y, str) else y

    def _note(self, x: Tensor, reason: str | None) -> None:
        """In the open traces: what ran, or why the modules did."""
        size, rows = x.shape[-1], x.shape[0] * x.shape[1]
        kernel, contract = ("modules", reason) if reason else ("cpu_decoder_step", self._layout.prepared(rows, x.dtype)[1])
        for part in self.parts:
            scheme = str(part.linears[0][1].scheme)
            registry.note("decoder_layer", kernel, contract, scheme, x.dtype, x.device.type, rows, size, size)

    def _tried(self, x: Any, named: dict[str, Any]) -> Tensor | str:
        """What the layers make of ``x``, or why their modules have to run."""
        if torch.is_grad_enabled() or shortcut.signature(x, False, None) is None or inlined.active():
            return "something looks at operators"
        if registry.is_strict():
            return "strict"
        shape = x.shape
        if len(shape) != 3 or x.dtype not in _FLOATS or not x.is_cpu:
            return "x"
        if (rows := shape[0] * shape[1]) > _FEW:
            return f"more than {_FEW} tokens"
        for name, value in named.items():
            if value is not None and name not in _READ:
                return "arguments"
        if (reason := self._known.differs()) is not None:
            return reason
        layout = self._layout
        if not layout.holds():
            layout = self._layout = Layout(self._known)
        prepared, _ = layout.prepared(rows, x.dtype)
        if prepared is None:
            return "its products are not by digits"
        return self._run(x.contiguous(), prepared, *(named.get(name) for name in _ORDER))

    def _run(self, x: Tensor, prepared: list[Tensor], turns: Any, cache: Any, mask: Any) -> Tensor | str:
        if self._functions["sdpa"] is not self._sdpa or any(_implementation(config) != "sdpa" for config in self._configs):
            return "attention"
        if type(turns) is not tuple or len(turns) != 2 or not type(turns[0]) is type(turns[1]) is Tensor:
            return "position_embeddings"
        if type(mask) not in (Tensor, type(None)) or (mask is None and x.shape[1] > 1):
            return "no attention_mask"
        if type(cache) not in self._caches or cache.offloading or max(self._numbers) >= len(cache.layers):
            return "cache"
        kept = [cache.layers[number] for number in self._numbers]
        kind = type(kept[0])
        if kind not in (self._growing, self._fixed) or any(type(of) is not kind or not of.is_initialized for of in kept):
            return "cache"
        if not all(type(of.keys) is type(of.values) is Tensor and of.keys.dim() == 4 for of in kept):
            return "cache"
        turns = turns[0].contiguous(), turns[1].contiguous()
        return (self._in_place if kind is self._fixed else self._growing_by)(x, prepared, turns, kept, mask)

    def _in_place(self, x: Tensor, prepared: list[Tensor], turns: Any, kept: list[Any], mask: Tensor | None) -> Tensor | str:
        """Over caches of fixed size, which a mask tells how far they are filled."""
        past, places = int(kept[0].cumulative_length), kept[0].keys.shape[2]
        if mask is None:
            return "no attention_mask"
        if any(int(of.cumulative_length) != past or of.keys.shape[2] != places for of in kept):
            return "cache"
        y = cpu_decoder.steps(x, prepared, turns, [of.keys for of in kept], [of.values for of in kept], past, places, mask)
        if isinstance(y, Tensor):
            for of in kept:
                of.cumulative_length.add_(x.shape[1])
        return y

    def _growing_by(self, x: Tensor, prepared: list[Tensor], turns: Any, kept: list[Any], mask: Tensor | None) -> Tensor | str:
        """Over caches that grow."""
        past, tokens = kept[0].keys.shape[2], x.shape[1]
        for of in kept:
            keys, values = of.keys, of.values
            if (
                keys.shape != values.shape
                or keys.shape[2] != past
                or not keys.dtype == values.dtype == x.dtype
                or not keys.is_cpu
            ):
                return "cache"
        rooms = [Room.of(of, tokens) for of in kept]
        keys, values = [room.keys for room in rooms], [room.values for room in rooms]
        y = cpu_decoder.steps(x, prepared, turns, keys, values, past, past + tokens, mask)
        if isinstance(y, Tensor):
            for room, of in zip(rooms, kept, strict=True):
                room.take(of, tokens)
        return y


def _implementation(config: Any) -> Any:
    """Its name, past a configuration's own way to look for names, which takes long."""
    return object.__getattribute__(config, "__dict__").get("_attn_implementation_internal")
