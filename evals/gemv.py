"""Weights loaded per second: every kernel against the limit of reading its bytes, in one run, weights cold.

Each figure is the median over sweeps through enough copies of a weight to leave the last-level cache cold (or, where that is
asked for, over one, which stays in the cache if it fits there). On a GPU a sweep is one CUDA graph. Where N = K each product
takes the one before it as its x, so that a kernel which starts early still has to wait for it. Sweeps are interleaved with sweeps
over the float weight, since a GPU's clock swings, and on a CPU, which others use too, with some that only read; where rows of x
are many enough to make a GPU lower its clock, they are timed once their own work has done so.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor, nn

from lowbit import strict, trace_kernels
from lowbit.environment import cpu_instructions
from lowbit.recipe import Recipe

from . import peers
from .bench_layers import BenchLayer
from .cold_cache import CLOCK_BOUND_ROWS, Sweep, Times, copies_of, timed
from .read_limit import ReadLimits

__all__ = ["BATCHES", "SCHEMES", "SHAPES", "decode_speeds", "device_name", "largest", "measure", "row_of", "table"]

SCHEMES = (
    "int8", "int4", "int4_sym", "int3", "int2", "int5", "int6", "fp8", "fp6", "fp6_e3m2", "fp4", "nf4",
    "mxfp8", "mxfp6", "mxfp4", "mxint8", "nvfp4", "int8_dynamic_activation_int8_weight",
)  # fmt: skip
SHAPES = (
    (1024, 1024), (2048, 2048), (4096, 4096), (8192, 8192), (14336, 4096), (4096, 14336), (28672, 8192), (8192, 28672),
)  # fmt: skip
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 2048, 4096)
_SMALL, _USUAL = 1 << 20, (4096, 4096)  # weights of a layer that are few; a layer of a usual model
_SWEEPS_PER_ROUND, _MIN_SECONDS, _MAX_SECONDS = (
    3,
    1.0,
    4.0,
)  # sweeps of a round; seconds that rounds take at least, and after which none begins
_COOL_DOWN_SECONDS = 0.2  # seconds behind hard work


def measure(
    schemes: Sequence[str | Recipe],
    shapes: Sequence[tuple[int, int]],
    batches: Sequence[int] = (1,),
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    repeats: int = 9,
    layout: str = "default",
    others: Sequence[str] = (),
    seconds: float = 45,
    cold: bool = True,
    kernels: Sequence[str] = (),
    progress: Callable[[str], None] = lambda what: None,
    keep: Callable[[dict[str, Any]], None] = lambda figures: None,
) -> dict[str, Any]:
    """Time ``QLinear.forward`` for each scheme, shape (N, K) and number of rows of x, beside F.linear in ``dtype``.

    ``schemes``: recipes, or their names. ``others``: names in :data:`peers.PEERS`, each measured in a process that may take
    ``seconds``, on the part of the grid that is theirs. ``cold=False``: over one copy, again and again. ``kernels``: the rows of
    the registry that may run, all if none is named. Returns plain data:
    ``rows`` as of :func:`row_of` (with ``float_us``, F.linear's interleaved with it), ``peers``, the same without that, and
    ``failures``, each with the error of a figure that could not be taken.
    ``keep`` is called with what there is after each shape, so that a run that is ended early leaves something.
    """
    torch_device = torch.device(device)
    recipes = {recipe.name: recipe for recipe in map(Recipe.of, schemes)}
    limits = ReadLimits(torch_device, repeats, cold)
    one = _Run(batches, torch_device, dtype, repeats, layout, limits, cold, progress, kernels)
    figures: dict[str, Any] = {"device": device_name(torch_device), "dtype": str(dtype), "cold": cold, "kernels": [*kernels]}
    figures |= {"rows": [], "peers": [], "failures": []}
    float_us: dict[tuple[int, int, int], float] = {}
    for n, k in shapes:
        rows = []
        floats: dict[int, Sweep] = {}
        for name in ("float", *recipes):
            for m, row in one.rows(name, recipes.get(name), n, k, floats):
                if name == "float" and "us" in row:
                    float_us[n, k, m] = row["us"]
                if "us" in row and (n, k, m) in float_us:
                    rows.append({**row, "times_float": row.get("float_us", float_us[n, k, m]) / row["us"]})
                else:
                    reason = row.get("error", "there is no figure of F.linear to compare with")
                    figures["failures"].append({"scheme": name, "m": m, "n": n, "k": k, "error": reason})
        figures["rows"] += sorted(rows, key=lambda row: row["m"])
        keep(figures)
    if others:
        on_gpu = torch_device.type == "cuda"  # where libraries tune for long
        peer_shapes = [shape for shape in shapes if shape in peers.SHAPES and on_gpu] or shapes
        peer_batches = [m for m in batches if m in peers.BATCHES and on_gpu] or batches
        found, missing = peers.measure(others, peer_shapes, peer_batches, device, repeats, seconds, progress, cold)
        figures["peers"] = [_peer_row(row, limits(row["bytes"]), float_us) for row in found]
        figures["failures"] += missing
    return figures


def decode_speeds(
    recipes: Sequence[str | Recipe], shape: tuple[int, int], device: str, progress: Callable[[str, int, int], None] | None = None
) -> dict[str, Any]:
    """:func:`measure` of one row of x, as a token is decoded, for what stands beside an evaluation: few repeats.

    ``progress``: called with (what is being done, done, in all).
    """
    done = itertools.count()

    def on_row(what: str) -> None:
        if progress is not None:
            progress(f"weights per second: {what}", next(done), 1 + len(recipes))

    return measure(recipes, [shape], (1,), device, repeats=5, progress=on_row)


def largest(layers: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """N and K of the largest linear layer among those of :func:`lowbit.evals.layers.layer_figures`.

    Where even that is so small that a call costs more than its weights, or there is none, those of a model with 8 billion.
    """
    shapes = [tuple(layer["shape"]) for layer in layers if layer.get("kind") == "linear"]
    n, k = max(shapes, key=lambda shape: (shape[0] * shape[1], shape), default=_USUAL)
    return (n, k) if n * k >= _SMALL else _USUAL


def _peer_row(row: dict[str, Any], limit: Times, float_us: dict[tuple[int, int, int], float]) -> dict[str, Any]:
    times, key = Times(row["us"], row["no_pdl_us"], row["pdl"]), (row["n"], row["k"], row["m"])
    names = {key: row[key] for key in ("peer", "version", "bits", "relative_error")}
    measured = row_of(times, limit, row["m"], row["n"], row["k"], row["bytes"])
    return names | measured | {"times_float": float_us[key] / times.us if key in float_us else None}


class _Run(NamedTuple):
    """How every figure of a run is taken."""

    batches: Sequence[int]
    device: torch.device
    dtype: torch.dtype
    repeats: int
    layout: str
    limits: ReadLimits
    cold: bool
    progress: Callable[[str], None]
    kernels: Sequence[str]

    def rows(
        self, name: str, recipe: Recipe | None, n: int, k: int, floats: dict[int, Sweep]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """(M, its row), or the error in place of the row; the copies of the weight serve every M.

        ``floats``: the float weight's sweep by M, which its own rows leave for those of the recipes.

        The largest M first, and a rest behind them: what computes hard lowers a GPU's clock for some tenths of a second, which
        every kernel shows that is not bound by the memory alone. Such sweeps are timed at the clock that they lead to themselves,
        not at the one that was left to them.
        """
        layers: Sequence[nn.Module] = []
        found: list[tuple[int, dict[str, Any], Times, Times | None, float | None]] = []
        last = 0
        for m in sorted(self.batches, reverse=True):
            self.progress(f"{name} {n}x{k} M={m}")
            if self.device.type == "cuda" and last > CLOCK_BOUND_ROWS >= m:
                time.sleep(_COOL_DOWN_SECONDS)
            last = m
            try:
                if not layers:
                    layers, size, byte_layout = _copies(recipe, n, k, self.device, self.dtype, self.layout, self.cold)
                x = torch.randn(m, k, dtype=self.dtype, device=self.device)
                with strict(*self.kernels) if self.kernels else contextlib.nullcontext():
                    times, limit, float_us = self._timed(layers, x, n == k, size, floats.get(m))
                    if recipe is None:
                        floats[m] = Sweep(layers, x, n == k)
                    with trace_kernels() as trace:
                        layers[0](x)
                entry = next(iter(trace.counts), None)
                kernel_and_contract = ("F.linear", str(self.dtype)) if entry is None else (entry.kernel, entry.contract)
                found.append(
                    (
                        m,
                        {
                            "scheme": name,
                            "kernel": kernel_and_contract[0],
                            "contract": kernel_and_contract[1],
                            "layout": byte_layout,
                        },
                        times,
                        limit,
                        float_us,
                    )
                )
            except (RuntimeError, ValueError, NotImplementedError) as error:
                yield m, {"error": " ".join(str(error).split())[:300]}
        layers = []
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        for m, labels, times, limit, float_us in found:
            row = labels | row_of(times, limit or self.limits(size), m, n, k, size)
            yield m, row if float_us is None else row | {"float_us": float_us}

    def _timed(
        self, layers: Sequence[nn.Module], x: Tensor, chained: bool, size: int, baseline: Sweep | None
    ) -> tuple[Times, Times | None, float | None]:
        """A layer's times, those of the reader where it was interleaved with the layer (on a CPU), and those of
        ``decode_speeds``."""
        if self.device.type != "cpu":
            times = timed(
                layers, x, chained=chained, repeats=self.repeats, settle_clock=len(x) > CLOCK_BOUND_ROWS, baseline=baseline
            )
            return times, None, times.baseline_us
        start, rounds = time.perf_counter(), []
        while self._needs_more(len(rounds), time.perf_counter() - start):
            times = timed(layers, x, chained=chained, repeats=_SWEEPS_PER_ROUND)
            limit = self.limits.measured_now(size, _SWEEPS_PER_ROUND)
            other = (
                times
                if baseline is None
                else timed(baseline.calls, baseline.x, chained=baseline.chained, repeats=_SWEEPS_PER_ROUND)
            )
            rounds.append((times.us, limit.us, other.us))
        us, limit_us, float_us = map(statistics.median, zip(*rounds, strict=True))
        return Times(us, us, None), Times(limit_us, limit_us, None), None if baseline is None else float_us

    def _needs_more(self, rounds: int, seconds: float) -> bool:
        """As many sweeps as are asked for; more, but no more than thrice as many, where all that is over in a moment."""
        if rounds == 0:
            return True
        return rounds < self.repeats and seconds < (_MAX_SECONDS if _SWEEPS_PER_ROUND * rounds < self.repeats else _MIN_SECONDS)


def _copies(
    recipe: Recipe | None, n: int, k: int, device: torch.device, dtype: torch.dtype, layout: str, cold: bool
) -> tuple[Sequence[nn.Module], int, str]:
    """Layers over copies of one weight, its bytes, and the arrangement of them."""
    if recipe is None:
        size = n * k * dtype.itemsize
        dense = torch.randn(n, k, dtype=dtype, device=device) * k**-0.5
        return [_Float(dense.clone()) for _ in range(copies_of(size, device, cold))], size, "rows"
    bench_layer = BenchLayer(recipe, n, k, device, dtype, layout)
    return bench_layer.copies(cold), bench_layer.nbytes, bench_layer.layer.weight.byte_layout


class _Float(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


def row_of(times: Times, limit: Times, m: int, n: int, k: int, size: int) -> dict[str, Any]:
    """A figure beside its limit in the same mode; ``plain_``: in a graph without early starts, where there were some."""
    compared = limit.us if times.pdl or times.pdl is None else limit.no_pdl_us
    row = {
        "m": m, "n": n, "k": k, "bytes": size,
        "us": times.us,
        "pdl": times.pdl,
        "billion_weights_per_second": n * k / times.us / 1e3,
        "limit_us": compared,
        "fraction_of_limit": compared / times.us,
    }  # fmt: skip
    if times.pdl is not None:
        row |= {"no_pdl_us": times.no_pdl_us, "no_pdl_limit_us": limit.no_pdl_us}
        row |= {"no_pdl_fraction_of_limit": limit.no_pdl_us / times.no_pdl_us}
    return row


def table(figures: dict[str, Any]) -> Table:
    """What :func:`measure` returned, for a terminal."""
    byte_layout = "cold" if figures.get("cold", True) else "warm"
    bench_layer = Table(title=f"{figures['device']}, {figures['dtype']} x, weights {byte_layout}", title_justify="left")
    left = ("scheme", "kernel", "layout")
    for name in ("N x K", "M", *left, "us", "billion weights/s", "of the limit", "without early starts", "times F.linear"):
        bench_layer.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for r in figures["rows"]:
        speeds = f"{r['us']:.2f}", f"{r['billion_weights_per_second']:.1f}", f"{r['fraction_of_limit']:.3f}"
        plain = f"{r['no_pdl_us']:.2f} ({r['no_pdl_fraction_of_limit']:.3f})" if r["pdl"] else ""
        names = r["scheme"], r["kernel"], r["layout"]
        bench_layer.add_row(f"{r['n']} x {r['k']}", str(r["m"]), *names, *speeds, plain, f"{r['times_float']:.2f}")
    for r in figures.get("peers", ()):
        speeds = f"{r['us']:.2f}", f"{r['billion_weights_per_second']:.1f}", f"{r['fraction_of_limit']:.3f}"
        plain = f"{r['no_pdl_us']:.2f} ({r['no_pdl_fraction_of_limit']:.3f})" if r["pdl"] else ""
        ratio = "" if r["times_float"] is None else f"{r['times_float']:.2f}"
        bench_layer.add_row(f"{r['n']} x {r['k']}", str(r["m"]), r["peer"], r["version"], "", *speeds, plain, ratio)
    return bench_layer


def device_name(device: torch.device) -> str:
    """Of a CPU: how many threads, and the instructions of the kernels, which LOWBIT_CPU may choose."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = f"cpu, {(n := torch.get_num_threads())} thread{'s' if n > 1 else ''}"
    return threads if (instructions := cpu_instructions()) is None else f"{threads}, {instructions}"
