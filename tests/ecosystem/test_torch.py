"""torch's own tools on quantized models give what they give on the float models of the same weights."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.fx import Tracer, symbolic_trace
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lowbit import QEmbedding, QLinear, QTensor, quantize_
from tests.ecosystem.test_module_state import SCHEMES

X = torch.randn(3, 64, generator=torch.Generator().manual_seed(3))
over_schemes = pytest.mark.parametrize("scheme", SCHEMES)
works_with = pytest.mark.works_with
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch's own


def layers(scheme: str) -> nn.Sequential:
    """Sizes that kernels' layouts take, and one group of 128 that comes out short."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))
    quantize_(model, scheme)
    return model.requires_grad_(False)


def dense(model: nn.Sequential) -> nn.Sequential:
    """The float model of the same weights."""
    made = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16)).requires_grad_(False)
    for layer, q in ((made[0], model[0]), (made[2], model[2])):
        layer.weight.data, layer.bias.data = q.weight.dequantize(), q.bias.data
    return made


class Adapted(nn.Module):
    """A frozen quantized base, and a low-rank adapter that trains."""

    def __init__(self, scheme: str) -> None:
        super().__init__()
        self.base = layers(scheme)
        self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


# ---- modes ---------------------------------------------------------------------------------------------------------


@works_with("torch", "modes (__torch_function__, __torch_dispatch__)")
@over_schemes
def test_modes_see_the_product_and_change_nothing(scheme: str) -> None:
    model, seen = layers(scheme), list[str]()

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(f"function {getattr(func, '__name__', func)}")
            return func(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    wanted = model(X)
    for mode, name in ((Functions, "function linear"), (Operators, "lowbit.linear.default")):
        seen.clear()
        with mode():
            assert torch.equal(model(X), wanted)
        assert seen.count(name if model[0].activation is None else name.replace("linear", "quantized_linear")) == 2


@works_with("torch", "torch.device(...) and default dtypes as contexts")
@over_schemes
def test_default_devices_and_dtypes_reach_no_byte(scheme: str) -> None:
    model = layers(scheme)
    wanted, codes = model(X), model[0].weight.clone()
    with torch.device("meta"):
        again = copy.deepcopy(model)
        x = X.clone().requires_grad_()
        y = again(x)
        y.sum().backward()
        again[0].weight.copy_(again[0].weight.dequantize())
        again.load_state_dict(model.state_dict())
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(model(X), wanted)
        assert again[0].weight.dequantize().dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(y, wanted)
    assert x.grad.device.type == "cpu"
    assert torch.equal(again[0].weight, codes)


@works_with("torch", "FakeTensorMode")
@over_schemes
def test_fake_tensors_tell_shapes_and_hold_nothing(scheme: str) -> None:
    from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode

    model, mode = layers(scheme), FakeTensorMode()
    with FakeCopyMode(mode):
        fake = copy.deepcopy(model)
    assert isinstance(fake[0].weight, QTensor)
    assert all(isinstance(part, FakeTensor) for part in fake[0].weight._parts().values())
    with mode:
        y = fake(torch.empty(7, 64, dtype=torch.float32))
    assert (type(y), y.shape, y.dtype) == (FakeTensor, (7, 16), torch.float32)


@works_with("torch", "FlopCounterMode")
@over_schemes
def test_operations_are_counted_as_those_of_the_float_model(scheme: str) -> None:
    """Forward and backward through frozen layers."""
    model = layers(scheme)
    found = []
    for counted in (model, dense(model)):
        with FlopCounterMode(display=False) as counter:
            counted(X.clone().requires_grad_()).sum().backward()
        found.append(counter.get_total_flops())
    assert found[0] == found[1] == 2 * 2 * 3 * (64 * 32 + 32 * 16)


@works_with("torch", "FlopCounterMode")
def test_operations_of_experts_and_of_tokens_that_are_rounded_before() -> None:
    experts, layer = QTensor.quantize(torch.randn(2, 32, 64), "int4"), layers("int8_dynamic_activation_int8_weight")[0]
    for call, wanted in (
        (lambda: torch.bmm(X.expand(2, 3, 64), experts.transpose(1, 2)), 2 * 2 * 3 * 32 * 64),
        (lambda: layer(QTensor.quantize(X, layer.activation)), 2 * 3 * 32 * 64),
    ):
        with FlopCounterMode(display=False) as counter:
            call()
        assert counter.get_total_flops() == wanted


# ---- transforms ------------------------------------------------------------------------------------------------------


def loss(call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: call(x).square().sum()


TRANSFORMS: dict[str, Callable[[nn.Module], Any]] = {
    "vjp": lambda m: torch.func.vjp(m, X)[1](torch.ones(3, 16))[0],
    "grad": lambda m: torch.func.grad(loss(m))(X),
    "jacrev": lambda m: torch.func.jacrev(m)(X),
    "vmap": lambda m: torch.func.vmap(m)(X),
    "vmap of another dimension": lambda m: torch.func.vmap(m, 1, 1)(X[:, None].repeat(1, 2, 1)),
    "vmap of vmap": lambda m: torch.func.vmap(torch.func.vmap(m))(X[None].repeat(2, 1, 1)),
    "gradients a sample": lambda m: torch.func.vmap(torch.func.grad(loss(m)))(X),
    "jvp": lambda m: torch.func.jvp(m, (X,), (torch.ones_like(X),))[1],
    "jacfwd": lambda m: torch.func.jacfwd(m)(X[0]),
    "hessian": lambda m: torch.func.hessian(loss(m))(X[0]),
    "linearize": lambda m: torch.func.linearize(m, X)[1](torch.ones_like(X)),
    "functionalize": lambda m: torch.func.functionalize(m)(X),
    "functional_call": lambda m: torch.func.functional_call(m, {n: p.clone() for n, p in m.named_parameters()}, X),
}


@works_with("torch", "torch.func")
@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:Attempted to insert a get_attr Node")
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if "activation" not in scheme])
def test_transforms_of_functions(scheme: str, transform: str) -> None:
    model, run = layers(scheme), TRANSFORMS[transform]
    torch.testing.assert_close(run(model), run(dense(model)), rtol=1e-5, atol=1e-5)


