"""What a decoder layer was when it was found, and whether it still is that: looked at before every step, in few microseconds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _global

from lowbit_kernels import cpu_decoder, registry
from lowbit_kernels.ops import product_call

from ..fused import Scope
from .structure import Structure

__all__ = ["Known", "Layout"]


class Known:
    """The modules of a layer, what hooks they had, and the weights, biases and norms that a step reads."""

    def __init__(self, layer: nn.Module, structure: Structure) -> None:
        named: list[Any] = [(layer, name, module) for name, module in layer._modules.items()]
        named += structure.named()
        self._children = [(name, parent, module) for parent, name, module in named]
        modules = [module for _, _, module in named]
        self._kinds = [(module, type(module)) for module in modules]
        every: list[dict[int, Any]] = [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        # Those of groups of fused layers do nothing for eager layers on a CPU.
        self._hooked = [(hooks, tuple(hooks)) for hooks in every if hooks]
        self._unhooked = [hooks for hooks in every if not hooks]
        hooked = [hook for hooks in every for hook in hooks.values()]
        self._hooks_of_others = not all(isinstance(getattr(hook, "__self__", None), Scope) for hook in hooked)
        self.attention: Any = structure.attention
        linears: tuple[Any, ...] = structure.linears
        self.linears = [(q, q.weight, q.bias, q._rounds, q.input_scale) for q in linears]
        norms: tuple[Any, ...] = structure.norms
        self.norms = [(norm, norm.weight, norm.variance_epsilon) for norm in norms]

    def differs(self, layer: nn.Module) -> str | None:
        """Why ``layer`` is not as it was found, or None."""
        for name, parent, module in self._children:
            if parent._modules.get(name) is not module:
                return "a module was replaced"
        if layer is not self._children[0][1]:  # a copy that shares what it consists of
            return "a copy"
        if self._hooks_of_others or any(self._unhooked) or _global._global_forward_hooks or _global._global_forward_pre_hooks:
            return "hooks"
        for hooks, known in self._hooked:
            if tuple(hooks) != known:
                return "hooks"
        for module, kind in self._kinds:
            if type(module) is not kind or "forward" in module.__dict__:
                return "a module was replaced"
        for q, weight, bias, rounds, fixed in self.linears:
            parameters = q._parameters
            if parameters["weight"] is not weight or parameters["bias"] is not bias:
                return "a weight was replaced"
            if q._rounds is not rounds or q._modules["transform"] is not None or q._buffers["input_scale"] is not fixed:
                return "an activation or a transform"
        for norm, weight, eps in self.norms:
            if norm._parameters["weight"] is not weight or norm.variance_epsilon != eps:
                return "a norm was replaced"
        return "training" if layer.training or self.attention.training else None

    def rows(self) -> list[int]:
        """Rows of each product's weight."""
        return [weight.shape[0] for _, weight, *_ in self.linears]


class Layout:
    """Where all that a step reads of a layer lies, and the layer prepared for it."""

    def __init__(self, known: Known, changed: int) -> None:
        attention = known.attention
        self._changed, self._scaling, self._size = changed, attention.scaling, attention.head_dim
        self._weights = [(w, w.packed, w.scale, w.zero_point, w._outer, w.byte_layout) for _, w, *_ in known.linears]
        tensors = [part for weight in self._weights for part in weight[1:5]]
        tensors += [tensor for _, _, bias, _, fixed in known.linears for tensor in (bias, fixed)]
        tensors += [weight for _, weight, _ in known.norms]
        self._places = [(tensor, tensor.data_ptr(), tensor.stride()) for tensor in tensors if tensor is not None]
        self._known = known
        self._ready: dict[tuple[int, torch.dtype], tuple[tuple[Tensor, ...] | None, str]] = {}

    def holds(self, changed: int) -> bool:
        """Whether everything lies where it did."""
        attention = self._known.attention
        if changed != self._changed or attention.scaling != self._scaling or attention.head_dim != self._size:
            return False
        for weight, packed, scale, zero, outer, layout in self._weights:
            if weight.packed is not packed or weight.scale is not scale or weight.zero_point is not zero:
                return False
            if weight._outer is not outer or weight.byte_layout != layout:
                return False
        moved = False
        for tensor, place, stride in self._places:
            moved = moved or tensor.data_ptr() != place or tensor.stride() != stride
        return not moved

    def prepared(self, rows: int, dtype: torch.dtype) -> tuple[tuple[Tensor, ...] | None, str]:
        """The layer for steps of as many tokens, or None where a product is not by digits; and its products' contracts."""
        found = self._ready.get((rows, dtype))
        if found is None:
            found = self._ready[rows, dtype] = self._prepare(rows, dtype)
        return found

    def _prepare(self, rows: int, dtype: torch.dtype) -> tuple[tuple[Tensor, ...] | None, str]:
        size, known = self._size, self._known
        plain = [*(tensor for tensor, _, _ in self._places), *(fixed for *_, fixed in known.linears if fixed is not None)]
        if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in plain) or size % 16 or size > cpu_decoder.LARGEST_HEAD:
            return None, ""
        if any(weight.dtype != dtype for _, weight, _ in known.norms):
            return None, ""
        if any(fixed is not None and fixed.dtype != torch.float32 for *_, fixed in known.linears):
            return None, ""
        products, kernels = [], []
        for _, weight, bias, rounds, fixed in known.linears:
            if weight.dim() != 2 or weight.transposed:
                return None, ""
            parts, k = (weight.packed, weight.scale, weight.zero_point, weight._outer), weight.shape[-1]
            op, spelling = ("linear", None) if rounds is None else ("quantized_linear", rounds.spelling)
            x = torch.empty(rows, k, dtype=dtype)
            kernels.append(registry.select(product_call(op, weight.spelling, weight.byte_layout, x, *parts, bias, spelling)))
            products.append(cpu_decoder.Product(*parts, bias, weight.scheme, k, fixed))
        heads, key_heads = (count // size for count in known.rows()[:2])
        norms, eps = tuple(weight.detach() for _, weight, _ in known.norms), tuple(eps for *_, eps in known.norms)
        layer = cpu_decoder.Layer(tuple(products), norms, eps, heads, key_heads, size, self._scaling)
        return cpu_decoder.prepared(layer, kernels), ", ".join(sorted({kernel.contract for kernel in kernels}))
