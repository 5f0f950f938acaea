"""The operators as torch knows them: registered when lowbit is imported, so that programs which name them (torch.export,
AOTInductor, torch.jit) load and run in a process that has used no other part of it.

This file imports nothing but torch. What an operator does, ``ops`` and ``token_ops`` say in their ``OPERATORS``, which are
imported when something first asks: that takes ten times as long as to name them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

__all__ = ["LIBRARY", "SCHEMAS", "Operator", "Schema"]


class Operator(NamedTuple):
    """What an operator does, what it returns for tensors without numbers, and its autograd rule, where it has one."""

    run: Callable[..., Any]
    fake: Callable[..., Any]
    setup: Callable[..., None] | None = None
    backward: Callable[..., Any] | None = None


class Schema(NamedTuple):
    """The arguments and results of an operator; the module whose ``OPERATORS`` say the rest; whether it has an autograd rule."""

    signature: str
    module: str
    differentiable: bool


_WEIGHT = "Tensor packed, Tensor scale, Tensor? zero_point, Tensor? outer"
_LAST = 'str epilogue="none"'  # a name of :mod:`.epilogues`
_OPS, _TOKENS = "lowbit_kernels.ops", "lowbit_kernels.token_ops"

SCHEMAS: dict[str, Schema] = {
    "linear": Schema(
        f"(Tensor x, {_WEIGHT}, Tensor? bias, str scheme, str layout, {_LAST}) -> Tensor", _OPS, differentiable=True
    ),
    "quantized_linear": Schema(
        f"(Tensor x, {_WEIGHT}, Tensor? bias, str scheme, str layout, str activation, Tensor? input_scale, {_LAST}) -> Tensor",
        _OPS,
        differentiable=True,
    ),
    "grouped_linear": Schema(
        f"(Tensor x, {_WEIGHT}, Tensor? bias, str scheme, str layout, {_LAST}) -> Tensor", _OPS, differentiable=True
    ),
    "embedding": Schema(
        f"(Tensor indices, {_WEIGHT}, str scheme, str layout, SymInt k, ScalarType dtype) -> Tensor", _OPS, differentiable=False
    ),
    "dequantize": Schema(
        f"({_WEIGHT}, str scheme, str layout, SymInt k, ScalarType dtype) -> Tensor", _OPS, differentiable=False
    ),
    "quantize": Schema(
        "(Tensor w, str scheme, str method) -> (Tensor, Tensor, Tensor, Tensor)", _OPS, differentiable=False
    ),
    "rms_norm_quantize": Schema(
        "(Tensor x, Tensor? weight, float eps, str activation) -> (Tensor, Tensor)", _TOKENS, differentiable=False
    ),
    "codes_linear": Schema(
        f"(Tensor codes, Tensor x_scale, {_WEIGHT}, Tensor? bias, str scheme, str layout, str activation, SymInt k, "
        "ScalarType dtype) -> Tensor",
        _TOKENS,
        differentiable=True,
    ),
}  # fmt: skip

LIBRARY = torch.library.Library("lowbit", "DEF")


def _deferred(name: str, module: str, field: str) -> Callable[..., Any]:
    """The field of the operator ``name``, whose module is imported by the first call."""
    found: list[Callable[..., Any]] = []

    def call(*args: Any, **named: Any) -> Any:
        if not found:
            found.append(getattr(importlib.import_module(module).OPERATORS[name], field))
        return found[0](*args, **named)

    return call


for _name, _schema in SCHEMAS.items():
    LIBRARY.define(f"{_name}{_schema.signature}")
    LIBRARY.impl(_name, _deferred(_name, _schema.module, "run"), "CompositeExplicitAutograd")
    torch.library.register_fake(f"lowbit::{_name}", _deferred(_name, _schema.module, "fake"), lib=LIBRARY)
    if _schema.differentiable:
        _setup, _backward = (_deferred(_name, _schema.module, field) for field in ("setup", "backward"))
        torch.library.register_autograd(f"lowbit::{_name}", _backward, setup_context=_setup, lib=LIBRARY)
