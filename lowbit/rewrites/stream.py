"""The residual stream of a model, found by running it once: which layers write to it, which norms read it, and which layers
read those norms. No architecture is known here.

Each layer's and each norm's output is cut off from what came before, as a leaf of the graph that autograd keeps. What reaches a
tensor then comes from the layers right before it, through additions, products, attention and whatever else has no weights. A
vector that is sent backwards from a norm's input, and arrives at a layer's output as a multiple of itself, says that this output
is added to what the norm reads, a number a token at most in between: that layer writes to the stream. Sent from a layer's input
to a norm's output, it says in the same way that the layer reads the norm.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..calibration.blocks import call
from ..calibration.data import Batch
from ..calibration.nesting import leaves, rebuilt
from ..layers import layer_kind
from .norms import Norm, measured

__all__ = ["Stream", "find_stream"]

_PARALLEL = 1e-4  # the sine between two directions that were computed in float32


class Output(NamedTuple):
    """The leaf ``place`` of what the module ``name`` gives."""

    name: str
    place: int


@dataclass
class Stream:
    """A residual stream of ``width`` channels.

    Attributes:
        norms: those that read it, by name.
        readers: by the name of each module with a weight the norm whose output it reads, ``""`` where it reads the stream.
        writers: by name the places, among the leaves of what it gives, of what is added to the stream.
        rowwise: writers whose input comes from other layers token by token: down projections, and no attention.
        guessed: modules that nothing reached, taken for what those are whose names differ in one number.
        opaque: what a module that is no single layer (a router, experts in one tensor) was called with.
    """

    width: int = 0
    norms: dict[str, Norm] = field(default_factory=dict)
    readers: dict[str, str] = field(default_factory=dict)
    writers: dict[str, set[int]] = field(default_factory=dict)
    rowwise: set[str] = field(default_factory=set)
    guessed: list[str] = field(default_factory=list)
    opaque: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def centres(self) -> bool:
        """Whether its norms take the mean away."""
        return any(norm.centres for norm in self.norms.values())


class _Origin(NamedTuple):
    """How a tensor comes from an output of ``width`` channels: ``parallel``, as a multiple of it a row; ``rowwise``, each row
    from one alone."""

    width: int
    parallel: bool
    rowwise: bool


@dataclass
class _Reading:
    """A module's input: its width, and the outputs that it comes from."""

    name: str
    width: int
    origins: dict[Output, _Origin]


