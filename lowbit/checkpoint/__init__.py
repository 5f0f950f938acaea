"""Checkpoints: a quantized model to a folder of safetensors files and back. ``docs/file-format.md`` describes the files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..environment import usable_device
from .assembly import Assembly
from .card import drop_card, write_card
from .header import Header
from .hf_config import build_on_meta, is_pretrained, read_quantization_config, write_config
from .inventory import Inventory
from .shards import open_files, write_files
from .tensor_file import CheckpointError

__all__ = ["CheckpointError", "load", "save"]


def save(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 4_000_000_000,
    beside: Callable[[Path], None] | None = None,
) -> None:
    """Write ``model`` to ``folder``: ``model.safetensors``, or several files and an index above ``max_shard_bytes``.

    Quantized weights are written in their canonical bytes whatever the layout in memory, everything else as it is, and
    a tensor with several names once. A transformers model's ``config.json`` and ``generation_config.json`` are written too, and
    a model card, ``README.md``, unless the folder has one that somebody else wrote.

    ``beside(path)`` may write further files of the same checkpoint, a tokenizer's say, into the folder ``path``, from which they
    are moved with the others.

    The folder's older checkpoint is replaced at the very end: an interrupted save leaves it whole. Files of other names
    stay. One save at a time may write to a folder.

    Raises ``ValueError`` naming the tensor for what a file cannot hold (a tensor on the meta device, a DTensor), and
    ``OSError`` naming the file that could not be written, as on a full disk.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    if type(max_shard_bytes) is not int or max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be an int of at least 1, got {max_shard_bytes!r}")
    found = Inventory(model)

    def extras(path: Path) -> None:
        if is_pretrained(model):
            write_config(model, path, _told(model, found.header))
            write_card(path, Path(folder))
        if beside is not None:
            beside(path)

    write_files(Path(folder), found.tensors, found.header, max_shard_bytes, extras)
    if found.header.is_plain:
        drop_card(Path(folder))


def load(folder: str | os.PathLike[str], model: nn.Module | None = None, device: torch.device | str | None = None) -> nn.Module:
    """The model in ``folder``, in evaluation mode.

    Args:
        folder: what :func:`save` wrote.
        model: a float model of the same structure, on any device; its layers are replaced and its tensors assigned. On
            the meta device it costs no memory of its own. Without it the folder's ``config.json`` says which
            transformers model to build.
        device: where the tensors go; by default where those of ``model`` are, and the CPU for a model on the meta device.

    Tensors that were one are one again. Float tensors have the dtype of the file, and a buffer that is no part of a
    ``state_dict`` (rotary frequencies) comes from the file only where ``model`` has it on the meta device. Takes as much
    memory as the files and one tensor.

    Raises :class:`CheckpointError`, which names the file and the tensor, for files that are cut short, altered, missing or
    of another version, and for tensors that do not fit ``model``, which is then left as it was.
    """
    path = Path(folder)
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    where = None if device is None else usable_device(device)
    # Tensors that are made in inference mode could never meet autograd again.
    with torch.inference_mode(False), open_files(path) as files:
        assembly = Assembly(build_on_meta(path) if model is None else model, files, where)
        assembly.read()
        loaded = assembly.apply().eval()
    if not files.header.is_plain and is_pretrained(loaded):
        from ..pretrained.quantizer import attach

        attach(loaded, quantization_config=read_quantization_config(path))
    return loaded


def _told(model: nn.Module, header: Header) -> dict[str, Any] | None:
    if header.is_plain:
        return None
    from ..pretrained.quantizer import quantization_config_of

    return quantization_config_of(model, header)
