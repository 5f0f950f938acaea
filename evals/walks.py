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

__all__ = ["COLD", "FEWEST", "HARD", "Times", "copies_of", "timed"]

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

    ``plain_us``: with full edges alone; the same as ``us`` where no edge is an early one.
    """

    us: float
    plain_us: float
    early: bool | None


def copies_of(size: int, device: torch.device, cold: bool = True) -> int:
    """How many copies of ``size`` bytes leave the last-level cache of ``device`` cold; one leaves it warm."""
    if not cold:
        return 1
    return max(2, -(-COLD[device.type] // max(size, 1)))


def timed(calls: Sequence[Call], x: Tensor, *, chained: bool = False, repeats: int = 9, settled: bool = False) -> Times:
    """The median over walks through all of ``calls``. ``chained``: each call takes what the one before it gave. ``settled``: of
    walks on a GPU behind others of the same, as many as its clock takes to settle: what computes hard lowers the clock some tens
    of milliseconds later, also that of what comes after it.

    Raises ``RuntimeError`` where a result is not finite: kernels may have other paths for such numbers.
    """
    with torch.no_grad():
        return _timed(calls, x, chained, repeats, settled)


def _timed(calls: Sequence[Call], x: Tensor, chained: bool, repeats: int, settled: bool) -> Times:
    for call in calls[:2]:  # what is compiled or chosen at the first call is not part of a walk
        y = call(x)
    seconds = _seconds(calls, x)
    fit = max(_SOME, int((_GRAPH if x.device.type == "cuda" else _EAGER) / seconds))
    if x.device.type != "cuda":
        calls = [*calls] * (FEWEST if len(calls) == 1 else 1)
        us, y = _eager(calls[:fit], x, chained, repeats)
        times = Times(us, us, None)
    else:
        rounds = -(-FEWEST // len(calls))
        times, y = _captured((list(calls) * rounds)[:fit], x, chained, repeats, _SETTLED if settled else 0.0)
    if y.is_floating_point() and not bool(torch.isfinite(y).all()):
        raise RuntimeError("the walk ended in numbers that are not finite")
    return times


def _walk(calls: Sequence[Call], x: Tensor, chained: bool) -> Tensor:
    y = x
    for i, call in enumerate(calls):
        y = call(y if chained and i % _CHAIN else x)
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


def _median(walk: Callable[[], float], repeats: int, before: float = 0.0) -> float:
    """Of walks behind one that does not count, or behind as many as take ``before`` seconds."""
    start, found = time.perf_counter(), []
    walk()
    while time.perf_counter() - start < before:
        walk()
    start = time.perf_counter()
    while len(found) < repeats and (len(found) < 3 or time.perf_counter() - start < _PATIENCE):
        found.append(walk())
    return statistics.median(found)


def _eager(calls: Sequence[Call], x: Tensor, chained: bool, repeats: int) -> tuple[float, Tensor]:
    y = x

    def walk() -> float:
        nonlocal y
        start = time.perf_counter()
        y = _walk(calls, x, chained)
        return (time.perf_counter() - start) * 1e6 / len(calls)

    return _median(walk, repeats), y


# ---- CUDA graphs -----------------------------------------------------------------------------------------------------


def _captured(calls: Sequence[Call], x: Tensor, chained: bool, repeats: int, before: float) -> tuple[Times, Tensor]:
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        try:
            y = _walk(calls, x, chained)
        finally:
            graph.capture_end()

    def replay() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3 / len(calls)

    graph.instantiate()
    us = _median(replay, repeats, before)
    early = _make_edges_full(graph.raw_cuda_graph()) > 0
    if not early:
        return Times(us, us, False), y
    graph.instantiate()
    return Times(us, _median(replay, repeats, before / 4), True), y  # so soon the clock is much what it was


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
