"""A model on disk, of which one block, or all that stands outside of blocks, is in memory at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from ..calibration.offload import BlockOffload
from ..plans import LayerPlan
from ..replacement import CompletedLayer
from . import malloc_trim
from .source import Source
from .workspace import Workspace

__all__ = ["DiskOffload"]


class DiskOffload(BlockOffload):
    """``model`` is an outline on the meta device; float weights are in ``source``, finished blocks in ``workspace``."""

    def __init__(self, model: nn.Module, source: Source, workspace: Workspace, device: torch.device | None) -> None:
        super().__init__(model)
        self.device = device
        self._source, self._workspace = source, workspace
        self._modified: set[nn.Module] = set()

    @contextlib.contextmanager
    def block(self, path: str) -> Iterator[None]:
        block = self.model.get_submodule(path)
        parameters: list[_Parameter] = []
        if self._workspace.has(path):
            self._workspace.read(path, block, str(self.device or "cpu"))
        else:
            parameters = self._materialized(block.named_modules(prefix=path))
        try:
            yield
        finally:
            if self._workspace.has(path):
                self._workspace.read(path, block, "meta")
            else:
                _to_meta(parameters)
            self.trim()

    @contextlib.contextmanager
    def outside(self, paths: Sequence[str]) -> Iterator[None]:
        inside = tuple(f"{path}." for path in paths)
        found = self.model.named_modules()
        parameters = self._materialized((name, m) for name, m in found if name not in paths and not name.startswith(inside))
        try:
            yield
        finally:
            _to_meta([place for place in parameters if place[0] not in self._modified])
            self.trim()

    def trim(self) -> None:
        malloc_trim.trim()

    def mark_modified(self, modules: Iterable[nn.Module]) -> None:
        self._modified |= set(modules)

    def is_completed(self, path: str) -> bool:
        return self._workspace.has(path)

    def restore(self, path: str) -> dict[str, CompletedLayer]:
        if not self._workspace.has(path):
            return {}
        self._workspace.read(path, self.model.get_submodule(path), "meta")
        return self._workspace.done(path)

    def save_block(self, path: str, entries: Sequence[LayerPlan]) -> None:
        self._workspace.save_block(path, self.model.get_submodule(path), entries)

    def _materialized(self, modules: Iterable[tuple[str, nn.Module]]) -> list[_Parameter]:
        """Give ``modules`` their numbers; names that share one parameter share one again."""
        parameters: list[_Parameter] = []
        made: dict[int, nn.Parameter] = {}
        for prefix, module in modules:
            for leaf, parameter in module._parameters.items():
                if parameter is None or not parameter.is_meta:
                    continue
                if id(parameter) not in made:
                    tensor = self._source.read(f"{prefix}.{leaf}".lstrip(".")).to(self.device or "cpu", parameter.dtype)
                    made[id(parameter)] = nn.Parameter(tensor, parameter.requires_grad)
                parameters.append((module, leaf, parameter))
            if self.device is not None:
                for leaf, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[leaf] = buffer.to(self.device)
        for module, leaf, parameter in parameters:
            module._parameters[leaf] = made[id(parameter)]
        return parameters


_Parameter = tuple[nn.Module, str, nn.Parameter]


def _to_meta(parameters: list[_Parameter]) -> None:
    """Take the numbers out again."""
    for module, leaf, parameter in parameters:
        module._parameters[leaf] = parameter
