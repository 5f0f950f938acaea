"""A folder that holds a float model, read a tensor at a time under the model's own names.

Where the files say it otherwise (experts one by one that the model holds as one tensor), transformers' own loader reads them
once, and each tensor is written under the model's name as soon as it arrives.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..calibration.ranks import Ranks
from ..checkpoint.shards import weight_files
from ..checkpoint.tensor_file import CheckpointError, Spec, Stored, TensorFile, write_tensor_file

__all__ = ["Source", "identity", "open_source", "opened", "untie"]

_ALONE = "the tensor that this file is named after"


class Source:
    """The tensors of ``model``, an outline without numbers, in open files; ``missing`` are those that the files lack.

    Raises :class:`~lowbit.CheckpointError` that names a tensor which the files have in another shape.
    """

    def __init__(self, model: nn.Module, files: list[TensorFile]) -> None:
        # A file of the transcript holds one tensor, whose name is the file's.
        self._home = {_name(file, name): (file, name) for file in files for name in file.specs}
        path = files[0].path.parent
        self._stored: dict[str, str] = {}
        self._ties: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
        self._prefix = f"{getattr(model, 'base_model_prefix', '')}."
        wanted = dict(model.named_parameters(remove_duplicate=False))
        self.missing = [name for name in wanted if not self._find(name)]
        for name in self._stored:
            parameter, spec = wanted[name], self.spec(name)
            if spec.shape != tuple(parameter.shape):
                raise CheckpointError(f"{path}: {name} is {spec} in the file and {list(parameter.shape)} in the model")
        for name, _ in _persistent_buffers(model):
            self._find(name)  # one that no file has is the model's own

    def _find(self, name: str) -> bool:
        """Any of the names that are tied to ``name`` will do, as in transformers."""
        root = self._ties.get(name, name)
        tied = [root, *(other for other, stored in self._ties.items() if stored == root)]
        found = next((folder_for for folder_for in map(self._stored_name, (name, *tied)) if folder_for is not None), None)
        if found is not None:
            self._stored[name] = found
        return found is not None

    def _stored_name(self, name: str) -> str | None:
        """The name by which the files hold what the model calls ``name``; None where they have no tensor of its own for it."""
        return next((n for n in (name, name.removeprefix(self._prefix), self._prefix + name) if n in self._home), None)

    def differ(self, name: str, other: str) -> bool:
        """Whether the files hold different tensors for two names."""
        first, second = self._stored_name(name), self._stored_name(other)
        if first is None or second is None or first == second:
            return False
        return not torch.equal(*(file.read(stored) for file, stored in (self._home[first], self._home[second])))

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def spec(self, name: str) -> Spec:
        file, stored = self._home[self._stored[name]]
        return file.specs[stored]

    def read(self, name: str) -> Tensor:
        """The tensor that the model calls ``name``, in memory of its own."""
        file, stored = self._home[self._stored[name]]
        return file.read(stored)

    def load_buffers(self, model: nn.Module) -> None:
        """Give ``model`` the buffers that the files have."""
        for name, module in _persistent_buffers(model):
            leaf = name.rpartition(".")[2]
            if name in self:
                current = module._buffers[leaf]
                assert current is not None
                module._buffers[leaf] = self.read(name).to(current.dtype)


def _name(file: TensorFile, name: str) -> str:
    return file.path.stem if name == _ALONE else name


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for prefix, module in model.named_modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None and leaf not in module._non_persistent_buffers_set:
                yield f"{prefix}.{leaf}".lstrip("."), module


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[list[TensorFile]]:
    """The safetensors files in ``folder``, open for as long as the block lasts."""
    with contextlib.ExitStack() as stack:
        yield [_opened(folder / name, stack) for name in weight_files(folder, "the folder of a float model")]


def untie(model: Any, files: list[TensorFile]) -> None:
    """Part weights of ``model``, an outline, that its class ties and of which the files hold different ones, as transformers
    does when it loads them."""
    source, ties = Source(model, files), getattr(model, "all_tied_weights_keys", None) or {}
    for name, stored in list(ties.items()):
        if source.differ(name, stored):
            path, _, leaf = name.rpartition(".")
            parameter = model.get_parameter(name)
            model.get_submodule(path)._parameters[leaf] = nn.Parameter(torch.empty_like(parameter), parameter.requires_grad)
            del ties[name]


@contextlib.contextmanager
def open_source(folder: Path, model: nn.Module, files: list[TensorFile], folder_for: Path) -> Iterator[Source]:
    """The tensors of ``model`` in the open ``files`` of ``folder``; what they call by other names is written to ``folder_for``
    first, by one process of several. Raises :class:`~lowbit.CheckpointError` that names a tensor which is nowhere."""
    source = Source(model, files)
    ranks = Ranks()
    if source.missing and ranks.rank == 0 and not folder_for.is_dir():
        part = folder_for.with_name(f"{folder_for.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        _transcribe(folder, model, set(source.missing), part)
        os.replace(part, folder_for)
    ranks.barrier()
    with contextlib.ExitStack() as stack:
        if folder_for.is_dir():
            source = Source(model, [*files, *(_opened(path, stack) for path in sorted(folder_for.iterdir()))])
        if source.missing:
            more = f" and {len(source.missing) - 1} more" if source.missing[1:] else ""
            raise CheckpointError(f"{folder}: holds no tensor for {source.missing[0]}{more} of the model that config.json names")
        yield source


def identity(files: list[TensorFile]) -> list[Any]:
    """What tells these files from others: names, sizes and times."""
    return [[file.path.name, file.path.stat().st_size, file.path.stat().st_mtime_ns] for file in files]


def _opened(path: Path, stack: contextlib.ExitStack) -> TensorFile:
    file = TensorFile(path)
    stack.callback(file.close)
    return file


def _transcribe(folder: Path, model: nn.Module, wanted: set[str], folder_for: Path) -> None:
    """Let transformers load ``folder``, and write what is ``wanted`` as it arrives; no tensor stays in memory."""
    received: dict[tuple[int, str], Path] = {}

    def written(module: nn.Module, leaf: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or not getattr(parameter, "_is_hf_initialized", False):
            return None
        path = folder_for / f"{len(received)}.safetensors"
        spec = Spec(parameter.dtype, tuple(parameter.shape))
        write_tensor_file(path, [Stored(_ALONE, spec, lambda: parameter)], {})
        received[id(module), leaf] = path
        empty: Any = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        empty._is_hf_initialized = True
        return empty  # in its place, so that it goes

    hook = register_module_parameter_registration_hook(written)  # type: ignore[arg-type]  # may return a parameter
    try:
        loaded = type(model).from_pretrained(folder, dtype="auto", local_files_only=True)  # type: ignore[attr-defined]
    finally:
        hook.remove()
    names = {id(module): prefix for prefix, module in loaded.named_modules()}
    for (module, leaf), path in received.items():
        name = f"{names.get(module, '?')}.{leaf}"
        if name in wanted:
            os.replace(path, folder_for / f"{name}.safetensors")
        else:
            path.unlink()
