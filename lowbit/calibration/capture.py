"""What the blocks of a stack are called with, found without running any of them."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .blocks import Previous, Stack, call
from .byproducts import fresh, is_cache
from .data import Batch
from .nesting import leaves, rebuilt

__all__ = ["Arguments", "Constants", "captured"]


class Constants:
    """Tensors that blocks are called with beside what flows from block to block (masks, positions): each value once, since
    those of one batch are those of the next."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def __len__(self) -> int:
        return len(self._tensors)

    def keep(self, tensor: Tensor) -> str:
        """The key under which :meth:`get` gives ``tensor`` from now on."""
        tensor = tensor.detach().cpu().contiguous()
        digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
        key = digest.hexdigest()
        self._tensors.setdefault(key, tensor)
        return key

    def get(self, key: str) -> Tensor:
        return self._tensors[key]


@dataclass(frozen=True)
class _Constant:
    key: str


@dataclass(frozen=True)
class Arguments:
    """How a block is called, with :class:`~lowbit.calibration.blocks.Previous` and constants in the places of tensors."""

    template: Any

    def filled(self, given: dict[int, Any], constants: Constants, device: torch.device | None) -> tuple[Any, dict[str, Any]]:
        """(args, kwargs), with the leaves ``given`` of the block before, on ``device``."""

        def leaf(what: Any) -> Any:
            found = given[what.index] if isinstance(what, Previous) else what
            found = constants.get(found.key) if isinstance(found, _Constant) else fresh(found)
            return found.to(device) if device is not None and isinstance(found, Tensor) else found

        args, kwargs = rebuilt(self.template, leaf)
        return args, kwargs


class _Enough(Exception):  # noqa: N818 - no error: the last block has been called, and nothing behind it matters
    pass


def captured(
    model: nn.Module, stack: Stack, batches: Sequence[Batch], constants: Constants, device: torch.device | None = None
) -> Iterator[tuple[dict[int, Any], list[Arguments]]]:
    """For each batch what comes into the first block of ``stack``, by its leaf, and the arguments of every block.

    The blocks do not run: each hands on what it was given, in the shape of its output, which is all that the code between
    blocks looks at.
    """
    calls: list[tuple[Any, Any]] = []
    caches: dict[int, tuple[Any, Any]] = {}  # by identity, each with a copy of what it was when a block was first called

    def stand_in(i: int) -> Callable[..., Any]:
        sources = stack.sources[i]
        handed = stack.sources[min(i + 1, len(stack.paths) - 1)]

        def forward(*args: Any, **kwargs: Any) -> Any:
            calls.append((args, kwargs))
            for leaf in leaves((args, kwargs)):
                if is_cache(leaf) and id(leaf) not in caches:
                    caches[id(leaf)] = leaf, fresh(leaf)
            if i + 1 == len(stack.paths):
                raise _Enough
            given = list(leaves((args, kwargs)))
            known = {index: given[place] for place, index in sources.items() if place < len(given)}
            known = {index: known.get(index) for index in handed.values()}
            return rebuilt(stack.shapes[i], lambda index: known.get(index))

        return forward

    modules = [model.get_submodule(path) for path in stack.paths]
    for batch in batches:
        calls.clear()
        caches.clear()
        with contextlib.ExitStack() as restored:
            for i, module in enumerate(modules):
                restored.callback(_restore, module, module.__dict__.get("forward"))
                module.forward = stand_in(i)
            with contextlib.suppress(_Enough):
                call(model, batch, device)
        if len(calls) != len(modules):
            raise RuntimeError(f"{len(calls)} of the {len(modules)} blocks of {stack.paths[0].rpartition('.')[0]} ran")
        first = list(leaves(calls[0]))
        state = {index: _kept(first[place]) for place, index in stack.sources[0].items()}
        copies = {key: copied for key, (_, copied) in caches.items()}
        yield state, [_template(arguments, stack.sources[i], constants, copies) for i, arguments in enumerate(calls)]


def _restore(module: nn.Module, forward: Any) -> None:
    if forward is None:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = forward


def _kept(what: Any) -> Any:
    return what.detach().cpu() if isinstance(what, Tensor) else what


def _template(arguments: tuple[Any, Any], sources: dict[int, int], constants: Constants, caches: dict[int, Any]) -> Arguments:
    places = iter(range(1 << 30))

    def leaf(what: Any) -> Any:
        place = next(places)
        if place in sources:
            return Previous(sources[place])
        return _Constant(constants.keep(what)) if isinstance(what, Tensor) else caches.get(id(what), what)

    return Arguments(rebuilt(arguments, leaf))
