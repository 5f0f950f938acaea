"""Fused layers that torch.compile traces give what the same layers give apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from lowbit import QLinear
from tests.lowbit.test_fused_calls import (
    CHANGES,
    Members,
    eager,  # noqa: F401 - for every test
    negate_bias,
    numbers,
    old_jit,
    pair,
    same,
)
from tests.support import strategies  # noqa: F401 - its profile

pytestmark = old_jit


class Block(nn.Module):
    """Layers within a module that is compiled, and what happens between two of them."""

    def __init__(self, members: Members, between: str) -> None:
        super().__init__()
        self.members, self.between = members, between

    def forward(self, x: Tensor) -> Any:
        return self.members(between, x, self.between)


def between(module: Members, x: Tensor, what: str) -> list[Tensor]:
    found = [module.q(x)]
    if what == "write":
        x.mul_(-1)
    elif what == "write a view":
        x.view(-1)[:7].mul_(-1)
    elif what == "bias":
        module.k.bias.neg_()
    elif what == "break":
        torch._dynamo.graph_break()
    elif what == "write, break":
        x.mul_(-1)
        torch._dynamo.graph_break()
    elif what == "break, write":
        torch._dynamo.graph_break()
        x.mul_(-1)
    elif what == "another":
        x = x + 1
    elif what == "no more":
        return found
    elif what == "grad":
        with torch.enable_grad():
            return [*found, module.k(x), module.v(x)]
    return [*found, module.k(x), module.v(x)]


WHAT = ("nothing", "write", "write a view", "bias", "break", "write, break", "break, write", "another", "no more", "grad")


COMPILED = [
    *((inside, what, torch.no_grad) for inside in (True, False) for what in WHAT),
    *((True, what, mode) for what in ("nothing", "write") for mode in (torch.inference_mode, torch.enable_grad)),
]


def heights(graphs: list[torch.fx.GraphModule]) -> int:
    return sum("lowbit.linear" in str(node.target) for graph in graphs for node in graph.graph.nodes)


@pytest.mark.parametrize(("inside", "what", "mode"), COMPILED, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_compiled_call_gives_what_it_gives_apart(inside: bool, what: str, mode: Callable[[], Any]) -> None:
    torch.compiler.reset()
    fused, apart = pair(bias=True)
    run: Any = Block(fused, what) if inside else fused
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(run, backend=backend, fullgraph="break" not in what)
    with mode():
        for seed in range(3):
            x, y = numbers(2, seed), numbers(2, seed)
            found = compiled(x) if inside else compiled(between, x, what)
            assert same(found, apart(between, y, what))
            assert same(x, y)
            gone = ref(x)
            del x
            assert gone() is None
    assert heights(graphs) == (1 if what in ("nothing", "no more") else 3)
    torch.compiler.reset()


@pytest.mark.parametrize("change", [*CHANGES[:-1], negate_bias], ids=lambda change: change.__name__)
def test_a_compiled_call_sees_what_changes_later(change: Callable[[QLinear], None]) -> None:
    torch.compiler.reset()
    fused, apart = pair(bias=True)
    compiled = torch.compile(Block(fused, "nothing"), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for seed in range(4):
            x = numbers(1, seed)
            assert same(compiled(x), apart(between, x, "nothing"))
            for module in (fused, apart):
                change(module.k)
    torch.compiler.reset()
