"""The blocks of a model, found by the names of its layers and by what runs: stacks in which each block reads what the one
before gave."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..environment import only_device
from ..layers import layer_kind
from ..torch_state import default_device
from .argument_snapshot import ArgumentSnapshot
from .cache_and_loss import copied_if_cache, without_cache_and_loss
from .data import Batch
from .pytree import tree_leaves, tree_map

__all__ = ["PreviousOutput", "Stack", "BlockStructure", "call", "children", "find_stacks"]


@dataclass(frozen=True)
class PreviousOutput:
    """Stands in a block's arguments for the leaf ``index`` of what the block before gave."""

    index: int


@dataclass
class Stack:
    """Blocks that run one behind the other.

    Attributes:
        paths: their names, in the order in which they run.
        sources: for each block the places of its arguments' leaves that come from the block before, with the leaf of that
            block's output. Those of the first block are what comes from outside in the same places.
        shapes: the output of each block, with the index of each leaf in its place.
    """

    paths: list[str] = field(default_factory=list)
    sources: list[dict[int, int]] = field(default_factory=list)
    shapes: list[Any] = field(default_factory=list)

    def next_inputs(self, i: int) -> list[int]:
        """The leaves of the output of block ``i`` that the next one reads; of the last, what its own place would read."""
        return sorted(set(self.sources[min(i + 1, len(self.paths) - 1)].values()))


@dataclass
class BlockStructure:
    """What one run of a model showed: its stacks in the order in which they run, and notes on blocks that make none."""

    stacks: list[Stack]
    notes: list[str]

    def block_of(self, name: str) -> str | None:
        """The block that the layer ``name`` stands in."""
        return next((path for stack in self.stacks for path in stack.paths if name.startswith(f"{path}.")), None)


@dataclass
class _Event:
    path: str
    sources: dict[int, int]  # from the event before, whatever that was
    shape: Any
    snapshot: ArgumentSnapshot
    mutated: str | None = None  # the kind of an argument that the block changed


def find_stacks(model: nn.Module, stacks: Iterable[str], batch: Batch, device: Any = None) -> BlockStructure:
    """Run ``model`` once on ``batch`` and look at which of its ``stacks`` (:func:`lowbit.recipe.block_counts`) are chains.

    A stack is one where blocks run once each, one behind the other, where each reads a tensor, unchanged, that the one before
    gave, and where none changes what it is called with. ``notes`` say what the others do instead.
    """
    candidates = {name: children(model, name) for name in stacks}
    stack_of = {path: name for name, children in candidates.items() for path in children}
    events: list[_Event] = []
    last: list[tuple[Any, int | None]] = []  # leaves of the last output, and their versions then

    def before(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            events.append(_Event(path, _sources((args, kwargs), last), None, ArgumentSnapshot((args, kwargs))))

        return hook

    def after(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            event = next((event for event in reversed(events) if event.path == path), None)
            assert event is not None
            counter = iter(range(1 << 30))
            event.mutated = event.snapshot.mutated_type()
            event.shape = tree_map(output, lambda leaf: next(counter))
            last[:] = [(leaf, leaf._version if isinstance(leaf, Tensor) else None) for leaf in tree_leaves(output)]

        return hook

    with contextlib.ExitStack() as hooks:
        for path in stack_of:
            module = model.get_submodule(path)
            hooks.callback(module.register_forward_pre_hook(before(path), with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(after(path), with_kwargs=True).remove)
        call(model, batch, device)
    last.clear()
    return _find_chains(candidates, stack_of, events)


def children(model: nn.Module, name: str) -> list[str]:
    """The numbered children of a stack, in their order; none where they are single layers, as those of a plain
    nn.Sequential are."""
    stack = model.get_submodule(name)
    found = [(int(leaf), child) for leaf, child in stack.named_children() if leaf.isdecimal()]
    if not found or any(layer_kind(child) is not None for _, child in found):
        return []
    return [f"{name}.{i}".lstrip(".") for i, child in sorted(found, key=lambda pair: pair[0])]


def _sources(arguments: Any, last: list[tuple[Any, int | None]]) -> dict[int, int]:
    found = {}
    for place, leaf in enumerate(tree_leaves(arguments)):
        if isinstance(leaf, Tensor):
            index = next(
                (j for j, (output_leaf, version) in enumerate(last) if output_leaf is leaf and leaf._version == version), None
            )
            if index is not None:
                found[place] = index
    return found


def _find_chains(candidates: dict[str, list[str]], stack_of: dict[str, str], events: list[_Event]) -> BlockStructure:
    order = list(dict.fromkeys(stack_of[event.path] for event in events))
    found, notes = [], []
    for name in order:
        places = [i for i, event in enumerate(events) if stack_of[event.path] == name]
        stack_events = [events[i] for i in places]
        problem = ""
        if len({event.path for event in stack_events}) < len(stack_events):
            problem = "blocks that run more than once"
        elif places != list(range(places[0], places[0] + len(places))):
            problem = "blocks between which others run"
        elif not all(event.sources for event in stack_events[1:]):
            problem = "a block that does not read what the one before gave"
        elif any(event.mutated for event in stack_events):
            kind = next(event.mutated for event in stack_events if event.mutated)
            problem = f"a block that changes the {kind} that it is called with"
        if problem:
            notes.append(
                f"{name or 'the model'} has {problem}: its layers are calibrated together, in one run of the whole model"
            )
            continue
        first = stack_events[1].sources if len(stack_events) > 1 else _first_tensor(stack_events[0])
        found.append(
            Stack(
                [e.path for e in stack_events], [first, *(e.sources for e in stack_events[1:])], [e.shape for e in stack_events]
            )
        )
    notes += [
        f"{name or 'the model'} has blocks that did not run: no data reached them"
        for name, children in candidates.items()
        if children and name not in order
    ]
    return BlockStructure(found, notes)


def _first_tensor(event: _Event) -> dict[int, int]:
    """Of a block that has no next one nothing has to be known: its own first argument stands for its input."""
    return {0: 0}


def call(model: nn.Module, batch: Batch, device: Any = None) -> Any:
    """``model`` on ``batch``, moved to ``device``, else to where all of the model is; without a cache of keys and values where
    nobody asks for one, and without a loss (:mod:`~lowbit.calibration.cache_and_loss`). A model whose parts are on several
    devices moves what it is given by itself."""
    where = device or only_device(model)

    def moved(leaf: Any) -> Any:
        return leaf.to(where) if where is not None and isinstance(leaf, Tensor) else copied_if_cache(leaf)

    with without_cache_and_loss(model), default_device(where):
        return model(*tree_map(batch.args, moved), **tree_map(batch.kwargs, moved))
