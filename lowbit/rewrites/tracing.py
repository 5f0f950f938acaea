"""Which layers read what a module gives, channel by channel, found by running: no table of architectures.

A module's output is multiplied by powers of two, each channel by its own, which is exact in every floating dtype. Where each
channel of what a linear layer reads is then what it was, times a power of two, its exponents spell out the channel that it comes
from, and the layer is handed its old input. Where all that a run gives is what it was, bit for bit, nothing else has seen the
factors: the module's output may be divided by any positive numbers that these layers are multiplied by.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..calibration.nesting import leaves
from ..layers import layer_kind
from ..weight import QuantizedModule
from .absorption import channels, way_of

__all__ = ["Source", "Trace", "trace"]

_ROWS = 64  # of what a layer reads that are compared, beside the largest number of each channel
_OUTPUTS = 256  # rows of what a run gives
_ALONE = 8  # members of a kind that are tried one by one where all together do not do
_SUBNORMAL = {torch.float16: 2.0**-24}  # the step below the smallest normal number, where real numbers are as small as that
_PIECES = 16  # into which the channels of a module are parted at most, where all of them do not do

Run = Callable[[], object]


@dataclass(frozen=True)
class Source:
    """A module whose output can be divided by positive numbers, one a channel.

    Attributes:
        name: of the module.
        way: in which its parameters take them (:mod:`~lowbit.rewrites.absorption`).
        channels: of its output.
        readers: for every linear layer that has to be multiplied by them, the source's channel that each channel of its input
            is proportional to, int64 [K], -1 for none.
    """

    name: str
    way: str
    channels: int
    readers: dict[str, Tensor]

    @property
    def reached(self) -> Tensor:
        """bool [channels]: which of them a reader reads; what becomes of the others is not known, and they have to stay."""
        out = torch.zeros(self.channels, dtype=torch.bool)
        for channel in self.readers.values():
            out[channel[channel >= 0]] = True
        return out


@dataclass(frozen=True)
class Trace:
    """What was found: ``sources``, those that are called last first, and ``hopeless``, patterns of the names of modules that
    are none, because something bends what they give."""

    sources: tuple[Source, ...]
    hopeless: frozenset[str]

    def renamed(self, name: Callable[[str], str]) -> Trace:
        """The same of modules with other names; patterns are those of all."""
        found = (
            replace(source, name=name(source.name), readers={name(reader): c for reader, c in source.readers.items()})
            for source in self.sources
        )
        return Trace(tuple(found), self.hopeless)


def trace(
    modules: Mapping[str, nn.Module], run: Run, sealed: frozenset[str] = frozenset(), example: Trace | None = None
) -> Trace:
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
    hopeless: set[str] = set()
    order = _called(candidates, run)
    last = max((order.index(name) for name in order if name in usable), default=0)
    order = order[:last]  # what comes behind is read by no layer
    if example is not None:
        known = {source.name: candidates[source.name] for source in example.sources if source.name in order}
        if len(known) == len(example.sources) and _confirmed(example.sources, known, linears, usable, run):
            found = list(example.sources)
        hopeless = set(example.hopeless)
    kinds: dict[str, list[str]] = {}
    for name in order:
        if pattern(name) not in hopeless and all(source.name != name for source in found):
            kinds.setdefault(pattern(name), []).append(name)
    for kind, names in kinds.items():
        sources, bent = _of_kind({name: candidates[name] for name in names}, linears, usable, run)
        found += sources
        hopeless |= {kind} if bent else set()
    found.sort(key=lambda source: list(candidates).index(source.name), reverse=True)
    return Trace(tuple(found), frozenset(hopeless))


def _confirmed(
    sources: Sequence[Source], members: dict[str, nn.Module], linears: dict[str, nn.Module], usable: set[str], run: Run
) -> bool:
    if not sources or any(name not in usable for source in sources for name in source.readers):
        return False
    return _Probe(members, linears, usable, run).confirms(sources)


def pattern(name: str) -> str:
    """``name`` with a star for every number in it."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _numbers(name: str) -> list[str]:
    return [part for part in name.split(".") if part.isdecimal()]


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
    probe = _Probe(members, linears, usable, run)
    if not probe.prepared():
        return [], False
    if (found := probe.sources()) is not None:
        return found, False
    bent = not probe.silent
    if len(members) > 1:
        alone = members.items() if len(members) <= _ALONE else ()
        parts = [_of_kind({name: module}, linears, usable, run) for name, module in alone]
        return [source for part, _ in parts for source in part], bent and all(odd for _, odd in parts)
    for start, stop in probe.pieces():
        if (found := probe.sources(start, stop)) is not None:
            return found, False
    return [], bent


