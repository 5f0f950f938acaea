"""Schemas of the operators, registered when lowbit is imported, so that programs that contain them (torch.export, AOTInductor,
torch.jit) load and run in a process that has used nothing else of it.

This file and :mod:`.rules` import torch alone. Implementations are in ``OPERATORS`` of ``ops`` and its like, imported
at the first use, which takes ten times as long as declaring them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from .rules import Rule, register

__all__ = ["LIBRARY", "SCHEMAS", "Operator", "Schema"]


class Operator(NamedTuple):
    """Implementation of an operator, its fake (shapes without values), and its autograd rule."""

    run: Callable[..., Any]
    fake: Callable[..., Any]
    rule: Rule


class Schema(NamedTuple):
    """Arguments and results of an operator, and the module whose ``OPERATORS`` implement it."""

    signature: str
    module: str


_WEIGHT = "Tensor packed, Tensor scale, Tensor? zero_point, Tensor? outer"
_LAST = 'str epilogue="none"'  # a name of :mod:`.epilogues`
_OPS, _TOKENS, _EXPERTS = "lowbit_kernels.ops", "lowbit_kernels.fused_norm_quant", "lowbit_kernels.experts"

SCHEMAS: dict[str, Schema] = {
    "linear": Schema(f"(Tensor x, {_WEIGHT}, Tensor? bias, str scheme, str layout, {_LAST}) -> Tensor", _OPS),
    "quantized_linear": Schema(
        f"(Tensor x, {_WEIGHT}, Tensor? bias, str scheme, str layout, str activation, Tensor? input_scale, {_LAST}) -> Tensor",
        _OPS,
    ),
    "grouped_linear": Schema(f"(Tensor x, {_WEIGHT}, Tensor? bias, str scheme, str layout, {_LAST}) -> Tensor", _OPS),
    "experts_linear": Schema(
        f"(Tensor x, {_WEIGHT}, Tensor? bias, str scheme, str layout, Tensor experts, {_LAST}) -> Tensor", _EXPERTS
    ),
    "embedding": Schema(f"(Tensor indices, {_WEIGHT}, str scheme, str layout, SymInt k, ScalarType dtype) -> Tensor", _OPS),
    "dequantize": Schema(f"({_WEIGHT}, str scheme, str layout, SymInt k, ScalarType dtype) -> Tensor", _OPS),
    "quantize": Schema("(Tensor w, str scheme, str method) -> (Tensor, Tensor, Tensor, Tensor)", _OPS),
    "rms_norm_quantize": Schema("(Tensor x, Tensor? weight, float eps, str activation) -> (Tensor, Tensor)", _TOKENS),
    "codes_linear": Schema(
        f"(Tensor codes, Tensor x_scale, {_WEIGHT}, Tensor? bias, str scheme, str layout, str activation, SymInt k, "
        "ScalarType dtype) -> Tensor",
        _TOKENS,
    ),
    "versions": Schema("(Tensor[] tensors) -> Tensor", "lowbit_kernels.versions"),
}  # fmt: skip

LIBRARY = torch.library.Library("lowbit", "DEF")


def _deferred(name: str, module: str, field: str) -> Callable[..., Any]:
    """A function that calls ``field`` of the operator ``name``; the first call imports its module."""
    found: list[Callable[..., Any]] = []

    def call(*args: Any, **named: Any) -> Any:
        if not found:
            found.append(attrgetter(field)(importlib.import_module(module).OPERATORS[name]))
        return found[0](*args, **named)

    return call


for _name, _schema in SCHEMAS.items():
    LIBRARY.define(f"{_name}{_schema.signature}")
    LIBRARY.impl(_name, _deferred(_name, _schema.module, "run"), "CompositeExplicitAutograd")
    torch.library.register_fake(f"lowbit::{_name}", _deferred(_name, _schema.module, "fake"), lib=LIBRARY)
    register(LIBRARY, _name, Rule(*(_deferred(_name, _schema.module, f"rule.{field}") for field in Rule._fields)))
