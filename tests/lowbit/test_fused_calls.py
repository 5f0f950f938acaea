"""Fused layers beside the same layers apart, whatever happens between two of their calls: equal to the bit, with nothing kept.

Weights and tensors hold small integers, whose products every kernel computes exactly, so that any other number is a wrong one.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lowbit
from lowbit import QLinear, QTensor, fuse_
from tests.support import strategies  # noqa: F401 - its profile

# Of forward mode in torch itself, and of torch.compile.
old_jit = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
pytestmark = old_jit
K, NAMES = 64, "qkv"
HEIGHTS = (48, 16, 32)


@functools.cache
def _weight(n: int, seed: int) -> QTensor:
    w = torch.randint(-8, 8, (n, K), generator=torch.Generator().manual_seed(seed)).float()
    w[:, ::32], w[:, 1::32] = -8, 7  # so that every scale is 1
    q = QTensor.quantize(w, "int4_g32")
    assert torch.equal(q.dequantize().float(), w)
    return q


def weight(n: int, seed: int) -> QTensor:
    """Integers from -8 to 7, which uint4 with groups of 32 holds as they are."""
    return copy.deepcopy(_weight(n, seed))


def numbers(m: int, seed: int) -> Tensor:
    """Integers from -1 to 1, and so few others than 0 that bfloat16 holds their products with a weight too."""
    x = torch.randint(-1, 2, (m, K), generator=torch.Generator().manual_seed(seed)).float()
    x[:, 24:] = 0
    return x


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager layers are fused on a GPU alone, whose rules hold here for a CPU."""
    monkeypatch.setattr("lowbit.fused._EAGER", {"cpu"})


class Members(nn.Module):
    """Three layers that read one tensor, in a module that does what it is told."""

    def __init__(self, bias: bool = False, seed: int = 0) -> None:
        super().__init__()
        for i, (name, n) in enumerate(zip(NAMES, HEIGHTS, strict=True)):
            made = nn.Parameter(torch.arange(n).float(), requires_grad=False) if bias else None
            self.add_module(name, QLinear(weight(n, seed + i), made))

    def forward(self, do: Any, *args: Any) -> Any:
        return do(self, *args)


def each(module: Members, x: Tensor) -> list[Tensor]:
    return [module.q(x), module.k(x), module.v(x)]


def pair(bias: bool = False, seed: int = 0) -> tuple[Members, Members]:
    """Layers fused, and the same layers apart."""
    fused, apart = Members(bias, seed), Members(bias, seed)
    assert fuse_(fused, each, numbers(2, 0)) == [("q", "k", "v")]
    return fused, apart


def products(model: nn.Module, *args: Any) -> list[int]:
    """The heights of the products that ``model(*args)`` runs."""
    with lowbit.trace_kernels() as trace:
        model(*args)
    return sorted(row.n for row, count in trace.counts.items() for _ in range(count))


# ---- whatever happens ------------------------------------------------------------------------------------------------

MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "grad": torch.enable_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "strict": lambda: lowbit.strict("reference_linear"),
    "trace": lowbit.trace_kernels,
}


def negate_all(x: Tensor) -> None:
    x.mul_(-1)


