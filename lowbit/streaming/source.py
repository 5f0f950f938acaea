"""A folder that holds a float model, read a tensor at a time under the model's own names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..checkpoint.shards import INDEX, SINGLE, read_index
from ..checkpoint.tensor_file import CheckpointError, Spec, TensorFile

__all__ = ["Source", "open_source"]


class Source:
    """The tensors of ``model``, an outline without numbers, in open files.

    Raises :class:`~lowbit.CheckpointError` that names the first tensor which the files lack, or have in another shape.
    """

    def __init__(self, model: nn.Module, files: list[TensorFile]) -> None:
        self._home = {name: file for file in files for name in file.specs}
        self._path = files[0].path.parent
        self._stored: dict[str, str] = {}
        self._ties: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
        self._prefix = f"{getattr(model, 'base_model_prefix', '')}."
        wanted = dict(model.named_parameters(remove_duplicate=False))
        missing = [name for name in wanted if not self._find(name)]
        if missing:
            more = f" and {len(missing) - 1} more" if missing[1:] else ""
            raise CheckpointError(
                f"{self._path}: holds no tensor {missing[0]}{more} under the model's names: load it with transformers and "
                "save_pretrained it anew, or quantize_ it in memory"
            )
        for name, parameter in wanted.items():
            spec = self.spec(name)
            if spec.shape != tuple(parameter.shape):
                raise CheckpointError(f"{self._path}: {name} is {spec} in the file and {list(parameter.shape)} in the model")
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
        stored = self._stored[name]
        return self._home[stored].specs[stored]

    def read(self, name: str) -> Tensor:
        """The tensor that the model calls ``name``, in memory of its own."""
        stored = self._stored[name]
        return self._home[stored].read(stored)

    def identity(self) -> list[Any]:
        """What tells these files from others: names, sizes and times."""
        paths = sorted({file.path for file in self._home.values()})
        return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in paths]

    def take_buffers(self, model: nn.Module) -> None:
        """Give ``model`` the buffers that the files have."""
        for name, module in _persistent_buffers(model):
            leaf = name.rpartition(".")[2]
            if name in self:
                current = module._buffers[leaf]
                assert current is not None
                module._buffers[leaf] = self.read(name).to(current.dtype)


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for prefix, module in model.named_modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None and leaf not in module._non_persistent_buffers_set:
                yield f"{prefix}.{leaf}".lstrip("."), module


@contextlib.contextmanager
def open_source(folder: Path, model: nn.Module) -> Iterator[Source]:
    """The safetensors files in ``folder``, open for as long as the block lasts."""
    with contextlib.ExitStack() as stack:
        names = sorted(set(read_index(folder / INDEX).values())) if (folder / INDEX).is_file() else [SINGLE]
        if not (folder / names[0]).is_file():
            raise CheckpointError(f"{folder}: holds neither {SINGLE} nor {INDEX}: give the folder of a float model")
        files = []
        for name in names:
            files.append(TensorFile(folder / name))
            stack.callback(files[-1].close)
        yield Source(model, files)
