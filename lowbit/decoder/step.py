"""Decoder layers whose steps of few tokens are one call of :mod:`lowbit_kernels.cpu_decoder`.

A layer that :func:`fuse_decoders_` has found gets a class of its own, derived from the one it had, that looks at each call: where
everything is as the step takes it the step runs, else the modules do, as before. Nothing is kept of a call.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from lowbit.catalog import changes
from lowbit_kernels import cpu_decoder, inlined, registry, shortcut

from .known import Known, Layout
from .room import Room
from .structure import structure_of

__all__ = ["fuse_decoders_"]

_NAME = "_lowbit_step"
_FEW = 16  # tokens
_ORDER = ("position_embeddings", "past_key_values", "attention_mask")
_READ = frozenset({*_ORDER, "position_ids", "use_cache", "cache_position"})  # of which known modules do not read the last three
_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})


def fuse_decoders_(model: nn.Module) -> list[str]:
    """Decoder layers of ``model`` on a CPU whose structure is known step as one call from now on; returns their names."""
    if cpu_decoder.available() is not None:
        return []
    found = []
    for name, layer in model.named_modules():
        if "self_attn" in layer._modules and (step := _step_of(layer)) is not None:
            kind: Any = type(layer)
            if _NAME not in kind.__dict__:
                layer.__class__ = _stepping(kind)
            object.__setattr__(layer, _NAME, step)
            found.append(name)
    return found


def _step_of(layer: nn.Module) -> Step | None:
    structure = structure_of(layer)
    if isinstance(structure, str) or any(linear.weight.packed.device.type != "cpu" for linear in structure.linears):
        return None
    known = Known(layer, structure)
    return Step(known) if known.differs(layer) in (None, "training") else None


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
            if step is not None and (y := step(self, args[0], kwargs)) is not None:
                return y
        return modules(self, *args, **kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        state = {name: value for name, value in self.__dict__.items() if name != _NAME}
        return _new, (base,), state  # copies run their modules

    made = type(base.__name__, (base,), {"forward": forward, "__reduce_ex__": reduce, "__module__": base.__module__, _NAME: None})
    made.__qualname__, made.__doc__ = base.__qualname__, base.__doc__
    return made


# ---- one layer -------------------------------------------------------------------------------------------------------


class Step:
    """A layer's step, with nothing of a call."""

    def __init__(self, known: Known) -> None:
        from transformers import cache_utils
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self._known = known
        self._layout = Layout(known, changes())  # exchanged as one, since threads may share a layer
        self._caches = frozenset({cache_utils.DynamicCache, cache_utils.StaticCache})
        self._growing, self._fixed = cache_utils.DynamicLayer, cache_utils.StaticLayer
        self._functions: Any = ALL_ATTENTION_FUNCTIONS
        self._sdpa = sdpa_attention_forward

    def __call__(self, layer: nn.Module, x: Any, named: dict[str, Any]) -> Tensor | None:
        """The layer's result; None where its modules have to run."""
        y = self._tried(layer, x, named)
        if registry.watched.get() and type(x) is Tensor and x.dim() == 3:
            self._note(x, None if isinstance(y, Tensor) else y)
        return None if isinstance(y, str) else y

    def _note(self, x: Tensor, reason: str | None) -> None:
        """In the open traces: what ran, or why the modules did."""
        size, rows = x.shape[-1], x.shape[0] * x.shape[1]
        kernel, contract = ("modules", reason) if reason else ("cpu_decoder_step", self._layout.prepared(rows, x.dtype)[1])
        scheme = str(self._known.linears[0][1].scheme)
        registry.note("decoder_layer", kernel, contract, scheme, x.dtype, x.device.type, rows, size, size)

    def _tried(self, layer: nn.Module, x: Any, named: dict[str, Any]) -> Tensor | str:
        """The layer's result, or why its modules have to run."""
        if torch.is_grad_enabled() or shortcut.signature(x, False, None) is None or inlined.active():
            return "something looks at operators"
        if registry.is_strict():
            return "strict"
        shape = x.shape
        if len(shape) != 3 or x.dtype not in _FLOATS or not x.is_cpu:
            return "x"
        if (rows := shape[0] * shape[1]) > _FEW:
            return f"more than {_FEW} tokens"
        if (reason := self._known.differs(layer)) is not None:
            return reason
        layout, changed = self._layout, changes()
        if not layout.holds(changed):
            layout = self._layout = Layout(self._known, changed)
        prepared, _ = layout.prepared(rows, x.dtype)
        if prepared is None:
            return "its products are not by digits"
        for name, value in named.items():
            if value is not None and name not in _READ:
                return "arguments"
        return self._run(x.contiguous(), prepared[-1], *(named.get(name) for name in _ORDER))

    def _run(self, x: Tensor, prepared: Tensor, turns: Any, cache: Any, mask: Any) -> Tensor | str:
        attention, tokens = self._known.attention, x.shape[1]
        if _implementation(attention.config) != "sdpa" or self._functions["sdpa"] is not self._sdpa:
            return "attention"
        if type(cache) not in self._caches or cache.offloading or attention.layer_idx >= len(cache.layers):
            return "cache"
        held = cache.layers[attention.layer_idx]
        if type(held) not in (self._growing, self._fixed) or not held.is_initialized:
            return "cache"
        if type(turns) is not tuple or len(turns) != 2 or not type(turns[0]) is type(turns[1]) is Tensor:
            return "position_embeddings"
        is_fixed, keys = type(held) is self._fixed, held.keys
        if mask is None and (tokens > 1 or is_fixed):
            return "no attention_mask"
        if not type(keys) is type(held.values) is Tensor or type(mask) not in (Tensor, type(None)) or keys.dim() != 4:
            return "cache"
        turns = turns[0].contiguous(), turns[1].contiguous()
        if is_fixed:
            y = cpu_decoder.step(x, prepared, turns, (keys, held.values), int(held.cumulative_length), keys.shape[2], mask)
            if isinstance(y, Tensor):
                held.cumulative_length.add_(tokens)
            return y
        if held.values.shape != keys.shape or not keys.dtype == held.values.dtype == x.dtype or not keys.is_cpu:
            return "cache"
        room, past = Room.of(held, tokens), keys.shape[2]
        y = cpu_decoder.step(x, prepared, turns, (room.keys, room.values), past, past + tokens, mask)
        if isinstance(y, Tensor):
            room.take(held, tokens)
        return y


def _implementation(config: Any) -> Any:
    """Its name, past a configuration's own way to look for names, which takes long."""
    return object.__getattribute__(config, "__dict__").get("_attn_implementation_internal")
