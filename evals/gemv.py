"""Weights loaded per second: every kernel against the limit of reading its bytes, in one run, weights cold.

Each figure is the median over walks through enough copies of a weight to leave the last-level cache cold (or, where that is
asked for, over one, which stays in the cache if it fits there). On a GPU a walk is one CUDA graph. Where N = K each product takes
the one before it as its x, so that a kernel which starts early still has to wait for it. Walks take turns with some of the float
weight, since a GPU's clock swings, and on a CPU, which others use too, with some that only read; where rows of x are many enough
to make a GPU lower its clock, they are timed once their own work has done so.
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
from .reader import Limits
from .specimens import Specimen
from .walks import HARD, Times, Walk, copies_of, timed

__all__ = ["BATCHES", "SCHEMES", "SHAPES", "beside", "device_name", "largest", "measure", "row_of", "table"]

SCHEMES = (
    "int8", "int4", "int4_sym", "int3", "int2", "int5", "int6", "fp8", "fp6", "fp6_e3m2", "fp4", "nf4",
    "mxfp8", "mxfp6", "mxfp4", "mxint8", "nvfp4", "int8_dynamic_activation_int8_weight",
)  # fmt: skip
SHAPES = (
    (1024, 1024), (2048, 2048), (4096, 4096), (8192, 8192), (14336, 4096), (4096, 14336), (28672, 8192), (8192, 28672),
)  # fmt: skip
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 2048, 4096)
_SMALL, _USUAL = 1 << 20, (4096, 4096)  # weights of a layer that are few; a layer of a usual model
_TURN, _SHORT, _LONG = 3, 1.0, 4.0  # walks of a turn; seconds that turns take at least, and after which none begins
_REST = 0.2  # seconds behind hard work


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
    ``rows`` as of :func:`row_of` (with ``float_us``, F.linear's in turns with it), ``peers``, the same without that, and
    ``failures``, each with the error of a figure that could not be taken.
    ``keep`` is called with what there is after each shape, so that a run that is ended early leaves something.
    """
    where = torch.device(device)
    recipes = {recipe.name: recipe for recipe in map(Recipe.of, schemes)}
    limits = Limits(where, repeats, cold)
    one = _Run(batches, where, dtype, repeats, layout, limits, cold, progress, kernels)
    figures: dict[str, Any] = {"device": device_name(where), "dtype": str(dtype), "cold": cold, "kernels": [*kernels]}
    figures |= {"rows": [], "peers": [], "failures": []}
    float_us: dict[tuple[int, int, int], float] = {}
    for n, k in shapes:
        rows = []
        floats: dict[int, Walk] = {}
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
        some = where.type == "cuda"  # where libraries tune for long
        theirs = [shape for shape in shapes if shape in peers.SHAPES and some] or shapes
        few = [m for m in batches if m in peers.BATCHES and some] or batches
        found, missing = peers.measure(others, theirs, few, device, repeats, seconds, progress, cold)
        figures["peers"] = [_peer_row(row, limits(row["bytes"]), float_us) for row in found]
        figures["failures"] += missing
    return figures


def beside(
    recipes: Sequence[str | Recipe], shape: tuple[int, int], device: str, progress: Callable[[str, int, int], None] | None = None
) -> dict[str, Any]:
    """:func:`measure` of one row of x, as a token is decoded, for what stands beside an evaluation: few repeats.

    ``progress``: called with (what is being done, done, in all).
    """
    done = itertools.count()

    def said(what: str) -> None:
        if progress is not None:
            progress(f"weights per second: {what}", next(done), 1 + len(recipes))

    return measure(recipes, [shape], (1,), device, repeats=5, progress=said)


