"""What a quantized model has to share with its float one beside the quantized weights: layers, biases, ties, all else."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..layers import Layer, find_layers, tied_groups
from ..quantized_module import QuantizedModule
from ..tensor import QTensor
from .report import Finding

__all__ = ["biases", "matched", "parameters", "ties"]


def matched(quantized: nn.Module, original: nn.Module) -> list[tuple[Layer, Layer]]:
    """The quantized layers, each with that of the float model in the same place; of those that share a weight all.

    Raises ``ValueError`` for models that are not two versions of one, and where nothing is quantized.
    """
    in_original = {name: layer for layer in find_layers(original) for name in layer.names}
    found = []
    for layer in find_layers(quantized):
        if not isinstance(layer.module, QuantizedModule):
            continue
        was = next((in_original[name] for name in layer.names if name in in_original), None)
        if was is None:
            raise ValueError(f"{layer.name} is in the quantized model alone: give the model that it was quantized from")
        if isinstance(was.module, QuantizedModule):
            raise ValueError(f"{layer.name} is quantized in both models: the second one has to be the float model")
        if was.weight.shape != layer.weight.shape:
            shapes = f"{tuple(layer.weight.shape)} and {tuple(was.weight.shape)}"
            raise ValueError(f"{layer.name} is {shapes} in the two models: give the model that it was quantized from")
        found.append((layer, was))
    if not found:
        raise ValueError("no layer of the first model is quantized: give the quantized model first, then the float one")
    return found


def biases(pairs: list[tuple[Layer, Layer]], rewritten: bool) -> Iterator[Finding]:
    """Biases that were dropped or, in a model that was not ``rewritten``, changed."""
    for layer, was in pairs:
        before, after = getattr(was.module, "bias", None), getattr(layer.module, "bias", None)
        if isinstance(before, Tensor) and not isinstance(after, Tensor):
            size = float(before.detach().abs().max())
            description = f"its bias was dropped (the float layer's reaches {size:.3g})"
        elif rewritten:
            continue
        elif isinstance(after, Tensor) and not isinstance(before, Tensor):
            description = "it has a bias, and the float layer has none"
        elif isinstance(before, Tensor) and isinstance(after, Tensor) and not _is_equal(before, after):
            off = float((after.detach().float().cpu() - before.detach().float().cpu()).abs().max())
            description = f"its bias is another one (off by up to {off:.3g})"
        else:
            continue
        yield Finding("bias", layer.name, description, "Copy the float layer's bias as it is: biases are not quantized")


def ties(quantized: nn.Module, original: nn.Module) -> Iterator[Finding]:
    """Layers that shared a weight and do not any more."""
    layers, after = find_layers(original), {name: layer for layer in find_layers(quantized) for name in layer.names}
    for group in tied_groups(layers):
        names = [layers[i].name for i in group]
        held = {id(_layer_parameters(after[name])) for name in names if name in after}
        if len(held) > 1:
            yield Finding(
                "tie", names[-1],
                f"it was tied to {names[0]} and is not any more: the weight is stored twice, and can become two weights",
                "Quantize both by one config with quantize_, or tie them again",
            )  # fmt: skip


def parameters(quantized: nn.Module, original: nn.Module) -> Iterator[Finding]:
    """Tensors outside of quantized layers that are not those of the float model."""
    inside = {name for name, module in quantized.named_modules(remove_duplicate=False) if isinstance(module, QuantizedModule)}
    before = dict(original.named_parameters(remove_duplicate=False)) | dict(original.named_buffers(remove_duplicate=False))
    after = dict(quantized.named_parameters(remove_duplicate=False)) | dict(quantized.named_buffers(remove_duplicate=False))
    unquantized = {name: value for name, value in after.items() if name.rpartition(".")[0] not in inside}
    unquantized = {name: value for name, value in unquantized.items() if not isinstance(value, QTensor)}  # experts are quantized
    other = [name for name, value in unquantized.items() if name in before and not _is_equal(before[name], value)]
    if other:
        more = f", and so are {len(other) - 1} more" if other[1:] else ""
        yield Finding(
            "parameter", other[0].rpartition(".")[0] or other[0],
            f"{other[0]} is not quantized and is not what it is in the float model{more}",
            "awq, smoothquant and rotation change a model on purpose: say rewritten=True, or compare with the float model that "
            "lowbit.rewrite_ gave before it was quantized; else look at what loaded it",
        )  # fmt: skip


def _layer_parameters(layer: Layer) -> Tensor | None:
    parameters = layer.module._parameters
    return parameters.get(layer.attribute)


def _is_equal(before: Tensor, after: Tensor) -> bool:
    """Whether the two are equal but for being stored in another dtype."""
    if before.shape != after.shape:
        return False
    a, b = before.detach().cpu(), after.detach().cpu()
    if not a.is_floating_point() or not b.is_floating_point():
        return torch.equal(a, b)
    steps = [torch.finfo(tensor.dtype).eps for tensor in (a, b)]
    if a.dtype == b.dtype:
        return torch.equal(a, b)
    a, b = a.double(), b.double()
    return bool(((a - b).abs() <= max(steps) * a.abs() + torch.finfo(torch.float16).tiny).all())
