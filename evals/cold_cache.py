"""Cold-cache timing: sweeps of calls over a rotation of as many copies of a weight as leave the last-level cache cold.

On a GPU a sweep is one CUDA graph, timed twice: as it was captured, where a kernel may start before the one ahead of it ends
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

__all__ = ["COLD", "MIN_GRAPH_CALLS", "CLOCK_BOUND_ROWS", "Times", "Sweep", "copies_of", "timed"]

COLD = {"cpu": 256 << 20, "cuda": 640 << 20}  # several times the last-level cache of either
CLOCK_BOUND_ROWS = 128  # rows of x above which a sweep is hard work
MIN_GRAPH_CALLS = 24  # calls in a graph, so that starting it costs each of them little
_GRAPH, _EAGER = 0.06, 0.25  # seconds a sweep should take at most
_MIN_CALLS = 6  # calls that it has at least
_MIN_SECONDS = 0.2  # seconds of repeats after which three are enough
_CLOCK_SETTLE_SECONDS = 0.2  # seconds of hard work after which a GPU keeps its clock
_CHAIN = 32  # calls after which a chain takes x anew: products of random matrices grow or fade

Call = Callable[[Tensor], Tensor]


class Times(NamedTuple):
    """Microseconds a call. ``pdl``: some edges of the graph let a kernel start early; None where there is no graph.

    ``no_pdl_us``: with full edges alone; the same as ``us`` where no edge is an early one. ``baseline_us``: of another sweep that
    was interleaved with this one.
    """

    us: float
    no_pdl_us: float
    pdl: bool | None
    baseline_us: float | None = None


class Sweep(NamedTuple):
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
    settle_clock: bool = False,
    baseline: Sweep | None = None,
) -> Times:
    """The median over sweeps through all of ``calls``, as of :class:`Sweep`; on a GPU interleaved with sweeps through
    ``baseline``.

    ``settle_clock``: of sweeps on a GPU behind others of the same, as many as its clock takes to settle: what computes hard
    lowers the clock some tens of milliseconds later, also that of what comes after it. Even then the clock swings: two that are
    to be compared are interleaved.

    Raises ``RuntimeError`` where a result is not finite: kernels may have other paths for such numbers.
    """
    with torch.no_grad():
        return _timed(Sweep(calls, x, chained), repeats, settle_clock, baseline)


def _timed(sweep: Sweep, repeats: int, settle_clock: bool, baseline: Sweep | None) -> Times:
    sweep = _fit_to_time(sweep)
    if sweep.x.device.type != "cuda":
        us, y = _eager(sweep, repeats)
        times = Times(us, us, None)
    else:
        times, y = _captured(
            sweep, repeats, _CLOCK_SETTLE_SECONDS if settle_clock else 0.0, None if baseline is None else _fit_to_time(baseline)
        )
    if y.is_floating_point() and not bool(torch.isfinite(y).all()):
        raise RuntimeError("the sweep ended in numbers that are not finite")
    return times


def _fit_to_time(sweep: Sweep) -> Sweep:
    """As many of its calls as fit in a sweep's time, and on a GPU, or over one copy, as many rounds as make it worth while."""
    calls, x, _ = sweep
    for call in calls[:2]:  # what is compiled or chosen at the first call is not part of a sweep
        call(x)
    seconds = _seconds(calls, x)
    on_gpu = x.device.type == "cuda"
    rounds = -(-MIN_GRAPH_CALLS // len(calls)) if on_gpu or len(calls) == 1 else 1
    return sweep._replace(calls=(list(calls) * rounds)[: max(_MIN_CALLS, int((_GRAPH if on_gpu else _EAGER) / seconds))])


def _run_once(sweep: Sweep) -> Tensor:
    y = sweep.x
    for i, call in enumerate(sweep.calls):
        y = call(y if sweep.chained and i % _CHAIN else sweep.x)
    return y


def _seconds(calls: Sequence[Call], x: Tensor) -> float:
    """Roughly what one call takes, with what its launch costs."""
    sample = calls[:4]
    _synchronize(x.device)
    start = time.perf_counter()
    for call in sample:
        call(x)
    _synchronize(x.device)
    return (time.perf_counter() - start) / len(sample)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _medians(sweeps: Sequence[Callable[[], float]], repeats: int, warm_seconds: float = 0.0) -> list[float]:
    """Of each of them, interleaved: behind a round that does not count, or behind as many as take ``warm_seconds`` seconds."""

    def round_of_all() -> list[float]:
        return [sweep() for sweep in sweeps]

    start, found = time.perf_counter(), []
    round_of_all()
    while time.perf_counter() - start < warm_seconds:
        round_of_all()
    start = time.perf_counter()
    while len(found) < repeats and (len(found) < 3 or time.perf_counter() - start < _MIN_SECONDS):
        found.append(round_of_all())
    return [statistics.median(times) for times in zip(*found, strict=True)]


def _eager(sweep: Sweep, repeats: int) -> tuple[float, Tensor]:
    y = sweep.x

    def timed_sweep() -> float:
        nonlocal y
        start = time.perf_counter()
        y = _run_once(sweep)
        return (time.perf_counter() - start) * 1e6 / len(sweep.calls)

    (us,) = _medians([timed_sweep], repeats)
    return us, y


# ---- CUDA graphs -----------------------------------------------------------------------------------------------------


class _Graph:
    """A sweep as one graph, which gives the microseconds of a call of it; ``y``: what the last one returned."""

    def __init__(self, sweep: Sweep) -> None:
        self._calls, self._graph = len(sweep.calls), torch.cuda.CUDAGraph(keep_graph=True)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            self._graph.capture_begin()
            try:
                self.y = _run_once(sweep)
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

    def disable_pdl(self) -> bool:
        """Let no kernel start early from now on; whether one did."""
        pdl = _make_edges_full(self._graph.raw_cuda_graph()) > 0
        if pdl:
            self._graph.instantiate()
        return pdl


def _captured(sweep: Sweep, repeats: int, warm_seconds: float, baseline: Sweep | None) -> tuple[Times, Tensor]:
    graph = _Graph(sweep)
    us, *of_other = _medians([graph] if baseline is None else [graph, _Graph(baseline)], repeats, warm_seconds)
    times = Times(us, us, False, *of_other)
    if graph.disable_pdl():  # so soon the clock is much what it was
        times = times._replace(no_pdl_us=_medians([graph], repeats, warm_seconds / 4)[0], pdl=True)
    return times, graph.y


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
    pdl = [i for i in range(count.value) if edges[i].type or edges[i].from_port]
    if not pdl:
        return 0
    count_pdl = ctypes.c_size_t(len(pdl))
    sources, targets = ((ctypes.c_void_p * len(pdl))(*(ends[i] for i in pdl)) for ends in (heads, tails))
    ask("cuGraphRemoveDependencies_v2", sources, targets, (_Edge * len(pdl))(*(edges[i] for i in pdl)), count_pdl)
    ask("cuGraphAddDependencies_v2", sources, targets, (_Edge * len(pdl))(), count_pdl)
    return len(pdl)
