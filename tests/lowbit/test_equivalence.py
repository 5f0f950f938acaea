"""Layers whose class has a forward of its own: those that compute what their kind does are quantized, the others stay."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

import lowbit
from lowbit import QEmbedding, QLinear, quantize_

AS_LINEAR: dict[str, Callable[..., Any]] = {
    "functional": lambda self, input: functional.linear(input, self.weight, self.bias),
    "another name": lambda self, x: functional.linear(x, self.weight, self.bias),
    "super": lambda self, input: nn.Linear.forward(self, input),
    "product": lambda self, input: input @ self.weight.T if self.bias is None else input @ self.weight.T + self.bias,
    "einsum": lambda self, input: torch.einsum("...k,nk->...n", input, self.weight) + (0 if self.bias is None else self.bias),
    "by sizes": lambda self, input: functional.linear(
        input.reshape(-1, self.in_features), self.weight, self.bias
    ).view(*input.shape[:-1], self.out_features),
}  # fmt: skip
NO_LINEAR: dict[str, Callable[..., Any]] = {
    "twice": lambda self, input: 2 * functional.linear(input, self.weight, self.bias),
    "without bias": lambda self, input: functional.linear(input, self.weight),
    "one more": lambda self, input: functional.linear(input, self.weight, self.bias) + 1,
    "relu": lambda self, input: functional.linear(input, self.weight, self.bias).relu(),
    "clamped": lambda self, input: functional.linear(input, self.weight, self.bias).clamp(-65504, 65504),
    "capped": lambda self, input: 30 * (functional.linear(input, self.weight, self.bias) / 30).tanh(),
    "no infinity": lambda self, input: functional.linear(input, self.weight, self.bias).nan_to_num(),
    "float32": lambda self, input: functional.linear(input.float(), self.weight.float(), None),
    "rounded": lambda self, input: functional.linear(input.bfloat16().to(input.dtype), self.weight, self.bias),
    "rounded weight": lambda self, input: functional.linear(input, self.weight.half().to(input.dtype) * 1.001, self.bias),
    "normalized": lambda self, input: functional.linear(input, functional.normalize(self.weight), self.bias),
    "eight bits": lambda self, input: functional.linear(
        (input * 127 / (s := input.abs().amax(-1, keepdim=True).clamp(min=1e-9))).round() * s / 127, self.weight, self.bias
    ),
    "dropout": lambda self, input: functional.dropout(functional.linear(input, self.weight, self.bias), 0.5, self.training),
    "a pair": lambda self, input: (functional.linear(input, self.weight, self.bias), self.bias),
    "two tensors": lambda self, input, mask: functional.linear(input, self.weight, self.bias) * mask,
    "an option": lambda self, input, scale=1.0: functional.linear(input, self.weight, self.bias) * scale,
    "any arguments": lambda self, *args, **kwargs: functional.linear(*args, self.weight, self.bias),
    "flattened": lambda self, input: functional.linear(input.reshape(-1, input.shape[-1]), self.weight, self.bias),
    "raises": lambda self, input: 1 / 0,
}  # fmt: skip


def subclass(base: type[nn.Module], forward: Callable[..., Any]) -> Any:
    return type("Own", (base,), {"forward": forward})


def quantized(module: nn.Module) -> str:
    """The reason why the plan leaves ``module``; empty where it is quantized."""
    model = nn.ModuleDict({"it": module})
    reason = lowbit.plan(model, {"it": "int8"}).layers[0].reason
    if not reason:
        quantize_(model, {"it": "int8"})
        assert isinstance(model["it"], QLinear | QEmbedding)
    return reason


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", AS_LINEAR)
def test_a_forward_that_computes_the_same_is_a_linear_layer(name, device, bias):
    own = subclass(nn.Linear, AS_LINEAR[name])(16, 8, bias=bias, device=device)
    if device == "meta":
        assert not lowbit.plan(nn.ModuleDict({"it": own}), {"it": "int8"}).layers[0].reason
    else:
        assert not quantized(own)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", NO_LINEAR)
def test_a_forward_that_computes_something_else_is_not(name, bias):
    if not bias and name == "without bias":
        return
    assert quantized(subclass(nn.Linear, NO_LINEAR[name])(16, 8, bias=bias)) == "Own computes something of its own"


def test_what_may_hang_on_an_attribute_is_not():
    own = subclass(nn.Linear, lambda self, input: functional.linear(input, self.weight, self.bias) * getattr(self, "scaling", 1))
    module = own(16, 8)
    module.scaling = 1
    assert quantized(module) == "Own computes something of its own"


def test_embeddings_and_conv1d_by_the_same_rule():
    rows = lambda self, input: functional.embedding(input, self.weight)  # noqa: E731
    scaled = lambda self, input: functional.embedding(input, self.weight) * 4  # noqa: E731
    moved = lambda self, input: functional.embedding(input + 2, self.weight)  # noqa: E731
    assert not quantized(subclass(nn.Embedding, rows)(16, 8))
    assert not quantized(subclass(nn.Embedding, rows)(16, 8, padding_idx=0))
    assert quantized(subclass(nn.Embedding, scaled)(16, 8)) == "Own computes something of its own"
    assert quantized(subclass(nn.Embedding, moved)(16, 8)) == "Own computes something of its own"
    assert not quantized(subclass(Conv1D, lambda self, x: x @ self.weight + self.bias)(16, 8))
    assert quantized(subclass(Conv1D, lambda self, x: x @ self.weight)(16, 8)) == "Own computes something of its own"


def test_asking_changes_nothing(monkeypatch):
    calls: list[Any] = []

    def forward(self: Any, input: Tensor) -> Tensor:
        calls.append(self)
        torch.rand(3)
        return functional.linear(input, self.weight, self.bias)

    module = subclass(nn.Linear, forward)(16, 8)
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16):
        assert not lowbit.plan(nn.ModuleDict({"it": module}), {"it": "int8"}).layers[0].reason
    assert torch.equal(torch.get_rng_state(), state)
    assert calls
    assert module not in calls
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    monkeypatch.setattr(type(module), "forward", lambda self, input: input)  # the class may change: it is asked again
    assert quantized(module) == "Own computes something of its own"


@pytest.mark.parametrize("bias", [True, False])
def test_falcon(bias):
    torch.manual_seed(0)
    model = nn.Sequential(FalconLinear(32, 48, bias=bias), FalconLinear(48, 16, bias=bias))
    assert len(lowbit.plan(model, "int8").quantized) == 2
    dense = copy.deepcopy(model)
    quantize_(model, "int8")
    for ours, float_ in zip(model, dense, strict=True):
        with torch.no_grad():
            float_.weight.copy_(ours.weight.dequantize())
    x = torch.randn(4, 32)
    torch.testing.assert_close(model(x), dense(x))
