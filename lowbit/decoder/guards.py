"""What decoder layers were when they were found, and whether they still are that: looked at before every step, in few
microseconds for each layer, which is why all of it is lists that Python compares in one go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _global

from lowbit.catalog import generation
from lowbit_kernels import cpu_decoder, registry
from lowbit_kernels.ops import product_call

from ..fused import FusionScope
from .structure import Structure

__all__ = ["LayerGuards", "PreparedLayers", "GuardedLayer"]


class GuardedLayer:
    """One layer: its modules, and the weights, biases and norms that a step reads."""

    def __init__(self, layer: nn.Module, structure: Structure) -> None:
        named: list[Any] = [(layer, name, module) for name, module in layer._modules.items()]
        named += structure.named()
        self.modules: list[Any] = [module for _, _, module in named]
        self.attention: Any = structure.attention
        linears: tuple[Any, ...] = structure.linears
        self.linears = [(q, q.weight, q.bias, q._input_quant, q.input_scale) for q in linears]
        norms: tuple[Any, ...] = structure.norms
        self.norms = [(norm.weight, norm.variance_epsilon) for norm in norms]
        # Where each thing is looked up that a step takes for granted, and what is there.
        self.places: list[tuple[dict[str, Any], str, Any]] = [(parent._modules, name, module) for parent, name, module in named]
        self.places += [(module.__dict__, "forward", None) for module in self.modules]
        self.places += [(module.__dict__, "training", False) for module in (layer, self.attention)]
        self.places += [(self.attention.__dict__, name, getattr(self.attention, name)) for name in _OF_ATTENTION]
        for q, weight, bias, rounds, fixed in self.linears:
            self.places += [
                (q._parameters, "weight", weight),
                (q._parameters, "bias", bias),
                (q.__dict__, "_input_quant", rounds),
            ]
            self.places += [(q._buffers, "input_scale", fixed), (q._modules, "transform", None)]
        for norm, (weight, eps) in zip(norms, self.norms, strict=True):
            self.places += [(norm._parameters, "weight", weight), (norm.__dict__, "variance_epsilon", eps)]


def _ids_in(dicts: list[Any], names: list[Any]) -> list[int]:
    """Of what each dictionary has by the name of its place."""
    get: Any = dict.get
    return list(map(id, map(get, dicts, names)))


_OF_ATTENTION = ("config", "head_dim", "layer_idx", "scaling")


class LayerGuards:
    """Some layers, one behind the other."""

    def __init__(self, parts: Sequence[GuardedLayer]) -> None:
        self.parts = parts
        places = [place for part in parts for place in part.places]
        self._dicts, self._names, self._values = ([place[i] for place in places] for i in range(3))
        self._ids = list(map(id, self._values))
        self._modules = [module for part in parts for module in part.modules]
        self._kinds = list(map(type, self._modules))
        every: list[dict[int, Any]] = [hooks for m in self._modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        # Those of groups of fused layers do nothing for eager layers on a CPU.
        self._hooked = [hooks for hooks in every if hooks]
        self._hooks = list(map(tuple, self._hooked))
        self._unhooked = [hooks for hooks in every if not hooks]
        hooked = [hook for hooks in self._hooked for hook in hooks.values()]
        self._hooks_of_others = not all(isinstance(getattr(hook, "__self__", None), FusionScope) for hook in hooked)

    def mismatch(self) -> str | None:
        """Why the layers are not as they were found, or None."""
        if self._hooks_of_others or any(self._unhooked) or list(map(tuple, self._hooked)) != self._hooks:
            return "hooks"
        if _global._global_forward_hooks or _global._global_forward_pre_hooks:
            return "hooks"
        if _ids_in(self._dicts, self._names) != self._ids or list(map(type, self._modules)) != self._kinds:
            return "a module, a weight or a setting is another one"
        return None


class PreparedLayers:
    """Where all that a step reads of layers lies, and the layers prepared for it."""

    def __init__(self, guards: LayerGuards) -> None:
        self._guards, self._generation = guards, generation()
        linears = [linear for part in guards.parts for linear in part.linears]
        attributes = [(weight.__dict__, name) for _, weight, *_ in linears for name in _OF_WEIGHT]
        self._dicts, self._names = ([place[i] for place in attributes] for i in range(2))
        self._values = [attribute_dict[name] for attribute_dict, name in attributes]
        self._ids = list(map(id, self._values))
        tensors = [*self._values, *(t for _, _, bias, _, fixed in linears for t in (bias, fixed))]
        tensors += [weight for part in guards.parts for weight, _ in part.norms]
        self._tensors: list[Tensor] = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
        self._places, self._strides = list(map(Tensor.data_ptr, self._tensors)), list(map(Tensor.stride, self._tensors))
        self._prepared: dict[tuple[int, torch.dtype], tuple[list[Tensor] | None, str]] = {}
        self._keep_alive: list[Any] = []

    def is_valid(self) -> bool:
        """Whether everything lies where it did."""
        if generation() != self._generation or _ids_in(self._dicts, self._names) != self._ids:
            return False
        return (
            list(map(Tensor.data_ptr, self._tensors)) == self._places and list(map(Tensor.stride, self._tensors)) == self._strides
        )

    def prepared(self, rows: int, dtype: torch.dtype) -> tuple[list[Tensor] | None, str]:
        """Each layer for steps of as many tokens, or None where one is not split-int8; and the products' contracts."""
        found = self._prepared.get((rows, dtype))
        if found is None:
            found = self._prepared[rows, dtype] = self._prepare(rows, dtype)
        return found

    def _prepare(self, rows: int, dtype: torch.dtype) -> tuple[list[Tensor] | None, str]:
        if any(type(tensor) not in (Tensor, nn.Parameter) or tensor.device.type != "cpu" for tensor in self._tensors):
            return None, ""
        made, contracts = [], set()
        for part in self._guards.parts:
            kernels = _kernels(part, rows, dtype)
            layer = None if kernels is None else cpu_decoder.prepared(_layer_of(part), kernels)
            if kernels is None or layer is None:
                return None, ""
            contracts |= {kernel.contract for kernel in kernels}
            made.append(layer[-1])
            self._keep_alive.append(layer)
        return made, ", ".join(sorted(contracts))


