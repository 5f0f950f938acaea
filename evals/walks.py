"""Walks: calls one behind the other over enough copies of a weight to leave the last-level cache cold, timed.

On a GPU a walk is one CUDA graph, timed twice: as it was captured, where a kernel may start before the one ahead of it ends
if its launch allows that (programmatic dependent launch), and with every edge of the graph a full one.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["COLD", "FEWEST", "HARD", "Times", "Walk", "copies_of", "timed"]

COLD = {"cpu": 256 << 20, "cuda": 640 << 20}  # several times the last-level cache of either
HARD = 128  # rows of x above which a walk is hard work
FEWEST = 24  # calls in a graph, so that starting it costs each of them little
_GRAPH, _EAGER = 0.06, 0.25  # seconds a walk should take at most
_SOME = 6  # calls that it has at least
_PATIENCE = 0.2  # seconds of repeats after which three are enough
_SETTLED = 0.2  # seconds of hard work after which a GPU keeps its clock
_CHAIN = 32  # calls after which a chain takes x anew: products of random matrices grow or fade

Call = Callable[[Tensor], Tensor]


class Times(NamedTuple):
    """Microseconds a call. ``early``: some edges of the graph let a kernel start early; None where there is no graph.

    ``plain_us``: with full edges alone; the same as ``us`` where no edge is an early one. ``beside_us``: of another walk that
    took turns with this one.
    """

    us: float
    plain_us: float
    early: bool | None
    beside_us: float | None = None


class Walk(NamedTuple):
    """Calls one behind the other. ``chained``: each takes what the one before it gave."""

    calls: Sequence[Call]
    x: Tensor
    chained: bool = False


def copies_of(size: int, device: torch.device, cold: bool = True) -> int:
    """How many copies of ``size`` bytes leave the last-level cache of ``device`` cold; one leaves it warm."""
    if not cold:
        return 1
    return max(2, -(-COLD[device.type] // max(size, 1)))


def timed(
    calls: Sequence[Call],
    x: Tensor,
    *,
    chained: bool = False,
    repeats: int = 9,
    settled: bool = False,
    beside: Walk | None = None,
) -> Times:
    """The median over walks through all of ``calls``, as of :class:`Walk`; on a GPU in turns with walks through ``beside``.

    ``settled``: of walks on a GPU behind others of the same, as many as its clock takes to settle: what computes hard lowers the
    clock some tens of milliseconds later, also that of what comes after it. Even then the clock swings: two that are to be
    compared take turns.

    Raises ``RuntimeError`` where a result is not finite: kernels may have other paths for such numbers.
    """
    with torch.no_grad():
        return _timed(Walk(calls, x, chained), repeats, settled, beside)


def _timed(walk: Walk, repeats: int, settled: bool, beside: Walk | None) -> Times:
    walk = _fitted(walk)
    if walk.x.device.type != "cuda":
        us, y = _eager(walk, repeats)
        times = Times(us, us, None)
    else:
        times, y = _captured(walk, repeats, _SETTLED if settled else 0.0, None if beside is None else _fitted(beside))
    if y.is_floating_point() and not bool(torch.isfinite(y).all()):
        raise RuntimeError("the walk ended in numbers that are not finite")
    return times


def _fitted(walk: Walk) -> Walk:
    """As many of its calls as fit in a walk's time, and on a GPU, or over one copy, as many rounds as make it worth while."""
    calls, x, _ = walk
    for call in calls[:2]:  # what is compiled or chosen at the first call is not part of a walk
        call(x)
    seconds = _seconds(calls, x)
    on_gpu = x.device.type == "cuda"
    rounds = -(-FEWEST // len(calls)) if on_gpu or len(calls) == 1 else 1
    return walk._replace(calls=(list(calls) * rounds)[: max(_SOME, int((_GRAPH if on_gpu else _EAGER) / seconds))])


def _through(walk: Walk) -> Tensor:
    y = walk.x
    for i, call in enumerate(walk.calls):
        y = call(y if walk.chained and i % _CHAIN else walk.x)
    return y


def _seconds(calls: Sequence[Call], x: Tensor) -> float:
    """Roughly what one call takes, with what its launch costs."""
    few = calls[:4]
    _synchronize(x.device)
    start = time.perf_counter()
    for call in few:
        call(x)
    _synchronize(x.device)
    return (time.perf_counter() - start) / len(few)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _medians(walks: Sequence[Callable[[], float]], repeats: int, before: float = 0.0) -> list[float]:
    """Of each of them, in turns: behind a turn that does not count, or behind as many as take ``before`` seconds."""

    def turn() -> list[float]:
        return [walk() for walk in walks]

    start, found = time.perf_counter(), []
    turn()
    while time.perf_counter() - start < before:
        turn()
    start = time.perf_counter()
    while len(found) < repeats and (len(found) < 3 or time.perf_counter() - start < _PATIENCE):
        found.append(turn())
    return [statistics.median(times) for times in zip(*found, strict=True)]


def _eager(walk: Walk, repeats: int) -> tuple[float, Tensor]:
    y = walk.x

    def taken() -> float:
        nonlocal y
        start = time.perf_counter()
        y = _through(walk)
        return (time.perf_counter() - start) * 1e6 / len(walk.calls)

    (us,) = _medians([taken], repeats)
    return us, y


# ---- CUDA graphs -----------------------------------------------------------------------------------------------------


class _Graph:
    """A walk as one graph, which gives the microseconds of a call of it; ``y``: what the last one returned."""

    def __init__(self, walk: Walk) -> None:
        self._calls, self._graph = len(walk.calls), torch.cuda.CUDAGraph(keep_graph=True)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            self._graph.capture_begin()
            try:
                self.y = _through(walk)
            finally:
                self._graph.capture_end()
        self._graph.instantiate()

    def __call__(self) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self._graph.replay()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3 / self._calls

    def wait(self) -> bool:
        """Let no kernel start early from now on; whether one did."""
        early = _make_edges_full(self._graph.raw_cuda_graph()) > 0
        if early:
            self._graph.instantiate()
        return early


def _captured(walk: Walk, repeats: int, before: float, beside: Walk | None) -> tuple[Times, Tensor]:
    own = _Graph(walk)
    us, *of_other = _medians([own] if beside is None else [own, _Graph(beside)], repeats, before)
    times = Times(us, us, False, *of_other)
    if own.wait():  # so soon the clock is much what it was
        times = times._replace(plain_us=_medians([own], repeats, before / 4)[0], early=True)
    return times, own.y


class _Edge(ctypes.Structure):
    """CUgraphEdgeData of the driver."""

    _fields_ = (
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    )


def _make_edges_full(graph: int) -> int:
    """Turn the edges of a graph that let a kernel start early into full ones; returns how many there were."""
    driver = ctypes.CDLL("libcuda.so.1")
    count = ctypes.c_size_t(0)

    def ask(name: str, *arguments: object) -> None:
        if error := getattr(driver, name)(ctypes.c_void_p(graph), *arguments):
            raise RuntimeError(f"{name} failed with error {error} of the CUDA driver")

    ask("cuGraphGetEdges_v2", None, None, None, ctypes.byref(count))
    heads, tails = (ctypes.c_void_p * count.value)(), (ctypes.c_void_p * count.value)()
    edges = (_Edge * count.value)()
    ask("cuGraphGetEdges_v2", heads, tails, edges, ctypes.byref(count))
    early = [i for i in range(count.value) if edges[i].type or edges[i].from_port]
    if not early:
        return 0
    some = ctypes.c_size_t(len(early))
    here, there = ((ctypes.c_void_p * len(early))(*(ends[i] for i in early)) for ends in (heads, tails))
    ask("cuGraphRemoveDependencies_v2", here, there, (_Edge * len(early))(*(edges[i] for i in early)), some)
    ask("cuGraphAddDependencies_v2", here, there, (_Edge * len(early))(), some)
    return len(early)
