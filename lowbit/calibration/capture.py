"""What the blocks of a stack are called with, found without running any of them."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .blocks import PreviousOutput, Stack, call
from .cache_and_loss import copied_if_cache, is_cache
from .data import Batch
from .pytree import tree_leaves, tree_map

__all__ = ["Arguments", "Constants", "capture_block_inputs"]


class Constants:
    """Tensors that blocks are called with beside what flows from block to block (masks, positions): each value once, since
    those of one batch are those of the next."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def __len__(self) -> int:
        return len(self._tensors)

    def add(self, tensor: Tensor) -> str:
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
    """How a block is called, with :class:`~lowbit.calibration.blocks.PreviousOutput` and constants in the places of tensors."""

    template: Any

    def fill(self, inputs: dict[int, Any], constants: Constants, device: torch.device | None) -> tuple[Any, dict[str, Any]]:
        """(args, kwargs), with the leaves ``inputs`` of the block before, on ``device``."""

        def leaf(value: Any) -> Any:
            found = inputs[value.index] if isinstance(value, PreviousOutput) else value
            found = constants.get(found.key) if isinstance(found, _Constant) else copied_if_cache(found)
            return found.to(device) if device is not None and isinstance(found, Tensor) else found

        args, kwargs = tree_map(self.template, leaf)
        return args, kwargs


class _StopForward(Exception):  # noqa: N818 - no error: the last block has been called, and nothing behind it matters
    pass


def capture_block_inputs(
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
        next_sources = stack.sources[min(i + 1, len(stack.paths) - 1)]

        def forward(*args: Any, **kwargs: Any) -> Any:
            calls.append((args, kwargs))
            for leaf in tree_leaves((args, kwargs)):
                if is_cache(leaf) and id(leaf) not in caches:
                    caches[id(leaf)] = leaf, copied_if_cache(leaf)
            if i + 1 == len(stack.paths):
                raise _StopForward
            inputs = list(tree_leaves((args, kwargs)))
            outputs = {index: inputs[place] for place, index in sources.items() if place < len(inputs)}
            outputs = {index: outputs.get(index) for index in next_sources.values()}
            return tree_map(stack.shapes[i], lambda index: outputs.get(index))

        return forward

    modules = [model.get_submodule(path) for path in stack.paths]
    for batch in batches:
        calls.clear()
        caches.clear()
        with contextlib.ExitStack() as restored:
            for i, module in enumerate(modules):
                restored.callback(_restore, module, module.__dict__.get("forward"))
                module.forward = stand_in(i)
            with contextlib.suppress(_StopForward):
                call(model, batch, device)
        if len(calls) != len(modules):
            raise RuntimeError(f"{len(calls)} of the {len(modules)} blocks of {stack.paths[0].rpartition('.')[0]} ran")
        first = list(tree_leaves(calls[0]))
        state = {index: _to_cpu(first[place]) for place, index in stack.sources[0].items()}
        copies = {key: copied for key, (_, copied) in caches.items()}
        yield state, [_template(arguments, stack.sources[i], constants, copies) for i, arguments in enumerate(calls)]


def _restore(module: nn.Module, forward: Any) -> None:
    if forward is None:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = forward


def _to_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _template(arguments: tuple[Any, Any], sources: dict[int, int], constants: Constants, caches: dict[int, Any]) -> Arguments:
    places = iter(range(1 << 30))

    def leaf(value: Any) -> Any:
        place = next(places)
        if place in sources:
            return PreviousOutput(sources[place])
        return _Constant(constants.add(value)) if isinstance(value, Tensor) else caches.get(id(value), value)

    return Arguments(tree_map(arguments, leaf))
