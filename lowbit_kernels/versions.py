"""The operator ``versions``: how often tensors were written to, for decisions while torch.compile traces.

While tracing, ``Tensor._version`` is known to the running graph only. But the shape of an operator's result is known, since its
fake computes it from the very tensors that the trace writes to. Nothing reads the result, so compilers drop the call.
"""

from __future__ import annotations

import itertools
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .rules import refused
from .schemas import Operator

__all__ = ["OPERATORS"]

_numbers = itertools.count(1)
_traces: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def _versions(tensors: list[Tensor]) -> Tensor:
    """A tensor [0, number of the trace, inference mode, version of each tensor]; tensors of inference mode have a new one each
    time, since their own does not count."""
    mode = getattr(tensors[0], "fake_mode", None)
    trace = 0 if mode is None else _traces.setdefault(mode, next(_numbers))
    written = [next(_numbers) if tensor.is_inference() else tensor._version for tensor in tensors]
    return torch.empty((0, trace, torch.is_inference_mode_enabled(), *written), dtype=torch.uint8, device="meta")


OPERATORS: dict[str, Operator] = {"versions": Operator(_versions, _versions, refused("versions have no gradient"))}
