"""Products that go straight to their kernel: the same numbers, errors, traces and gradients as through the dispatcher."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lowbit import QLinear, QTensor, Scheme, strict, trace_kernels
from lowbit_kernels import fast_dispatch, reference, registry
from lowbit_kernels.prepared_call import Product, SchemeBound
from lowbit_kernels.registry import Kernel, NoKernelError
from tests.lowbit.test_tensor import FAMILIES, make
from tests.support.strategies import schemes

INT8 = Scheme.parse("int8")


def x_of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def operator(module: QLinear, x: Tensor) -> Tensor:
    w = module.weight
    parts = (w.packed, w.scale, w.zero_point, w.outer, module.bias, w.scheme_str, w.byte_layout)
    if module.activation is None:
        return torch.ops.lowbit.linear(x, *parts)
    return torch.ops.lowbit.quantized_linear(x, *parts, str(module.activation), module.input_scale)


def tensor(module: QLinear) -> Callable[[Tensor], Tensor]:
    weight = module.weight
    return lambda x: F.linear(x, weight, module.bias)


@pytest.fixture
def module() -> QLinear:
    """One that has run: the kernels of these signatures are known."""
    made = QLinear(make("int4", 6, 40), nn.Parameter(torch.randn(6), requires_grad=False))
    for _ in range(2):
        made(x_of(3, 40))
        made(x_of(40))
    assert len(made.weight._dispatch) == 2
    return made


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


# ---- the same numbers ------------------------------------------------------------------------------------------


@given(
    scheme=schemes(),
    n=st.integers(1, 20),
    k=st.integers(1, 70),
    lead=st.lists(st.integers(0, 4), max_size=3),
    dtype=st.sampled_from((torch.float16, torch.bfloat16, torch.float32, torch.float64)),
    bias=st.booleans(),
    activation=st.sampled_from((None, INT8)),
)
def test_the_same_bits_as_the_operator(
    scheme: Scheme, n: int, k: int, lead: list[int], dtype: torch.dtype, bias: bool, activation: Scheme | None
) -> None:
    module = QLinear(make(scheme, n, k), nn.Parameter(torch.randn(n), requires_grad=False) if bias else None, activation).to(
        dtype
    )
    x = x_of(*lead, k, dtype=dtype)
    want = operator(module, x)
    for _ in range(2):
        y = module(x)
        assert (y.dtype, y.shape) == (dtype, (*lead, n))
        torch.testing.assert_close(y, want, rtol=0, atol=0, equal_nan=True)
    assert len(module.weight._dispatch) == 1
    if activation is None:
        call = tensor(module)
        for _ in range(2):
            torch.testing.assert_close(call(x), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("scheme", FAMILIES, ids=str)
def test_a_known_call_goes_past_the_dispatcher(scheme: Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = QLinear(make(scheme, 6, 40)), x_of(2, 40)
    weight = module.weight
    want, _ = module(x), F.linear(x, weight)
    monkeypatch.setattr(torch.ops, "lowbit", None)
    monkeypatch.setattr(fast_dispatch, "product_call", None)
    assert torch.equal(module(x), want)
    assert torch.equal(F.linear(x, weight), want)
    with torch.inference_mode():
        assert torch.equal(module(x), want)
    with torch.no_grad():
        assert torch.equal(module(x), want)


# ---- what has to see a call sees it ----------------------------------------------------------------------------


def test_trace_and_strictness_come_after_many_calls_as_before_them(module: QLinear) -> None:
    x, weight = x_of(3, 40), module.weight
    F.linear(x, weight)
    for call in (module, lambda x: F.linear(x, weight)):
        with trace_kernels() as trace:
            for _ in range(3):
                call(x)
        assert list(trace.counts.values()) == [3]
        with strict("reference_linear"), trace_kernels() as trace:
            call(x)
        assert set(trace.kernels()) == {"reference_linear"}
        call(x_of(65, 40))
        with strict("cpu_gemv"), pytest.raises(NoKernelError, match=r"M: takes 1\.\.64, got 65"):
            call(x_of(65, 40))
        call(x)
    assert len(module.weight._dispatch) == 5  # with a bias and without


def test_modes_and_traces_see_the_operator(module: QLinear) -> None:
    x = x_of(3, 40)
    weight = module.weight
    for call in (module, lambda x: F.linear(x, weight, module.bias)):
        want = call(x)
        with Seen() as seen:
            y = call(x)
        assert "lowbit.linear.default" in seen.names
        assert torch.equal(y, want)
        with Called() as called:
            y = call(x)
        assert torch.equal(y, want)
        assert called.names
        graph = make_fx(call)(x)
        assert [str(node.target) for node in graph.graph.nodes if "lowbit" in str(node.target)] == ["lowbit.linear.default"]
        torch.testing.assert_close(graph(x), want)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = module(mode.from_tensor(x))
    assert type(fake) is not Tensor
    assert fake.shape == (3, 6)


def test_autocast_holds_after_calls_without_it(module: QLinear) -> None:
    x = x_of(3, 40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(x).dtype == F.linear(x, module.weight, module.bias).dtype == torch.bfloat16
    assert module(x).dtype == torch.float32


def test_gradients_flow_after_calls_without_them(module: QLinear) -> None:
    dense = nn.Linear(40, 6)
    dense.weight.data, dense.bias.data = module.weight.dequantize().float(), module.bias.data
    weight = module.weight
    F.linear(x_of(3, 40), weight, module.bias)
    for call in (module, lambda x: F.linear(x, weight, module.bias)):
        for of_x, of_bias in ((True, False), (False, True), (True, True)):
            module.bias.requires_grad_(of_bias)
            module.bias.grad = dense.bias.grad = None
            x, y = x_of(3, 40).requires_grad_(of_x), x_of(3, 40).requires_grad_(of_x)
            call(x).square().sum().backward()
            dense(y).square().sum().backward()
            torch.testing.assert_close(x.grad, y.grad, rtol=1e-3, atol=1e-3) if of_x else None
            torch.testing.assert_close(module.bias.grad, dense.bias.grad, rtol=1e-3, atol=1e-3) if of_bias else None
    with torch.no_grad():
        assert not module(x).requires_grad


def test_transforms_mean_what_they_mean_for_the_operator(module: QLinear) -> None:
    x = x_of(3, 40)
    for transform in (
        lambda f: torch.vmap(f)(x),
        lambda f: torch.func.jvp(f, (x,), (x,)),
        lambda f: torch.func.grad(lambda x: f(x).sum())(x),
    ):
        outcomes = []
        for call in (module, lambda x: operator(module, x)):
            try:
                outcomes.append(transform(call))
            except Exception as error:
                outcomes.append(type(error))
        assert type(outcomes[0]) is type(outcomes[1])
        if isinstance(outcomes[0], type):
            assert outcomes[0] is outcomes[1]


def test_an_output_can_be_changed_in_place_behind_no_grad() -> None:
    for activation in (None, INT8):
        module = QLinear(make("int4", 6, 40), None, activation)
        for _ in range(2):
            with torch.no_grad():
                y = module(x_of(2, 3, 40))
            y.mul_(torch.ones(6, requires_grad=True)).sum().backward()


# ---- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda m: m(x_of(3, 39)), ValueError, "x must end in 40 features"),
        (lambda m: m(torch.tensor(1.0)), ValueError, "x must end in 40 features"),
        (lambda m: m(x_of(3, 40).int()), TypeError, "x must be float16"),
        (lambda m: m(x_of(3, 40).to("meta")), ValueError, "x is on meta and the weight on cpu"),
        (lambda m: m(x_of(3, 40, dtype=torch.float16)), TypeError, "bias must be torch.float16"),
        (lambda m: F.linear(x_of(3, 40), m.weight, torch.ones(5)), ValueError, r"bias must have shape \(6,\), got \(5,\)"),
        (lambda m: F.linear(x_of(3, 40), m.weight, torch.ones(6).half()), TypeError, "bias must be torch.float32"),
        (lambda m: F.linear(x_of(3, 39), m.weight), ValueError, "x must end in 40 features"),
    ],
)  # fmt: skip
def test_what_is_refused_at_first_is_refused_later(
    module: QLinear, change: Callable[[QLinear], Any], error: type[Exception], words: str
) -> None:
    for _ in range(2):
        with pytest.raises(error, match=words):
            change(module)
    module(x_of(3, 40))
    assert len(module.weight._dispatch) == 2


def test_parts_that_are_exchanged_are_checked_again(module: QLinear) -> None:
    x = x_of(3, 40)
    kept = module.bias
    module.bias = nn.Parameter(kept[:0].clone(), requires_grad=False)
    with pytest.raises(ValueError, match="bias must have shape"):
        module(x)
    module.bias = kept
    for change in (lambda m: m.half(), lambda m: m.float(), lambda m: setattr(m, "weight", make("nvfp4", 6, 40))):
        change(module)
        assert not module.weight._dispatch
        y = x.to(module.bias.dtype)
        assert torch.equal(module(y), operator(module, y))
    module.activation = INT8
    assert torch.equal(module(x), operator(module, x))
    module.activation = None
    assert torch.equal(module(x), operator(module, x))


def test_a_functional_call_runs_on_what_it_is_given(module: QLinear) -> None:
    x, other = x_of(3, 40), make("int4", 6, 40, seed=5)
    y = torch.func.functional_call(module, {"weight": other}, (x,))
    assert torch.equal(y, F.linear(x, other, module.bias))
    bias = torch.randn(6, requires_grad=True)
    torch.func.functional_call(module, {"bias": bias}, (x,)).sum().backward()
    assert bias.grad is not None


def test_a_parametrized_bias_is_computed(module: QLinear) -> None:
    class Double(nn.Module):
        def forward(self, bias: Tensor) -> Tensor:
            return 2 * bias

    x = x_of(3, 40)
    y = module(x)
    bias = module.bias.detach().clone()
    nn.utils.parametrize.register_parametrization(module, "bias", Double())
    torch.testing.assert_close(module(x), y + bias)


# ---- how much is kept ------------------------------------------------------------------------------------------


def test_every_batch_runs_and_few_are_kept() -> None:
    module, weight = QLinear(make("int4", 6, 40)), make("int4", 6, 40)
    whole = x_of(300, 40)
    for m in [*range(300), *range(300, 0, -7)]:
        torch.testing.assert_close(module(whole[:m]), module(whole)[:m])
        assert torch.equal(F.linear(whole[:m], weight), module(whole[:m]))
        assert 0 < len(module.weight._dispatch) <= fast_dispatch._MOST
        assert 0 < len(weight._dispatch) <= fast_dispatch._MOST


def test_threads_share_a_module() -> None:
    module = QLinear(make("int4", 6, 40))
    wants = [operator(module, x_of(m, 40)) for m in range(100)]
    wrong: list[int] = []

    def sweep(offset: int) -> None:
        for i in range(300):
            m = (7 * i + offset) % 100
            if not torch.equal(module(x_of(m, 40)), wants[m]):
                wrong.append(m)

    threads = [threading.Thread(target=sweep, args=(13 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_tensor_takes_rows_and_transposes_as_before() -> None:
    q: QTensor = make("int4", 6, 40)
    x = x_of(2, 40)
    for _ in range(2):
        torch.testing.assert_close(F.linear(x, q[2]), x @ q.dequantize()[2])
        torch.testing.assert_close(F.linear(x_of(2, 6), q.t()), x_of(2, 6) @ q.dequantize())
        torch.testing.assert_close(F.linear(x, q), x @ q.dequantize().t())


def test_a_bound_row_asks_the_scheme_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Scheme] = []

    @SchemeBound
    def linear(scheme: Scheme) -> Product:
        """A row."""
        asked.append(scheme)
        return reference.linear

    assert (linear.__name__, linear.__doc__, linear.__module__) == ("linear", "A row.", __name__)
    real = registry.kernels()
    monkeypatch.setattr(registry, "kernels", lambda: (Kernel("bound", "linear", linear, "weights rounded once"), *real))
    registry._select.cache_clear()
    try:
        module, x = QLinear(make("int4", 6, 40)), x_of(2, 40)
        for _ in range(5):
            y = module(x)
        assert asked == [module.scheme]
        with trace_kernels() as trace:
            assert torch.equal(operator(module, x), y)
        assert set(trace.kernels()) == {"bound"}
        assert len(asked) == 2
    finally:
        registry._select.cache_clear()
