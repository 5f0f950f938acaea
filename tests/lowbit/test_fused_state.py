"""What else looks at fused layers: errors, threads, gradients, states, copies and tracers."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import lowbit
from lowbit import QLinear, Scheme, fuse_
from tests.lowbit.test_fused_calls import (
    HEIGHTS,
    K,
    Members,
    each,
    eager,  # noqa: F401 - for every test
    numbers,
    old_jit,
    pair,
    products,
    same,
)
from tests.support import strategies  # noqa: F401 - its profile

pytestmark = old_jit


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
    with lowbit.trace_kernels() as trace:
        found = each(fused, x)
    assert sorted(row.n for row in trace.counts) == sorted(HEIGHTS)
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

    def sweep(offset: int) -> None:
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
        threads = [threading.Thread(target=sweep, args=(3 * i,)) for i in range(8)]
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
        duplicate = layer._replicate_for_data_parallel()
        for key, parameter in layer._parameters.items():
            setattr(duplicate, key, None if parameter is None else parameter.detach().clone())
        setattr(replica, name, duplicate)
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
