"""Which layers read what a module gives, channel by channel, found by running: no table of architectures.

A module's output is multiplied by powers of two, each channel by its own, which is exact in every floating dtype. Where each
channel of what a linear layer reads is then what it was, times a power of two, its exponents spell out the channel that it comes
from, and the layer is handed its old input. Where all that a run gives is what it was, bit for bit, nothing else has seen the
factors: the module's output may be divided by any positive numbers that these layers are multiplied by.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from ..layers import layer_kind
from ..quantized_module import QuantizedModule
from .absorption import channels
from .probe import Probe, Run, Source, pattern

__all__ = ["Source", "ReaderMap", "pattern", "find_readers"]

_MAX_ALONE = 8  # members of a kind that are tried one by one where all together do not do


@dataclass(frozen=True)
class ReaderMap:
    """What was found: ``sources``, those that are called last first, and ``excluded``, patterns of the names of modules that
    are none, because something bends what they give."""

    sources: tuple[Source, ...]
    excluded: frozenset[str]

    def renamed(self, name: Callable[[str], str]) -> ReaderMap:
        """The same of modules with other names; patterns are those of all."""
        found = (
            replace(source, name=name(source.name), readers={name(reader): c for reader, c in source.readers.items()})
            for source in self.sources
        )
        return ReaderMap(tuple(found), self.excluded)


def find_readers(
    modules: Mapping[str, nn.Module], run: Run, sealed: frozenset[str] = frozenset(), example: ReaderMap | None = None
) -> ReaderMap:
    """The sources among ``modules``.

    Args:
        modules: by name, those that ``run`` runs and that may be changed.
        run: runs them on some data and gives the result.
        sealed: names of those whose parameters others read too, so that they cannot be changed.
        example: what was found in a block that is built alike, under the names of this one. Its sources are confirmed all in
            one run, its hopeless modules are passed over.

    The data flows through with some modules' outputs replaced by random numbers, so that no channel is silent by chance. A
    layer that is not called is taken for what others are whose names differ from its in numbers alone (another expert); where
    there are none no source is found.
    """
    linears = {name: m for name, m in modules.items() if layer_kind(m) in ("linear", "conv1d")}
    usable = {name for name, m in linears.items() if _usable(m) and name not in sealed}
    candidates = {name: m for name, m in modules.items() if name not in sealed and channels(m)}
    found: list[Source] = []
    excluded: set[str] = set()
    order = _called(candidates, run)
    last = max((order.index(name) for name in order if name in usable), default=0)
    order = order[:last]  # what comes behind is read by no layer
    if example is not None:
        confirmed_members = {source.name: candidates[source.name] for source in example.sources if source.name in order}
        if len(confirmed_members) == len(example.sources) and _confirmed(
            example.sources, confirmed_members, linears, usable, run
        ):
            found = list(example.sources)
        excluded = set(example.excluded)
    kinds: dict[str, list[str]] = {}
    for name in order:
        if pattern(name) not in excluded and all(source.name != name for source in found):
            kinds.setdefault(pattern(name), []).append(name)
    for kind, names in kinds.items():
        sources, bent = _of_kind({name: candidates[name] for name in names}, linears, usable, run)
        found += sources
        excluded |= {kind} if bent else set()
    found.sort(key=lambda source: list(candidates).index(source.name), reverse=True)
    return ReaderMap(tuple(found), frozenset(excluded))


def _confirmed(
    sources: Sequence[Source], members: dict[str, nn.Module], linears: dict[str, nn.Module], usable: set[str], run: Run
) -> bool:
    if not sources or any(name not in usable for source in sources for name in source.readers):
        return False
    return Probe(members, linears, usable, run).confirms(sources)


def _usable(module: nn.Module) -> bool:
    return not isinstance(module, QuantizedModule) and getattr(module, "transform", None) is None and bool(channels(module))


def _called(candidates: Mapping[str, nn.Module], run: Run) -> list[str]:
    """Those whose every output is a tensor with a channel for each of their parameters' numbers, in the order of their calls."""
    order: dict[str, bool] = {}

    def hook(name: str, module: nn.Module) -> Any:
        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            fits = isinstance(output, Tensor) and output.is_floating_point() and output.dim() > 1
            order[name] = order.get(name, True) and fits and output.shape[-1] == channels(module)

        return module.register_forward_hook(after, with_kwargs=True)

    with contextlib.ExitStack() as hooks:
        for name, module in candidates.items():
            hooks.callback(hook(name, module).remove)
        run()
    return [name for name, fits in order.items() if fits]


def _of_kind(
    members: dict[str, nn.Module], linears: dict[str, nn.Module], usable: set[str], run: Run
) -> tuple[list[Source], bool]:
    """Sources among ``members``, which are tried together: what each gives is read by others; and whether there are none because
    what they give is bent, for sure and not for want of data."""
    probe = Probe(members, linears, usable, run)
    if not probe.prepared():
        return [], False
    if (found := probe.sources()) is not None:
        return found, False
    bent = not probe.has_silent_channel
    if len(members) > 1:
        each_alone = members.items() if len(members) <= _MAX_ALONE else ()
        parts = [_of_kind({name: module}, linears, usable, run) for name, module in each_alone]
        return [source for part, _ in parts for source in part], bent and all(is_bent for _, is_bent in parts)
    for start, stop in probe.pieces():
        if (found := probe.sources(start, stop)) is not None:
            return found, False
    return [], bent
