"""Layers that are multiplied in one call, and what must be the same for one to take its rows of it.

The products of a group belong to one forward call of the module that its layers are parts of, and to the thread that runs it.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any
from weakref import WeakMethod, ref

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from lowbit_kernels import fast_dispatch, inlined, registry

from .linear import QLinear
from .tensor import QTensor
from .tensor_ops import row_range
from .tensor_products import product

__all__ = ["FusedLinears", "FusionScope"]

_PARTS = ("packed", "scale", "zero_point")
_MAX_ROWS = 16  # rows of x: a product of more takes far longer than its launch, and copying each layer's part of it counts
_EAGER = frozenset({"cuda"})  # on a CPU a product has no launch, and takes no longer than what is asked here before another's
_numbers = itertools.count()


# ---- calls ---------------------------------------------------------------------------------------------------------


class _Products:
    """The products of one tensor that its layers have not asked for yet, and what was known when they were computed."""

    def __init__(self, x: Tensor, guard: tuple[Any, ...], writes: list[list[int]], parts: dict[int, Tensor]) -> None:
        self.x, self.guard, self.writes, self.parts = x, guard, writes, parts


class _Call:
    """The products of each group during one forward call."""

    def __init__(self) -> None:
        self.products: dict[int, _Products] = {}


class _Arguments(tuple[Any, ...]):
    """The arguments of a call, which alone keep what belongs to it: no hook tells of a call that KeyboardInterrupt ends."""

    call: _Call


class FusionScope:
    """A module whose forward calls are watched, for the groups that its layers make."""

    def __init__(self) -> None:
        self.groups: list[FusedLinears] = []
        self._running = threading.local()  # itself and no class of its own, which torch.compile reads as empty

    @staticmethod
    def of(module: nn.Module) -> FusionScope:
        """The scope of ``module``, which its hooks belong to."""
        for hook in module._forward_pre_hooks.values():
            if isinstance(found := getattr(hook, "__self__", None), FusionScope):
                return found
        scope = FusionScope()
        module.register_forward_pre_hook(scope._enter)
        module.register_forward_hook(scope._leave, always_call=True)
        return scope

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not self.groups:
            return None
        arguments = _Arguments(args)
        arguments.call = _Call()
        self._running.call = ref(arguments.call)  # a call within a call of the same module: the outer one goes on unfused
        return arguments

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._running.call = None

    def call(self) -> _Call | None:
        """The call that the current thread is in."""
        running = getattr(self._running, "call", None)
        return None if running is None else running()

    def __reduce__(self) -> Any:
        return FusionScope, ()  # copies of layers are by themselves, and the hooks of a copied module have nothing to do


# ---- groups --------------------------------------------------------------------------------------------------------


class FusedLinears:
    """Layers whose weights lie one behind the other, so that ``scope`` can be called with one product for all of them."""

    def __init__(self, layers: list[QLinear], scope: FusionScope) -> None:
        first, sizes = layers[0], [layer.out_features for layer in layers]
        layout = first.weight.byte_layout if len({layer.weight.byte_layout for layer in layers}) == 1 else "canonical"
        weights = [layer.weight._to_layout(layout) for layer in layers]
        parts: dict[str, Tensor | None] = {name: _joined([getattr(weight, name) for weight in weights]) for name in _PARTS}
        shape, bias = (sum(sizes), first.in_features), _joined([layer.bias for layer in layers])
        settings = (None, first.scheme, shape, first.weight.dtype, layout)
        weight = QTensor(parts["packed"], parts["scale"], parts["zero_point"], *settings).to_layout(layout)
        fixed = None if first.input_scale is None else first.input_scale.detach().clone()
        self._fused_layer = QLinear(weight, bias, first.activation, fixed)
        self._layers, self._sizes, self._number = [ref(layer) for layer in layers], sizes, next(_numbers)
        start = 0
        for i, (layer, size) in enumerate(zip(layers, sizes, strict=True)):
            # By ``data``, so that a write into one layer's rows does not count as one into those of the others.
            rows = row_range(self._fused_layer.weight, start, start + size)
            layer.weight._become(rows._apply_to_parts(lambda part: part.data))
            layer.weight.pins_layout = True
            if bias is not None:
                layer.bias.data = bias.data[start : start + size]  # the same parameter: whoever trains it goes on
            layer.fused, layer._place = self, i
            start += size
        self._parts_read = [(layer.weight, layer.bias, layer.input_scale) for layer in layers]
        self._read = [_read_by(*parts_read) for parts_read in self._parts_read]
        self._fixed = [_fixed_by(layer.bias, layer.input_scale) for layer in layers]
        leave = WeakMethod(self._leave)
        for layer in layers:
            layer.weight._on_parts_changed = leave
        self._scope = scope
        scope.groups.append(self)

    def part(self, layer: QLinear, x: Tensor) -> Tensor | None:
        """The product of ``x`` and ``layer``; None where the layer has to compute it by itself."""
        if (call := self._scope.call()) is None:
            return None
        place, products = layer._place, call.products.get(self._number)
        if products is not None and products.x is not x:
            return None
        guard = self._compile_guard(layer, x) if is_dynamo_compiling() else self._guard(layer, x)
        if guard is None:
            return None
        if products is None:
            writes = [self._writes(i) for i in range(len(self._read))]
            products = call.products[self._number] = _Products(x, guard, writes, dict(enumerate(self._multiply(x))))
        elif products.guard != guard or products.writes[place] != self._writes(place):
            return None
        y = products.parts.pop(place, None)
        if not products.parts:
            del call.products[self._number]
        return y

    def _multiply(self, x: Tensor) -> list[Tensor]:
        """The product of each layer, as a tensor of its own that lies together, as a layer's does."""
        fused_layer, biases = self._fused_layer, [bias for _, bias, _ in self._parts_read if bias is not None]
        if biases and is_dynamo_compiling():  # a graph has to read the biases themselves: their ``data`` may be exchanged
            bias = torch.cat([bias.detach() for bias in biases])
            y = product(x, fused_layer.weight, bias, fused_layer._input_quant)
        else:
            y = fused_layer.forward(x)
        return [part.contiguous() for part in torch.unsafe_split_with_sizes(y, self._sizes, -1)]

    def leave(self, layer: QLinear) -> None:
        """``layer`` changes for good, unless it is a replica of one, and none of the group."""
        if self._layers[layer._place]() is layer:
            self._leave()

    def _leave(self) -> None:
        """Each layer is by itself again; its rows stay where they are."""
        if self in self._scope.groups:
            self._scope.groups.remove(self)
        for layer in filter(None, (reference() for reference in self._layers)):
            layer.fused = None
        for weight, *_ in self._parts_read:
            weight.pins_layout, weight._on_parts_changed = False, None

    # ---- what is known ---------------------------------------------------------------------------------------------

    def _writes(self, place: int) -> list[int]:
        """How often the weight and bias of a layer were written to. Compilers know it of all layers together."""
        return [] if is_dynamo_compiling() else [tensor._version for tensor in self._read[place]]

    def _guard(self, layer: QLinear, x: Tensor) -> tuple[Any, ...] | None:
        """What the products of ``x`` depend on and may change between two layers' calls, if ``layer`` is as it was when it was
        fused. None where it is not, or where something has to see each layer's product."""
        if x.device.type not in _EAGER:
            return None
        place, (weight, bias, scale) = layer._place, _parts_read_by(layer)
        its_weight, its_bias, its_scale = self._parts_read[place]
        if weight is not its_weight or bias is not its_bias or scale is not its_scale:
            return None  # somebody wrote into the module's parameters past it, for a while or for ever
        if (bias is not None or scale is not None) and _fixed_by(bias, scale) != self._fixed[place]:
            return None
        guard: tuple[Any, ...] = inlined.active(), torch.is_inference_mode_enabled(), registry.observed.get(), x.shape
        for part in _parts(x):
            if not fast_dispatch.is_plain(part, weight._trains, bias) or (numbers := _numbers_of(part)) is None:
                return None
            guard += numbers
        k = layer.in_features
        return guard if x.shape[-1:] == (k,) and x.numel() <= _MAX_ROWS * k else None

    def _compile_guard(self, layer: QLinear, x: Tensor) -> tuple[Any, ...] | None:
        """:meth:`_guard`, while torch.compile traces: what differs there is decided once, and is no part of the graph, which no
        change of a fixed ``input_scale`` would reach."""
        if layer.input_scale is not None or (isinstance(x, QTensor) and layer.bias is not None):
            return None
        for now, then in zip(_parts_read_by(layer), self._parts_read[layer._place], strict=True):
            if now is not then:
                return None
        read = _parts(x)
        for tensor in read:
            if type(tensor) is not Tensor:
                return None
        if torch.is_grad_enabled():
            for tensor in (*read, layer.bias):
                if tensor is not None and tensor.requires_grad:
                    return None
            if layer.weight._trains:
                return None
        if torch.is_autocast_enabled(x.device.type):
            return None
        for parts_read in self._parts_read:
            read.extend(_read_by(*parts_read))
        return tuple(torch.ops.lowbit.versions(read).shape), torch.is_grad_enabled(), inlined.active()


