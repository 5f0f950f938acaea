"""Quantized weights in the folders that accelerate offloads to: codes and scales, a file a weight, as torch.save writes them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ..tensor import QTensor

__all__ = ["is_quantized", "read_codes", "replace_everywhere", "wrap_offload_weight", "wrap_offloading", "write_codes"]

KEY = "lowbit_file"
"""What the entry of a quantized weight has in the index of an offload folder."""


def write_codes(weight: QTensor, name: str, folder: Any) -> dict[str, Any]:
    """Write ``weight`` into ``folder``; the entry that the folder's index has of it."""
    file = f"{name}.pt"
    torch.save(weight.detach().cpu(), Path(folder) / file)
    dtype = str(weight.dtype).removeprefix("torch.")
    return {KEY: file, "scheme": weight.scheme_str, "dtype": dtype, "shape": list(weight.shape)}


def read_codes(entry: dict[str, Any], folder: Any) -> QTensor:
    """The weight that ``entry`` speaks of. Its bytes are mapped to memory where its layout is that of the file."""
    from ..checkpoint.tensor_file import CheckpointError  # with which most of lowbit comes

    path = Path(folder or "", entry[KEY])
    try:
        weight = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise CheckpointError(f"{path}: the weight that was offloaded there cannot be read: {error.strerror or error}") from error
    if not is_quantized(weight) or list(weight.shape) != list(entry["shape"]):
        raise CheckpointError(f"{path}: is not the weight {entry['shape']} that the index of the folder has there")
    found: QTensor = weight
    return found


def is_quantized(weight: Any) -> bool:
    """Whether ``weight`` is a QTensor, without importing that class: where it is not imported there is none."""
    tensor = sys.modules.get("lowbit.tensor")
    return tensor is not None and isinstance(weight, tensor.QTensor)


def wrap_offloading(offload: Any) -> None:
    """Let the functions of ``offload``, which is ``accelerate.utils.offload``, write and read quantized weights."""
    replace_everywhere(offload.offload_weight, _with_codes(offload.offload_weight))
    offload.OffloadedWeightsLoader.__getitem__ = _reading_codes(offload.OffloadedWeightsLoader.__getitem__)


def wrap_offload_weight() -> None:
    """Wrap the function of transformers that writes a weight to disk while it loads a model."""
    from transformers.integrations import accelerate as integration

    if not hasattr(integration.offload_weight, "__lowbit__"):
        replace_everywhere(integration.offload_weight, _with_codes(integration.offload_weight))


def replace_everywhere(old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Let every module that has the function ``old`` under its name have ``new``: modules import functions by their names."""
    name = old.__name__
    new.__lowbit__ = True  # type: ignore[attr-defined]
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, new)


def _with_codes(write: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(write)
    def offload_weight(weight: Any, weight_name: str, offload_folder: Any, index: Any = None) -> Any:
        if not is_quantized(weight) or offload_folder is None:
            return write(weight, weight_name, offload_folder, index)
        entry = write_codes(weight, weight_name, offload_folder)
        if index is not None:
            index[weight_name] = entry
        return index

    return offload_weight


def _reading_codes(read: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(read)
    def get(self: Any, key: str) -> Any:
        entry = None if key in self.state_dict else self.index.get(key)
        return read(self, key) if entry is None or KEY not in entry else read_codes(entry, self.save_folder)

    return get