def largest(layers: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """N and K of the largest linear layer among those of :func:`lowbit.evals.layers.layer_figures`.

    Where even that is so small that a call costs more than its weights, or there is none, those of a model with 8 billion.
    """
    shapes = [tuple(layer["shape"]) for layer in layers if layer.get("kind") == "linear"]
    n, k = max(shapes, key=lambda shape: (shape[0] * shape[1], shape), default=_USUAL)
    return (n, k) if n * k >= _SMALL else _USUAL


def _peer_row(row: dict[str, Any], limit: Times, float_us: dict[tuple[int, int, int], float]) -> dict[str, Any]:
    times, where = Times(row["us"], row["plain_us"], row["early"]), (row["n"], row["k"], row["m"])
    names = {key: row[key] for key in ("peer", "version", "bits", "relative_error")}
    measured = row_of(times, limit, row["m"], row["n"], row["k"], row["bytes"])
    return names | measured | {"times_float": float_us[where] / times.us if where in float_us else None}


class _Run(NamedTuple):
    """How every figure of a run is taken."""

    batches: Sequence[int]
    device: torch.device
    dtype: torch.dtype
    repeats: int
    layout: str
    limits: Limits
    cold: bool
    progress: Callable[[str], None]
    kernels: Sequence[str]

    def rows(
        self, name: str, recipe: Recipe | None, n: int, k: int, floats: dict[int, Walk]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """(M, its row), or the error in place of the row; the copies of the weight serve every M.

        ``floats``: the float weight's walk by M, which its own rows leave for those of the recipes.

        The largest M first, and a rest behind them: what computes hard lowers a GPU's clock for some tenths of a second, which
        every kernel shows that is not bound by the memory alone. Such walks are timed at the clock that they lead to themselves,
        not at the one that was left to them.
        """
        layers: Sequence[nn.Module] = []
        found: list[tuple[int, dict[str, Any], Times, Times | None, float | None]] = []
        last = 0
        for m in sorted(self.batches, reverse=True):
            self.progress(f"{name} {n}x{k} M={m}")
            if self.device.type == "cuda" and last > HARD >= m:
                time.sleep(_REST)
            last = m
            try:
                if not layers:
                    layers, size, held = _copies(recipe, n, k, self.device, self.dtype, self.layout, self.cold)
                x = torch.randn(m, k, dtype=self.dtype, device=self.device)
                with strict(*self.kernels) if self.kernels else contextlib.nullcontext():
                    times, limit, float_us = self._timed(layers, x, n == k, size, floats.get(m))
                    if recipe is None:
                        floats[m] = Walk(layers, x, n == k)
                    with trace_kernels() as trace:
                        layers[0](x)
                receipt = next(iter(trace.counts), None)
                ran = ("F.linear", str(self.dtype)) if receipt is None else (receipt.kernel, receipt.contract)
                found.append((m, {"scheme": name, "kernel": ran[0], "contract": ran[1], "layout": held}, times, limit, float_us))
            except (RuntimeError, ValueError, NotImplementedError) as error:
                yield m, {"error": " ".join(str(error).split())[:300]}
        layers = []
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        for m, how, times, limit, float_us in found:
            row = how | row_of(times, limit or self.limits(size), m, n, k, size)
            yield m, row if float_us is None else row | {"float_us": float_us}

    def _timed(
        self, layers: Sequence[nn.Module], x: Tensor, chained: bool, size: int, beside: Walk | None
    ) -> tuple[Times, Times | None, float | None]:
        """A layer's times, those of the reader where it took turns with the layer (on a CPU), and those of ``beside``."""
        if self.device.type != "cpu":
            own = timed(layers, x, chained=chained, repeats=self.repeats, settled=len(x) > HARD, beside=beside)
            return own, None, own.beside_us
        start, turns = time.perf_counter(), []
        while self._needs_more(len(turns), time.perf_counter() - start):
            own = timed(layers, x, chained=chained, repeats=_TURN)
            limit = self.limits.now(size, _TURN)
            other = own if beside is None else timed(beside.calls, beside.x, chained=beside.chained, repeats=_TURN)
            turns.append((own.us, limit.us, other.us))
        us, limit_us, float_us = map(statistics.median, zip(*turns, strict=True))
        return Times(us, us, None), Times(limit_us, limit_us, None), None if beside is None else float_us

    def _needs_more(self, turns: int, seconds: float) -> bool:
        """As many walks as are asked for; more, but no more than thrice as many, where all that is over in a moment."""
        if turns == 0:
            return True
        return turns < self.repeats and seconds < (_LONG if _TURN * turns < self.repeats else _SHORT)


def _copies(
    recipe: Recipe | None, n: int, k: int, device: torch.device, dtype: torch.dtype, layout: str, cold: bool
) -> tuple[Sequence[nn.Module], int, str]:
    """Layers over copies of one weight, its bytes, and the arrangement of them."""
    if recipe is None:
        size = n * k * dtype.itemsize
        dense = torch.randn(n, k, dtype=dtype, device=device) * k**-0.5
        return [_Float(dense.clone()) for _ in range(copies_of(size, device, cold))], size, "rows"
    made = Specimen(recipe, n, k, device, dtype, layout)
    return made.copies(cold), made.nbytes, made.layer.weight.byte_layout


class _Float(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


def row_of(times: Times, limit: Times, m: int, n: int, k: int, size: int) -> dict[str, Any]:
    """A figure beside its limit in the same mode; ``plain_``: in a graph without early starts, where there were some."""
    compared = limit.us if times.early or times.early is None else limit.plain_us
    row = {
        "m": m, "n": n, "k": k, "bytes": size,
        "us": times.us,
        "early": times.early,
        "billion_weights_per_second": n * k / times.us / 1e3,
        "limit_us": compared,
        "fraction_of_limit": compared / times.us,
    }  # fmt: skip
    if times.early is not None:
        row |= {"plain_us": times.plain_us, "plain_limit_us": limit.plain_us}
        row |= {"plain_fraction_of_limit": limit.plain_us / times.plain_us}
    return row


def table(figures: dict[str, Any]) -> Table:
    """What :func:`measure` returned, for a terminal."""
    held = "cold" if figures.get("cold", True) else "warm"
    made = Table(title=f"{figures['device']}, {figures['dtype']} x, weights {held}", title_justify="left")
    left = ("scheme", "kernel", "layout")
    for name in ("N x K", "M", *left, "us", "billion weights/s", "of the limit", "without early starts", "times F.linear"):
        made.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for r in figures["rows"]:
        speeds = f"{r['us']:.2f}", f"{r['billion_weights_per_second']:.1f}", f"{r['fraction_of_limit']:.3f}"
        plain = f"{r['plain_us']:.2f} ({r['plain_fraction_of_limit']:.3f})" if r["early"] else ""
        names = r["scheme"], r["kernel"], r["layout"]
        made.add_row(f"{r['n']} x {r['k']}", str(r["m"]), *names, *speeds, plain, f"{r['times_float']:.2f}")
    for r in figures.get("peers", ()):
        speeds = f"{r['us']:.2f}", f"{r['billion_weights_per_second']:.1f}", f"{r['fraction_of_limit']:.3f}"
        plain = f"{r['plain_us']:.2f} ({r['plain_fraction_of_limit']:.3f})" if r["early"] else ""
        ratio = "" if r["times_float"] is None else f"{r['times_float']:.2f}"
        made.add_row(f"{r['n']} x {r['k']}", str(r["m"]), r["peer"], r["version"], "", *speeds, plain, ratio)
    return made


def device_name(device: torch.device) -> str:
    """Of a CPU: how many threads, and the instructions of the kernels, which LOWBIT_CPU may choose."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = f"cpu, {(n := torch.get_num_threads())} thread{'s' if n > 1 else ''}"
    return threads if (instructions := cpu_instructions()) is None else f"{threads}, {instructions}"
