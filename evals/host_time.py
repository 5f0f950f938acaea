"""Host time of a call: what Python, the dispatcher and the launch take before the device has anything to do.

Weights are so small that a GPU is done before the next call arrives; the clock is the host's, and the device is waited for
between rounds alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from lowbit import QLinear, quantize_, trace_kernels

__all__ = ["measure", "table"]

_CALLS = 200  # a round: fewer than a GPU's queue holds
_ROUNDS = 15
_STACK = 30


def measure(
    schemes: Sequence[str] = ("int4", "int8"),
    size: int = 256,
    batches: Sequence[int] = (1, 16),
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """Microseconds of host time a layer of ``size`` x ``size``, alone and in a stack of 30; medians over rounds.

    ``rows`` begin with the float layer for each number of rows of x. Beside each quantized layer stand F.linear with its
    weight as a tensor, and its operator through torch's dispatcher, as modes and the code of ``torch.compile`` call it.
    """
    rows = []
    for m in batches:
        x = torch.randn(m, size, dtype=dtype, device=device)
        dense = nn.Linear(size, size, bias=False, dtype=dtype, device=device)
        rows.append(_row("float", "F.linear", m, dense, x))
        for scheme in schemes:
            model = nn.Sequential(nn.Linear(size, size, bias=False, dtype=dtype, device=device))
            quantize_(model, scheme)
            layer = model[0]
            assert isinstance(layer, QLinear)
            with torch.no_grad(), trace_kernels() as trace:
                layer(x)
            row = _row(scheme, next(iter(trace.kernels())), m, layer, x)
            if layer.activation is None:
                row["tensor_us"] = _time(lambda x=x, w=layer.weight: nn.functional.linear(x, w), x)
            rows.append({**row, "operator_us": _time(_operator(layer, x), x)})
    return {"device": _name(torch.device(device)), "dtype": str(dtype), "size": size, "rows": rows}


def _row(scheme: str, kernel: str, m: int, layer: nn.Module, x: Tensor) -> dict[str, Any]:
    stack = nn.Sequential(*(layer for _ in range(_STACK)))
    return {
        "scheme": scheme,
        "kernel": kernel,
        "m": m,
        "us": _time(lambda: layer(x), x),
        "stack_us": _time(lambda: stack(x), x, calls=_CALLS // _STACK) / _STACK,
    }


def _operator(layer: QLinear, x: Tensor) -> Callable[[], Tensor]:
    w = layer.weight
    parts = (w.packed, w.scale, w.zero_point, w.outer, layer.bias, w.scheme_str, w.byte_layout)
    if layer.activation is None:
        return lambda: torch.ops.lowbit.linear(x, *parts)
    return lambda: torch.ops.lowbit.quantized_linear(x, *parts, str(layer.activation), layer.input_scale)


@torch.no_grad()
def _time(call: Callable[[], Any], x: Tensor, calls: int = _CALLS) -> float:
    """Microseconds a call."""

    def round_() -> float:
        if x.is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) * 1e6 / calls

    round_()
    return statistics.median(round_() for _ in range(_ROUNDS))


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"


def table(figures: dict[str, Any]) -> Table:
    """What :func:`measure` returned, for a terminal."""
    made = Table(title=f"{figures['device']}, {figures['dtype']} x, {figures['size']} x {figures['size']}", title_justify="left")
    for name in ("scheme", "M", "kernel", "layer us", "in a stack us", "tensor us", "operator us"):
        made.add_column(name, justify="left" if name in ("scheme", "kernel") else "right", no_wrap=True)
    for r in figures["rows"]:
        times = (f"{r[name]:.1f}" if name in r else "" for name in ("us", "stack_us", "tensor_us", "operator_us"))
        made.add_row(r["scheme"], str(r["m"]), r["kernel"], *times)
    return made
