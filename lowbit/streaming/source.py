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

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..calibration.ranks import Ranks
from ..checkpoint.shards import weight_files
from ..checkpoint.tensor_file import CheckpointError, Spec, Stored, TensorFile, write_tensor_file

__all__ = ["Source", "identity", "open_source", "opened"]

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
        spellings = [name, name.removeprefix(self._prefix), self._prefix + name, self._ties.get(name, name)]
        tied = self._ties.get(name)
        spellings += [] if tied is None else [tied.removeprefix(self._prefix), self._prefix + tied]
        found = next((spelling for spelling in spellings if spelling in self._home), None)
        if found is not None:
            self._stored[name] = found
        return found is not None

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def spec(self, name: str) -> Spec:
        file, stored = self._home[self._stored[name]]
        return file.specs[stored]

    def read(self, name: str) -> Tensor:
        """The tensor that the model calls ``name``, in memory of its own."""
        file, stored = self._home[self._stored[name]]
        return file.read(stored)

    def take_buffers(self, model: nn.Module) -> None:
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


@contextlib.contextmanager
def open_source(folder: Path, model: nn.Module, files: list[TensorFile], home: Path) -> Iterator[Source]:
    """The tensors of ``model`` in the open ``files`` of ``folder``; what they call by other names is written to ``home`` first,
    by one process of several. Raises :class:`~lowbit.CheckpointError` that names a tensor which is nowhere."""
    source = Source(model, files)
    ranks = Ranks()
    if source.missing and ranks.rank == 0 and not home.is_dir():
        part = home.with_name(f"{home.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        _transcribe(folder, model, set(source.missing), part)
        os.replace(part, home)
    ranks.wait()
    with contextlib.ExitStack() as stack:
        if home.is_dir():
            source = Source(model, [*files, *(_opened(path, stack) for path in sorted(home.iterdir()))])
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


def _transcribe(folder: Path, model: nn.Module, wanted: set[str], home: Path) -> None:
    """Let transformers load ``folder``, and write what is ``wanted`` as it arrives; no tensor stays in memory."""
    arrived: dict[tuple[int, str], Path] = {}

    def written(module: nn.Module, leaf: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or not getattr(parameter, "_is_hf_initialized", False):
            return None
        path = home / f"{len(arrived)}.safetensors"
        spec = Spec(parameter.dtype, tuple(parameter.shape))
        write_tensor_file(path, [Stored(_ALONE, spec, lambda: parameter)], {})
        arrived[id(module), leaf] = path
        empty: Any = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        empty._is_hf_initialized = True
        return empty  # in its place, so that it goes

    hook = register_module_parameter_registration_hook(written)  # type: ignore[arg-type]  # may return a parameter
    try:
        loaded = type(model).from_pretrained(folder, dtype="auto", local_files_only=True)  # type: ignore[attr-defined]
    finally:
        hook.remove()
    names = {id(module): prefix for prefix, module in loaded.named_modules()}
    for (module, leaf), path in arrived.items():
        name = f"{names.get(module, '?')}.{leaf}"
        if name in wanted:
            os.replace(path, home / f"{name}.safetensors")
        else:
            path.unlink()
