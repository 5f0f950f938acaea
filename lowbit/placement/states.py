"""``Accelerator.save_state`` and ``load_state`` of models with quantized weights: files of plain tensors hold their parts.

They have the names that a folder of lowbit's has; a state of parts loads into the quantized model."""

from __future__ import annotations

from typing import Any

from safetensors.torch import load_file
from torch import nn

from ..checkpoint.header import Entry
from ..checkpoint.inventory import join_name, part_as_stored
from ..packing import unpack
from ..quantized_module import QuantizedModule
from ..tensor import QTensor

__all__ = ["in_parts", "load_parts"]


def load_parts(model: nn.Module, filename: Any, strict: bool, device: Any) -> tuple[list[str], list[str]]:
    """The state in ``filename`` into ``model``; the names that are missing from it, and those that it has beside.

    Raises ``RuntimeError`` with them where ``strict``.
    """
    ties, state = _other_names(model), load_file(filename, device=str(device))
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items() if not isinstance(module, QuantizedModule) else ():
            if isinstance(parameter, QTensor):
                _assemble(state, join_name(prefix, name), parameter)
    found = model.load_state_dict(state, strict=False)
    missing, unexpected = sorted(set(found.missing_keys) - ties), sorted(found.unexpected_keys)
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"{filename} holds the state of another model: it lacks {missing[:5]}, and has {unexpected[:5]} beside"
        )
    return missing, unexpected


def _assemble(state: dict[str, Any], path: str, like: QTensor) -> None:
    """Put the weight whose parts ``state`` has, that of experts in one parameter, in their place."""
    entry = Entry("parameter", like.scheme, like._stored_shape, like.dtype, transposed=like.transposed)
    names, specs, packing = entry.names(path), entry.parts(), entry.packing()
    if not all(name in state for name in names.values()):
        return  # told as missing, or as a weight that does not fit
    for part, name in names.items():
        if (state[name].dtype, tuple(state[name].shape)) != (specs[part].dtype, specs[part].shape):
            raise RuntimeError(f"size mismatch for {name}: {tuple(state[name].shape)}, and a {like.scheme_str} has {specs[part]}")
    found = {part: state.pop(name) for part, name in names.items()}
    parts = {part: unpack(tensor, *packing[part]) if part in packing else tensor for part, tensor in found.items()}
    order = (parts["packed"].squeeze(-1), parts["scale"], parts.get("zero_point"), parts.get("outer"))
    state[path] = QTensor(*order, like.scheme, like._stored_shape, like.dtype, transposed=like.transposed)


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
