"""The blocks of a model, found by the names of its layers and by what runs: stacks in which each block reads what the one
before gave."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..ambient import default_device
from ..environment import only_device
from ..layers import layer_kind
from .byproducts import fresh, without_byproducts
from .data import Batch
from .mutation import Witness
from .nesting import leaves, rebuilt

__all__ = ["Previous", "Stack", "Survey", "call", "children", "survey"]


@dataclass(frozen=True)
class Previous:
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

    def carried(self, i: int) -> list[int]:
        """The leaves of the output of block ``i`` that the next one reads; of the last, what its own place would read."""
        return sorted(set(self.sources[min(i + 1, len(self.paths) - 1)].values()))


@dataclass
class Survey:
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
    witness: Witness
    changed: str | None = None  # the kind of an argument that the block changed


def survey(model: nn.Module, stacks: Iterable[str], batch: Batch, device: Any = None) -> Survey:
    """Run ``model`` once on ``batch`` and look at which of its ``stacks`` (:func:`lowbit.recipe.block_counts`) are chains.

    A stack is one where blocks run once each, one behind the other, where each reads a tensor, unchanged, that the one before
    gave, and where none changes what it is called with. ``notes`` say what the others do instead.
    """
    candidates = {name: children(model, name) for name in stacks}
    homes = {path: name for name, children in candidates.items() for path in children}
    events: list[_Event] = []
    last: list[tuple[Any, int | None]] = []  # leaves of the last output, and their versions then

    def before(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            events.append(_Event(path, _sources((args, kwargs), last), None, Witness((args, kwargs))))

        return hook

    def after(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            event = next((event for event in reversed(events) if event.path == path), None)
            assert event is not None
            counter = iter(range(1 << 30))
            event.changed = event.witness.changed()
            event.shape = rebuilt(output, lambda leaf: next(counter))
            last[:] = [(leaf, leaf._version if isinstance(leaf, Tensor) else None) for leaf in leaves(output)]

        return hook

    with contextlib.ExitStack() as hooks:
        for path in homes:
            module = model.get_submodule(path)
            hooks.callback(module.register_forward_pre_hook(before(path), with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(after(path), with_kwargs=True).remove)
        call(model, batch, device)
    last.clear()
    return _judged(candidates, homes, events)


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
    for place, leaf in enumerate(leaves(arguments)):
        if isinstance(leaf, Tensor):
            index = next((j for j, (given, version) in enumerate(last) if given is leaf and leaf._version == version), None)
            if index is not None:
                found[place] = index
    return found


def _judged(candidates: dict[str, list[str]], homes: dict[str, str], events: list[_Event]) -> Survey:
    order = list(dict.fromkeys(homes[event.path] for event in events))
    found, notes = [], []
    for name in order:
        places = [i for i, event in enumerate(events) if homes[event.path] == name]
        own = [events[i] for i in places]
        why = ""
        if len({event.path for event in own}) < len(own):
            why = "blocks that run more than once"
        elif places != list(range(places[0], places[0] + len(places))):
            why = "blocks between which others run"
        elif not all(event.sources for event in own[1:]):
            why = "a block that does not read what the one before gave"
        elif any(event.changed for event in own):
            kind = next(event.changed for event in own if event.changed)
            why = f"a block that changes the {kind} that it is called with"
        if why:
            notes.append(f"{name or 'the model'} has {why}: its layers are calibrated together, in one run of the whole model")
            continue
        first = own[1].sources if len(own) > 1 else _first_tensor(own[0])
        found.append(Stack([e.path for e in own], [first, *(e.sources for e in own[1:])], [e.shape for e in own]))
    notes += [
        f"{name or 'the model'} has blocks that did not run: no data reached them"
        for name, children in candidates.items()
        if children and name not in order
    ]
    return Survey(found, notes)


def _first_tensor(event: _Event) -> dict[int, int]:
    """Of a block that has no next one nothing has to be known: its own first argument stands for its input."""
    return {0: 0}


def call(model: nn.Module, batch: Batch, device: Any = None) -> Any:
    """``model`` on ``batch``, moved to ``device``, else to where all of the model is; without a cache of keys and values where
    nobody asks for one, and without a loss (:mod:`~lowbit.calibration.byproducts`). A model whose parts are on several devices
    moves what it is given by itself."""
    where = device or only_device(model)

    def moved(leaf: Any) -> Any:
        return leaf.to(where) if where is not None and isinstance(leaf, Tensor) else fresh(leaf)

    with without_byproducts(model), default_device(where):
        return model(*rebuilt(batch.args, moved), **rebuilt(batch.kwargs, moved))