@dataclass
class _Read:
    """What a layer read in one call: for each channel its largest number and where it was, and some rows, exactly."""

    shape: tuple[int, ...]
    places: Tensor
    largest: Tensor
    rows: Tensor

    @staticmethod
    def of(x: Tensor, places: Tensor | None = None) -> _Read:
        flat = x.detach().reshape(-1, x.shape[-1])
        if places is None:
            places = flat.abs().nan_to_num(torch.inf).argmax(0) if len(flat) else torch.zeros(0, dtype=torch.long)
        largest = flat.gather(0, places[None])[0] if len(flat) else flat.new_zeros(flat.shape[1])
        return _Read(tuple(x.shape), places, _wide(largest), _wide(_some(flat, _ROWS)))


@dataclass
class _Heard:
    """What one run showed: the exponents of each layer's channels, and what it gave."""

    output: list[Any] = field(default_factory=list)
    exponents: dict[str, Tensor] = field(default_factory=dict)
    odd: set[str] = field(default_factory=set)
    silent: bool = False


class _Probe:
    """Runs with the outputs of ``members`` multiplied."""

    def __init__(self, members: dict[str, nn.Module], linears: dict[str, nn.Module], usable: set[str], run: Run) -> None:
        self._members, self._linears, self._usable, self._run = members, linears, usable, run
        self._stand_ins: dict[str, list[Tensor]] = {}
        self._reads: dict[str, list[_Read]] = {}
        self._ways: dict[str, str | None] = {}
        self._offsets, total = {}, 0
        for name, module in members.items():
            self._offsets[name] = total
            total += channels(module)
        self._total = total
        self._output: list[Any] = []
        self._bent: set[str] = set()  # layers that read something else than multiples, in the last run that failed
        self.silent = False  # whether some channel told nothing

    def prepared(self) -> bool:
        """Run once without factors. False where the parameters of a member cannot take them."""
        self._output = self._ran(None).output
        return all(self._ways.get(name) is not None for name in self._members)

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Parts of a module's channels, where a layer that it bends reads fewer than it has: queries, keys and values, say."""
        sizes = {_inputs(self._linears[name]) for name in self._bent if name in self._usable}
        steps = {math.gcd(self._total, k) for k in sizes if k < self._total}
        steps |= {step // 2 for step in steps if step % 2 == 0}
        for step in sorted(steps, reverse=True):
            if self._total // step <= _PIECES:
                yield from ((start, start + step) for start in range(self._total - step, -1, -step))

    def sources(self, start: int = 0, stop: int | None = None) -> list[Source] | None:
        """What the members' channels from ``start`` to ``stop`` are read by; None where something else sees them too."""
        stop = self._total if stop is None else stop
        half = any(_dtype(module) == torch.float16 for module in self._members.values())
        base = 4 if half else 16  # 2^15 times a number may not fit
        index = torch.zeros(self._total, dtype=torch.long)
        index[start:stop] = torch.arange(start, stop) + 1
        codes: dict[str, Tensor] = {}
        odd: set[str] = set()
        for digit in range(math.ceil(math.log(self._total + 1, base) - 1e-9)):
            exponents = index // base**digit % base
            if not bool(exponents.any()):
                continue
            heard = self._ran(exponents)
            self.silent = self.silent or heard.silent
            if not self._is_output(heard.output):
                self._bent = heard.odd
                return None
            odd |= heard.odd
            for name, exponents in heard.exponents.items():
                codes[name] = codes.get(name, 0) + exponents * base**digit
        if any(bool((code < 0).any() or (code > self._total).any()) for code in codes.values()):
            return None
        reached = {name: code - 1 for name, code in codes.items() if bool(code.any())}
        if not self._complete(reached):
            self.silent = True
            return None
        if odd & reached.keys():
            return None
        return [source for name in self._members if (source := self._source(name, reached)) is not None]

    def confirms(self, sources: Sequence[Source]) -> bool:
        """Whether ``sources``, of which each is a member, are read by their readers and by nothing else."""
        if not self.prepared() or any(self._ways[source.name] != source.way for source in sources):
            return False
        draw = torch.Generator().manual_seed(self._total)
        exponents = torch.randint(4, (self._total,), generator=draw)
        undone: dict[str, Tensor] = {}
        for source in sources:
            mine = exponents[self._offsets[source.name] :][: source.channels]
            mine *= source.reached
            for name, channel in source.readers.items():
                undone[name] = undone.get(name, 0) + torch.where(channel >= 0, mine[channel.clamp(min=0)], 0)
        return self._is_output(self._ran(exponents, undone).output)

    def _source(self, name: str, reached: dict[str, Tensor]) -> Source | None:
        first, count = self._offsets[name], channels(self._members[name])
        readers = {}
        for reader, channel in reached.items():
            mine = (channel >= first) & (channel < first + count)
            if bool(mine.any()):
                readers[reader] = torch.where(mine, channel - first, -1)
        way = self._ways[name]
        return Source(name, way, count, readers) if readers and way is not None else None

    def _complete(self, reached: dict[str, Tensor]) -> bool:
        """Enter layers that were not called as what those are that they are like. False where there are none."""
        for name in [name for name in self._linears if name not in self._reads]:
            same = [other for other in self._reads if pattern(other) == pattern(name)]
            same = [other for other in same if _inputs(self._linears[other]) == _inputs(self._linears[name])]
            found = [self._by_example(name, other, reached) for other in same]
            first = found[0] if found else None
            if first is None or name not in self._usable or any(a is None or not torch.equal(a, first) for a in found):
                return False
            if bool((first >= 0).any()):
                reached[name] = first
        return True

    def _by_example(self, name: str, other: str, reached: dict[str, Tensor]) -> Tensor | None:
        """The channels that ``name`` reads if ``other``, whose name differs in numbers, is an example: those of the member whose
        numbers are the first ones of its own, as the example's are of the example's. None where that is no example."""
        channel = reached.get(other)
        nothing = torch.full((_inputs(self._linears[name]),), -1)
        if channel is None:
            return nothing
        giver = next(m for m in self._members if self._offsets[m] <= int(channel.max()) < self._offsets[m] + self._size(m))
        if _numbers(giver) != _numbers(other)[: len(_numbers(giver))]:
            return None
        own = iter(_numbers(name))
        wanted = ".".join(next(own) if part.isdecimal() else part for part in giver.split("."))
        if wanted not in self._members:
            return nothing  # it was not called either
        return torch.where(channel >= 0, channel - self._offsets[giver] + self._offsets[wanted], -1)

    def _size(self, name: str) -> int:
        return channels(self._members[name])

    # ---- runs ------------------------------------------------------------------------------------------------------

    def _ran(self, exponents: Tensor | None, undone: Mapping[str, Tensor] | None = None) -> _Heard:
        """One run with outputs times two to the ``exponents``; what layers read is put right by what they see, or by what is
        known to have to be ``undone``."""
        heard = _Heard()
        calls: dict[str, int] = {}
        with contextlib.ExitStack() as hooks:
            for name, module in self._linears.items():
                before = self._reader(name, calls, None if exponents is None else heard, undone)
                hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            for name, module in self._members.items():
                after = self._giver(name, {}, exponents)
                hooks.callback(module.register_forward_hook(after, with_kwargs=True).remove)
            heard.output = [_some(x.detach().reshape(-1, x.shape[-1]), _OUTPUTS) for x in _tensors(self._run())]
        return heard

    def _giver(self, name: str, calls: dict[str, int], exponents: Tensor | None) -> Any:
        offset = self._offsets[name]

        def after(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
            call = calls[name] = calls.get(name, -1) + 1
            if exponents is None:
                if name not in self._ways:
                    self._ways[name] = way_of(module, lambda: module.forward(*args, **kwargs), output)
                self._stand_ins.setdefault(name, []).append(_noise(output, offset + call))
                return self._stand_ins[name][call]
            held = self._stand_ins[name]
            if call >= len(held) or held[call].shape != output.shape:
                return output  # another run than the first: its result will tell
            factor = torch.exp2(exponents[offset : offset + output.shape[-1]].to(output.device).double())
            return held[call] * factor.to(output.dtype)

        return after

    def _reader(self, name: str, calls: dict[str, int], heard: _Heard | None, undone: Mapping[str, Tensor] | None) -> Any:
        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            place = "input" if "input" in kwargs else "x"
            x = args[0] if args else kwargs.get(place)
            if not isinstance(x, Tensor):
                return None
            call = calls[name] = calls.get(name, -1) + 1
            if heard is None:
                self._reads.setdefault(name, []).append(_Read.of(x))
                return None
            exponents = self._exponents(name, call, x, heard) if undone is None else undone.get(name, torch.zeros(1))
            if exponents is None or bool((exponents != heard.exponents.get(name, exponents)).any()):
                heard.odd.add(name)
                return None
            heard.exponents[name] = exponents
            if name not in self._usable or not bool(exponents.any()):
                return None
            old = x * torch.exp2(-exponents.to(x.device).double()).to(x.dtype)
            return ((old, *args[1:]), kwargs) if args else (args, {**kwargs, place: old})

        return before

    def _exponents(self, name: str, call: int, x: Tensor, heard: _Heard) -> Tensor | None:
        """Of the powers of two by which each channel of ``x`` is larger than before, int64 [K]; None where some are none."""
        reads = self._reads.get(name, [])
        if call >= len(reads) or reads[call].shape != tuple(x.shape):
            return None
        old = reads[call]
        new = _Read.of(x, old.places)
        (a, p), (b, q) = torch.frexp(old.largest), torch.frexp(new.largest)
        exponents = (q - p).long()
        silent = old.largest == 0
        # What is below the smallest normal number was rounded to steps of this size, and has it doubled like all the rest.
        step = _SUBNORMAL.get(x.dtype, 0.0) * (torch.exp2(exponents.double()) + 1)
        wrong = (new.rows - torch.ldexp(old.rows, exponents)).abs() > step
        if not torch.equal(a, b) or bool(wrong.any()):
            return None
        if bool(silent.any()) and bool(exponents.any()):
            heard.silent = True
            return None  # what such a channel comes from cannot be told
        return exponents.cpu()

    def _is_output(self, output: list[Any]) -> bool:
        """Whether this is what the first run gave: the very bits, or as near as two such runs are to each other."""

        def same(a: list[Tensor], b: list[Tensor]) -> bool:
            return len(a) == len(b) and all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(a, b, strict=True))

        if same(output, self._output) or _nearly(output, self._output):
            return True
        again = self._ran(torch.zeros(self._total, dtype=torch.long)).output
        return not same(again, self._output) and _apart(output, self._output) <= 4 * _apart(again, self._output)


def _nearly(a: list[Tensor], b: list[Tensor]) -> bool:
    """Whether these are one result, but for numbers that the dtype of one holds with fewer digits than others, as below the
    smallest normal one: each within two units in its last place."""
    if len(a) != len(b) or not any(x.dtype in _SUBNORMAL for x in b):
        return False
    for x, y in zip(a, b, strict=True):
        wide = y.double()
        room = 2 * torch.finfo(y.dtype).eps * torch.maximum(wide.abs(), wide.square().mean().sqrt() / 256)
        if x.shape != y.shape or not bool(((x.double() - wide).abs() <= room).all()):
            return False
    return True


def _apart(a: list[Tensor], b: list[Tensor]) -> float:
    if len(a) != len(b) or any(x.shape != y.shape for x, y in zip(a, b, strict=True)):
        return math.inf
    return sum(float((x.double() - y.double()).square().sum()) for x, y in zip(a, b, strict=True)) ** 0.5


def _tensors(what: object) -> Iterator[Tensor]:
    return (x for x in leaves(what) if isinstance(x, Tensor) and x.dim() and x.is_floating_point())


def _some(rows: Tensor, count: int) -> Tensor:
    """At most ``count`` of ``rows``, from all parts of them, in memory of their own."""
    if len(rows) <= count:
        return rows.clone()
    return rows[torch.linspace(0, len(rows) - 1, count, dtype=torch.float64).long().to(rows.device)]


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _noise(like: Tensor, seed: int) -> Tensor:
    """Random normal numbers as large as those of ``like`` are, or near 1 where it is nothing but zeros."""
    generator = torch.Generator().manual_seed(seed)
    size = float(like.detach().double().square().mean().sqrt()) if like.numel() else 0.0
    noise = torch.randn(like.shape, generator=generator) * (size if 0 < size < math.inf else 1.0)
    return noise.to(like.device, like.dtype)


def _inputs(module: nn.Module) -> int:
    weight = module._parameters["weight"]
    assert weight is not None
    return weight.shape[0] if layer_kind(module) == "conv1d" else weight.shape[1]


def _dtype(module: nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype
