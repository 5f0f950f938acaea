"""accelerate's hooks of a layer that another takes the place of: taken off the one and given to the other.

A hook moves the tensors of its module to where it runs before each call. Where it offloads, the module has them on the meta
device between calls, and the hook's ``weights_map`` has the values: in memory, or in files.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..tensor import QTensor

__all__ = [
    "ATTRIBUTES",
    "execution_device",
    "attach_hook",
    "is_hooked",
    "is_offloaded",
    "offloaded_in_memory",
    "offloaded",
    "resident",
    "detach_hook",
]

ATTRIBUTES = frozenset({"_hf_hook", "_old_forward", "forward"})
"""What accelerate writes on a module that has a hook."""


def is_hooked(module: nn.Module) -> bool:
    """Whether ``module`` has a hook of accelerate's, around the ``forward`` of its class."""
    held = vars(module)
    if "_hf_hook" not in held or "accelerate.hooks" not in sys.modules:
        return False
    inner = held.get("_old_forward")
    is_lowbit = getattr(inner, "__func__", None) is type(module).forward and getattr(inner, "__self__", None) is module
    return is_lowbit and getattr(held.get("forward"), "__wrapped__", None) is inner


def offloaded(module: nn.Module, name: str) -> Tensor | None:
    """The values of the parameter or buffer ``name`` of ``module``, which is on the meta device, where its hook has them."""
    for hook in _aligning(module):
        if hook.offload and name in hook.weights_map:
            found = hook.weights_map[name]
            assert isinstance(found, Tensor)
            return found
    return None


def resident(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """``tensor``, the parameter or buffer ``name`` of ``module``, with its values where a hook has them."""
    found = offloaded(module, name) if tensor.is_meta else None
    return tensor if found is None else found


def offloaded_in_memory(module: nn.Module, name: str) -> Tensor | None:
    """:func:`offloaded`, where that is in memory; what is read from a file is another tensor each time."""
    for hook in _aligning(module):
        store, key = hook.weights_map, name
        while hasattr(store, "dataset"):
            store, key = store.dataset, f"{store.prefix}{key}"
        found = getattr(store, "state_dict", store) if hook.offload else {}
        if key in found:
            assert isinstance(found[key], Tensor)
            return found[key]
    return None


def is_offloaded(module: nn.Module) -> bool:
    """Whether a hook keeps the tensors of ``module`` elsewhere between calls."""
    return any(hook.offload for hook in _aligning(module))


def execution_device(module: nn.Module) -> torch.device | None:
    """Where the hook of ``module``, if it has one, lets it run."""
    where = next((hook.execution_device for hook in _aligning(module) if hook.execution_device is not None), None)
    return None if where is None else torch.device(where)


def detach_hook(module: nn.Module, name: str = "weight") -> Any:
    """Take the hook off ``module``, whose parameter ``name`` is replaced, and give it; all but that parameter, where it is
    offloaded, is then where it was before it was hooked."""
    if not is_hooked(module):
        return None
    from accelerate.hooks import remove_hook_from_module

    hook, weight = vars(module)["_hf_hook"], module._parameters.get(name)
    for each in _aligning(module):
        if each.offload:  # another weight comes
            each.original_devices[name] = torch.device("meta")
        for pointer, places in list((each.tied_params_map or {}).items()):
            if any(tensor is weight for tensor in places.values()):
                del each.tied_params_map[pointer]  # the memory there is another tensor's soon
    remove_hook_from_module(module)
    return hook


def attach_hook(module: nn.Module, hook: Any, name: str = "weight") -> None:
    """Hook ``module``, whose parameter ``name`` is quantized now. Where the hook offloads it keeps the new weight where it kept
    the old one."""
    if hook is None:
        return
    from accelerate.hooks import add_hook_to_module

    weight = module._parameters[name]
    assert isinstance(weight, QTensor)
    for each in _each(hook):
        if getattr(each, "offload", False):
            _store(each.weights_map, name, weight)
        if name in getattr(each, "tied_params_names", ()):
            each.tied_params_names.discard(name)
            each.tied_params_map[weight.data_ptr()] = {}
    add_hook_to_module(module, hook)


def _aligning(module: nn.Module) -> Iterator[Any]:
    hooks = sys.modules.get("accelerate.hooks")
    if hooks is not None and (hook := vars(module).get("_hf_hook")) is not None:
        yield from (each for each in _each(hook) if isinstance(each, hooks.AlignDevicesHook))


def _each(hook: Any) -> Iterator[Any]:
    """The hooks that are one after the other in ``hook``."""
    if hasattr(hook, "hooks"):
        for inner in hook.hooks:
            yield from _each(inner)
    else:
        yield hook


def _store(store: Any, name: str, weight: QTensor) -> None:
    """Let ``store``, which hooks read values from, have ``weight`` under ``name``."""
    from accelerate.utils import OffloadedWeightsLoader, PrefixedDataset
    from accelerate.utils.offload import offload_weight, save_offload_index

    if isinstance(store, PrefixedDataset):
        _store(store.dataset, f"{store.prefix}{name}", weight)
    elif not isinstance(store, OffloadedWeightsLoader):
        store[name] = weight.detach()
    elif name in store.state_dict or store.save_folder is None:
        store.state_dict[name] = weight.detach()
    else:
        old = store.index[name]
        store.index[name] = offload_weight(weight, name, store.save_folder, {})[name]
        save_offload_index({name: store.index[name]}, store.save_folder)
        if "safetensors_file" not in old:
            Path(store.save_folder, f"{name}.dat").unlink(missing_ok=True)