@works_with("torch", "torch.func")
@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:Attempted to insert a get_attr Node")
def test_transforms_of_a_layer_that_rounds_x() -> None:
    """It has its own values, and the derivatives of a layer that does not."""
    layer = layers("int8_dynamic_activation_int8_weight")[0]
    for name in ("vjp", "jacrev", "jvp", "jacfwd", "linearize"):
        run = TRANSFORMS[name] if name != "vjp" else lambda m: torch.func.vjp(m, X)[1](torch.ones(3, 32))[0]
        plain = nn.Linear(64, 32)
        plain.weight.data, plain.bias.data = layer.weight.dequantize(), layer.bias.data
        torch.testing.assert_close(run(layer), run(plain.requires_grad_(False)), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.func.vmap(layer)(X), layer(X), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.func.functionalize(layer)(X), layer(X))


# ---- what averages, moves and exchanges parameters ---------------------------------------------------------------------


@works_with("torch", "AveragedModel")
@over_schemes
def test_averages_of_a_model_whose_adapter_trains(scheme: str) -> None:
    model = Adapted(scheme)
    codes = {name: p.clone() for name, p in model.base.named_parameters()}
    halving = get_ema_multi_avg_fn(0.5)
    averages = [AveragedModel(model), AveragedModel(model, use_buffers=True), AveragedModel(model, multi_avg_fn=halving)]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.5)
    passed = []
    for _ in range(3):
        model(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        passed.append(model.up.weight.detach().clone())
        for average in averages:
            average.update_parameters(model)
    assert not torch.equal(passed[0], passed[2])
    mean, exponential = sum(passed) / 3, (passed[0] + passed[1]) / 4 + passed[2] / 2
    for average, wanted in zip(averages, (mean, mean, exponential), strict=True):
        torch.testing.assert_close(average.module.up.weight, wanted)
        for name, p in average.module.base.named_parameters():
            assert torch.equal(p, codes[name]), name


@works_with("torch", "meta device, to_empty")
@works_with("torch", "load_state_dict(assign=)")
@over_schemes
def test_a_model_without_values_takes_them_from_a_state(scheme: str) -> None:
    model = layers(scheme)
    wanted = model(X)
    empty = copy.deepcopy(model).to("meta")
    assert empty(X.to("meta")).shape == (3, 16)
    with pytest.raises(NotImplementedError, match="no data"):
        empty.to("cpu")
    with pytest.warns(UserWarning, match="is a no-op"):
        empty.load_state_dict(model.state_dict())
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    assigned = copy.deepcopy(empty)
    assert assigned.load_state_dict(model.state_dict(), assign=True)
    filled = empty.to_empty(device="cpu")
    filled.load_state_dict(model.state_dict())
    for other in (assigned, filled):
        assert torch.equal(other(X), wanted)
        assert all(type(a) is type(b) for a, b in zip(other.parameters(), model.parameters(), strict=True))


@works_with("torch", "distributed checkpoints (DCP)")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")
@over_schemes
def test_a_distributed_checkpoint_of_one_process(scheme: str, tmp_path: Path) -> None:
    model, other = Adapted(scheme), Adapted(scheme)
    for parameter in other.parameters():
        parameter.data += 1
    assert not torch.equal(other(X), model(X))
    dcp.save({"model": model.state_dict()}, checkpoint_id=str(tmp_path))
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=str(tmp_path))
    other.load_state_dict(state["model"])
    assert torch.equal(other(X), model(X))
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())


