"""Quantized layers put back as float ones that hold the numbers their codes stand for."""

from __future__ import annotations

import torch
from torch import nn

from .embedding import QEmbedding
from .layers import replace_module
from .linear import QLinear
from .module_attributes import transfer_attributes
from .quantized_module import QuantizedModule, local_tensor
from .tensor import QTensor

__all__ = ["dequantize_"]


def dequantize_(model: nn.Module, dtype: torch.dtype | None = None) -> list[str]:
    """Replace every quantized layer of ``model`` in place by a float one with its dequantized weight, in ``dtype`` (that of the
    weight by default), and quantized parameters of other modules; the names of both. Weights that were one are one again.

    A layer that rounds its input does so no more. Raises ``ValueError`` that names a layer with something ahead of it that
    a rewrite put there: a float layer has no place for it.
    """
    names: dict[QuantizedModule, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, QuantizedModule):
            names.setdefault(module, []).append(name)
    for module, found in names.items():
        if getattr(module, "transform", None) is not None:
            raise ValueError(f"{found[0]} multiplies its input by {module.transform} first, which a float layer does not")
    dense: dict[int, nn.Parameter] = {}
    for module, found in names.items():
        weight = local_tensor(module.weight)
        if id(weight) not in dense:
            dense[id(weight)] = nn.Parameter(weight.dequantize(dtype or weight.dtype), requires_grad=False)
        replace_module(model, tuple(found), _float(module, dense[id(weight)]))
    done = [found[0] for found in names.values()]
    for prefix, module in model.named_modules():  # experts in one parameter
        for name, parameter in module._parameters.items():
            if isinstance(parameter, QTensor):
                values = parameter.dequantize(dtype or parameter.dtype)
                module._parameters[name] = nn.Parameter(values.contiguous(), requires_grad=False)
                done.append(f"{prefix}.{name}".lstrip("."))
    return done


def _float(module: QuantizedModule, weight: nn.Parameter) -> nn.Module:
    made: nn.Module
    n, k = weight.shape
    if isinstance(module, QEmbedding):
        made = nn.Embedding(n, k, padding_idx=module.padding_idx, device="meta")
    else:
        assert isinstance(module, QLinear)
        made = nn.Linear(k, n, bias=module.bias is not None, device="meta")
        if module.bias is not None:
            bias = module.bias.detach().to(weight.dtype)
            made.bias = nn.Parameter(bias, requires_grad=False)
    transfer_attributes(module, made)
    made.weight = weight  # behind, for a quantized weight's own attributes are its codes
    return made
