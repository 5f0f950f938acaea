"""Quantized weights in the folders that accelerate offloads to: codes and scales, a file a weight, as torch.save writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..checkpoint.tensor_file import CheckpointError
from ..tensor import QTensor
from .wrapping import KEY

__all__ = ["read_codes", "write_codes"]


def write_codes(weight: QTensor, name: str, folder: Any) -> dict[str, Any]:
    """Write ``weight`` into ``folder``; the entry that the folder's index has of it."""
    file = f"{name}.pt"
    torch.save(weight.detach().cpu(), Path(folder) / file)
    dtype = str(weight.dtype).removeprefix("torch.")
    return {KEY: file, "scheme": weight.spelling, "dtype": dtype, "shape": list(weight.shape)}


def read_codes(entry: dict[str, Any], folder: Any) -> QTensor:
    """The weight that ``entry`` speaks of. Its bytes are mapped to memory where its layout is that of the file."""
    path = Path(folder or "", entry[KEY])
    try:
        weight = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise CheckpointError(f"{path}: the weight that was offloaded there cannot be read: {error.strerror or error}") from error
    if not isinstance(weight, QTensor) or list(weight.shape) != list(entry["shape"]):
        raise CheckpointError(f"{path}: is not the weight {entry['shape']} that the index of the folder has there")
    return weight
