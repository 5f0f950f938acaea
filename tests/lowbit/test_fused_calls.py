"""Fused layers beside the same layers apart, whatever happens between two of their calls: equal to the bit, with nothing kept.

Weights and tensors hold small integers, whose products every kernel computes exactly, so that any other number is a wrong one.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import lowbit
from lowbit import QLinear, QTensor, Scheme, fuse_
from tests.support import strategies  # noqa: F401 - its profile

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit:DeprecationWarning"
)  # forward mode of torch itself, and torch.compile
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
    with lowbit.trace_kernels() as receipt:
        model(*args)
    return sorted(row.n for row, count in receipt.counts.items() for _ in range(count))


# ---- whatever happens ------------------------------------------------------------------------------------------------

MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "grad": torch.enable_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "strict": lambda: lowbit.strict("reference_linear"),
    "receipt": lowbit.trace_kernels,
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


# ---- nothing is kept -------------------------------------------------------------------------------------------------


class Stop(BaseException):
    """As KeyboardInterrupt, which no hook of a module sees."""


def first(module: Members, x: Tensor, error: type[BaseException] | None = None) -> Tensor:
    y = module.q(x)
    if error is not None:
        raise error
    return y


@pytest.mark.parametrize("error", [None, KeyError, Stop, GeneratorExit])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_that_is_not_called_keeps_nothing(bias: bool, error: type[BaseException] | None) -> None:
    fused, _ = pair(bias)
    x = numbers(1, 1)
    gone = ref(x)
    with torch.no_grad(), contextlib.suppress(KeyError, Stop, GeneratorExit):
        fused(first, x, error)
    assert fused._forward_pre_hooks
    del x
    assert gone() is None
    assert products(fused, lambda module: (module.q(numbers(1, 1)), module.k(numbers(1, 1)))) == [16, 96]


def test_outside_of_a_forward_call_layers_are_by_themselves() -> None:
    fused, apart = pair()
    x = numbers(1, 1)
    with lowbit.trace_kernels() as receipt:
        found = each(fused, x)
    assert sorted(row.n for row in receipt.counts) == sorted(HEIGHTS)
    assert same(found, each(apart, x))
    assert products(fused, each, x) == [sum(HEIGHTS)]
    assert products(fused, each, x) == [sum(HEIGHTS)]


def iterate(module: Members, x: Tensor) -> Iterator[Tensor]:
    yield module.q(x)
    yield module.k(x)


def test_a_generator_that_outlives_its_call_is_by_itself() -> None:
    fused, apart = pair()
    x = numbers(1, 1)
    found = fused(iterate, x)
    assert same(list(found), list(apart(iterate, x)))
    assert products(fused, lambda module, x: list(iterate(module, x)), x) == [sum(HEIGHTS)]


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 17, 200])
@pytest.mark.parametrize("lead", [(), (1, 2)])
def test_parts_lie_as_the_results_of_layers_do(rows: int, lead: tuple[int, ...]) -> None:
    fused, apart = pair()
    x = numbers(rows, 3).expand(*lead, rows, K).contiguous()
    for one, other in zip(fused(each, x), apart(each, x), strict=True):
        assert one.shape == other.shape
        assert one.is_contiguous()
        assert not one._is_view()
        assert same(one, other)
        assert same(one.view(-1), other.view(-1))


def test_a_part_that_is_changed_is_nobody_elses() -> None:
    def changing(module: Members, x: Tensor) -> list[Tensor]:
        return [layer(x).mul_(i + 2) for i, layer in enumerate(module.children())]

    for x in (numbers(1, 3), numbers(3, 3), numbers(3, 3).requires_grad_()):
        fused, apart = pair()
        found, wanted = fused(changing, x), apart(changing, x)
        assert same(found, wanted)
        assert [y._version for y in found] == [y._version for y in wanted]


# ---- threads ---------------------------------------------------------------------------------------------------------


def test_threads_get_their_own_rows() -> None:
    fused, apart = pair(bias=True)
    xs = [numbers(1 + i % 3, i) for i in range(24)]
    wanted = [apart(each, x) for x in xs]
    wrong: list[Any] = []

    def walk(offset: int) -> None:
        for i in range(60):
            j = (5 * i + offset) % len(xs)
            try:
                if not same(fused(each, xs[j]), wanted[j]):
                    wrong.append(j)
            except Exception as error:
                wrong.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=walk, args=(3 * i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert wrong == []


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
def test_a_gradient_is_recorded_where_the_first_call_recorded_none(bias: bool) -> None:
    def mixed(module: Members, x: Tensor) -> Tensor:
        with torch.no_grad():
            module.q(x)
        return module.k(x)

    fused, apart = pair(bias)
    found = []
    for module in (fused, apart):
        for layer in module.children():
            if bias:
                layer.bias.requires_grad_()
        x = numbers(1, 1).requires_grad_()
        y = module(mixed, x)
        found.append(torch.autograd.grad(y.sum(), (x, module.k.bias) if bias else (x,)))
    assert same(*found)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_calls_have_the_same_gradients(reentrant: bool) -> None:
    found = []
    for module in pair(bias=True):
        x = numbers(2, 1).requires_grad_()
        module.k.bias.requires_grad_()
        ys = checkpoint(lambda x, module=module: tuple(module(each, x)), x, use_reentrant=reentrant)
        sum(y.square().sum() for y in ys).backward()
        found.append([*ys, x.grad, module.k.bias.grad])
    assert same(*found)


def test_biases_that_are_trained_are_read() -> None:
    fused, apart = pair(bias=True)
    x = numbers(1, 1)
    for module in (fused, apart):
        held = dict(module.named_parameters())
        biases = [layer.bias.requires_grad_() for layer in module.children()]
        optimizer = torch.optim.SGD(biases, lr=2.0)
        sum(y.sum() for y in module(each, x)).backward()
        optimizer.step()
        assert all(held[f"{name}.bias"] is layer.bias for name, layer in module.named_children())
    with torch.no_grad():
        assert same(fused(each, x), apart(each, x))
        assert products(fused, each, x) == [sum(HEIGHTS)]


# ---- other programs that look at modules -----------------------------------------------------------------------------


def test_states_are_loaded_into_fused_layers() -> None:
    fused, _ = pair(bias=True)
    other, x = Members(bias=True, seed=30), numbers(2, 1)
    for layer in other.children():
        layer.bias.data.mul_(3)
    for assign in (False, True):
        fused.load_state_dict(other.state_dict(), assign=assign)
        assert same(fused(each, x), other(each, x))


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deep", "shallow", "pickle"]
)
def test_copies_are_apart_and_can_be_fused(copied: Callable[[Members], Members]) -> None:
    fused, apart = pair(bias=True)
    x = numbers(1, 1)
    made, wanted = copied(fused), apart(each, x)
    assert same(made(each, x), wanted)
    if made.q is not fused.q:
        assert all(layer.fused is None for layer in made.children())
        assert fuse_(made, each, x) == [("q", "k", "v")]
        assert products(made, each, x) == [sum(HEIGHTS)]
        assert len(made._forward_pre_hooks) == 1
        assert same(made(each, x), wanted)
    del made
    gc.collect()
    assert products(fused, each, x) == [sum(HEIGHTS)]
    assert same(fused(each, x), wanted)


def test_replicas_are_apart_and_leave_the_group_as_it_is() -> None:
    fused, apart = pair(bias=True)
    x = numbers(1, 1)
    replica = fused._replicate_for_data_parallel()
    for name, layer in fused.named_children():
        twin = layer._replicate_for_data_parallel()
        for key, parameter in layer._parameters.items():
            setattr(twin, key, None if parameter is None else parameter.detach().clone())
        setattr(replica, name, twin)
    assert same(replica(each, x), apart(each, x))
    assert products(fused, each, x) == [sum(HEIGHTS)]


def test_parameters_that_are_put_in_for_a_call_are_read() -> None:
    fused, apart = pair(bias=True)
    x, biases = numbers(1, 1), {"k.bias": torch.full((16,), 100.0)}

    def swapped(module: Members, x: Tensor) -> list[Tensor]:
        found = [module.q(x)]
        found.append(torch.func.functional_call(module, biases, (lambda module, x: module.k(x), x)))
        return [*found, module.k(x)]

    with torch.no_grad():
        for do in (each, swapped):
            assert same(fused(do, x), apart(do, x))
            found, wanted = (torch.func.functional_call(module, biases, (do, x)) for module in (fused, apart))
            assert same(found, wanted)
    assert products(fused, each, x) == [sum(HEIGHTS)]


def test_a_layer_within_an_adapter_is_fused_still() -> None:
    class Adapter(nn.Module):
        def __init__(self, base: QLinear) -> None:
            super().__init__()
            self.base, self.a, self.b = base, nn.Linear(K, 4, bias=False), nn.Linear(4, base.out_features, bias=False)
            for layer, value in ((self.a, 1.0), (self.b, 2.0)):
                nn.init.constant_(layer.weight, value)

        def forward(self, x: Tensor) -> Tensor:
            y = self.base(x)
            y += self.b(self.a(x))
            return y

    fused, apart = pair(bias=True)
    for module in (fused, apart):
        module.q, module.v = Adapter(module.q), Adapter(module.v)
    x = numbers(1, 1)
    with torch.no_grad():
        assert same(fused(each, x), apart(each, x))
        assert products(fused, each, x) == [sum(HEIGHTS)]
    found = [
        torch.autograd.grad(sum(y.sum() for y in module(each, x)), list(module.q.a.parameters())) for module in (fused, apart)
    ]
    assert same(*found)


def test_a_fixed_input_scale_that_changes_is_that_of_its_layer_alone() -> None:
    found = []
    for fuse in (True, False):
        module, x = Members(), numbers(1, 1)
        for name, layer in list(module.named_children()):
            setattr(module, name, QLinear(layer.weight, None, Scheme("int8", scale="fp32"), torch.tensor(1.0)))
        if fuse:
            assert fuse_(module, each, x) == [("q", "k", "v")]
            assert products(module, each, x) == [sum(HEIGHTS)]
        for layer in (module.q, module.k):
            found.append(module(each, x))
            layer.input_scale.mul_(2)
        found.append(module(each, x))
    assert same(found[:3], found[3:])


def test_what_traces_sees_each_layer() -> None:
    fused, apart = pair()
    x = numbers(1, 1)

    class Call(nn.Module):
        def __init__(self, module: Members) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: Tensor) -> list[Tensor]:
            return self.module(each, x)

    program = torch.export.export(Call(fused), (x,)).module()
    graph = make_fx(Call(fused))(x)
    for call in (program, graph):
        for seed in (1, 2):
            assert same(list(call(numbers(1, seed))), apart(each, numbers(1, seed)))
    for transform in (
        lambda f: torch.func.grad(lambda x: sum(y.sum() for y in f(x)))(x),
        lambda f: torch.func.jvp(lambda x: f(x)[1], (x,), (x,)),
        lambda f: torch.func.vjp(lambda x: f(x)[1], x)[1](torch.ones(1, 16)),
    ):
        found, wanted = (transform(lambda x, module=module: module(each, x)) for module in (fused, apart))
        assert same(list(found), list(wanted))


# ---- torch.compile ---------------------------------------------------------------------------------------------------


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
