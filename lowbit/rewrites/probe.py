"""Runs of a model with some modules' outputs times powers of two, and what they show of who reads them."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..calibration.pytree import tree_leaves
from ..layers import layer_kind
from .absorption import absorb_rule_of, channels
from .input_record import SUBNORMAL, InputRecord, is_close, max_difference, sample_rows

__all__ = ["Probe", "Run", "Source", "pattern"]

_OUTPUTS = 256  # rows of what a run gives that are compared
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
    absorb_rule: str
    channels: int
    readers: dict[str, Tensor]

    @property
    def reached(self) -> Tensor:
        """bool [channels]: which of them a reader reads; what becomes of the others is not known, and they have to stay."""
        out = torch.zeros(self.channels, dtype=torch.bool)
        for channel in self.readers.values():
            out[channel[channel >= 0]] = True
        return out


def pattern(name: str) -> str:
    """``name`` with a star for every number in it."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _numbers(name: str) -> list[str]:
    return [part for part in name.split(".") if part.isdecimal()]


@dataclass
class _ProbeRun:
    """What one run showed: the exponents of each layer's channels, and what it gave."""

    output: list[Any] = field(default_factory=list)
    exponents: dict[str, Tensor] = field(default_factory=dict)
    inconsistent: set[str] = field(default_factory=set)
    has_silent_channel: bool = False


