"""transformers' experts with quantized weights: an implementation that multiplies each token by the experts that it chose.

It stands beside ``eager``, ``batched_mm`` and ``grouped_mm`` in transformers' table and computes what they compute. They take
quantized experts as well; ``batched_mm`` copies the codes of each token's experts, and ``eager`` looks at every expert's mask.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from ..expert_products import experts_linear, grouped_linear, has_experts_kernel
from ..experts import expert_weights
from ..tensor import QTensor

__all__ = ["NAME", "experts_forward", "multiply_by_experts"]

NAME = "lowbit"
_USUAL = (None, "eager", "batched_mm", "grouped_mm")


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What experts ``self`` make of ``hidden_states`` [T, H]: for each token the sum over its experts ``top_k_index`` [T, k],
    times ``top_k_weights`` [T, k]. An index beyond the experts is one of another process, and adds nothing."""
    tokens, k = top_k_index.shape
    if all(_has_kernel(self, name, hidden_states, tokens * k) for name in _names(self)):
        return _without_sorting(self, hidden_states, top_k_index.reshape(-1).long(), top_k_weights)
    chosen, order = torch.sort(top_k_index.reshape(-1), stable=True)
    counts = torch.bincount(chosen, minlength=self.num_experts)[: self.num_experts]
    ends: list[int] = counts.cumsum(0).tolist()
    first, last = _names(self)
    y = _product(self, first, hidden_states[order // k], ends)
    y = _product(self, last, self._apply_gate(y) if self.has_gate else self.act_fn(y), ends)
    if getattr(self, "has_post_expert_norm", False):  # not known to every transformers 5
        y = self.post_expert_norm(y)
    y = y * top_k_weights.reshape(-1)[order, None]
    if ends[-1] < len(order):
        y = torch.where(torch.arange(len(order), device=y.device)[:, None] < ends[-1], y, 0)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return y[back].view(tokens, k, -1).sum(1).to(hidden_states.dtype)


def _names(self: Any) -> tuple[str, str]:
    return "gate_up_proj" if self.has_gate else "up_proj", "down_proj"


def _has_kernel(self: Any, name: str, x: Tensor, rows: int) -> bool:
    weight = getattr(self, name)
    return isinstance(weight, QTensor) and has_experts_kernel(weight, x, rows)


def _without_sorting(self: Any, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """:func:`experts_forward` by kernels that are given the experts of rows, ``experts`` [T k], and need nothing of the host."""
    first, last = ((getattr(self, name), getattr(self, f"{name}_bias", None) if self.has_bias else None) for name in _names(self))
    y = experts_linear(x, first[0], experts, first[1])
    y = experts_linear(self._apply_gate(y) if self.has_gate else self.act_fn(y), last[0], experts, last[1])
    if getattr(self, "has_post_expert_norm", False):  # not known to every transformers 5
        y = torch.where((experts < self.num_experts)[:, None], self.post_expert_norm(y), 0)
    y = y.view(*weights.shape, -1)
    if weights.dtype == y.dtype:
        return torch.bmm(weights[:, None], y)[:, 0].to(x.dtype)
    return (y * weights[..., None]).sum(1).to(x.dtype)


def _product(self: Any, name: str, x: Tensor, ends: list[int]) -> Tensor:
    """``x``, sorted by expert, times the matrices of ``name``."""
    weight, bias = getattr(self, name), getattr(self, f"{name}_bias", None) if self.has_bias else None
    if isinstance(weight, QTensor):
        return grouped_linear(x, weight, ends, bias)
    starts = [0, *ends[:-1]]
    found = [x.new_zeros(0, weight.shape[2 if self.is_transposed else 1])]
    for expert, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if end > start:
            matrix = weight[expert].t() if self.is_transposed else weight[expert]
            found.append(nn.functional.linear(x[start:end], matrix, None if bias is None else bias[expert]))
    found.append(x.new_zeros(len(x) - ends[-1], found[0].shape[1]))
    return torch.cat(found)


def multiply_by_experts(model: nn.Module) -> None:
    """Let the models of transformers in ``model`` that hold quantized experts multiply by them with :func:`experts_forward`,
    unless an implementation other than transformers' own three was chosen."""
    home = sys.modules.get("transformers.integrations.moe")
    if home is None or not hasattr(home, "ALL_EXPERTS_FUNCTIONS"):
        return
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "_experts_implementation", NAME) not in _USUAL:
            continue
        if any(isinstance(module._parameters[leaf], QTensor) for leaf in expert_weights(module)):
            home.ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
            config._experts_implementation_internal = NAME  # not the property, which reaches every part of the model
