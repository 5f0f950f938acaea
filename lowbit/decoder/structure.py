"""Decoder layers that are those of Llama, Qwen2, Qwen3 or Mistral, found by what they consist of and what they run.

A layer is known where its modules have the usual names and each of their forward calls, and the functions these call, are the
same code as one of transformers' own of these models, whichever class has it. Names alone would take models that scale a residual
or rotate other halves of a head for the same.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple

from torch import nn

from ..linear import QLinear
from ..tensor import QTensor

__all__ = ["Structure", "loops_over_layers", "structure_of"]

_MODELS = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}
_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_ACTIVATIONS = ("SiLU", "SiLUActivation")


class Structure(NamedTuple):
    """A layer's modules: the products in their order, and the norms before attention, before gate, of query and key heads."""

    attention: nn.Module
    mlp: nn.Module
    linears: tuple[QLinear, ...]
    norms: tuple[nn.Module, ...]
    activation: nn.Module

    def named(self) -> list[tuple[nn.Module, str, nn.Module]]:
        """(parent, name, module) of every module below the layer's own."""
        names = (*_LINEARS, "q_norm", "k_norm", "act_fn")
        found = []
        for parent in (self.attention, self.mlp):
            found += [(parent, name, module) for name in names if (module := parent._modules.get(name)) is not None]
        return found


def structure_of(layer: nn.Module) -> Structure | str:
    """The structure of ``layer``, or why it has none that is known."""
    children, attention, mlp = layer._modules, layer._modules.get("self_attn"), layer._modules.get("mlp")
    if attention is None or mlp is None or set(children) != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        return "its modules are not those of a known decoder layer"
    submodules: dict[str, Any] = {**attention._modules, **mlp._modules}
    norms = [children["input_layernorm"], children["post_attention_layernorm"]]
    heads = [submodules[name] for name in ("q_norm", "k_norm") if submodules.get(name) is not None]
    if (
        not set(_LINEARS) <= set(submodules) <= {*_LINEARS, "q_norm", "k_norm", "act_fn"}
        or len(heads) == 1
        or "act_fn" not in submodules
    ):
        return "its modules are not those of a known decoder layer"
    linears = [submodules[name] for name in _LINEARS]
    if not all(type(linear) is QLinear and isinstance(linear._parameters.get("weight"), QTensor) for linear in linears):
        return "not all of its linear layers are quantized"
    if type(submodules["act_fn"]).__name__ not in _ACTIVATIONS:
        return f"activation {type(submodules['act_fn']).__name__}"
    forwards = _known_forwards()
    for kind, modules in (("layer", [layer]), ("attention", [attention]), ("mlp", [mlp]), ("norm", [*norms, *heads])):
        for module in modules:
            if _code_of(type(module).forward) not in forwards.get(kind, ()):
                return f"{type(module).__name__} runs code of its own"
    if ("q_norm" in inspect.unwrap(type(attention).forward).__code__.co_names) != bool(heads):
        return "its modules are not those of a known decoder layer"
    return Structure(attention, mlp, tuple(linears), (*norms, *heads), submodules["act_fn"])  # type: ignore[arg-type]


def loops_over_layers(model: nn.Module) -> bool:
    """Whether ``model`` calls its layers as the known ones do: those of one slice, once each, with the same arguments."""
    return _code_of(type(model).forward) in _known_forwards()["model"]


_Code = tuple[Any, ...]
_KINDS = {"layer": "DecoderLayer", "attention": "Attention", "mlp": "MLP", "norm": "RMSNorm", "model": "Model"}


@functools.cache
def _known_forwards() -> dict[str, set[_Code]]:
    """What the forward calls of each kind of module are, where transformers is there."""
    forwards: dict[str, set[_Code]] = {kind: set() for kind in _KINDS}
    for name, prefix in _MODELS.items():
        try:
            module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        except ImportError:
            continue
        for kind, suffix in _KINDS.items():
            if (found := getattr(module, prefix + suffix, None)) is not None:
                forwards[kind].add(_code_of(found.forward))
    return forwards


def _code_of(function: Callable[..., Any], depth: int = 3) -> _Code:
    """What ``function`` does: its code, names and constants, and the same of the functions of its module that it calls."""
    plain = inspect.unwrap(function)
    code = getattr(plain, "__code__", None)
    if not isinstance(code, CodeType):
        return (repr(function),)
    constants = tuple(c for c in code.co_consts if not isinstance(c, CodeType) and c != plain.__doc__)
    called = [plain.__globals__.get(name) for name in code.co_names] if depth else []
    submodules = tuple(_code_of(f, depth - 1) for f in called if inspect.isfunction(f) and f.__module__ == plain.__module__)
    return code.co_code, code.co_names, code.co_varnames, constants, submodules
