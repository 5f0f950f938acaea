"""A model on disk, of which one block, or all that stands outside of blocks, is in memory at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from ..calibration.residence import Residence
from ..plans import LayerPlan
from ..replacement import Done
from . import heap
from .source import Source
from .workspace import Workspace

__all__ = ["OnDisk"]


class OnDisk(Residence):
    """``model`` is an outline on the meta device; float weights are in ``source``, finished blocks in ``workspace``."""

    def __init__(self, model: nn.Module, source: Source, workspace: Workspace, device: torch.device | None) -> None:
        super().__init__(model)
        self.device = device
        self._source, self._workspace = source, workspace
        self._changed: set[nn.Module] = set()

    @contextlib.contextmanager
    def block(self, path: str) -> Iterator[None]:
        block = self.model.get_submodule(path)
        held: list[_Held] = []
        if self._workspace.has(path):
            self._workspace.read(path, block, str(self.device or "cpu"))
        else:
            held = self._filled(block.named_modules(prefix=path))
        try:
            yield
        finally:
            if self._workspace.has(path):
                self._workspace.read(path, block, "meta")
            else:
                _emptied(held)
            self.trim()

    @contextlib.contextmanager
    def outside(self, paths: Sequence[str]) -> Iterator[None]:
        inside = tuple(f"{path}." for path in paths)
        found = self.model.named_modules()
        held = self._filled((name, m) for name, m in found if name not in paths and not name.startswith(inside))
        try:
            yield
        finally:
            _emptied([place for place in held if place[0] not in self._changed])
            self.trim()

    def trim(self) -> None:
        heap.trim()

    def hold(self, modules: Iterable[nn.Module]) -> None:
        self._changed |= set(modules)

    def is_done(self, path: str) -> bool:
        return self._workspace.has(path)

    def restored(self, path: str) -> dict[str, Done]:
        if not self._workspace.has(path):
            return {}
        self._workspace.read(path, self.model.get_submodule(path), "meta")
        return self._workspace.done(path)

    def keep(self, path: str, entries: Sequence[LayerPlan]) -> None:
        self._workspace.keep(path, self.model.get_submodule(path), entries)

    def _filled(self, modules: Iterable[tuple[str, nn.Module]]) -> list[_Held]:
        """Give ``modules`` their numbers; names that share one parameter share one again."""
        held: list[_Held] = []
        made: dict[int, nn.Parameter] = {}
        for prefix, module in modules:
            for leaf, parameter in module._parameters.items():
                if parameter is None or not parameter.is_meta:
                    continue
                if id(parameter) not in made:
                    tensor = self._source.read(f"{prefix}.{leaf}".lstrip(".")).to(self.device or "cpu", parameter.dtype)
                    made[id(parameter)] = nn.Parameter(tensor, parameter.requires_grad)
                held.append((module, leaf, parameter))
            if self.device is not None:
                for leaf, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[leaf] = buffer.to(self.device)
        for module, leaf, parameter in held:
            module._parameters[leaf] = made[id(parameter)]
        return held


_Held = tuple[nn.Module, str, nn.Parameter]


def _emptied(held: list[_Held]) -> None:
    """Take the numbers out again."""
    for module, leaf, parameter in held:
        module._parameters[leaf] = parameter
