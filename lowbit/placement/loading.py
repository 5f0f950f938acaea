"""A quantized folder through accelerate's ``load_checkpoint_in_model`` and ``load_checkpoint_and_dispatch``.

accelerate looks up the tensors of a file among those of the model. Here the folder is read as :func:`lowbit.load` reads one, and
its tensors then go where the device map has them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint import load
from ..checkpoint.assembly import Assembly
from ..checkpoint.header import is_quantized
from ..checkpoint.inventory import join_name
from ..checkpoint.shards import open_files, weight_files
from ..checkpoint.tensor_file import CheckpointError, TensorFile
from ..quantized_module import QuantizedModule

__all__ = ["load_in_model", "outline", "quantized_folder"]


def outline(model: nn.Module, folder: Path) -> None:
    """Make of ``model``, on the meta device, the outline of what ``folder`` holds, of which a device map is made."""
    if any(not parameter.is_meta for parameter in model.parameters()):
        return
    with open_files(folder) as files:
        assembly = Assembly(model, files, torch.device("meta"))
        assembly.read()
        assembly.apply()


def quantized_folder(checkpoint: Any) -> Path | None:
    """The folder that ``checkpoint``, a folder or a file in one, speaks of, if what it holds is quantized by lowbit."""
    path = Path(checkpoint)
    folder = path.parent if path.is_file() else path
    try:
        first = TensorFile(folder / next(iter(weight_files(folder, "a folder with a model"))))
    except (CheckpointError, OSError):
        return None  # accelerate says what is wrong, or reads what lowbit does not
    first.close()
    return folder if is_quantized(first.metadata, first.path) else None


def load_in_model(folder: Path, model: Any, device_map: Any, offload_folder: Any, dtype: Any, offload_buffers: bool) -> None:
    """Put what ``folder`` holds into ``model``, and each tensor where ``device_map`` has it: a device, or ``offload_folder``."""
    if device_map is not None and "disk" in device_map.values():
        if offload_folder is None:
            raise ValueError("device_map sends weights to disk: give offload_folder=, where they are to be")
        Path(offload_folder).mkdir(parents=True, exist_ok=True)
    training = model.training
    load(folder, model, device="cpu").train(training)
    if dtype is not None:
        model.to(getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype)
    if device_map is not None:
        _place(model, device_map, offload_folder, offload_buffers)


def _place(model: nn.Module, device_map: dict[str, Any], offload_folder: Any, offload_buffers: bool) -> None:
    """Send every tensor of ``model`` where ``device_map`` has it. Weights that are one stay one on a device."""
    from accelerate.utils import set_module_tensor_to_device
    from accelerate.utils.offload import offload_weight, save_offload_index

    index: dict[str, Any] = {}
    moved: dict[tuple[int, Any], nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            path = join_name(prefix, name)
            where = _where(device_map, path)
            if where == "disk":
                offload_weight(parameter.detach(), path, offload_folder, index)
                set_module_tensor_to_device(module, name, "meta")
            elif (id(parameter), where) in moved:
                module._parameters[name] = moved[id(parameter), where]
            else:
                set_module_tensor_to_device(module, name, where)
                found = module._parameters[name]
                assert found is not None
                moved[id(parameter), where] = found
        for name, buffer in list(module._buffers.items()):
            where = _where(device_map, join_name(prefix, name)) if buffer is not None else "disk"
            if where != "disk":
                set_module_tensor_to_device(module, name, where)
            elif buffer is not None and offload_buffers and name not in module._non_persistent_buffers_set:
                offload_weight(buffer, join_name(prefix, name), offload_folder, index)
                set_module_tensor_to_device(module, name, "meta")
        if isinstance(module, QuantizedModule):
            module._relayout()
    save_offload_index(index, offload_folder)


def _where(device_map: dict[str, Any], path: str) -> Any:
    """The device of the innermost module around ``path``, or of itself, that ``device_map`` names."""
    while path and path not in device_map:
        path = path.rpartition(".")[0]
    if path not in device_map:
        raise ValueError("device_map has no device for some of the model's tensors: name every module, or give '' one")
    return device_map[path]
