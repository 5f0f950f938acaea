"""Peak memory while a model is quantized, over the model itself: at most twice its largest linear layer is the promise.

``lowbit bench memory`` measures it.
"""

from __future__ import annotations

import resource
import threading
import time
from pathlib import Path

from torch import nn

from lowbit import quantize_

__all__ = ["peak_over_model"]


def peak_over_model(scheme: str, size: int = 4096, layers: int = 8) -> dict[str, float]:
    """Quantize ``layers`` linear layers of ``size`` x ``size`` in bf16; bytes, the peak sampled each millisecond."""
    quantize_(nn.Sequential(nn.Linear(64, 64).bfloat16()), scheme)  # libraries loaded, threads started
    model = nn.Sequential(*(nn.Linear(size, size, bias=False).bfloat16() for _ in range(layers)))
    before = _resident()
    peak, stop = before, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not stop.is_set():
            peak = max(peak, _resident())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    quantize_(model, scheme)
    stop.set()
    watcher.join()
    layer = size * size * 2
    return {
        "over_model_bytes": peak - before,
        "largest_layer_bytes": layer,
        "times_largest_layer": (peak - before) / layer,
        "after_bytes": _resident() - before,
    }


def _resident() -> int:
    """Bytes of physical memory that this process holds."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
