"""Block rewrites: what layers read is divided channel by channel, by whatever comes before them or by a module in front."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from ..layers import Layer, layer_kind, replace_module
from ..module_attributes import transfer_attributes
from ..plans import LayerPlan
from ..statistics import Statistics
from ..transforms import ChannelScale, TransformedLinear
from .absorption import absorb, scale_columns
from .reader_map import ReaderMap, Source, find_readers
from .rescale_record import Rescaled
from .search import Choice, Pool, Reader

if TYPE_CHECKING:
    from ..calibration.ranks import Ranks
    from ..rewrite import Rewrite

__all__ = ["InputStatistics", "Rescaler", "sealed"]

SEALED = "another layer reads its weight, which stays as it is"
PREPARED = "its input is transformed already, and nothing before it takes factors"


class InputStatistics(Protocol):
    """The statistics of layers, which those that read one tensor share: each such group has the name of its first."""

    def group(self, name: str) -> str:
        """The group of the layer ``name``."""

    def has_data(self, group: str) -> bool:
        """Whether data reached it."""

    def statistics(self, group: str) -> Statistics | None:
        """Its statistics; None where no data reached it."""

    def dead_channels(self, group: str) -> int:
        """How many channels of their input were 0 in every row."""

    def rescale(self, group: str, s: Tensor) -> None:
        """Its statistics are those of x / s from now on."""


@dataclass(frozen=True)
class _Job:
    """Inputs that are divided together: ``groups`` of layers, each with the channels that they are divided with, and all
    ``readers`` that have to be multiplied."""

    source: Source | None
    count: int
    groups: dict[str, Tensor]
    readers: dict[str, Tensor]


class Rescaler:
    """Carries out ``rewrites`` on layers whose statistics are known, before they are rounded.

    ``entries`` and ``layers`` are those of the whole model, and ``sealed`` the names of :func:`sealed` modules. ``keep_float32``:
    the layers' weights become float32 until they are rounded to a grid, and are not rounded to their dtype before. ``trim`` is
    called when large tensors have been let go.
    """

    def __init__(
        self,
        rewrites: Sequence[Rewrite],
        model: nn.Module,
        entries: Sequence[LayerPlan],
        layers: Sequence[Layer],
        sealed: frozenset[str],
        ranks: Ranks,
        keep_float32: bool = True,
        trim: Callable[[], None] = lambda: None,
    ) -> None:
        self._keep_float32, self._trim = keep_float32, trim
        self._rewrites, self._model, self._sealed, self._ranks = rewrites, model, sealed, ranks
        self._entries, self._layers = entries, layers
        self._examples: dict[object, ReaderMap] = {}
        self.records: dict[int, tuple[Rescaled, ...]] = {}
        self.notes: dict[int, tuple[str, ...]] = {}
        self.modified: list[nn.Module] = []  # beside the layers

    def rescale(
        self, scope: Mapping[str, nn.Module], places: Sequence[int], inputs: InputStatistics, run: Callable[[], object] | None
    ) -> None:
        """Rewrite the layers at ``places`` and what they read.

        ``scope``: the modules, by name, that ``run`` runs and that may be changed; ``run`` is None in a process without data.
        """
        self.records, self.notes, self.modified = {}, {}, []
        at = {self._entries[i].name: i for i in places}
        first = next(rank for rank, has_run in enumerate(self._ranks.all_gather(run is not None)) if has_run)
        found = self._traced(scope, run) if run is not None and first == self._ranks.rank else ()
        sources = self._ranks.all_gather(found)[first]
        jobs = self._jobs(sources, at, inputs)
        for rewrite in self._rewrites:
            options = dict(rewrite.options)
            insert = options.pop("insert", True)
            chosen: dict[int, Choice] = {}
            for number, job in enumerate(jobs):
                if number % self._ranks.count == self._ranks.rank and (job.source is not None or insert):
                    chosen[number] = rewrite.method.run(self._pool(job, at, inputs), **options)
            choices = {number: choice for part in self._ranks.all_gather(chosen) for number, choice in part.items()}
            for number, choice in sorted(choices.items()):
                self._apply_choice(rewrite.name, jobs[number], choice, scope, at, inputs)

    def module(self, i: int) -> nn.Module:
        """The layer at place ``i`` as it is now."""
        return self._layers[i].module

    def _traced(self, scope: Mapping[str, nn.Module], run: Callable[[], object]) -> tuple[Source, ...]:
        """The sources in ``scope``, after the example of the last block that was built alike."""
        prefix = next(iter(scope))
        key = tuple((name[len(prefix) :], type(module), _shapes(module)) for name, module in scope.items())
        example = self._examples.get(key)
        found = find_readers(scope, run, self._sealed, example and example.renamed(lambda name: prefix + name))
        self._examples[key] = found.renamed(lambda name: name[len(prefix) :])
        return found.sources

    # ---- what is divided together --------------------------------------------------------------------------------

    def _jobs(self, sources: Sequence[Source], at: Mapping[str, int], inputs: InputStatistics) -> list[_Job]:
        groups: dict[str, list[str]] = {}
        for name in at:
            if inputs.has_data(inputs.group(name)):
                groups.setdefault(inputs.group(name), []).append(name)
        jobs: list[_Job] = []
        covered: set[str] = set()
        for source in sources:
            own_groups = {group: source.readers[names[0]] for group, names in groups.items() if names[0] in source.readers}
            if own_groups and not covered & own_groups.keys():
                covered |= own_groups.keys()
                jobs.append(_Job(source, source.channels, own_groups, source.readers))
        for group, names in groups.items():
            if group in covered:
                continue
            reason = SEALED if any(name in self._sealed for name in names) else ""
            reason = reason or (PREPARED if any("transform" in self._layers[at[name]].module._modules for name in names) else "")
            for name in names if reason else []:
                self.notes[at[name]] = tuple(f"{rewrite.name}: {reason}" for rewrite in self._rewrites)
            if not reason:
                k = self._layers[at[names[0]]].weight.shape[1]
                jobs.append(_Job(None, k, {group: torch.arange(k)}, {name: torch.arange(k) for name in names}))
        return jobs

    def _pool(self, job: _Job, at: Mapping[str, int], inputs: InputStatistics) -> Pool:
        def readers() -> Iterator[Reader]:
            for group, channels in job.groups.items():
                self._trim()
                statistics = inputs.statistics(group)
                assert statistics is not None
                for name in [name for name in at if inputs.group(name) == group]:
                    weight, config = self._layers[at[name]].weight.detach(), self._entries[at[name]].config
                    assert config is not None
                    compute = weight if weight.dtype == torch.float64 else weight.float()
                    yield Reader(compute, config, statistics.to(weight.device), channels.to(weight.device))

        return Pool(job.count, readers)

    # ---- dividing ------------------------------------------------------------------------------------------------

    def _apply_choice(
        self,
        rewrite: str,
        job: _Job,
        choice: Choice,
        scope: Mapping[str, nn.Module],
        at: Mapping[str, int],
        inputs: InputStatistics,
    ) -> None:
        into = "" if job.source is None else job.source.name
        if choice.label:
            divisor = choice.divisor
            if job.source is None:
                divisor = self._prepare([at[name] for name in job.readers], divisor)
            else:
                divisor = torch.where(job.source.reached, divisor, 1.0)
                divisor = absorb(scope[into], job.source.absorb_rule, divisor, keep_float32=self._keep_float32 and into in at)
                self.modified.append(scope[into])
            for name, channels in job.readers.items():
                module = self._layers[at[name]].module if name in at else scope[name]
                scale_columns(module, _spread(divisor, channels), keep_float32=self._keep_float32 and name in at)
                if name not in at:
                    self.modified.append(module)
            for group, channels in job.groups.items():
                inputs.rescale(group, _spread(divisor, channels))
        for name in [name for name in at if inputs.group(name) in job.groups]:
            record = Rescaled(rewrite, into, choice.label, choice.before, choice.after)
            self.records[at[name]] = (*self.records.get(at[name], ()), record)
            if dead_channels := inputs.dead_channels(inputs.group(name)):
                k = len(job.groups[inputs.group(name)])
                note = f"{rewrite}: {dead_channels} of {k} input channels were 0 in every row, and are not divided"
                self.notes[at[name]] = (*self.notes.get(at[name], ()), note)

    def _prepare(self, places: Sequence[int], divisor: Tensor) -> Tensor:
        """Put a module that divides by ``divisor`` in front of the layers at ``places``; what it divides by, as it is stored."""
        for i in places:
            layer = self._layers[i]
            old = layer.module
            factor = (1 / divisor).float().to(layer.weight.device)
            weight = old._parameters["weight"]
            assert weight is not None
            if layer.kind == "conv1d":
                weight = nn.Parameter(weight.detach().t().contiguous(), weight.requires_grad)
            earlier = old._modules.get("transform")
            if isinstance(earlier, ChannelScale):  # another rewrite's
                factor = earlier.get_buffer("factor") * factor
            layer.module = TransformedLinear(weight, old._parameters.get("bias"), ChannelScale(factor))
            transfer_attributes(old, layer.module)
            layer.kind = layer_kind(layer.module) or layer.kind
            layer.transposed = layer.kind == "conv1d"
            replace_module(self._model, layer.names, layer.module)
        return 1 / (1 / divisor).float().double()


def sealed(model: nn.Module) -> frozenset[str]:
    """The names of modules with a parameter that another module reads too, or that stand in several places themselves."""
    places: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for parameter in module._parameters.values():
            if parameter is not None:
                places.setdefault(id(parameter), []).append(name)
    return frozenset(name for names in places.values() if len(names) > 1 for name in names)


def _spread(divisor: Tensor, channels: Tensor) -> Tensor:
    return torch.where(channels >= 0, divisor.cpu()[channels.clamp(min=0)], 1.0)


def _shapes(module: nn.Module) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(parameter.shape) for parameter in module._parameters.values() if parameter is not None)
