"""Statistics of what linear layers and experts read, taken while a block runs; layers that read one tensor share theirs."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..statistics import Statistics, Tally
from .data import Batch
from .expert_inputs import ExpertInputs, Experts
from .padding import Padding
from .ranks import Ranks

__all__ = ["Collector", "InputsDivergedError", "expert_key", "read_by"]

_HELD = 8  # rows of an expert are summed up once there is one for so many channels, since a sum costs K^2 however few they are


class InputsDivergedError(RuntimeError):
    """Layers that read one tensor in the first call read several later: their statistics have to be taken apart."""


def expert_key(name: str, expert: int) -> str:
    """What :class:`Collector` calls one of the experts ``name``."""
    return f"{name}[{expert}]"


class Collector:
    """Listens to ``modules`` and sums up what they read, without ``padding``; and to ``experts``, each of whose matrices has a
    tally of its own, called :func:`expert_key`. Of padding that a router sends to an expert nothing is known: it counts.

    Two layers share a tally where both read the very same tensor when they are first called, which is checked in every
    later call. ``share=False`` gives each its own. Where the tallies would take more than ``limit_bytes`` bytes, those that come
    first are summed up, at least one, and the layers of the others are :meth:`is_deferred`, for another run. ``drifts``: also sum
    up how far what they read is from what the float model gives there. ``skip``: keys of experts that nothing is asked of.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        padding: Padding,
        share: bool = True,
        limit_bytes: int | None = None,
        drifts: bool = False,
        experts: Mapping[str, Experts] | None = None,
        skip: Collection[str] = (),
    ) -> None:
        self._experts, self._skip = dict(experts or {}), frozenset(skip)
        self._held: dict[str, list[Tensor]] = {}  # rows of experts that are not summed up yet
        self._modules, self._padding, self._share, self._limit_bytes, self._drifts = modules, padding, share, limit_bytes, drifts
        self._full: set[str] = set()  # leaders without a tally
        self._leaders: dict[str, str] = {}
        self._tallies: dict[str, Tally] = {}
        self._found: dict[str, Statistics] = {}
        self._calls: dict[str, int] = {}
        self._reading: dict[str, tuple[Tensor, int, int]] = {}  # in this run, by leader: what it read, its version, which call
        self._number, self._batch = 0, Batch((), {})
        self._float_inputs: dict[str, Iterator[Tensor]] = {}
        self._rows = 0

    @contextlib.contextmanager
    def observing(
        self, number: int, batch: Batch, float_inputs: Mapping[str, Sequence[Tensor]] | None = None, rows: int = 0
    ) -> Iterator[None]:
        """Within the block, a run on the ``batch`` of this ``number``, the modules' inputs count. ``float_inputs``: what the
        float model's layers read, by name and call by call; only where a layer reads as many ``rows`` as the block does, since an
        expert hears other tokens as soon as its router hears other numbers."""
        self._number, self._batch, self._rows = number, batch, rows
        self._float_inputs = {name: iter(calls) for name, calls in (float_inputs or {}).items()}
        with self._padding.tracking_encoder(), contextlib.ExitStack() as hooks:
            for name, module in self._modules.items():
                hooks.callback(module.register_forward_pre_hook(self._hook(name), with_kwargs=True).remove)
            if self._experts:
                hooks.enter_context(ExpertInputs(self._experts, self._add_expert))
            try:
                yield
            finally:
                self._reading.clear()
                self._float_inputs.clear()
        for name, leader in self._leaders.items():
            if self._calls[name] != self._calls[leader]:
                raise InputsDivergedError(f"{name} and {leader} were not called as often")

    def _hook(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = read_by(module, args, kwargs)
            if x is not None:
                self._add(name, x)

        return hook

    def _add(self, name: str, x: Tensor) -> None:
        calls = self._calls[name] = self._calls.get(name, 0) + 1
        float_inputs = next(self._float_inputs.get(name, iter(())), None)
        if name not in self._leaders:
            self._leaders[name] = self._leader(name, x) if self._share and calls == 1 else name
        leader = self._leaders[name]
        if leader != name:
            read = self._reading.get(leader)
            if read is None or read[2] != calls or not _same(read, x):
                raise InputsDivergedError(f"{name} and {leader} read one tensor in their first call, and two in a later one")
            return
        self._reading[name] = x, x._version, calls
        if name not in self._tallies and name not in self._full:
            if self._fits(x.shape[-1]):
                self._tallies[name] = Tally(x.shape[-1], x.device, self._drifts)
            else:
                self._full.add(name)
        if name not in self._full:
            if float_inputs is not None and (float_inputs.shape != x.shape or x.numel() != self._rows * x.shape[-1]):
                float_inputs = None
            x_without_padding = self._padding.without_padding(x, self._batch, name)
            float_x = None if float_inputs is None else self._padding.without_padding(float_inputs, self._batch, name, x)
            self._tallies[name].add(x_without_padding, name, self._number, float_x)

    def _add_expert(self, name: str, expert: int, x: Tensor) -> None:
        key, k = expert_key(name, expert), x.shape[-1]
        if key in self._skip or not len(x):
            return
        self._leaders[key], self._calls[key] = key, 0
        if key not in self._tallies and key not in self._full:
            if self._fits(k):
                self._tallies[key] = Tally(k, x.device, self._drifts)
            else:
                self._full.add(key)
        if key not in self._full:
            held = self._held.setdefault(key, [])
            held.append(x.detach())
            if sum(map(len, held)) * _HELD >= k:
                self._sum_up(key)

    def _sum_up(self, key: str) -> None:
        rows = torch.cat(self._held.pop(key))
        self._tallies[key].add(rows, key)

    def finish(self) -> None:
        """Sum up what is left of the rows of experts. Raises as :meth:`~lowbit.statistics.Tally.add`."""
        for key in list(self._held):
            self._sum_up(key)

    def _fits(self, k: int) -> bool:
        used = sum(matrix.nbytes for tally in self._tallies.values() for matrix in tally.matrices)
        return self._limit_bytes is None or not self._tallies or used + (16 if self._drifts else 8) * k * k <= self._limit_bytes

    def _leader(self, name: str, x: Tensor) -> str:
        return next((other for other, read in self._reading.items() if read[2] == 1 and _same(read, x)), name)

    # ---- afterwards ----------------------------------------------------------------------------------------------

    def all_reduce(self, ranks: Ranks, diverged: bool, error: ValueError | None) -> bool:
        """Sum up what all processes heard. False where layers that share a tally in one do not in another, or ``diverged``.

        Raises the first ``error`` of any process, in all of them.
        """
        sizes = {name: len(tally.absmax) for name, tally in self._tallies.items()}
        gathered = ranks.all_gather((diverged, error, dict(self._leaders), sizes))
        for _, found, _, _ in gathered:
            if found is not None:
                raise found
        leaders: dict[str, str] = {}
        for _, _, leaders_there, _ in gathered:
            for name, leader in leaders_there.items():
                diverged = diverged or leaders.setdefault(name, leader) != leader
        if diverged or any(diverged_there for diverged_there, _, _, _ in gathered):
            return False
        self._leaders = leaders
        device = next((tally.gram.device for tally in self._tallies.values()), torch.device("cpu"))
        # In the order of the model, which is the same everywhere; a layer that heard nothing here adds nothing.
        widths = {name: k for _, _, _, sizes_there in gathered for name, k in sizes_there.items()}
        keys = [expert_key(name, i) for name, experts in self._experts.items() for i in range(experts.number)]
        observed = [name for name in (*self._modules, *keys) if name in widths]
        tallies = {name: self._tallies.get(name) or Tally(widths[name], device, self._drifts) for name in observed}
        self._tallies.clear()
        for name in sorted(tallies, key=lambda name: len(tallies[name].absmax)):  # the largest last: each takes half from here on
            tally = ranks.all_reduce(tallies.pop(name))
            if tally.count:
                self._found[name] = tally.statistics()
        return True

    def group(self, name: str) -> str:
        """The layer whose tally is that of ``name``."""
        return self._leaders.get(name, name)

    def is_deferred(self, name: str) -> bool:
        """Whether there was no room for what ``name`` reads."""
        return self.group(name) in self._full

    def has_data(self, group: str) -> bool:
        """Whether anything reached ``group``, and it is not let go."""
        return group in self._found

    def statistics(self, group: str) -> Statistics | None:
        """The statistics of a group; None where nothing reached it."""
        return self._found.get(group)

    def dead_channels(self, group: str) -> int:
        """How many channels of a group's input were 0 in every row."""
        return int((self._found[group].absmax == 0).sum())

    def rescale(self, group: str, s: Tensor) -> None:
        """The layers of ``group`` read x / s from now on."""
        self._found[group] = self._found[group].scaled(s)

    def discard(self, group: str) -> None:
        """Another process sees to this group."""
        self._found.pop(group, None)

    def pop_statistics(self, group: str) -> Statistics | None:
        """The statistics of a group, by the name of its first layer, which are let go; None where nothing reached it."""
        return self._found.pop(group, None)


def read_by(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """What the weight of ``module`` reads where that is called with these arguments; None for no tensor."""
    x = args[0] if args else kwargs.get("input", kwargs.get("x"))
    if not isinstance(x, Tensor):
        return None
    transform = module._modules.get("transform")
    return x if transform is None else transform(x)


def _same(read: tuple[Tensor, int, int], x: Tensor) -> bool:
    """Whether ``x`` is what was read, or a view of the same numbers, which nobody has changed since."""
    other, version, _ = read
    if x._version != version:
        return False
    kind = (x.shape, x.stride(), x.dtype, x.device) == (other.shape, other.stride(), other.dtype, other.device)
    return x is other or (kind and x.layout == torch.strided and x.data_ptr() == other.data_ptr() and x.numel() > 0)
