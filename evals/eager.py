"""What plain eager calls take: cold weights, no graph and no compiler, one layer behind the other.

A call takes whichever is longer, the host's time to launch it or the device's to run it; both stand in a row.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from lowbit.recipe import Recipe

from .bench_layers import BenchLayer
from .cold_cache import MIN_GRAPH_CALLS, copies_of

__all__ = ["measure", "table"]

_ROUNDS = 31


def measure(
    schemes: Sequence[str] = ("int8", "int4"),
    shapes: Sequence[tuple[int, int]] = ((4096, 4096), (8192, 8192)),
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
) -> list[dict[str, Any]]:
    """Microseconds a call at one row of x, for weights [n, k] of each shape, beside a float layer's; medians over sweeps.

    ``us``: from the first call until the device has done the last one; ``host_us``: until the host has launched it.
    """
    return [row for n, k in shapes for row in _of_shape(schemes, n, k, torch.device(device), dtype)]


def _of_shape(schemes: Sequence[str], n: int, k: int, device: torch.device, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    x = torch.randn(1, k, device=device, dtype=dtype)
    size = n * k * dtype.itemsize
    dense = [nn.Linear(k, n, bias=False, device=device, dtype=dtype) for _ in range(copies_of(size, device))]
    layers_by_name: dict[str, Sequence[nn.Module]] = {"float": dense}
    layers_by_name |= {scheme: BenchLayer(Recipe.parse(scheme), n, k, device, dtype).copies() for scheme in schemes}
    sweeps = {name: _enough_copies(layers) for name, layers in layers_by_name.items()}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sweeps}
    for i in range(_ROUNDS + 2):  # interleaved, so that a host that slows down does so for all
        for name, layers in sweeps.items():
            times = _timed_sweep(layers, x)
            if i >= 2:  # what is chosen and prepared at the first calls is not part of it
                found[name].append(times)
    float_us = statistics.median(us for us, _ in found["float"])
    for name, times in found.items():
        us, host_us = (statistics.median(each) for each in zip(*times, strict=True))
        yield {"scheme": name, "m": 1, "n": n, "k": k, "us": us, "host_us": host_us, "times_float": float_us / us}


def _enough_copies(layers: Sequence[nn.Module]) -> list[Callable[[Tensor], Tensor]]:
    return list(layers) * -(-MIN_GRAPH_CALLS // len(layers))


@torch.no_grad()
def _timed_sweep(layers: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> tuple[float, float]:
    def synchronize() -> float:
        if x.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    start = synchronize()
    for layer in layers:
        layer(x)
    launched = time.perf_counter()
    return (synchronize() - start) * 1e6 / len(layers), (launched - start) * 1e6 / len(layers)


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """What :func:`measure` returned, for a terminal."""
    layers_by_name = Table(title="one row of x, eager, weights cold", title_justify="left")
    for name in ("N x K", "scheme", "us", "host us", "times float"):
        layers_by_name.add_column(name, justify="left" if name in ("N x K", "scheme") else "right", no_wrap=True)
    for r in rows:
        layers_by_name.add_row(
            f"{r['n']} x {r['k']}", r["scheme"], f"{r['us']:.1f}", f"{r['host_us']:.1f}", f"{r['times_float']:.2f}"
        )
    return layers_by_name
