"""What transformers keeps when a model is quantized: heads, and modules that stay in float32."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.base import get_keys_to_not_convert

__all__ = ["apply_fp32_modules", "default_exclusions"]


def default_exclusions(model: nn.Module) -> dict[nn.Module, str]:
    """The modules in ``model`` that no rule for everything takes, and what each of them is.

    For every transformers model that ``model`` is or holds: its output embeddings; what stands outside of its base model, which
    is the head that its class puts there, unless it is a model of its own or a stack of blocks; modules whose weight
    ``_keep_in_fp32_modules`` or ``_keep_in_fp32_modules_strict`` names; and the last layer, from ``get_keys_to_not_convert``.
    That list also has all tied weights, which can be quantized here.
    """
    found: dict[nn.Module, str] = {}
    inside: set[nn.Module] = set()
    for holder in model.modules():
        if isinstance(holder, PreTrainedModel):
            outermost = holder not in inside
            inside.update(holder.modules())
            for module, reason in (*_heads(holder), *_float32(holder), *(_last(holder) if outermost else ())):
                found.setdefault(module, reason)
    return found


def apply_fp32_modules(model: Any, dtype: torch.dtype) -> None:
    """Give the parameters of ``model``, which are on the meta device and in ``dtype``, the dtypes that from_pretrained loads them
    in: float32 for those that transformers keeps in it."""
    plan = model._get_dtype_plan(dtype)
    made: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            name = f"{prefix}.{leaf}" if prefix else leaf
            if parameter is None or not parameter.is_meta or not parameter.is_floating_point():
                continue
            key = next((key for key in plan if _names(key, name)), None)
            if key is not None and parameter.dtype != plan[key]:
                wide = nn.Parameter(torch.empty_like(parameter, dtype=plan[key]), parameter.requires_grad)
                module._parameters[leaf] = made.setdefault(id(parameter), wide)


def _heads(model: Any) -> Iterator[tuple[nn.Module, str]]:
    """The output embeddings of ``model``, and what its class puts on the base model."""
    try:
        output = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):  # encoders without a head
        output = None
    if output is not None:
        yield output, "the head"
    if model.base_model is not model:
        others = {module for body in _bodies(model) for module in body.modules()}
        yield from ((module, "a head") for module in model.modules() if module not in others)


def _bodies(model: Any) -> Iterator[nn.Module]:
    """What is no head of ``model``: its base model, other models of transformers, and blocks that are repeated."""
    for module in model.modules():
        if module is model.base_model or (isinstance(module, PreTrainedModel) and module is not model):
            yield module
        elif isinstance(module, nn.ModuleList):
            yield from (block for block in module if sum(isinstance(layer, nn.Linear) for layer in block.modules()) > 1)


def _last(model: Any) -> Iterator[tuple[nn.Module, str]]:
    """What transformers' own list for ``model`` has beside its ties."""
    if next(model.parameters(), None) is None:
        return
    ties = model.all_tied_weights_keys
    keys = set(get_keys_to_not_convert(model)) - {name.removesuffix(".weight") for name in (*ties, *ties.values())}
    for name, module in model.named_modules():
        if any(f"{name}.".startswith(f"{key}.") for key in keys):
            yield module, "the last layer, which transformers keeps"


def _float32(model: Any) -> Iterator[tuple[nn.Module, str]]:
    for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
        for key in getattr(model, attribute) or ():
            reason = f"{key} in transformers' {attribute}"
            yield from ((module, reason) for name, module in model.named_modules() if _names(key, f"{name}.weight"))


def _names(key: str, name: str) -> bool:
    """Whether transformers, when it loads the parameter ``name``, takes it to be one of ``key``."""
    return re.search(key.replace("*", ".*"), name) is not None
