"""Which row of the registry is the fastest, by scheme, shape and M: the tables that lowbit_kernels.crossovers reads.

    python -m lowbit.evals.crossover --device cuda

measures every row that takes a call and writes the table of this GPU among the package's own.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit import explain, strict
from lowbit.recipe import Recipe
from lowbit_kernels.crossovers import file_of

from .bench_layers import BenchLayer
from .cold_cache import CLOCK_BOUND_ROWS, Sweep, timed
from .figures import as_json
from .gemv import device_name
from .results import origin, replace_file

__all__ = ["BATCHES", "SCHEMES", "SHAPES", "measure", "segments"]

SCHEMES = (
    "int8", "int4", "int4_sym", "int3", "int2", "int5", "int6", "fp8", "fp6", "fp4", "nf4", "mxfp8", "mxfp6", "mxfp4", "mxint8",
    "nvfp4", "int8_dynamic_activation_int8_weight", "int8_dynamic_activation_int4_weight",
)  # fmt: skip
SHAPES = ((1024, 1024), (2048, 2048), (4096, 4096), (8192, 8192), (28672, 8192))
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
_GAIN = 0.97  # a row that comes later in the registry's order must be this much quicker to be taken before an earlier one


def measure(
    schemes: Sequence[str] = SCHEMES,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    batches: Sequence[int] = BATCHES,
    device: str = "cuda",
    repeats: int = 5,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """A table for :mod:`lowbit_kernels.crossovers`, with the microseconds behind it. Rows of the reference are measured only
    where no other row takes a call."""
    torch_device = torch.device(device)
    major, minor = torch.cuda.get_device_capability(torch_device) if torch_device.type == "cuda" else (0, 0)
    entries = []
    for name in schemes:
        for n, k in shapes:
            if progress is not None:
                progress(f"{name} {n}x{k}")
            entries.append(_entry(Recipe.parse(name), n, k, batches, torch_device, repeats))
    return {"device": device_name(torch_device), "arch": 10 * major + minor, "entries": entries}


def _entry(recipe: Recipe, n: int, k: int, batches: Sequence[int], device: torch.device, repeats: int) -> dict[str, Any]:
    bench_layer = BenchLayer(recipe, n, k, device)
    layers, measured = bench_layer.copies(), {}
    for m in sorted(batches, reverse=True):  # what computes hard lowers a GPU's clock for a while
        explanation = explain(bench_layer.layer, m)
        taking = [row for row, refusal in explanation.rows if refusal is None]
        rows = [row for row in taking if not row.startswith("reference")] or [explanation.kernel]
        if len(rows) == 1:
            measured[m] = dict.fromkeys(rows, 0.0)
            continue
        x = torch.randn(m, k, dtype=torch.bfloat16, device=device)
        sweeps = {row: Sweep([partial(_run_row, row, layer) for layer in layers], x, n == k) for row in rows}
        measured[m] = _against_first(sweeps, repeats) if m > CLOCK_BOUND_ROWS else _interleaved(sweeps, repeats)
    del layers
    if device.type == "cuda":
        torch.cuda.empty_cache()
    call, several = explanation.call, [(m, rows) for m, rows in sorted(measured.items()) if len(rows) > 1]
    return {
        "op": call.op, "scheme": str(call.scheme), "layout": call.layout, "n": n, "k": k,
        "up_to": segments(measured),
        "us": {str(m): {row: round(us, 2) for row, us in rows.items()} for m, rows in several},
    }  # fmt: skip


def _run_row(row: str, layer: nn.Module, x: Tensor) -> Tensor:
    with strict(row):
        y: Tensor = layer(x)
    return y


def _interleaved(sweeps: dict[str, Sweep], repeats: int) -> dict[str, float]:
    times: dict[str, list[float]] = {row: [] for row in sweeps}
    for _ in range(repeats):
        for row, (calls, x, chained) in sweeps.items():
            times[row].append(timed(calls, x, chained=chained, repeats=1).us)
    return {row: statistics.median(found) for row, found in times.items()}


def _against_first(sweeps: dict[str, Sweep], repeats: int) -> dict[str, float]:
    """Each interleaved with the first one, behind as much of both as a clock takes to settle: what a row takes is what the first
    one does times their ratio, for a clock that is another one a second later moves both."""
    (first, base), *others = sweeps.items()
    us = {first: timed(base.calls, base.x, chained=base.chained, repeats=repeats, settle_clock=True).us}
    for row, (calls, x, chained) in others:
        times = timed(calls, x, chained=chained, repeats=repeats, settle_clock=True, baseline=base)
        us[row] = times.us if times.baseline_us is None else us[first] * times.us / times.baseline_us
    return us


def segments(measured: dict[int, dict[str, float]]) -> list[tuple[int | None, str]]:
    """(the largest M, row) pairs from the microseconds of each row at each M, rows in the registry's order."""
    found: list[tuple[int | None, str]] = []
    last_m = 0
    for m, rows in sorted(measured.items()):
        best = next(iter(rows))
        for row, us in rows.items():
            if us < _GAIN * rows[best]:
                best = row
        if found and found[-1][1] == best:
            found.pop()
        elif found:
            found[-1] = (_crossing(last_m, m, measured, found[-1][1], best), found[-1][1])
        found.append((m, best))
        last_m = m
    return [*found[:-1], (None, found[-1][1])] if found else []


def _crossing(low: int, high: int, measured: dict[int, dict[str, float]], first: str, second: str) -> int:
    """The last M, from ``low`` to below ``high``, at which the row ``first`` is no slower than ``second``, as far as straight
    lines between logarithms tell; ``low`` where one of them was not measured at both."""
    times = [measured[m].get(row, 0.0) for m in (low, high) for row in (first, second)]
    if not all(times):
        return low
    at_low, at_high = (math.log(times[i + 1] / times[i]) for i in (0, 2))  # of `second` to `first`
    if not at_high < 0 <= at_low:
        return low
    return min(int(low * (high / low) ** (at_low / (at_low - at_high))), high - 1)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure where one kernel becomes faster than another.")
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--shapes", default=",".join(f"{n}x{k}" for n, k in SHAPES))
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="the file; by default that of this GPU in the package")
    options = parser.parse_args(arguments)
    shapes = [(int(n), int(k)) for n, k in (shape.split("x") for shape in options.shapes.split(","))]
    batches = [int(m) for m in options.batches.split(",")]
    found = measure(
        options.schemes.split(","), shapes, batches, options.device, options.repeats, lambda what: print(what, flush=True)
    )
    path = options.out or file_of(found["device"])
    replace_file(path, as_json({**origin(), **found}))
    print(path)


if __name__ == "__main__":
    main()
