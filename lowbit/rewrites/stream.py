"""The residual stream of a model, found by running it once: which layers write to it, which norms read it, and which layers
read those norms. No architecture is known here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..calibration.blocks import call
from ..calibration.data import Batch
from ..calibration.nesting import leaves
from ..layers import layer_kind
from .norms import Norm
from .origins import Origin, Output, Reading, Trace

__all__ = ["Stream", "find_stream"]


@dataclass
class Stream:
    """A residual stream of ``width`` channels.

    Attributes:
        norms: those that read it, by name.
        readers: by the name of each module with a weight the norm whose output it reads, ``""`` where it reads the stream.
        writers: by name the places, among the leaves of what it gives, of what is added to the stream.
        rowwise: writers whose input comes from other layers token by token: down projections, and no attention.
        guessed: modules that nothing reached, taken for what those are whose names differ in one number.
        calls: what a module was called with that is no plain layer: a router, experts in one tensor, an embedding that scales.
    """

    width: int = 0
    norms: dict[str, Norm] = field(default_factory=dict)
    readers: dict[str, str] = field(default_factory=dict)
    writers: dict[str, set[int]] = field(default_factory=dict)
    rowwise: set[str] = field(default_factory=set)
    guessed: list[str] = field(default_factory=list)
    calls: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def centres(self) -> bool:
        """Whether its norms take the mean away."""
        return any(norm.centres for norm in self.norms.values())


def find_stream(model: nn.Module, batch: Batch, device: torch.device | None = None) -> Stream:
    """The residual stream of ``model`` as a run on ``batch``, moved to ``device``, shows it.

    Raises ``ValueError`` that names a module where there is none, or one that no rotation can pass.
    """
    trace = Trace(model)
    with trace.listening(), torch.inference_mode(False), torch.enable_grad():
        output = call(model, batch, device)
        ends = [trace.origins(leaf) for leaf in leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return _judged(trace, ends)


def _judged(trace: Trace, ends: list[dict[Output, Origin]]) -> Stream:
    stream = Stream(calls=trace.calls)
    writers = _writers(trace, stream)
    _check_norms(trace, stream, writers)
    for reading in trace.readings:
        if reading.name not in stream.norms:
            _judge_reader(stream, reading, writers)
        if not _is_rowwise(trace, reading):
            stream.rowwise.discard(reading.name)
    for origins in ends:
        if given := [home.name for home in origins if home.name in stream.norms or home in writers]:
            raise ValueError(
                f"the model gives what {given[0]} gives, in the basis of the residual stream: rotation needs a model whose "
                "output a layer computes, such as one with its head"
            )
    _guess(trace, stream)
    return stream


def _is_rowwise(trace: Trace, reading: Reading) -> bool:
    """Whether a single layer reads, token by token, what other layers give: a down projection."""
    layers = {name for name, module in trace.sources.items() if layer_kind(module) is not None} - trace.embeddings
    homes = {home.name for home in reading.origins}
    return bool(homes) and homes | {reading.name} <= layers and all(origin.rowwise for origin in reading.origins.values())


def _writers(trace: Trace, stream: Stream) -> set[Output]:
    """Everything that reaches a norm together with an embedding; ``stream`` learns of the norms and of the writers."""
    writers: set[Output] = set()
    for reading in trace.readings:
        if reading.name not in trace.norms:
            continue
        if not any(home.name in trace.embeddings or home in writers for home in reading.origins):
            continue
        stream.norms[reading.name] = trace.norms[reading.name]
        if stream.width not in (0, reading.width):
            raise ValueError(f"{reading.name} reads a stream of {reading.width} channels, and others one of {stream.width}")
        stream.width = reading.width
        for home, origin in reading.origins.items():
            if origin.width != reading.width:
                continue  # a factor of what a layer adds, such as the share of an expert
            if not origin.parallel:
                raise ValueError(
                    f"what {home.name} gives reaches the stream in front of {reading.name} otherwise than by being added: "
                    "rotation has no way through it"
                )
            writers.add(home)
    if not writers:
        raise ValueError("no residual stream was found: no norm reads what an embedding gives, and layers add to")
    for home in writers:
        stream.writers.setdefault(home.name, set()).add(home.place)
    called = {reading.name for reading in trace.readings}
    stream.rowwise = {name for name in stream.writers if name in called}
    return writers


def _check_norms(trace: Trace, stream: Stream, writers: set[Output]) -> None:
    behind = next((home.name for home in writers if home.name in trace.norms), None)
    if behind is not None:
        raise ValueError(
            f"{behind} is a norm whose output is added to the residual stream: its gain belongs to the channels, which a "
            "rotation mixes, and no layer behind it could take it"
        )
    if len({norm.centres for norm in stream.norms.values()}) > 1:
        raise ValueError("some norms of the residual stream take the mean away and others do not: rotation cannot serve both")


def _judge_reader(stream: Stream, reading: Reading, writers: set[Output]) -> None:
    origins = {home: origin for home, origin in reading.origins.items() if origin.width == stream.width}
    norms = {home.name for home in origins if home.name in stream.norms}
    direct = writers & origins.keys()
    if not norms and not direct:
        return
    read = next(iter(norms)) if norms else ""
    if len(norms) > 1 or (norms and len(origins) > 1) or (direct and direct != origins.keys()):
        names = ", ".join(sorted({home.name for home in origins})[:4])
        raise ValueError(f"{reading.name} reads what {names} give together, a norm and others: rotation has no way through it")
    if not all(origin.parallel for origin in origins.values()):
        what = f"what {read} gives" if read else "the residual stream"
        raise ValueError(f"{reading.name} reads {what} through something that is no product with one number a token")
    if stream.readers.setdefault(reading.name, read) != read:
        raise ValueError(f"{reading.name} reads {stream.readers[reading.name] or 'the stream'} and {read or 'the stream'}")
    if not read and stream.centres:
        raise ValueError(f"{reading.name} reads the residual stream past its norms, which take its mean away and it does not")


def _guess(trace: Trace, stream: Stream) -> None:
    """Experts that no token reached are what the others are."""
    reached = {reading.name for reading in trace.readings} | stream.writers.keys()
    for name, module in trace.sources.items():
        if name in reached or layer_kind(module) == "embedding":
            continue
        numbers = list(re.finditer(r"(?<=\.)\d+(?=\.)", name))
        if not numbers:
            continue
        # The last number is the expert's; those before it are a block's, each of which has norms of its own.
        place = numbers[-1]
        alike = re.compile(re.escape(name[: place.start()]) + r"\d+" + re.escape(name[place.end() :]))
        roles = {
            (stream.readers.get(other), frozenset(stream.writers.get(other, ())), other in stream.rowwise)
            for other in reached
            if alike.fullmatch(other)
        }
        inside = any(read is not None and read.startswith(name[: place.start()]) for read, _, _ in roles)
        if len(roles) != 1 or inside:
            continue
        read, written, rowwise = roles.pop()
        if read is not None:
            stream.readers[name] = read
        if written:
            stream.writers[name] = set(written)
        if rowwise:
            stream.rowwise.add(name)
        stream.guessed.append(name)
