"""Host time of a call: what Python, the dispatcher and the launch take before the device has anything to do.

Weights are so small that a GPU is done before the next call arrives; the clock is the host's, and the device is waited for
between rounds alone. ``python -m evals.host_time --device cuda`` prints JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit import QLinear, quantize_, trace_kernels

from .results import origin, write_result

__all__ = ["measure"]

_CALLS = 200  # a round: fewer than a GPU's queue holds
_ROUNDS = 15
_STACK = 30


def measure(
    schemes: tuple[str, ...] = ("int4", "int8"),
    size: int = 256,
    batches: tuple[int, ...] = (1, 16),
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """Microseconds of host time a layer of ``size`` x ``size``, alone and in a stack of 30; medians over rounds.

    ``F.linear`` is the float layer in the same conditions, ``operator`` the quantized one through torch's dispatcher, as
    ``torch.compile`` and modes see it.
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
            weight = layer.weight
            rows.append(
                {
                    **_row(scheme, next(iter(trace.kernels())), m, layer, x),
                    "tensor_us": _time(lambda x=x, w=weight: nn.functional.linear(x, w), x),
                    "operator_us": _time(_operator(layer, x), x),
                }
            )
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
    parts = (layer.packed, layer.scale, layer.zero_point, layer.outer, layer.bias)
    return lambda: torch.ops.lowbit.linear(x, *parts, layer.spelling, layer.byte_layout)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", default="int4,int8", help="with commas between")
    parser.add_argument("--batches", default="1,16", help="rows of x, with commas between")
    parser.add_argument("--size", type=int, default=256, help="rows and columns of each weight")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="write JSON there too")
    asked = parser.parse_args()
    batches = tuple(int(m) for m in asked.batches.split(","))
    figures = measure(tuple(asked.schemes.split(",")), asked.size, batches, asked.device)
    if asked.out is not None:
        write_result(asked.out, figures)
    print(json.dumps({**origin(), **figures}, indent=1))


if __name__ == "__main__":
    main()
