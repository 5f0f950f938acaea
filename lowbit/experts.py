"""Fused experts: modules that keep the weights of all their experts in one parameter each, and the routers beside them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .tensor import QTensor

__all__ = ["expert_weights", "router_weights", "relayout_experts"]

_ROUTERS = ("gate", "router")


def is_stack(parameter: Tensor) -> bool:
    """Whether ``parameter`` is floats [E, N, K]."""
    return not is_lazy(parameter) and parameter.dim() == 3 and parameter.is_floating_point()


def expert_weights(module: nn.Module) -> dict[str, bool]:
    """The parameters of ``module`` that are one matrix an expert, and whether each is [E, K, N] and not [E, N, K], K being what a
    product sums over; empty for a module that is no fused experts.

    transformers' ``use_experts_implementation`` marks such modules, and notes which way round their weights are. Without the mark
    shapes tell: of ``gate_up_proj`` and ``down_proj`` each gives what the other takes, [E, 2 I, H] and [E, H, I], or [E, H, 2 I]
    and [E, I, H]. A matrix [E, N, K] named ``weight`` is that of ParallelExperts (JetMoe).
    """
    found = {leaf: p for leaf, p in module._parameters.items() if p is not None and is_stack(p)}
    if not found:
        return {}
    if hasattr(module, "is_transposed") and hasattr(module, "has_gate"):
        return dict.fromkeys(found, bool(module.is_transposed))
    if {"gate_up_proj", "down_proj"} <= found.keys():
        (experts, a, b), (others, c, d) = found["gate_up_proj"].shape, found["down_proj"].shape
        if experts == others and (a, b) == (2 * d, c):
            return dict.fromkeys(("gate_up_proj", "down_proj"), False)
        if experts == others and (b, a) == (2 * c, d):
            return dict.fromkeys(("gate_up_proj", "down_proj"), True)
    if type(module).__name__.endswith("ParallelExperts") and found.keys() == {"weight"}:
        return {"weight": False}
    return {}


def relayout_experts(model: nn.Module) -> None:
    """Let quantized weights of fused experts in ``model`` lie as products with each of their matrices read them."""
    for module in model.modules():
        for leaf in expert_weights(module):
            if isinstance(weight := module._parameters[leaf], QTensor):
                weight.read_by("linear")


def _count(module: nn.Module) -> int:
    """How many experts ``module`` is; 0 where it is none."""
    return next((module.get_parameter(leaf).shape[0] for leaf in expert_weights(module)), 0)


def router_weights(model: nn.Module) -> dict[tuple[nn.Module, str], str]:
    """What chooses among experts, by module and parameter, with what to say of it: weights with a row an expert, in a module
    called ``gate`` or ``router`` beside fused experts or a list of ``experts``."""
    found: dict[tuple[nn.Module, str], str] = {}
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is None:
                continue
            listed = name == "experts" and isinstance(child, (nn.ModuleList, nn.ModuleDict))
            experts = len(child) if listed else max((_count(part) for part in child.modules()), default=0)  # type: ignore[arg-type]
            if experts < 2 or not (listed or _count(child) or name.endswith("experts")):
                continue
            for sibling, other in parent._modules.items():
                if other is not None and sibling != name and _routes(sibling):
                    found.update(dict.fromkeys(_rows(other, experts), "a router"))
    return found


def _routes(name: str) -> bool:
    return name in _ROUTERS or name.endswith("router")


def _rows(module: nn.Module, count: int) -> Iterator[tuple[nn.Module, str]]:
    for part in module.modules():
        for leaf, parameter in part._parameters.items():
            if parameter is not None and not is_lazy(parameter) and parameter.dim() == 2 and parameter.shape[0] == count:
                yield part, leaf