class Probe:
    """Runs with the outputs of ``members`` multiplied."""

    def __init__(self, members: dict[str, nn.Module], linears: dict[str, nn.Module], usable: set[str], run: Run) -> None:
        self._members, self._linears, self._usable, self._run = members, linears, usable, run
        self._stand_ins: dict[str, list[Tensor]] = {}
        self._input_records: dict[str, list[InputRecord]] = {}
        self._absorb_rules: dict[str, str | None] = {}
        self._offsets, total = {}, 0
        for name, module in members.items():
            self._offsets[name] = total
            total += channels(module)
        self._total = total
        self._output: list[Any] = []
        self._bending: set[str] = set()  # layers that read something else than multiples, in the last run that failed
        self.has_silent_channel = False  # whether some channel told nothing

    def prepared(self) -> bool:
        """Run once without factors. False where the parameters of a member cannot take them."""
        self._output = self._run_with(None).output
        return all(self._absorb_rules.get(name) is not None for name in self._members)

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Parts of a module's channels, where a layer that it bends reads fewer than it has: queries, keys and values, say."""
        sizes = {_inputs(self._linears[name]) for name in self._bending if name in self._usable}
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
        inconsistent: set[str] = set()
        for digit in range(math.ceil(math.log(self._total + 1, base) - 1e-9)):
            exponents = index // base**digit % base
            if not bool(exponents.any()):
                continue
            result = self._run_with(exponents)
            self.has_silent_channel = self.has_silent_channel or result.has_silent_channel
            if not self._is_output(result.output):
                self._bending = result.inconsistent
                return None
            inconsistent |= result.inconsistent
            for name, exponents in result.exponents.items():
                codes[name] = codes.get(name, 0) + exponents * base**digit
        if any(bool((code < 0).any() or (code > self._total).any()) for code in codes.values()):
            return None
        reached = {name: code - 1 for name, code in codes.items() if bool(code.any())}
        if not self._complete(reached):
            self.has_silent_channel = True
            return None
        if inconsistent & reached.keys():
            return None
        return [source for name in self._members if (source := self._source(name, reached)) is not None]

    def confirms(self, sources: Sequence[Source]) -> bool:
        """Whether ``sources``, of which each is a member, are read by their readers and by nothing else."""
        if not self.prepared() or any(self._absorb_rules[source.name] != source.absorb_rule for source in sources):
            return False
        draw = torch.Generator().manual_seed(self._total)
        exponents = torch.randint(4, (self._total,), generator=draw)
        undone: dict[str, Tensor] = {}
        for source in sources:
            source_channels = exponents[self._offsets[source.name] :][: source.channels]
            source_channels *= source.reached
            for name, channel in source.readers.items():
                undone[name] = undone.get(name, 0) + torch.where(channel >= 0, source_channels[channel.clamp(min=0)], 0)
        return self._is_output(self._run_with(exponents, undone).output)

    def _source(self, name: str, reached: dict[str, Tensor]) -> Source | None:
        first, count = self._offsets[name], channels(self._members[name])
        readers = {}
        for reader, channel in reached.items():
            source_channels = (channel >= first) & (channel < first + count)
            if bool(source_channels.any()):
                readers[reader] = torch.where(source_channels, channel - first, -1)
        absorb_rule = self._absorb_rules[name]
        return Source(name, absorb_rule, count, readers) if readers and absorb_rule is not None else None

    def _complete(self, reached: dict[str, Tensor]) -> bool:
        """Enter layers that were not called as what those are that they are like. False where there are none."""
        for name in [name for name in self._linears if name not in self._input_records]:
            same = [other for other in self._input_records if pattern(other) == pattern(name)]
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
        numbers = iter(_numbers(name))
        matching_name = ".".join(next(numbers) if part.isdecimal() else part for part in giver.split("."))
        if matching_name not in self._members:
            return nothing  # it was not called either
        return torch.where(channel >= 0, channel - self._offsets[giver] + self._offsets[matching_name], -1)

    def _size(self, name: str) -> int:
        return channels(self._members[name])

    # ---- runs ------------------------------------------------------------------------------------------------------

    def _run_with(self, exponents: Tensor | None, undone: Mapping[str, Tensor] | None = None) -> _ProbeRun:
        """One run with outputs times two to the ``exponents``; what layers read is put right by what they see, or by what is
        known to have to be ``undone``."""
        result = _ProbeRun()
        calls: dict[str, int] = {}
        with contextlib.ExitStack() as hooks:
            for name, module in self._linears.items():
                before = self._input_hook(name, calls, None if exponents is None else result, undone)
                hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            for name, module in self._members.items():
                after = self._output_hook(name, {}, exponents)
                hooks.callback(module.register_forward_hook(after, with_kwargs=True).remove)
            result.output = [sample_rows(x.detach().reshape(-1, x.shape[-1]), _OUTPUTS) for x in _tensors(self._run())]
        return result

    def _output_hook(self, name: str, calls: dict[str, int], exponents: Tensor | None) -> Any:
        offset = self._offsets[name]

        def after(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
            call = calls[name] = calls.get(name, -1) + 1
            if exponents is None:
                if name not in self._absorb_rules:
                    self._absorb_rules[name] = absorb_rule_of(module, lambda: module.forward(*args, **kwargs), output)
                self._stand_ins.setdefault(name, []).append(_noise(output, offset + call))
                return self._stand_ins[name][call]
            held = self._stand_ins[name]
            if call >= len(held) or held[call].shape != output.shape:
                return output  # another run than the first: its result will tell
            factor = torch.exp2(exponents[offset : offset + output.shape[-1]].to(output.device).double())
            return held[call] * factor.to(output.dtype)

        return after

    def _input_hook(self, name: str, calls: dict[str, int], result: _ProbeRun | None, undone: Mapping[str, Tensor] | None) -> Any:
        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            place = "input" if "input" in kwargs else "x"
            x = args[0] if args else kwargs.get(place)
            if not isinstance(x, Tensor):
                return None
            call = calls[name] = calls.get(name, -1) + 1
            if result is None:
                self._input_records.setdefault(name, []).append(InputRecord.of(x))
                return None
            exponents = self._exponents(name, call, x, result) if undone is None else undone.get(name, torch.zeros(1))
            if exponents is None or bool((exponents != result.exponents.get(name, exponents)).any()):
                result.inconsistent.add(name)
                return None
            result.exponents[name] = exponents
            if name not in self._usable or not bool(exponents.any()):
                return None
            old = x * torch.exp2(-exponents.to(x.device).double()).to(x.dtype)
            return ((old, *args[1:]), kwargs) if args else (args, {**kwargs, place: old})

        return before

    def _exponents(self, name: str, call: int, x: Tensor, result: _ProbeRun) -> Tensor | None:
        """Of the powers of two by which each channel of ``x`` is larger than before, int64 [K]; None where some are none."""
        reads = self._input_records.get(name, [])
        if call >= len(reads) or reads[call].shape != tuple(x.shape):
            return None
        old = reads[call]
        new = InputRecord.of(x, old.places)
        (a, p), (b, q) = torch.frexp(old.largest), torch.frexp(new.largest)
        exponents = (q - p).long()
        has_silent_channel = old.largest == 0
        # What is below the smallest normal number was rounded to steps of this size, and has it doubled like all the rest.
        step = SUBNORMAL.get(x.dtype, 0.0) * (torch.exp2(exponents.double()) + 1)
        wrong = (new.rows - torch.ldexp(old.rows, exponents)).abs() > step
        if not torch.equal(a, b) or bool(wrong.any()):
            return None
        if bool(has_silent_channel.any()) and bool(exponents.any()):
            result.has_silent_channel = True
            return None  # what such a channel comes from cannot be told
        return exponents.cpu()

    def _is_output(self, output: list[Any]) -> bool:
        """Whether this is what the first run gave: the very bits, or as near as two such runs are to each other."""

        def same(a: list[Tensor], b: list[Tensor]) -> bool:
            return len(a) == len(b) and all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(a, b, strict=True))

        if same(output, self._output) or is_close(output, self._output):
            return True
        repeated = self._run_with(torch.zeros(self._total, dtype=torch.long)).output
        return not same(repeated, self._output) and max_difference(output, self._output) <= 4 * max_difference(
            repeated, self._output
        )


def _tensors(nested: object) -> Iterator[Tensor]:
    return (x for x in tree_leaves(nested) if isinstance(x, Tensor) and x.dim() and x.is_floating_point())


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