def negate_view(x: Tensor) -> None:
    x.view(-1)[: K // 2].mul_(-1)


def negate_data(x: Tensor) -> None:
    x.data.mul_(-1)


def negate_numpy(x: Tensor) -> None:
    x.detach().numpy()[:] *= -1


def exchange(x: Tensor) -> None:
    x.data = numbers(len(x) + 1, 7)


COUNTED = (negate_all, negate_view, exchange)
UNCOUNTED = (negate_data, negate_numpy)  # which no version tells of


def negate_bias(layer: QLinear) -> None:
    with torch.no_grad():
        layer.bias.neg_()


def exchange_bias(layer: QLinear) -> None:
    layer.bias = nn.Parameter(-layer.bias.detach(), requires_grad=False)


def exchange_bias_data(layer: QLinear) -> None:
    layer.bias.data = -layer.bias.data


def train_bias(layer: QLinear) -> None:
    layer.bias.requires_grad_(not layer.bias.requires_grad)


def write_weight(layer: QLinear) -> None:
    other = weight(layer.out_features, 9).to_layout(layer.weight.byte_layout)
    for part, new in zip(layer.weight._parts().values(), other._parts().values(), strict=True):
        with torch.no_grad():
            part.copy_(new)


def exchange_weight(layer: QLinear) -> None:
    layer.weight = weight(layer.out_features, 11)


def exchange_weight_data(layer: QLinear) -> None:
    layer.weight.data = weight(layer.out_features, 13)


def write_rows(layer: QLinear) -> None:
    with torch.no_grad():
        layer.weight[:16].copy_(weight(16, 15))


def hook(layer: QLinear) -> None:
    layer.register_forward_pre_hook(lambda layer, args: (-args[0],))


CHANGES = (
    negate_bias,
    exchange_bias,
    exchange_bias_data,
    train_bias,
    write_weight,
    write_rows,
    exchange_weight,
    exchange_weight_data,
    hook,
)

calls = st.tuples(st.just("call"), st.sampled_from(NAMES), st.integers(0, 2), st.sampled_from([*MODES]))
quiet = st.tuples(st.just("call"), st.sampled_from(NAMES), st.just(0), st.just("no_grad"))
writes = st.tuples(st.just("write"), st.integers(0, 2), st.sampled_from(COUNTED))
changes = st.tuples(st.just("change"), st.sampled_from(NAMES), st.sampled_from(CHANGES))
results = st.tuples(st.just("result"), st.integers(0, 3))
plain = st.one_of(quiet, calls, writes, changes, results)


def programs(step: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    """Steps, among them calls of the module that run more of them."""
    nested = st.recursive(
        step,
        lambda inner: st.tuples(
            st.sampled_from(("forward", "thread", "raise")), st.lists(inner, min_size=1, max_size=6).map(tuple)
        ),
        max_leaves=12,
    )
    alike = st.tuples(st.just("forward"), st.lists(quiet, min_size=2, max_size=5).map(tuple))
    return st.lists(st.one_of(nested, alike), max_size=5)


class Run:
    """What a program gives, step by step."""

    def __init__(self, module: Members, seed: int) -> None:
        self.module, self.found = module, []  # type: ignore[var-annotated]
        with torch.inference_mode():
            inference = numbers(1, seed + 2)
        self.xs = [numbers(1, seed), numbers(3, seed + 1).requires_grad_(), inference]

    def __call__(self, module: Members, program: tuple[Any, ...], fails: bool = False) -> None:
        for step in program:
            try:
                self.step(*step)
            except (RuntimeError, ValueError, TypeError, AttributeError) as error:
                self.found.append(type(error))
        if fails:
            raise KeyError("as told")

    def step(self, kind: str, *what: Any) -> None:
        if kind == "call":
            name, i, mode = what
            with MODES[mode]():
                y = getattr(self.module, name)(self.xs[i])
            self.found.append((y, y.detach().clone(), y.requires_grad, y.is_inference(), y.is_contiguous()))
        elif kind == "write":
            with torch.inference_mode() if self.xs[what[0]].is_inference() else torch.no_grad():
                what[1](self.xs[what[0]])
        elif kind == "result":
            ys = [entry[0] for entry in self.found if isinstance(entry, tuple)]
            y = ys[what[0] % len(ys)] if ys else torch.zeros(1)
            with torch.inference_mode() if y.is_inference() else torch.no_grad():
                y.mul_(-1)
        elif kind == "change":
            what[1](getattr(self.module, what[0]))
        elif kind == "thread":
            thread = threading.Thread(target=self, args=(self.module, *what))
            thread.start()
            thread.join()
        elif kind == "raise":
            with contextlib.suppress(KeyError):
                self.module(self, *what, True)
        else:
            self.module(self, *what)

    def gradients(self) -> list[Any]:
        """Those of x and of the biases, of everything that was found and has one."""
        ys = [entry[0] for entry in self.found if isinstance(entry, tuple) and entry[0].requires_grad]
        leaves = [self.xs[1], *(layer.bias for layer in self.module.children() if layer.bias.requires_grad)]
        try:
            return list(torch.autograd.grad([y.sum() for y in ys], leaves, allow_unused=True)) if ys else []
        except RuntimeError as error:  # of what was written to
            return [str(error)]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def check(program: list[Any], seed: int) -> None:
    fused, apart = (Run(module, seed) for module in pair(bias=True))
    for run in (fused, apart):
        run(run.module, tuple(program))
    assert same(fused.found, apart.found)
    assert same(fused.gradients(), apart.gradients())


@settings(max_examples=150)
@given(program=programs(plain), seed=st.integers(0, 50))
def test_a_program_gives_what_it_gives_apart(program: list[Any], seed: int) -> None:
    check(program, seed)


@settings(max_examples=50)
@given(
    program=programs(plain | st.tuples(st.just("write"), st.integers(0, 2), st.sampled_from(UNCOUNTED))), seed=st.integers(0, 50)
)
def test_a_program_on_a_cpu_gives_what_it_gives_apart(program: list[Any], seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lowbit.fused._EAGER", {"cuda"})
        check(program, seed)
