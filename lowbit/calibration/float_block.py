"""A block as it was before its layers were rounded, which runs beside it and tells what they would read in the float model."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .collection import read_by

__all__ = ["FloatBlock", "in_dtypes"]


class FloatBlock:
    """A copy of ``block``, whose name in the model is ``path``.

    ``dtypes``: those of layers' weights by name, as they run; ``run(batch, block)`` runs a block on the inputs that the float
    model gives, of which there are ``rows[batch]``.
    """

    def __init__(
        self,
        block: nn.Module,
        path: str,
        dtypes: Mapping[str, torch.dtype],
        run: Callable[[int, nn.Module], object],
        rows: Mapping[int, int],
    ) -> None:
        self._block, self._path, self._run, self._rows = copy.deepcopy(block), path, run, rows
        for name, dtype in dtypes.items():
            module = self._module(name)
            module._parameters["weight"] = _of_dtype(module, dtype)

    def run(self, batch: int) -> object:
        """What it gives for ``batch``."""
        return self._run(batch, self._block)

    def layer_inputs(self, names: Iterable[str], batch: int) -> tuple[dict[str, list[Tensor]], int]:
        """What its layers ``names`` read in ``batch``, call by call, and how many rows it reads itself."""
        found: dict[str, list[Tensor]] = {}

        def hook(name: str) -> Callable[..., None]:
            def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                x = read_by(module, args, kwargs)
                if x is not None:
                    found.setdefault(name, []).append(x.detach())

            return record

        with contextlib.ExitStack() as hooks:
            for name in names:
                hooks.callback(self._module(name).register_forward_pre_hook(hook(name), with_kwargs=True).remove)
            self.run(batch)
        return found, self._rows[batch]

    def _module(self, name: str) -> nn.Module:
        return self._block.get_submodule(name[len(self._path) + 1 :])


@contextlib.contextmanager
def in_dtypes(modules: Mapping[str, nn.Module], dtypes: Mapping[str, torch.dtype]) -> Iterator[None]:
    """Within the block the weights of ``modules`` are of ``dtypes``, by name, so that they can run on what comes before them;
    afterwards they are as they were, which a rewrite may have made wider."""
    originals: list[tuple[nn.Module, nn.Parameter | None]] = []
    try:
        for name, dtype in dtypes.items():
            module = modules[name]
            weight = module._parameters.get("weight")
            if weight is not None and weight.dtype != dtype:
                originals.append((module, weight))
                module._parameters["weight"] = _of_dtype(module, dtype)
        yield
    finally:
        for module, weight in originals:
            module._parameters["weight"] = weight


def _of_dtype(module: nn.Module, dtype: torch.dtype) -> nn.Parameter | None:
    weight = module._parameters["weight"]
    return None if weight is None else nn.Parameter(weight.detach().to(dtype), requires_grad=False)