# ---- graphs ----------------------------------------------------------------------------------------------------------


@works_with("torch", "fx.symbolic_trace")
@over_schemes
def test_a_symbolic_trace_has_a_node_for_each_layer(scheme: str) -> None:
    model = nn.Sequential(QEmbedding(QTensor.quantize(torch.randn(10, 64), "int4")), *layers(scheme))

    class ThroughModules(Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return False

    ids = torch.arange(4)
    for graph in (symbolic_trace(model), torch.fx.GraphModule(model, ThroughModules().trace(model))):
        called = [graph.get_submodule(str(node.target)) for node in graph.graph.nodes if node.op == "call_module"]
        assert [layer for layer in called if isinstance(layer, (QLinear, QEmbedding))] == [model[0], model[1], model[3]]
        assert torch.equal(graph(ids), model(ids))
        assert torch.equal(copy.deepcopy(graph)(ids), model(ids))
    with pytest.raises(ValueError, match="trace a module that holds it"):
        symbolic_trace(model[1])


@works_with("torch", "fx.symbolic_trace")
def test_a_symbolic_trace_of_functions_of_a_weight() -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(QTensor.quantize(torch.randn(8, 64), "int4"), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight) + x @ self.weight.t()

    model = Product()
    graph = symbolic_trace(model)
    assert torch.equal(graph(X), model(X))
    assert isinstance(graph.weight, QTensor)


@works_with("torch", "jit.trace")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@over_schemes
def test_a_traced_model_is_saved_with_the_bytes_of_its_weights_alone(scheme: str) -> None:
    turned = QLinear(QTensor.quantize(torch.randn(16, 16), "int4"), transform=nn.Linear(16, 16).requires_grad_(False))
    program = nn.Sequential(Adapted(scheme).requires_grad_(False), turned)
    traced = torch.jit.trace(program, X)
    x = torch.randn(7, 64)
    assert torch.equal(traced(x), program(x))
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    loaded = torch.jit.load(file)
    assert torch.equal(loaded(x), program(x))
    stored = {name: p.shape for name, p in loaded.named_parameters()}
    assert stored == {name: p.shape for name, p in program.named_parameters() if not isinstance(p, QTensor)}