def _joined(parts: list[Any]) -> nn.Parameter | None:
    if parts[0] is None:
        return None
    return nn.Parameter(torch.cat([part.detach() for part in parts]), requires_grad=False)


def _parts_read_by(layer: QLinear) -> tuple[Any, Any, Any]:
    """What a product of ``layer`` reads beside x."""
    return layer._parameters.get("weight"), layer._parameters.get("bias"), layer._buffers.get("input_scale")


def _read_by(weight: QTensor, bias: Tensor | None, fixed: Tensor | None) -> list[Tensor]:
    """The tensors with the numbers of these."""
    read = weight.packed, weight.scale, weight.zero_point, bias, fixed
    return [tensor for tensor in read if tensor is not None]


def _fixed_by(bias: Tensor | None, scale: Tensor | None) -> tuple[int, ...]:
    """What stays while layers are fused: where the bias is, which is trained in place, and all of a fixed input_scale."""
    where = (0 if bias is None else bias.data_ptr(),)
    return where if scale is None else (*where, scale.data_ptr(), scale._version)


def _parts(x: Tensor) -> list[Tensor]:
    """What holds the numbers of ``x``, which may be rounded tokens."""
    return [x] if type(x) is Tensor or not isinstance(x, QTensor) else list(x._parts().values())


def _numbers_of(x: Tensor) -> tuple[Any, ...] | None:
    """What two looks at a tensor have in common only if its numbers did not change between them, for what is computed in its turn
    in a stream or a captured graph. None where nothing tells: tensors of inference mode have no version."""
    if x.is_inference() or x.layout is not torch.strided:
        return None
    guard = x.data_ptr(), x.stride(), x.dtype, x._version  # another tensor may be put into ``x.data``
    if not x.is_cuda:
        return guard
    return *guard, torch._C._cuda_getCurrentRawStream(x.device.index), torch._C._cuda_isCurrentStreamCapturing()
