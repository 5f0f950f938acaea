"""Functions at the end of a product, applied to each element of y after the bias.

A kernel that supports one applies it in float32, before y is rounded. Otherwise the registry applies it to the kernel's y, and
the kernel trace says so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lowbit.catalog import Catalog

__all__ = ["EPILOGUES", "Epilogue", "epilogue"]

_aten = torch.ops.aten


class Epilogue(NamedTuple):
    """``run(y)``, and ``backward(grad, y)`` of the y that it was given."""

    run: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


def _same(y: Tensor) -> Tensor:
    return y


def _passed(grad: Tensor, y: Tensor) -> Tensor:
    return grad


def _silu_backward(grad: Tensor, y: Tensor) -> Tensor:
    if not torch.is_grad_enabled() and forward_ad._current_level < 0:
        return _aten.silu_backward(grad, y)
    slope = torch.sigmoid(y)  # torch's operator above has no gradient of its own
    return grad * (slope * (1 + y * (1 - slope)))


def _check(name: str, value: Epilogue) -> None:
    if not isinstance(value, Epilogue):
        raise TypeError(f"EPILOGUES[{name!r}] must be an Epilogue, got {type(value).__name__}")


EPILOGUES: Catalog[Epilogue] = Catalog(
    "EPILOGUES",
    {
        "none": Epilogue(_same, _passed),
        "relu": Epilogue(_aten.relu.default, lambda grad, y: _aten.threshold_backward(grad, y, 0)),
        "silu": Epilogue(_aten.silu.default, _silu_backward),
        "gelu": Epilogue(_aten.gelu.default, _aten.gelu_backward.default),
        "gelu_tanh": Epilogue(partial(_aten.gelu, approximate="tanh"), partial(_aten.gelu_backward, approximate="tanh")),
    },
    _check,
)


def epilogue(name: str) -> Epilogue:
    """The function called ``name``. Raises ``ValueError`` where there is none."""
    if name not in EPILOGUES:
        raise ValueError(f"no epilogue named {name!r}; there are {', '.join(EPILOGUES)}")
    return EPILOGUES[name]
