"""Fusing: layers that read one tensor multiply it in one call, as if they were one layer.

At batch 1 a small layer costs mostly its launch, and three small ones (query, key, value) cost three. Their weights are laid
one behind the other; each keeps its module, its name and its rows, so that a model looks and saves as before.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lowbit_kernels.layouts import LAYOUTS

from .decoder import fuse_decoders_
from .fused import FusedLinears, FusionScope
from .linear import QLinear
from .tensor import QTensor
from .torch_state import isolated

__all__ = ["fuse_"]


@isolated()
def fuse_(model: nn.Module, *args: Any, **kwargs: Any) -> list[tuple[str, ...]]:
    """Fuse the quantized linear layers of ``model`` that read the same tensors; returns their names, group by group.

    ``model(*args, **kwargs)`` is run once to see which those are: layers that are called once each with one tensor. They are
    fused where they have one scheme, activation scheme and device, and either all or none a bias; schemes whose weights have a
    scale as a whole (``outer``) and numbers of rows that a layout cannot put side by side are left as they are. Layers of
    different layouts become canonical. Moving the model or exchanging a weight takes a group apart again.

    A group is multiplied at once on a GPU and within ``torch.compile``, in a forward call of the innermost module that called all
    of its layers, called as a module. The first of them multiplies for all; another takes its part if nothing differs that its
    product depends on: the tensor and its version, the weights and biases, inference mode, the thread, the stream. Nothing is
    kept past that call. A layer that is called otherwise multiplies by itself, as all of them do where a gradient is recorded,
    autocast is on or torch's modes and transforms look at operators. So do they for more than 16 rows of ``x`` and for tensors of
    ``inference_mode``, which have no version (use ``no_grad``), except within ``torch.compile``; and there with a fixed
    ``input_scale``. Eager layers on a CPU are never multiplied at once: that takes as long as their own products do.

    On a CPU a decoder layer of Llama, Qwen2, Qwen3 or Mistral, or of a model that runs the same code, steps as one call, and all
    layers of a model together, by split-int8 products: up to 16 tokens behind others of a dynamic or a static cache, without
    gradients, with ``sdpa`` attention. It rounds where the modules round, and sums norms and attention in another order. Hooks
    within the layer, modules or weights that were exchanged, other caches, other attention and what looks at operators have its
    modules run, as before; ``lowbit.trace_kernels`` shows both, and why. A copy of the model runs its modules until it is fused.

    Versions count what torch writes to ``x``. They do not count what is written by ``x.data``, or to its memory by kernels that
    torch knows nothing of: between two layers' calls within one forward call that is missed.
    """
    names: dict[QLinear, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, QLinear):
            names.setdefault(module, name)
    with _reading(model) as readings:
        model(*args, **kwargs)
    found = []
    for layers, calls in _groups(readings):
        if (scope := _innermost(calls)) is not None:
            FusedLinears(layers, FusionScope.of(scope))
            found.append(tuple(names[layer] for layer in layers))
    fuse_decoders_(model)
    return found


Calls = tuple[tuple[int, nn.Module], ...]  # of modules, within each other, each with its number
Readings = dict[QLinear, list[tuple[Tensor, Calls]]]


@contextlib.contextmanager
def _reading(model: nn.Module) -> Iterator[Readings]:
    """What each layer reads while the block runs, and the calls that its own is within. A tensor that changes between two
    readers is as good as two."""
    readings: Readings = {}
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    running: list[tuple[int, nn.Module]] = []
    thread, started = threading.get_ident(), 0

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal started
        if threading.get_ident() != thread:  # replicas of DataParallel
            return
        if isinstance(module, QLinear):
            x = args[0] if args else next(iter(kwargs.values()))
            same, before = seen.setdefault(id(x), (x, x.clone()))  # held, so that no other tensor takes its id
            readings.setdefault(module, []).append((same if torch.equal(before, x) else x.clone(), tuple(running)))
        started += 1
        running.append((started, module))

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if threading.get_ident() == thread:
            running.pop()

    with contextlib.ExitStack() as hooks:
        for module in model.modules():
            hooks.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield readings


def _groups(readings: Readings) -> list[tuple[list[QLinear], list[Calls]]]:
    """Layers that can be fused, in the order in which they were called, and the calls that they were called in."""
    groups: dict[Any, tuple[list[QLinear], list[Calls]]] = {}
    for layer, read in readings.items():
        if len(read) == 1 and _may_be_fused(layer):
            ((x, calls),) = read
            layers, within = groups.setdefault((id(x), *_kind(layer)), ([], []))
            layers.append(layer)
            within.append(calls)
    return [group for group in groups.values() if len(group[0]) > 1]


def _innermost(calls: list[Calls]) -> nn.Module | None:
    """The module whose call is within all of ``calls``, and has no such call within it."""
    common = None
    for one, *others in zip(*calls, strict=False):
        if all(other == one for other in others):
            common = one[1]
    return common


def _may_be_fused(layer: QLinear) -> bool:
    weight = layer._parameters.get("weight")
    if not isinstance(weight, QTensor) or layer.transform is not None or layer.fused is not None or layer._forward_hooks:
        return False
    tensors = [tensor for tensor in (layer.bias, layer.input_scale) if tensor is not None]
    if not all(type(tensor) in (Tensor, nn.Parameter) and not tensor.is_inference() for tensor in tensors):
        return False
    return weight.outer is None and layer.out_features % LAYOUTS[weight.byte_layout].rows == 0


def _kind(layer: QLinear) -> tuple[Any, ...]:
    static = None if layer.input_scale is None else float(layer.input_scale)
    weight = layer.weight
    key = weight.scheme_str, layer.in_features, weight.dtype, weight.device
    return *key, None if layer.bias is None else layer.bias.dtype, str(layer.activation), static
