"""Weights loaded per second: every kernel against the limit of reading its bytes, in one run, weights cold.

Each figure is the median over walks through enough copies of a weight to leave the last-level cache cold; on a GPU a
walk is one CUDA graph. The float weight runs beside the quantized ones, under the same conditions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from lowbit import QTensor, Scheme, trace_kernels

from .reader import reader

__all__ = ["SHAPES", "measure", "table"]

SHAPES = ((1024, 1024), (4096, 4096), (11008, 4096))
_COLD = {"cpu": 256 << 20, "cuda": 640 << 20}  # several times the last-level cache of either


def measure(
    schemes: Sequence[str],
    shapes: Sequence[tuple[int, int]] = SHAPES,
    batches: Sequence[int] = (1,),
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    repeats: int = 9,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Time ``lowbit::linear`` for each scheme, shape (N, K) and number of rows of x, beside F.linear in ``dtype``.

    Returns plain data: ``rows`` with microseconds a call, bytes read, billions of weights a second, the fraction of the
    limit (the time to read the same bytes over the time taken), the ratio to F.linear, the kernel and its contract.
    """
    where = torch.device(device)
    rows = []
    for n, k in shapes:
        for m in batches:
            x = torch.randn(m, k, dtype=dtype, device=where)
            baseline = 0.0
            for scheme in ("float", *schemes):
                if progress is not None:
                    progress(f"{scheme} {n}x{k} M={m}")
                row = _row(scheme, x, n, k, repeats)
                baseline = row["us"] if scheme == "float" else baseline
                rows.append({**row, "m": m, "n": n, "k": k, "times_float": baseline / row["us"]})
    return {
        "device": _device_name(where),
        "dtype": str(dtype),
        "rows": rows,
    }


def _row(scheme: str, x: Tensor, n: int, k: int, repeats: int) -> dict[str, Any]:
    dense = torch.randn(n, k, dtype=x.dtype, device=x.device)
    weight: Tensor = dense if scheme == "float" else QTensor.quantize(dense, Scheme.parse(scheme))
    size = weight.nbytes
    copies = max(2, -(-_COLD[x.device.type] // size))
    weights = [weight.clone() for _ in range(copies)]
    calls = [lambda w=w: torch.nn.functional.linear(x, w) for w in weights]
    kernel, contract = "F.linear", str(x.dtype)
    if scheme != "float":
        with trace_kernels() as trace:
            calls[0]()
        receipt = next(iter(trace.counts))
        kernel, contract = receipt.kernel, receipt.contract
    us = _median(calls, x.device, repeats)
    buffers = [torch.randint(0, 255, (-(-size // 16384) * 16384,), dtype=torch.uint8, device=x.device) for _ in range(copies)]
    read = reader(x.device)
    limit = _median([lambda b=b: read(b) for b in buffers], x.device, repeats) * size / buffers[0].numel()
    return {
        "scheme": scheme,
        "kernel": kernel,
        "contract": contract,
        "us": us,
        "bytes": size,
        "billion_weights_per_second": n * k / us / 1e3,
        "limit_us": limit,
        "fraction_of_limit": limit / us,
    }


def _median(calls: Sequence[Callable[[], Tensor]], device: torch.device, repeats: int) -> float:
    """Microseconds a call, the median over walks through all of ``calls``."""
    walk = _graph_walk(calls) if device.type == "cuda" else _eager_walk(calls)
    walk()
    return statistics.median(walk() for _ in range(repeats)) / len(calls)


def _eager_walk(calls: Sequence[Callable[[], Tensor]]) -> Callable[[], float]:
    def walk() -> float:
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) * 1e6

    return walk


def _graph_walk(calls: Sequence[Callable[[], Tensor]]) -> Callable[[], float]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:3]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]

    def walk() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        assert kept
        return start.elapsed_time(end) * 1e3

    return walk


def table(figures: dict[str, Any]) -> Table:
    """What :func:`measure` returned, for a terminal."""
    made = Table(title=f"{figures['device']}, {figures['dtype']} x, weights cold", title_justify="left")
    for name in ("N x K", "M", "scheme", "kernel", "us", "billion weights/s", "of the limit", "times F.linear"):
        made.add_column(name, justify="left" if name in ("scheme", "kernel") else "right", no_wrap=True)
    for r in figures["rows"]:
        speeds = f"{r['us']:.1f}", f"{r['billion_weights_per_second']:.1f}", f"{r['fraction_of_limit']:.3f}"
        made.add_row(f"{r['n']} x {r['k']}", str(r["m"]), r["scheme"], r["kernel"], *speeds, f"{r['times_float']:.2f}")
    return made


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
