"""Calibrating: a model is quantized block by block, each on what the quantized blocks before it give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..ambient import default_device
from ..layers import Layer, tied_groups
from ..plans import LayerPlan
from ..recipe import block_counts
from ..replacement import Replacement, RoundedWeight, moved
from ..rewrites.rescaling import Rescaler, sealed
from ..statistics import Statistics
from .blocks import Survey, call, children, survey
from .capture import Arguments, Constants, captured
from .collection import Collector, PartedError
from .data import Batch
from .depths import steps
from .modes import evaluating
from .nesting import leaves
from .padding import Padding
from .ranks import Ranks
from .residence import Residence, streamed
from .states import Inputs, States
from .twin import Twin, narrowed

if TYPE_CHECKING:
    from ..rewrite import Rewrite

__all__ = ["Calibrator"]

NO_BLOCKS = "no stack of blocks was found: calibrated as one block, the whole model"


class Calibrator:
    """Quantizes the layers of a model with statistics of their inputs.

    For each block: its inputs are what the blocks before it, quantized, gave; one run over them collects the statistics of
    its layers, which are then rewritten, rounded and replaced; a second run gives the next block's inputs. No activation of more
    than one block is kept. Where a rounder looks at how far inputs drifted from those of the float model, a float copy of the
    block runs beside it, on what the float blocks before gave, and its layers are seen to in the order in which they read each
    other. Embeddings come first, without data; what else stands outside of blocks comes last, in a run of the
    whole model.

    ``room``: bytes that the statistics of a block may take at a time, None for any; only for one process without
    ``rewrites``, which look at all of a block's statistics at once.
    """

    def __init__(
        self,
        model: nn.Module,
        entries: Sequence[LayerPlan],
        layers: list[Layer],
        batches: Sequence[Batch],
        replacement: Replacement,
        residence: Residence,
        states: States,
        rewrites: Sequence[Rewrite] = (),
        room: int | None = None,
    ) -> None:
        self.notes: list[str] = []
        self._model, self._batches, self._replacement = model, batches, replacement
        self._residence, self._states, self._ranks = residence, states, Ranks()
        self._mine = self._ranks.share(len(batches))
        self._names = [entry.name for entry in entries]
        self._padding = Padding(model)
        self._modules = {i: layer.module for i, layer in enumerate(layers) if entries[i].target is not None}
        self._heard = {i for i, layer in enumerate(layers) if layer.kind in ("linear", "conv1d")}
        self._ties = [group for group in tied_groups(layers) if any(i in self._modules for i in group)]
        self._room = room
        self._rescaler: Rescaler | None = None
        if rewrites:
            self._rescaler = Rescaler(
                rewrites, model, entries, layers, sealed(model), self._ranks, replacement.rounds, residence.trim
            )
        self._stacks = block_counts(name for layer in layers for name in layer.names)

    def run(self) -> None:
        """Do all of it; ``notes`` then say what there is to know of the model as a whole."""
        candidates = [path for name in self._stacks for path in children(self._model, name)]
        for path in candidates:
            self._restore(path)
        with evaluating(self._model):
            with streamed(self._model, self._residence, candidates):
                found = survey(self._model, self._stacks, self._batches[0], self._residence.device)
            self.notes += found.notes
            if not found.stacks:
                self.notes.append(NO_BLOCKS)
            homes = self._homes(found)
            tied = {i for group in self._ties for i in group}
            tables = [i for i, module in self._modules.items() if isinstance(module, nn.Embedding) and i not in tied]
            if tables:
                with self._residence.outside(candidates):
                    for i in tables:
                        self._carry_out(i, None)
            for stack in range(len(found.stacks)):
                self._walk(found, stack, homes)
            self._rest([path for stack in found.stacks for path in stack.paths])

    def _homes(self, found: Survey) -> dict[int, str]:
        """The block of each layer that can be quantized with it: one whose weight no layer elsewhere reads."""
        homes = {i: found.block_of(self._names[i]) for i in self._modules}
        for group in self._ties:
            if len({homes.get(i) for i in group}) > 1:
                homes.update(dict.fromkeys(group))
        return {i: home for i, home in homes.items() if home is not None}

    def _carry_out(self, i: int, statistics: Statistics | None) -> None:
        self._replacement.carry_out(i, statistics, calibrated=True)
        del self._modules[i]

    def _restore(self, path: str) -> None:
        """Take over a block that an earlier run finished."""
        for name, done in self._residence.restored(path).items():
            i = self._names.index(name)
            self._replacement.take_over(i, done)
            del self._modules[i]

    # ---- blocks --------------------------------------------------------------------------------------------------

    def _walk(self, found: Survey, number: int, homes: dict[int, str]) -> None:
        stack, constants = found.stacks[number], Constants()
        device, residence = self._residence.device, self._residence
        calls: dict[int, list[Arguments]] = {}
        rows: dict[int, int] = {}  # that come into the blocks
        mine = [self._batches[batch] for batch in self._mine]
        earlier = [path for s in found.stacks[:number] for path in s.paths]
        later = [path for s in found.stacks[number:] for path in s.paths]
        with streamed(self._model, residence, earlier, later):
            found_calls = captured(self._model, stack, mine, constants, device)
            for batch, (state, arguments) in zip(self._mine, found_calls, strict=True):
                self._states.put(number, 0, batch, Inputs(state))
                calls[batch], rows[batch] = arguments, _rows(state)
        self._ranks.wait()
        asking = {homes[j] for j in self._modules if j in homes and self._asks_drift(j)}
        beside = max((i for i, path in enumerate(stack.paths) if path in asking), default=-1)  # the last with a twin
        done = next((i for i, path in enumerate(stack.paths) if not residence.is_done(path)), len(stack.paths))
        for i in range(self._states.latest(number, done, len(self._batches)), len(stack.paths)):
            path, last = stack.paths[i], i + 1 == len(stack.paths)
            inside = [j for j in self._modules if homes.get(j) == path]
            if last and not inside:
                break
            with residence.block(path):
                block = self._model.get_submodule(path)

                def run(batch: int, block: nn.Module = block, i: int = i, floats: bool = False) -> object:
                    inputs = self._states.get(number, i, batch)
                    args, kwargs = calls[batch][i].filled(inputs.meant if floats else inputs.leaves, constants, device)
                    with default_device(device):
                        return block(*args, **kwargs)

                scope = dict(block.named_modules(prefix=path))
                if path in asking and self._rescaler is not None:
                    self._rescale(inside, self._collected(inside, run), run, scope)
                twin = None
                if i <= beside:
                    if i < done:
                        raise ValueError(f"{path} is finished, and what it gave is not there any more: begin in a new folder")
                    twin = Twin(
                        block, path, self._dtypes([j for j in inside if j in self._heard]), partial(run, floats=True), rows
                    )
                if path in asking and twin is not None:
                    self._in_steps(inside, run, scope, twin)
                else:
                    self._quantize(inside, run, scope)
                if not last:
                    for batch in self._mine:
                        given = _carried(run(batch), stack.carried(i))
                        floats = _carried(twin.run(batch), stack.carried(i)) if twin is not None and i < beside else None
                        self._states.put(number, i + 1, batch, Inputs(given, floats))
                self._ranks.wait()
                if i >= done and self._ranks.rank == 0:
                    residence.keep(path, [self._replacement.entries[j] for j in inside])
                self._ranks.wait()
            if self._ranks.rank == 0:
                self._states.drop(number, i)

    def _rest(self, paths: list[str]) -> None:
        """What stands outside of blocks, by runs of the whole model."""
        rest = list(self._modules)
        if rest:
            with streamed(self._model, self._residence, paths):
                inside = tuple(f"{path}." for path in paths)
                scope = {n: m for n, m in self._model.named_modules() if n not in paths and not n.startswith(inside)}
                self._quantize(rest, lambda batch: call(self._model, self._batches[batch], self._residence.device), scope)
                if self._rescaler is not None:
                    self._residence.hold(self._rescaler.changed)

    # ---- statistics ----------------------------------------------------------------------------------------------

    def _asks_drift(self, i: int) -> bool:
        target = self._replacement.entries[i].target
        return target is not None and target.asks_drift

    def _dtypes(self, places: Sequence[int]) -> dict[str, torch.dtype]:
        """In which dtypes the layers at ``places`` came, by name."""
        return {self._names[i]: getattr(torch, self._replacement.entries[i].dtype) for i in places}

    def _in_steps(self, places: list[int], run: Callable[[int], object], scope: Mapping[str, nn.Module], twin: Twin) -> None:
        """Round and replace the layers at ``places`` in the order in which they read each other, each with statistics of what
        those before it, rounded, give, and of how far that is from what ``twin`` gives."""
        dtypes = self._dtypes(places)
        modules = {self._names[i]: self._modules[i] for i in places if i in self._heard}

        def ready(batch: int) -> object:
            left = {self._names[i]: self._modules[i] for i in places if i in self._modules and i in self._heard}
            with narrowed(left, {name: dtypes[name] for name in left}):
                return run(batch)

        mine = steps(modules, partial(ready, self._mine[0])) if self._mine else None
        order = next((found for found in self._ranks.gathered(mine) if found is not None), [])
        at = {self._names[i]: i for i in places}
        for step in [[name for name in at if name not in modules], *order]:
            self._quantize([at[name] for name in step], ready, scope, twin)

    def _quantize(
        self, places: list[int], run: Callable[[int], object], scope: Mapping[str, nn.Module], twin: Twin | None = None
    ) -> None:
        """Round and replace the layers at ``places`` with the statistics of ``run``, called with each batch, which runs the
        modules in ``scope``, which are rewritten before, unless a ``twin`` runs beside them.

        Every process rounds some of the groups, and all place what came of them. Where there is no room for all statistics at
        once, batches run again for the rest, and no layer is replaced before every one is rounded: the bytes are the same.
        """
        held: dict[int, RoundedWeight] = {}
        while places:
            collector = self._collected(places, run, twin)
            later = [i for i in places if collector.postponed(self._names[i])]
            now = [i for i in places if i not in later]
            if self._rescaler is not None and twin is None:
                self._rescale(now, collector, run, scope)
            if not self._replacement.rounds:
                for i in now:
                    self._carry_out(i, None)
            else:
                held |= self._rounded(now, collector, hold=bool(later or held))
            places = later
        # Of a tied weight the layer that has data decides.
        for i in sorted(held, key=lambda i: held[i].loss is None):
            self._replacement.place(i, held[i])
            del self._modules[i]

    def _rounded(self, places: list[int], collector: Collector, hold: bool) -> dict[int, RoundedWeight]:
        """What becomes of the layers at ``places``; empty where they could be replaced as they were rounded."""
        hold = hold or self._ranks.count > 1
        groups: dict[str, list[int]] = {}
        for i in places:
            groups.setdefault(collector.group(self._names[i]), []).append(i)
        mine: dict[int, RoundedWeight] = {}
        for number, group in enumerate(sorted(groups, key=lambda group: not collector.reached(group))):
            self._residence.trim()
            if number % self._ranks.count != self._ranks.rank:
                collector.let_go(group)
                continue
            statistics = collector.taken(group)
            for i in groups[group]:
                if hold:
                    mine[i] = self._replacement.round(i, statistics, calibrated=True)
                else:
                    self._carry_out(i, statistics)
                self._residence.trim()
        if self._ranks.count == 1:
            return mine
        mine = {i: rounded._replace(weight=moved(rounded.weight, "cpu")) for i, rounded in mine.items()}
        return {i: rounded for part in self._ranks.gathered(mine) for i, rounded in part.items()}

    def _rescale(
        self, places: list[int], collector: Collector, run: Callable[[int], object], scope: Mapping[str, nn.Module]
    ) -> None:
        """What comes between collecting and rounding. One batch is enough to see who reads what."""
        assert self._rescaler is not None
        first = next(iter(self._mine), None)
        heard = [i for i in places if i in self._heard]
        self._rescaler.rescale(scope, heard, collector, None if first is None else partial(run, first))
        for i in heard:
            self._modules[i] = self._rescaler.module(i)
            self._replacement.note(i, self._rescaler.records.get(i, ()), self._rescaler.notes.get(i, ()))
        self._residence.trim()

    def _collected(
        self, places: list[int], run: Callable[[int], object], twin: Twin | None = None, share: bool = True
    ) -> Collector:
        modules = {self._names[i]: self._modules[i] for i in places if i in self._heard}
        collector = Collector(modules, self._padding, share, self._room, drifts=twin is not None)
        error: ValueError | None = None
        try:
            for number in self._mine:
                batch = self._batches[number]
                meant, rows = ({}, 0) if twin is None else twin.heard(modules, number)
                with collector.listening(number, batch, meant, rows):
                    run(number)
                self._residence.trim()
            parted = False
        except PartedError:
            parted = True
        except ValueError as found:
            parted, error = False, found
        if not collector.join(self._ranks, parted, error):
            return self._collected(places, run, twin, share=False)
        return collector


def _carried(output: object, wanted: list[int]) -> dict[int, object]:
    """The leaves of a block's output that the next one reads."""
    given = list(leaves(output))
    return {i: given[i].detach().cpu() if isinstance(given[i], Tensor) else given[i] for i in wanted}


def _rows(leaves: dict[int, object]) -> int:
    """Of the first tensor in ``leaves`` [..., K], the rows."""
    return next((leaf.numel() // leaf.shape[-1] for leaf in leaves.values() if isinstance(leaf, Tensor) and leaf.numel()), 0)
