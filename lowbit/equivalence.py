"""Whether a layer whose class has a forward of its own computes what layers of its kind do, found by calling it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .module_attributes import MARKS, SETTINGS, attributes

__all__ = ["computes_standard"]

_N, _K, _ROWS = 3, 5, 7
_NO_OPTIONS = {"padding_idx": None, "max_norm": None, "norm_type": 2.0, "scale_grad_by_freq": False, "sparse": False}
_BITS = {torch.float64: 12, torch.float32: 3, torch.bfloat16: 3}  # of numbers whose products and sums are exact in each dtype


def computes_standard(module: nn.Module, kind: str) -> bool:
    """Whether the ``forward`` of ``module`` takes one tensor and gives ``x @ weight.T + bias`` (of kind ``"linear"``),
    ``x @ weight + bias`` (``"conv1d"``) or the rows that indices name (``"embedding"``), bit for bit.

    It is called with small weights in place of its own, on numbers that no order of a sum rounds, of several sizes, shapes and
    dtypes, on infinity and NaN, and in both modes. With attributes beyond those of its kind it does not count, for what it
    computes may hang on them.
    """
    if attributes(module).keys() - SETTINGS - MARKS or not _has_one_argument(module):
        return False
    cls: Any = type(module)
    return _class_computes(cls, cls.forward, kind, module._parameters.get("bias") is not None)


@functools.lru_cache(maxsize=64)  # a model has hundreds of layers of one class
def _class_computes(cls: Any, forward: Any, kind: str, has_bias: bool) -> bool:
    quiet = torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False)
    try:
        with quiet[0], quiet[1], quiet[2], quiet[3]:
            probes = [_probe_module(cls, kind, dtype, has_bias) for dtype in _BITS]
            return all(_agrees(probe.train(training), kind) for probe in probes for training in (False, True))
    except Exception:  # whatever a foreign forward raises, it raises it on what layers of its kind take
        return False


def _has_one_argument(module: nn.Module) -> bool:
    try:
        found = [*inspect.signature(module.forward).parameters.values()]
    except (TypeError, ValueError):
        return False
    return len(found) == 1 and found[0].kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _agrees(probe: nn.Module, kind: str) -> bool:
    weight, bias = probe._parameters["weight"], probe._parameters.get("bias")
    assert weight is not None
    for x in _inputs(kind, weight.dtype):
        if kind == "embedding":
            want = functional.embedding(x, weight)
        else:
            want = functional.linear(x, weight.t() if kind == "conv1d" else weight, bias)
        got = probe.forward(x.clone())
        if type(got) is not Tensor or (got.dtype, got.shape) != (want.dtype, want.shape):
            return False
        if not bool(((got == want) | (got.isnan() & want.isnan())).all()):
            return False
    return True


def _probe_module(cls: type[nn.Module], kind: str, dtype: torch.dtype, has_bias: bool) -> nn.Module:
    """A module of the class with a small weight, which its own constructor knows nothing of."""
    sizes: dict[str, dict[str, Any]] = {
        "linear": {"in_features": _K, "out_features": _N},
        "conv1d": {"nx": _K, "nf": _N},
        "embedding": {"num_embeddings": _ROWS, "embedding_dim": _K, **_NO_OPTIONS},
    }
    shape = {"linear": (_N, _K), "conv1d": (_K, _N), "embedding": (_ROWS, _K)}[kind]
    probe: nn.Module = object.__new__(cls)
    vars(probe).update({**vars(nn.Module()), **sizes[kind]})
    draw = torch.Generator().manual_seed(0)
    probe._parameters["weight"] = nn.Parameter(_numbers(shape, draw, dtype))
    if kind != "embedding":
        probe._parameters["bias"] = nn.Parameter(_numbers((_N,), draw, dtype)) if has_bias else None
    return probe


def _inputs(kind: str, dtype: torch.dtype) -> Iterator[Tensor]:
    draw = torch.Generator().manual_seed(1)
    for shape in ((), (4,), (2, 3), (0, 2), (2, 1, 3, 2)):
        if kind == "embedding":
            yield from (torch.randint(0, _ROWS, shape, generator=draw, dtype=index) for index in (torch.int64, torch.int32))
        elif kind == "linear" or shape:  # Conv1D takes rows
            powers = (0, -20, 30) if dtype == torch.float64 else (0,)
            yield from (_numbers((*shape, _K), draw, dtype) * 2.0**power for power in powers)
    if kind != "embedding":
        x = _numbers((3, _K), draw, dtype)
        x[0, 0], x[1, 1] = torch.inf, torch.nan
        yield x


def _numbers(shape: tuple[int, ...], draw: torch.Generator, dtype: torch.dtype) -> Tensor:
    top = 2 ** (_BITS[dtype] - 1)
    return (torch.randint(1 - top, top, shape, generator=draw) / top).to(dtype)
