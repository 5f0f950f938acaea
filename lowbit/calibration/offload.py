"""Where the parts of a model are while it is calibrated: in place, or on a device one block at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..environment import only_device
from ..plans import LayerPlan
from ..quantized_module import QuantizedModule
from ..replacement import CompletedLayer

__all__ = ["DeviceOffload", "BlockOffload", "onload_blocks"]


class BlockOffload:
    """A model that stays where it is.

    Others bring a block (:meth:`block`), or all that stands outside of blocks (:meth:`outside`), to where it can run, for
    as long as a ``with`` statement lasts.
    """

    device: torch.device | None
    """Where inputs have to be; None where they are right already, or the model moves them by itself."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.device = model, only_device(model)

    def block(self, path: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def outside(self, paths: Sequence[str]) -> contextlib.AbstractContextManager[None]:
        """All but the blocks at ``paths``."""
        return contextlib.nullcontext()

    def trim(self) -> None:
        """Large tensors have just been let go."""

    def mark_modified(self, modules: Iterable[nn.Module]) -> None:
        """What ``modules``, which are there, hold is other now than where they came from, and stays."""

    def is_completed(self, path: str) -> bool:
        """Whether an earlier run finished the block at ``path``."""
        return False

    def restore(self, path: str) -> dict[str, CompletedLayer]:
        """What an earlier run did to the layers of the block at ``path``, which is then what that run made of it."""
        return {}

    def save_block(self, path: str, entries: Sequence[LayerPlan]) -> None:
        """The block at ``path``, which is there, is finished, and ``entries`` are its layers."""


class DeviceOffload(BlockOffload):
    """A model that is moved to ``device`` a block at a time and back, or to stay there (``save_block``) once it has been there
    as a block."""

    def __init__(self, model: nn.Module, device: torch.device, keep: bool) -> None:
        super().__init__(model)
        self.device, self._keep_on_device = device, keep
        self._origin = {name: _place(module) for name, module in model.named_modules()}

    @contextlib.contextmanager
    def block(self, path: str) -> Iterator[None]:
        self._move(path, lambda name: self.device)
        try:
            yield
        finally:
            self._move(path, self._original_device)

    @contextlib.contextmanager
    def outside(self, paths: Sequence[str]) -> Iterator[None]:
        inside = tuple(f"{path}." for path in paths)
        names = [name for name, _ in self.model.named_modules() if name not in paths and not name.startswith(inside)]
        for name in names:
            _move(self.model.get_submodule(name), self.device)
        try:
            yield
        finally:
            for name in names:
                _move(self.model.get_submodule(name), self._original_device(name))

    def _move(self, path: str, device_of: Callable[[str], torch.device | None]) -> None:
        for name, module in self.model.get_submodule(path).named_modules(prefix=path):
            _move(module, device_of(name))

    def _original_device(self, name: str) -> torch.device | None:
        owner = name if name in self._origin else name.rpartition(".")[0]  # a module that a rewrite put in front of a layer
        is_final = self._keep_on_device and isinstance(self.model.get_submodule(owner), QuantizedModule)
        return None if is_final else self._origin.get(owner)


def _place(module: nn.Module) -> torch.device | None:
    tensors = [*module._parameters.values(), *module._buffers.values()]
    return next((tensor.device for tensor in tensors if tensor is not None), None)


def _move(module: nn.Module, device: torch.device | None) -> None:
    """Move what ``module`` itself holds."""
    if device is not None and _place(module) not in (None, device):

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device)

        module._apply(moved, recurse=False)


@contextlib.contextmanager
def onload_blocks(
    model: nn.Module, residence: BlockOffload, paths: Sequence[str], excluded: Sequence[str] = ()
) -> Iterator[None]:
    """Within the block all of ``model`` can run but the blocks at ``excluded``: each of those at ``paths`` is there while it
    runs."""
    entered: list[Any] = []

    def before(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            entered.append(residence.block(path))
            entered[-1].__enter__()

        return hook

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if entered:  # empty where the block itself raised
            entered.pop().__exit__(None, None, None)

    with contextlib.ExitStack() as stack:
        stack.enter_context(residence.outside([*paths, *excluded]))
        for path in paths:
            module = model.get_submodule(path)
            stack.callback(module.register_forward_pre_hook(before(path)).remove)
            stack.callback(module.register_forward_hook(after, always_call=True).remove)
        yield