_OF_WEIGHT = ("packed", "scale", "zero_point", "_outer", "byte_layout")


def _kernels(part: GuardedLayer, rows: int, dtype: torch.dtype) -> list[registry.Kernel] | None:
    """What the products of a layer run on; None where no step can do the same."""
    size = part.attention.head_dim
    if size % 16 or size > cpu_decoder.LARGEST_HEAD or any(weight.dtype != dtype for weight, _ in part.norms):
        return None
    kernels = []
    for _, weight, bias, rounds, fixed in part.linears:
        if weight.dim() != 2 or weight.transposed or (fixed is not None and fixed.dtype != torch.float32):
            return None
        parts = (weight.packed, weight.scale, weight.zero_point, weight._outer)
        op, scheme_str = ("linear", None) if rounds is None else ("quantized_linear", rounds.scheme_str)
        x = torch.empty(rows, weight.shape[-1], dtype=dtype)
        kernels.append(registry.select(product_call(op, weight.scheme_str, weight.byte_layout, x, *parts, bias, scheme_str)))
    return kernels


def _layer_of(part: GuardedLayer) -> cpu_decoder.Layer:
    size = part.attention.head_dim
    products = tuple(
        cpu_decoder.Product(w.packed, w.scale, w.zero_point, w._outer, bias, w.scheme, w.shape[-1], fixed)
        for _, w, bias, _, fixed in part.linears
    )
    norms, eps = tuple(weight.detach() for weight, _ in part.norms), tuple(eps for _, eps in part.norms)
    heads, key_heads = (part.linears[i][1].shape[0] // size for i in range(2))
    return cpu_decoder.Layer(products, norms, eps, heads, key_heads, size, part.attention.scaling)
