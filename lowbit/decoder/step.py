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
from torch.nn.modules import module as _global

from lowbit.catalog import changes
from lowbit_kernels import cpu_decoder, inlined, registry, shortcut
from lowbit_kernels.ops import product_call

from ..fused import Scope
from ..tensor import QTensor
from .room import Room
from .structure import Structure, structure_of

__all__ = ["fuse_decoders_"]

_NAME = "_lowbit_step"
_FEW = 16  # tokens
_NEUTRAL = frozenset({"position_ids", "use_cache", "cache_position"})  # arguments that the modules of a known layer do not read
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
    step = Step(layer, structure)
    return step if step.differs() is None else None


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


_Ready = tuple[tuple[Tensor, ...] | None, str]  # a prepared layer, or none, and the contracts of its products


class Step:
    """What a layer was when it was found, and what its step was prepared from."""

    def __init__(self, layer: nn.Module, structure: Structure) -> None:
        top = [
            (layer, name, layer._modules[name]) for name in ("input_layernorm", "post_attention_layernorm", "self_attn", "mlp")
        ]
        below: list[Any] = structure.named()
        self._children = [(parent._modules, name, module) for parent, name, module in (*top, *below)][4:]
        self._top = [(name, module) for _, name, module in top]
        modules = [module for _, _, module in (*top, *below)]
        self._kinds = [(module.__dict__, module, type(module)) for module in modules]
        every: list[dict[int, Any]] = [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        # Those of groups of fused layers do nothing for eager layers on a CPU.
        self._hooked = [(hooks, tuple(hooks)) for hooks in every if hooks]
        self._unhooked = [hooks for hooks in every if not hooks]
        self._hooks_of_others = not all(
            isinstance(getattr(h, "__self__", None), Scope) for hooks in every for h in hooks.values()
        )
        self._linears: list[Any] = [
            (q, q._parameters, q._parameters["weight"], q._parameters["bias"], q._rounds, q._buffers["input_scale"])
            for q in structure.linears
        ]
        norms: tuple[Any, ...] = structure.norms
        self._norms = [(norm, norm._parameters["weight"], norm.variance_epsilon) for norm in norms]
        self._attention: Any = structure.attention
        self._kept: tuple[Any, dict[Any, _Ready]] = ((), {})  # changed as one, since threads may share a layer

    def differs(self) -> str | None:
        """Why the layer is not as it was found, or None."""
        if any(modules.get(name) is not module for modules, name, module in self._children):
            return "a module was replaced"
        if self._hooks_of_others or any(self._unhooked) or _global._global_forward_hooks or _global._global_forward_pre_hooks:
            return "hooks"
        if any(tuple(hooks) != known for hooks, known in self._hooked):
            return "hooks"
        for own, module, kind in self._kinds:
            if type(module) is not kind or "forward" in own:
                return "a module was replaced"
        for q, parameters, weight, bias, rounds, fixed in self._linears:
            if parameters["weight"] is not weight or parameters["bias"] is not bias or q._buffers["input_scale"] is not fixed:
                return "a weight was replaced"
            if q._rounds is not rounds or q._modules["transform"] is not None:
                return "an activation or a transform"
        for norm, weight, eps in self._norms:
            if norm._parameters["weight"] is not weight or norm.variance_epsilon != eps:
                return "a norm was replaced"
        return None

    def __call__(self, layer: nn.Module, x: Any, named: dict[str, Any]) -> Tensor | None:
        """The layer's result; None where its modules have to run."""
        y = self._tried(layer, x, named)
        if isinstance(y, str):
            if registry.watched.get() and isinstance(x, Tensor) and x.dim() == 3:
                self._note(x, "modules", y)
            return None
        if registry.watched.get():
            self._note(x, "cpu_decoder_step", self._prepared(x)[1])
        return y

    def _note(self, x: Tensor, kernel: str, contract: str) -> None:
        size, rows = x.shape[-1], x.shape[0] * x.shape[1]
        spelling = str(self._linears[0][2].scheme)
        registry.note("decoder_layer", kernel, contract, spelling, x.dtype, x.device.type, rows, size, size)

    def _tried(self, layer: nn.Module, x: Any, named: dict[str, Any]) -> Tensor | str:
        """The layer's result, or why its modules have to run."""
        if torch.is_grad_enabled() or shortcut.signature(x, False, None) is None or inlined.active():
            return "something looks at operators"
        if x.dim() != 3 or x.dtype not in _FLOATS or not 0 < x.shape[0] * x.shape[1] <= _FEW or x.device.type != "cpu":
            return f"more than {_FEW} tokens" if x.dim() == 3 and x.shape[0] * x.shape[1] > _FEW else "x"
        if registry.is_strict():
            return "strict"
        if layer.training or self._attention.training:
            return "training"
        if any(layer._modules.get(name) is not module for name, module in self._top):
            return "a module was replaced"
        if (reason := self.differs()) is not None:
            return reason
        prepared, _ = self._prepared(x)
        if prepared is None:
            return "its products are not by digits"
        turns, cache, mask = named.get("position_embeddings"), named.get("past_key_values"), named.get("attention_mask")
        if any(value is not None and name not in _NEUTRAL and name not in _TAKEN for name, value in named.items()):
            return "arguments"
        return self._run(x.contiguous(), prepared[-1], turns, cache, mask)

    def _run(self, x: Tensor, prepared: Tensor, turns: Any, cache: Any, mask: Any) -> Tensor | str:
        from transformers.cache_utils import DynamicCache, DynamicLayer, StaticCache, StaticLayer

        attention = self._attention
        if attention.config._attn_implementation != "sdpa" or not _is_usual_sdpa():
            return "attention"
        number, tokens = attention.layer_idx, x.shape[1]
        if type(cache) not in (DynamicCache, StaticCache) or cache.offloading or number >= len(cache.layers):
            return "cache"
        held = cache.layers[number]
        if type(held) not in (DynamicLayer, StaticLayer) or not held.is_initialized:
            return "cache"
        if not isinstance(turns, tuple) or len(turns) != 2 or any(type(t) is not Tensor or t.dtype != x.dtype for t in turns):
            return "position_embeddings"
        if mask is None and (tokens > 1 or type(held) is StaticLayer):
            return "no attention_mask"
        if not self._fits(x, held.keys, held.values):
            return "cache"
        cos, sin = turns
        if cos.shape != sin.shape or cos.shape[1:] != (tokens, attention.head_dim) or cos.shape[0] not in (1, x.shape[0]):
            return "position_embeddings"
        turns = cos.contiguous(), sin.contiguous()
        is_static = type(held) is StaticLayer
        past = int(held.cumulative_length) if is_static else held.keys.shape[2]
        places = held.keys.shape[2] if is_static else past + tokens
        if past + tokens > places or (mask is not None and not _is_mask(mask, x, places)):
            return "attention_mask"
        if is_static:
            y = cpu_decoder.step(x, prepared, turns, (held.keys, held.values), past, places, mask)
            if y is not None:
                held.cumulative_length.add_(tokens)
        else:
            room = Room.of(held, tokens)
            y = cpu_decoder.step(x, prepared, turns, (room.keys, room.values), past, places, mask)
            if y is not None:
                room.take(held, tokens)
        return "x has no digits" if y is None else y

    def _fits(self, x: Tensor, keys: Any, values: Any) -> bool:
        if type(keys) is not Tensor or type(values) is not Tensor or keys.dim() != 4 or keys.dtype != x.dtype:
            return False
        attention = self._attention
        heads = self._linears[1][2].shape[0] // attention.head_dim
        shape = keys.shape
        return (
            keys.device.type == "cpu" and values.dtype == x.dtype and values.shape == shape and shape[0] == x.shape[0]
            and shape[1] == heads and shape[3] == attention.head_dim and keys.stride(3) == 1 and values.stride(3) == 1
        )  # fmt: skip

    # ---- what is prepared ----------------------------------------------------------------------------------------------

    def _prepared(self, x: Tensor) -> _Ready:
        """The layer as a step of such an ``x`` takes it, made anew where anything lies elsewhere than before."""
        attention = self._attention
        places: list[Any] = [changes(), attention.scaling, attention.head_dim]
        for _, _, weight, bias, _, fixed in self._linears:
            for part in (weight.packed, weight.scale, weight.zero_point, weight._outer, bias, fixed):
                if part is not None:
                    places += (id(part), part.data_ptr(), part.stride())
            places.append(weight.byte_layout)
        for _, weight, _ in self._norms:
            places.append(weight.data_ptr())
        known, ready = self._kept
        if known != places:
            ready = {}
            self._kept = places, ready
        kind = x.shape[0] * x.shape[1], x.dtype
        if kind not in ready:
            ready[kind] = self._prepare(x)
        return ready[kind]

    def _prepare(self, x: Tensor) -> _Ready:
        attention = self._attention
        size = attention.head_dim
        if any(type(weight) not in (Tensor, nn.Parameter) or weight.dtype != x.dtype for _, weight, _ in self._norms):
            return None, ""
        if size % 16 or size > cpu_decoder.LARGEST_HEAD or any(not _is_plain(w, b, f) for _, _, w, b, _, f in self._linears):
            return None, ""
        products, kernels = [], []
        for _, _, weight, bias, rounds, fixed in self._linears:
            parts, k = (weight.packed, weight.scale, weight.zero_point, weight._outer), weight.shape[-1]
            rows = x.new_empty(x.shape[0] * x.shape[1], k)
            op, spelling = ("linear", None) if rounds is None else ("quantized_linear", rounds.spelling)
            kernels.append(registry.select(product_call(op, weight.spelling, weight.byte_layout, rows, *parts, bias, spelling)))
            products.append(cpu_decoder.Product(*parts, bias, weight.scheme, k, fixed))
        heads, key_heads = (self._linears[i][2].shape[0] // size for i in (0, 1))
        norms, eps = tuple(weight.detach() for _, weight, _ in self._norms), tuple(eps for _, _, eps in self._norms)
        layer = cpu_decoder.Layer(tuple(products), norms, eps, heads, key_heads, size, attention.scaling)
        contracts = sorted({kernel.contract for kernel in kernels})
        return cpu_decoder.prepared(layer, kernels), ", ".join(contracts)


_TAKEN = frozenset({"position_embeddings", "past_key_values", "attention_mask"})


def _is_plain(weight: QTensor, bias: Tensor | None, fixed: Tensor | None) -> bool:
    parts = (weight.packed, weight.scale, weight.zero_point, weight._outer, bias, fixed)
    if fixed is not None and fixed.dtype != torch.float32:
        return False
    return weight.dim() == 2 and not weight.transposed and all(type(t) in (Tensor, nn.Parameter) for t in parts if t is not None)


def _is_mask(mask: Any, x: Tensor, places: int) -> bool:
    if type(mask) is not Tensor or mask.dim() != 4 or mask.dtype not in (torch.bool, x.dtype) or mask.device.type != "cpu":
        return False
    batch, heads, tokens, of = mask.shape
    return batch in (1, x.shape[0]) and heads == 1 and tokens in (1, x.shape[1]) and of == places and mask.stride(3) == 1


def _is_usual_sdpa() -> bool:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
