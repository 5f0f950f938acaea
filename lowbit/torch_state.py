"""What a program may have set for all of torch, and what must not show in the bytes of a quantized model.

Default dtype and device, autocast, inference mode, gradients, the precision of float32 products: whoever calls lowbit has chosen
them for work of their own. Every call that makes bytes does its work within :func:`isolated`, where they are as torch starts, and
behind which they are as they were. What only chooses an implementation (threads, deterministic algorithms, backends that are
turned off) stays as it is.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

__all__ = ["default_device", "isolated", "fixed_torch_seed"]

_AUTOCAST = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "maia", "xla", "privateuseone")


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Within the block (or the function that it decorates) torch is as it starts, but for gradients, which are not recorded.

    Settings of the whole process, the default dtype and the precision of float32 products, are restored when the last block that
    is open in any thread ends: other threads see them change.
    """
    with contextlib.ExitStack() as stack:
        # Parameters made in inference mode could never meet autograd again.
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(_PROCESS)
        for kind in _AUTOCAST:
            if torch.is_autocast_enabled(kind):
                stack.callback(torch.clear_autocast_cache)  # it keeps weights that may be others by then
                stack.enter_context(torch.autocast(kind, enabled=False))
        device = torch.empty(0).device
        if device.type != "cpu":
            stack.callback(setattr, _THREAD, "device", _THREAD.device)
            _THREAD.device = device
            stack.enter_context(torch.device("cpu"))
        yield


@contextlib.contextmanager
def default_device(device: torch.device | None) -> Iterator[None]:
    """Within the block, for a model that runs on ``device``, the caller's default device holds, where that is of the same kind: a
    model that makes tensors without naming a device works for its caller that way alone."""
    given = _THREAD.device
    if given is None or device is None or given.type != device.type or given.type == "meta":
        yield
    else:
        with given:
            yield


@contextlib.contextmanager
def fixed_torch_seed() -> Iterator[None]:
    """Within the block torch's global generators start from 0; afterwards they are as they were."""
    cuda = torch.cuda.is_initialized()  # else there is nothing to keep, and a seed would wait for it
    with torch.random.fork_rng(range(torch.cuda.device_count()) if cuda else []):
        torch.default_generator.manual_seed(0)
        if cuda:
            torch.cuda.manual_seed_all(0)
        yield


class _Thread(threading.local):
    device: torch.device | None = None


class _Process:
    """A context that may be entered by several threads at once: the first one in changes the settings of the process, the last
    one out puts them back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before: contextlib.ExitStack | None = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                with contextlib.ExitStack() as stack:
                    _reset_process_state(stack)
                    self._before = stack.pop_all()
            self._inside += 1

    def __exit__(self, *error: Any) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._before is not None:
                self._before.close()
                self._before = None


def _reset_process_state(stack: contextlib.ExitStack) -> None:
    dtype = torch.get_default_dtype()
    if dtype != torch.float32:
        stack.callback(torch.set_default_dtype, dtype)
        torch.set_default_dtype(torch.float32)
    backends: Any = torch.backends
    # From the general to the special: one that only follows another needs no change of its own, and goes on following it.
    places = (backends, backends.cudnn, backends.cuda.matmul, backends.mkldnn.matmul, backends.mkldnn.conv)
    before = [place.fp32_precision for place in places]
    stack.callback(_set_precisions, places, before)
    with contextlib.suppress(RuntimeError):  # it cannot tell where precisions were set by backend, which follow
        precision = torch.get_float32_matmul_precision()
        if precision != "highest":
            stack.callback(torch.set_float32_matmul_precision, precision)
            torch.set_float32_matmul_precision("highest")
    for place in places:
        if place.fp32_precision not in ("none", "ieee"):
            place.fp32_precision = "none"


def _set_precisions(places: Sequence[Any], wanted: Sequence[str]) -> None:
    for place, precision in zip(places, wanted, strict=True):
        if place.fp32_precision != precision:
            place.fp32_precision = precision


_THREAD = _Thread()
_PROCESS = _Process()
