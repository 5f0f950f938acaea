"""``Accelerator.save_state`` and ``load_state`` of models with quantized weights: files of plain tensors hold their parts.

They have the names that a folder of lowbit's has; a state of parts loads into the quantized model."""

from __future__ import annotations

from typing import Any

from safetensors.torch import load_file
from torch import nn

from ..checkpoint.header import Entry
from ..checkpoint.inventory import part_as_stored
from ..tensor import QTensor

__all__ = ["in_parts", "load_parts"]


def load_parts(model: nn.Module, filename: Any, strict: bool, device: Any) -> tuple[list[str], list[str]]:
    """The state in ``filename`` into ``model``; the names that are missing from it, and those that it has beside.

    Raises ``RuntimeError`` with them where ``strict``.
    """
    ties = _other_names(model)
    found = model.load_state_dict(load_file(filename, device=str(device)), strict=False)
    missing, unexpected = sorted(set(found.missing_keys) - ties), sorted(found.unexpected_keys)
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"{filename} holds the state of another model: it lacks {missing[:5]}, and has {unexpected[:5]} beside"
        )
    return missing, unexpected


def in_parts(state: dict[str, Any]) -> dict[str, Any]:
    """``state`` with the stored parts of each QTensor in its place, and each tensor once."""
    found: dict[str, Any] = {}
    known: set[tuple[int, ...]] = set()
    for name, value in state.items():
        if not isinstance(value, QTensor):
            found[name] = value
            continue
        place = (value.packed.data_ptr(), value.scale.data_ptr(), *value._stored_shape)
        if place in known and value.numel():
            continue  # the weight of an embedding that is also the head's
        known.add(place)
        is_layer = name.rpartition(".")[2] == "weight"
        entry = Entry("linear" if is_layer else "parameter", value.scheme, value._stored_shape, value.dtype)
        for part, stored in entry.names(name.removesuffix(".weight") if is_layer else name).items():
            found[stored] = part_as_stored(value, part)
    return found


def _other_names(model: nn.Module) -> set[str]:
    """The names of parameters that another name stands for as well."""
    names = {name for name, _ in model.named_parameters()}
    return {name for name, _ in model.named_parameters(remove_duplicate=False)} - names
