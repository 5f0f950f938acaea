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

from lowbit_kernels import cpu_decoder, fast_dispatch, inlined, registry

from .guards import GuardedLayer, LayerGuards, PreparedLayers
from .kv_cache import GrowableCache
from .structure import structure_of

__all__ = ["NAME", "DecoderStep", "fuse_layers_"]

NAME = "_lowbit_step"
_MAX_TOKENS = 16  # tokens
_ORDER = ("position_embeddings", "past_key_values", "attention_mask")
_KNOWN_ARGUMENTS = frozenset(
    {*_ORDER, "position_ids", "use_cache", "cache_position"}
)  # of which known modules do not read the last three
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
        object.__setattr__(layer, NAME, DecoderStep([layer], [GuardedLayer(layer, structure)]))


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
            step: DecoderStep | None = self._lowbit_step
            if step is not None and step.layers[0] is self and (y := step(args[0], kwargs)) is not None:
                return y
        return modules(self, *args, **kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        state = {name: value for name, value in self.__dict__.items() if name != NAME}
        return _new, (base,), state  # copies run their modules

    made = type(base.__name__, (base,), {"forward": forward, "__reduce_ex__": reduce, "__module__": base.__module__, NAME: None})
    made.__qualname__, made.__doc__ = base.__qualname__, base.__doc__
    return made


class DecoderStep:
    """The step of one layer, or of several one behind the other, with nothing of a call."""

    def __init__(self, layers: list[nn.Module], parts: Sequence[GuardedLayer]) -> None:
        from transformers import cache_utils
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self.layers, self.parts = layers, parts
        self._guards = LayerGuards(parts)
        self._prepared = PreparedLayers(self._guards)  # exchanged as one, since threads may share a layer
        self._numbers = [part.attention.layer_idx for part in parts]
        self._configs = list({id(part.attention.config): part.attention.config for part in parts}.values())
        self._caches = frozenset({cache_utils.DynamicCache, cache_utils.StaticCache})
        self._growing, self._fixed = cache_utils.DynamicLayer, cache_utils.StaticLayer
        self._functions: Any = ALL_ATTENTION_FUNCTIONS
        self._sdpa = sdpa_attention_forward

    def __call__(self, x: Any, named: dict[str, Any]) -> Tensor | None:
        """What the layers make of ``x``; None where their modules have to run."""
        y = self._try_step(x, named)
        # Of several layers that do not step together each says why it does not step by itself.
        if registry.observed.get() and type(x) is Tensor and x.dim() == 3 and (isinstance(y, Tensor) or len(self.layers) == 1):
            self._note(x, None if isinstance(y, Tensor) else y)
        return None if isinstance(y, str) else y

    def _note(self, x: Tensor, reason: str | None) -> None:
        """In the open traces: what ran, or why the modules did."""
        size, rows = x.shape[-1], x.shape[0] * x.shape[1]
        kernel, contract = ("modules", reason) if reason else ("cpu_decoder_step", self._prepared.prepared(rows, x.dtype)[1])
        for part in self.parts:
            scheme = str(part.linears[0][1].scheme)
            registry.note("decoder_layer", kernel, contract, scheme, x.dtype, x.device.type, rows, size, size)

    def _try_step(self, x: Any, named: dict[str, Any]) -> Tensor | str:
        """What the layers make of ``x``, or why their modules have to run."""
        if torch.is_grad_enabled() or fast_dispatch.signature(x, False, None) is None or inlined.active():
            return "something looks at operators"
        if registry.is_strict():
            return "strict"
        shape = x.shape
        if len(shape) != 3 or x.dtype not in _FLOATS or not x.is_cpu:
            return "x"
        if (rows := shape[0] * shape[1]) > _MAX_TOKENS:
            return f"more than {_MAX_TOKENS} tokens"
        for name, value in named.items():
            if value is not None and name not in _KNOWN_ARGUMENTS:
                return "arguments"
        if (reason := self._guards.mismatch()) is not None:
            return reason
        prepared_layers = self._prepared
        if not prepared_layers.is_valid():
            prepared_layers = self._prepared = PreparedLayers(self._guards)
        prepared, _ = prepared_layers.prepared(rows, x.dtype)
        if prepared is None:
            return "its products are not split-int8"
        return self._run(x.contiguous(), prepared, *(named.get(name) for name in _ORDER))

    def _run(self, x: Tensor, prepared: list[Tensor], rope: Any, cache: Any, mask: Any) -> Tensor | str:
        if self._functions["sdpa"] is not self._sdpa or any(_implementation(config) != "sdpa" for config in self._configs):
            return "attention"
        if type(rope) is not tuple or len(rope) != 2 or not type(rope[0]) is type(rope[1]) is Tensor:
            return "position_embeddings"
        if type(mask) not in (Tensor, type(None)) or (mask is None and x.shape[1] > 1):
            return "no attention_mask"
        if type(cache) not in self._caches or cache.offloading or max(self._numbers) >= len(cache.layers):
            return "cache"
        caches = [cache.layers[number] for number in self._numbers]
        kind = type(caches[0])
        if kind not in (self._growing, self._fixed) or any(
            type(layer_cache) is not kind or not layer_cache.is_initialized for layer_cache in caches
        ):
            return "cache"
        if not all(
            type(layer_cache.keys) is type(layer_cache.values) is Tensor and layer_cache.keys.dim() == 4 for layer_cache in caches
        ):
            return "cache"
        rope = rope[0].contiguous(), rope[1].contiguous()
        return (self._fixed_cache_step if kind is self._fixed else self._growing_cache_step)(x, prepared, rope, caches, mask)

    def _fixed_cache_step(
        self, x: Tensor, prepared: list[Tensor], rope: Any, caches: list[Any], mask: Tensor | None
    ) -> Tensor | str:
        """Over caches of fixed size, which a mask tells how far they are filled."""
        past_length, places = int(caches[0].cumulative_length), caches[0].keys.shape[2]
        if mask is None:
            return "no attention_mask"
        if any(
            int(layer_cache.cumulative_length) != past_length or layer_cache.keys.shape[2] != places for layer_cache in caches
        ):
            return "cache"
        y = cpu_decoder.steps(
            x,
            prepared,
            rope,
            [layer_cache.keys for layer_cache in caches],
            [layer_cache.values for layer_cache in caches],
            past_length,
            places,
            mask,
        )
        if isinstance(y, Tensor):
            for layer_cache in caches:
                layer_cache.cumulative_length.add_(x.shape[1])
        return y

    def _growing_cache_step(
        self, x: Tensor, prepared: list[Tensor], rope: Any, caches: list[Any], mask: Tensor | None
    ) -> Tensor | str:
        """Over caches that grow."""
        past_length, tokens = caches[0].keys.shape[2], x.shape[1]
        for layer_cache in caches:
            keys, values = layer_cache.keys, layer_cache.values
            if (
                keys.shape != values.shape
                or keys.shape[2] != past_length
                or not keys.dtype == values.dtype == x.dtype
                or not keys.is_cpu
            ):
                return "cache"
        growable = [GrowableCache.of(layer_cache, tokens) for layer_cache in caches]
        keys, values = (
            [growable_cache.keys for growable_cache in growable],
            [growable_cache.values for growable_cache in growable],
        )
        y = cpu_decoder.steps(x, prepared, rope, keys, values, past_length, past_length + tokens, mask)
        if isinstance(y, Tensor):
            for growable_cache, layer_cache in zip(growable, caches, strict=True):
                growable_cache.append(layer_cache, tokens)
        return y


def _implementation(config: Any) -> Any:
    """Its name, past a configuration's own way to look for names, which takes long."""
    return object.__getattribute__(config, "__dict__").get("_attn_implementation_internal")