def find_stream(model: nn.Module, batch: Batch, device: torch.device | None = None) -> Stream:
    """The residual stream of ``model`` as a run on ``batch``, moved to ``device``, shows it.

    Raises ``ValueError`` that names a module where there is none, or one that no rotation can pass.
    """
    trace = _Trace(model)
    with trace.listening(), torch.inference_mode(False), torch.enable_grad():
        output = call(model, batch, device)
        ends = [trace.origins(leaf) for leaf in leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return _judged(trace, ends)


class _Trace:
    """What a run of ``model`` shows: what each module with a weight, and each norm, reads."""

    def __init__(self, model: nn.Module) -> None:
        self.readings: list[_Reading] = []
        self.norms: dict[str, Norm] = {}
        self.opaque: dict[str, tuple[Any, Any]] = {}
        self.sources = {name: module for name, module in model.named_modules() if _has_weight(module)}
        self.embeddings = {name for name, module in self.sources.items() if layer_kind(module) == "embedding"}
        self._bare = {name: module for name, module in model.named_modules() if _is_bare(module) and name not in self.sources}
        self._none: set[str] = set()  # modules that are no norms
        self._home: dict[int, Output] = {}
        self._leaves: list[Tensor] = []  # told apart by their identity, and so have to live
        self._looking = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        with contextlib.ExitStack() as hooks:
            for name, module in self.sources.items():
                hooks.callback(module.register_forward_pre_hook(self._before(name), with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(self._after(name)).remove)
            for name, module in self._bare.items():
                hooks.callback(module.register_forward_hook(self._after_bare(name)).remove)
            yield

    def _before(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            x = next((leaf for leaf in leaves([args, kwargs]) if isinstance(leaf, Tensor) and leaf.is_floating_point()), None)
            if x is None or x.dim() == 0:
                return
            if layer_kind(module) is None and name not in self.opaque:
                self.opaque[name] = rebuilt((args, kwargs), _detached)
            self.readings.append(_Reading(name, x.shape[-1], self.origins(x)))

        return hook

    def _after(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            count = iter(range(1 << 30))
            return rebuilt(output, lambda leaf: self._cut(leaf, Output(name, next(count))))

        return hook

    def _after_bare(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            x = args[0] if args else None
            if self._looking or name in self._none or not isinstance(x, Tensor) or not isinstance(output, Tensor):
                return None
            if not x.is_floating_point() or x.shape != output.shape or x.dim() == 0:
                return None
            if name not in self.norms:
                self._looking = True
                found = measured(module, x.shape[-1])
                self._looking = False
                if found is None:
                    self._none.add(name)
                    return None
                self.norms[name] = found
            self.readings.append(_Reading(name, x.shape[-1], self.origins(x)))
            return self._cut(output, Output(name, 0))

        return hook

    def _cut(self, leaf: Any, home: Output) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.dim() == 0:
            return leaf
        made = leaf.detach().requires_grad_()
        self._home[id(made)] = home
        self._leaves.append(made)
        return made.clone()  # which may be changed in place

    def origins(self, x: Tensor) -> dict[Output, _Origin]:
        """The outputs that ``x`` [..., n] comes from."""
        reached = [leaf for leaf in _reached(x) if id(leaf) in self._home]
        if not reached:
            return {}
        rows = x.reshape(-1, x.shape[-1])
        direction = torch.randn(x.shape[-1], generator=torch.Generator().manual_seed(0)).to(x)
        sent = torch.zeros_like(rows)
        sent[-1] = direction
        found = torch.autograd.grad(x, reached, sent.view_as(x), retain_graph=True, allow_unused=True)
        origins: dict[Output, _Origin] = {}
        for leaf, gradient in zip(reached, found, strict=True):
            origin = _Origin(leaf.shape[-1], True, True)
            if gradient is not None:
                gradient = gradient.reshape(-1, gradient.shape[-1]).double()
                gradient = gradient[gradient.abs().amax(-1) > 0]
                origin = _Origin(leaf.shape[-1], _parallel(gradient, direction.double()), len(gradient) <= 1)
            home = self._home[id(leaf)]
            before = origins.get(home, origin)
            origins[home] = _Origin(origin.width, origin.parallel and before.parallel, origin.rowwise and before.rowwise)
        return origins


def _has_weight(module: nn.Module) -> bool:
    """Whether it is a layer, or another module that multiplies by a parameter of its own and has no layer inside."""
    if layer_kind(module) is not None:
        return True
    own = any(parameter is not None and parameter.dim() >= 2 for parameter in module._parameters.values())
    return own and not any(layer_kind(child) for child in module.modules())


def _is_bare(module: nn.Module) -> bool:
    return not any(True for _ in module.children())


def _detached(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _reached(x: Tensor) -> list[Tensor]:
    """The leaves that autograd would reach from ``x``, each once."""
    found: dict[int, Tensor] = {}
    waiting, seen = [x.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found[id(variable)] = variable
        waiting += [before for before, _ in node.next_functions]
    return list(found.values())


def _parallel(rows: Tensor, direction: Tensor) -> bool:
    """Whether every row of ``rows`` is a multiple of ``direction``."""
    if rows.shape[-1] != len(direction):
        return False
    along = rows @ direction / direction.square().sum()
    return bool(((rows - along[:, None] * direction).norm(dim=-1) <= _PARALLEL * rows.norm(dim=-1)).all())


# ---- what follows from it --------------------------------------------------------------------------------------------


def _judged(trace: _Trace, ends: list[dict[Output, _Origin]]) -> Stream:
    stream = Stream(opaque=trace.opaque)
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


def _is_rowwise(trace: _Trace, reading: _Reading) -> bool:
    """Whether a single layer reads, token by token, what other layers give: a down projection."""
    layers = {name for name, module in trace.sources.items() if layer_kind(module) is not None} - trace.embeddings
    homes = {home.name for home in reading.origins}
    return bool(homes) and homes | {reading.name} <= layers and all(origin.rowwise for origin in reading.origins.values())


def _writers(trace: _Trace, stream: Stream) -> set[Output]:
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


def _check_norms(trace: _Trace, stream: Stream, writers: set[Output]) -> None:
    behind = next((home.name for home in writers if home.name in trace.norms), None)
    if behind is not None:
        raise ValueError(
            f"{behind} is a norm whose output is added to the residual stream: its gain belongs to the channels, which a "
            "rotation mixes, and no layer behind it could take it"
        )
    if len({norm.centres for norm in stream.norms.values()}) > 1:
        raise ValueError("some norms of the residual stream take the mean away and others do not: rotation cannot serve both")


def _judge_reader(stream: Stream, reading: _Reading, writers: set[Output]) -> None:
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


def _guess(trace: _Trace, stream: Stream) -> None:
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
