"""What a program may have set for all of torch when it calls lowbit: context managers by name."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["STATES", "entered", "snapshot"]


@contextlib.contextmanager
def _set(setter: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


class _Function(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _tensor_type(kind: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and used
        torch.set_default_tensor_type(kind)


def _mkldnn_precision(value: str) -> None:
    torch.backends.mkldnn.matmul.fp32_precision = value


@contextlib.contextmanager
def _anomalies() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow
        with torch.autograd.detect_anomaly():
            yield


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    torch.manual_seed(1234)
    yield


STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "default dtype bfloat16": partial(_set, torch.set_default_dtype, torch.bfloat16, torch.float32),
    "default dtype float16": partial(_set, torch.set_default_dtype, torch.float16, torch.float32),
    "default dtype float64": partial(_set, torch.set_default_dtype, torch.float64, torch.float32),
    "default tensor type double": partial(_set, _tensor_type, torch.DoubleTensor, torch.FloatTensor),
    "set_default_device meta": partial(_set, torch.set_default_device, "meta", None),
    "with device meta": partial(torch.device, "meta"),
    "autocast bfloat16": partial(torch.autocast, "cpu", torch.bfloat16),
    "autocast float16": partial(torch.autocast, "cpu", torch.float16),
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
    "gradients": torch.enable_grad,
    "anomaly detection": _anomalies,
    "deterministic algorithms": partial(_set, torch.use_deterministic_algorithms, True, False),
    "matmul precision medium": partial(_set, torch.set_float32_matmul_precision, "medium", "highest"),
    "matmul precision high": partial(_set, torch.set_float32_matmul_precision, "high", "highest"),
    "mkldnn precision bf16": partial(_set, _mkldnn_precision, "bf16", "none"),
    "function mode": _Function,
    "dispatch mode": _Dispatch,
    "another seed": _seeded,
}


@contextlib.contextmanager
def entered(*names: str) -> Iterator[None]:
    """Within the block all of ``names`` hold, the last one innermost."""
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(STATES[name]())
        yield


def snapshot() -> tuple[object, ...]:
    """What the states change, for comparisons."""
    return (
        torch.get_default_dtype(),
        torch.empty(0).device.type,
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.fp32_precision,
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.mkldnn.matmul.fp32_precision,
        torch.get_rng_state().numpy().tobytes(),
    )
