"""The autograd rule of every operator under whatever saves, recomputes, compiles or transforms what it is recorded in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lowbit import QEmbedding, QLinear, QTensor, Scheme
from lowbit_kernels.epilogues import EPILOGUES
from lowbit_kernels.layouts import LAYOUTS

N, K, E = 32, 128, 3
SCHEMES = ("uint4:g32:zint:bf16", "nf4:g64:bf16", "fp4_e2m1:g16:fp8_e4m3fn:outer", "int8:row:bf16")
ACTIVATIONS = ("int8:row:fp32", "fp8_e4m3fn:row:fp32", "fp8_e4m3fn:g32:e8m0")
ops: Any = torch.ops.lowbit
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # forward mode of torch itself


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@dataclass(frozen=True)
class Case:
    """A call of an operator with one weight. What may have a gradient comes in: x (None where it is codes) and the bias."""

    op: str
    scheme: str = SCHEMES[0]
    layout: str = "canonical"
    epilogue: str = "none"
    activation: str | None = None
    static: bool = False

    @property
    def weight(self) -> QTensor:
        shape = (E, N, K) if self.op in ("grouped_linear", "experts_linear") else (N, K)
        return QTensor.quantize(numbers(*shape), Scheme.parse(self.scheme)).to_layout(self.layout)

    def bind(self, dtype: torch.dtype = torch.float32) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
        """The product, and x and a bias to call it with; of codes, the bias alone."""
        weight, operator = self.weight, getattr(ops, self.op)
        parts = (weight.packed, weight.scale, weight.zero_point, weight.outer)
        how, bias = (str(weight.scheme), self.layout), numbers(N, dtype=dtype)
        if self.op == "codes_linear":
            codes, scale, _, _ = ops.quantize(numbers(4, K), self.activation, "range")
            return lambda bias: operator(codes, scale, *parts, bias, *how, self.activation, K, dtype), (bias,)
        if self.op == "grouped_linear":
            bias, x = numbers(E, N, dtype=dtype), numbers(E, 4, K, dtype=dtype)
        elif self.op == "experts_linear":
            bias, x = numbers(E, N, dtype=dtype), numbers(4, K, dtype=dtype)
            return lambda x, bias: operator(x, *parts, bias, *how, CHOSEN, self.epilogue), (x, bias)
        else:
            x = numbers(2, 4, K, dtype=dtype)
        rounded = () if self.activation is None else (self.activation, torch.tensor(0.03) if self.static else None)
        return lambda x, bias: operator(x, *parts, bias, *how, *rounded, self.epilogue), (x, bias)


CHOSEN = torch.arange(8) % (E + 1)  # experts of the rows of experts_linear, and an index that is none


def _cases() -> Iterator[Case]:
    for layout in LAYOUTS:
        yield from (Case("linear", scheme, layout) for scheme in SCHEMES)
    yield from (Case("linear", epilogue=name) for name in EPILOGUES if name != "none")
    for activation in ACTIVATIONS:
        yield from (Case("quantized_linear", SCHEMES[3], layout, activation=activation) for layout in LAYOUTS)
        yield Case("quantized_linear", SCHEMES[3], epilogue="silu", activation=activation)
        yield Case("codes_linear", SCHEMES[3], activation=activation)
    yield Case("quantized_linear", SCHEMES[3], activation=ACTIVATIONS[0], static=True)
    yield Case("quantized_linear", SCHEMES[3], activation=ACTIVATIONS[0], static=True, epilogue="gelu")
    yield from (Case("grouped_linear", scheme) for scheme in SCHEMES)
    yield Case("grouped_linear", epilogue="silu")
    yield from (Case("experts_linear", scheme) for scheme in SCHEMES)
    yield Case("experts_linear", epilogue="silu")


CASES = tuple(_cases())
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(v) for v in vars(case).values()))


def gradients(f: Callable[..., Tensor], values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    given = tuple(value.clone().requires_grad_() for value in values)
    f(*given).square().sum().backward()
    return tuple(value.grad for value in given if value.grad is not None)


def same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> bool:
    return len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_every_operator_has_a_rule() -> None:
    names = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("lowbit::")}
    assert names == {case.op for case in CASES} | {"quantize", "dequantize", "embedding", "rms_norm_quantize", "versions"}
    assert all(torch._C._dispatch_has_kernel_for_dispatch_key(f"lowbit::{name}", "Autograd") for name in names)


# ---- what saves and recomputes -----------------------------------------------------------------------------------


class Counting(saved_tensors_hooks):
    """Saves every tensor as a number, and notes which are asked for."""

    def __init__(self) -> None:
        self.packed: list[Tensor] = []
        self.unpacked: list[int] = []
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> int:
        self.packed.append(tensor)
        return len(self.packed) - 1

    def _unpack(self, place: int) -> Tensor:
        self.unpacked.append(place)
        return self.packed[place]


@every_case
def test_what_is_saved_is_unpacked_once(case: Case) -> None:
    f, values = case.bind()
    counting = Counting()

    def hooked(*given: Tensor) -> Tensor:
        with counting:
            return f(*given)

    assert same(gradients(hooked, values), gradients(f, values))
    assert sorted(counting.unpacked) == [*range(len(counting.packed))]


def offloaded(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(*given: Tensor) -> Tensor:
        with save_on_cpu():
            return f(*given)

    return call


WAYS: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Tensor]]] = {
    "saved on the CPU": offloaded,
    "reentrant": lambda f: lambda *given: checkpoint(f, *given, use_reentrant=True),
    "recomputed": lambda f: lambda *given: checkpoint(f, *given, use_reentrant=False),
    "recomputed twice": lambda f: WAYS["recomputed"](WAYS["recomputed"](f)),
    "recomputed, then saved": lambda f: offloaded(WAYS["recomputed"](f)),
}


@pytest.mark.parametrize("way", WAYS)
@every_case
def test_gradients_are_the_same_however_they_are_kept(case: Case, way: str) -> None:
    f, values = case.bind()
    assert same(gradients(WAYS[way](f), values), gradients(f, values))


def compiled(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(f, backend="aot_eager", fullgraph=True)


COMPILED: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Tensor]]] = {
    "compiled": compiled,
    "a compiled call recomputed": lambda f: WAYS["recomputed"](compiled(f)),
    "recomputing compiled": lambda f: compiled(WAYS["recomputed"](f)),
    "a compiled call saved on the CPU": lambda f: offloaded(compiled(f)),
}
ONE_EACH = tuple({(case.op, case.epilogue == "none"): case for case in CASES}.values())


@pytest.mark.parametrize("way", COMPILED)
@pytest.mark.parametrize("case", ONE_EACH, ids=lambda case: f"{case.op}-{case.epilogue}")
def test_gradients_are_the_same_compiled(case: Case, way: str) -> None:
    torch.compiler.reset()
    f, values = case.bind()
    torch.testing.assert_close(gradients(COMPILED[way](f), values), gradients(f, values))
    torch.compiler.reset()


class Block(nn.Module):
    """Layers as a model has them, with nothing that is trained but what comes in and the biases."""

    def __init__(self, activation: Scheme | None) -> None:
        super().__init__()
        weights = (QTensor.quantize(numbers(N, N) / N, Scheme.parse(SCHEMES[0])) for _ in range(2))
        self.first, self.second = (QLinear(weight, nn.Parameter(numbers(N)), activation) for weight in weights)
        self.experts = QTensor.quantize(numbers(2, N, N) / N, Scheme.parse(SCHEMES[0]))

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(F.silu(self.first(x)), self.second.weight, self.second.bias)
        return torch.bmm(x.expand(2, *x.shape), self.experts.transpose(1, 2))[1] @ self.first.weight


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("activation", [None, Scheme.parse("int8")], ids=str)
def test_layers_and_tensors_are_recomputed(activation: Scheme | None, reentrant: bool) -> None:
    module, x = Block(activation), numbers(4, N)
    found = []
    for call in (module, lambda x: checkpoint(module, x, use_reentrant=reentrant)):
        module.zero_grad()
        found.append((*gradients(call, (x,)), *(p.grad.clone() for p in module.parameters() if p.grad is not None)))
    assert len(found[0]) == 3
    assert same(*found)


# ---- gradients of gradients, and what transforms ask -------------------------------------------------------------

SMOOTH = tuple(case for case in CASES if case.op in ("linear", "grouped_linear", "experts_linear") and case.layout == "canonical")
smooth_cases = pytest.mark.parametrize("case", SMOOTH, ids=lambda case: f"{case.op}-{case.scheme}-{case.epilogue}")


def dense(case: Case) -> Callable[..., Tensor]:
    """The product as torch computes it with the dequantized weight, in float64."""
    weight = case.weight.dequantize(torch.float64)
    end: Callable[[Tensor], Tensor] = {
        "none": lambda y: y, "relu": F.relu, "silu": F.silu, "gelu": F.gelu,
        "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    }[case.epilogue]  # fmt: skip

    def product(x: Tensor, bias: Tensor) -> Tensor:
        if case.op == "experts_linear":
            y = x.repeat_interleave(2, 0) @ weight.mT + bias.unsqueeze(-2)
            chosen = torch.nn.functional.one_hot(CHOSEN, E + 1)[:, :E].T
            return end((y * chosen[..., None]).sum(0))
        return end(x @ weight.mT + (bias.unsqueeze(-2) if weight.dim() > 2 else bias))

    return product


def mixed(f: Callable[..., Tensor], values: tuple[Tensor, ...]) -> Any:
    """Gradients of the norm of gradients."""
    x, bias = (value.clone().requires_grad_() for value in values)
    first = torch.autograd.grad(f(x, bias).pow(3).sum(), (x, bias), create_graph=True)
    return torch.autograd.grad(sum(grad.square().sum() for grad in first), (x, bias))


def nested(f: Callable[..., Tensor], values: tuple[Tensor, ...]) -> Any:
    def norm(x: Tensor, bias: Tensor) -> Tensor:
        return sum(grad.square().sum() for grad in torch.func.grad(lambda *v: f(*v).pow(3).sum(), (0, 1))(x, bias))

    return torch.func.grad(norm, (0, 1))(*values)


def jacobian(f: Callable[..., Tensor], values: tuple[Tensor, ...]) -> Any:
    return torch.func.jacrev(lambda bias: f(values[0], bias).sum(-2))(values[1])


def forwards(f: Callable[..., Tensor], values: tuple[Tensor, ...]) -> Any:
    return [torch.func.jvp(f, values, values), torch.func.jvp(lambda bias: f(values[0], bias), values[1:], values[1:])]


def dual(f: Callable[..., Tensor], values: tuple[Tensor, ...]) -> Any:
    with forward_ad.dual_level():
        x, bias = values[0].clone().requires_grad_(), values[1]
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, x.detach()), bias)).tangent


def forward_over_reverse(f: Callable[..., Tensor], values: tuple[Tensor, ...]) -> Any:
    return torch.func.jvp(torch.func.grad(lambda x: f(x, values[1]).pow(3).sum()), values[:1], values[:1])


TRANSFORMS: dict[str, Callable[[Callable[..., Tensor], tuple[Tensor, ...]], Any]] = {
    "vjp": lambda f, values: torch.func.vjp(f, *values)[1](f(*values)),
    "create_graph": mixed,
    "grad of grad": nested,
    "jacrev": jacobian,
    "jvp": forwards,
    "dual numbers": dual,
    "jvp of grad": forward_over_reverse,
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@smooth_cases
def test_transforms_give_what_they_give_of_the_dequantized_weight(case: Case, transform: str) -> None:
    f, values = case.bind(torch.float64)
    torch.testing.assert_close(TRANSFORMS[transform](f, values), TRANSFORMS[transform](dense(case), values))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch calls the operator in a loop
def test_gradients_of_each_sample() -> None:
    case = Case("linear", epilogue="silu")
    f, (x, bias) = case.bind(torch.float64)

    def each(product: Callable[..., Tensor]) -> Any:
        return torch.func.vmap(torch.func.grad(lambda x, bias: product(x, bias).square().sum(), (0, 1)), (0, None))(x, bias)

    torch.testing.assert_close(each(f), each(dense(case)))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS[:2])
def test_the_rounding_of_x_passes_gradients_as_they_are(activation: str, static: bool) -> None:
    case = Case("quantized_linear", SCHEMES[3], activation=activation, static=static)
    f, (x, bias) = case.bind(torch.float64)
    weight, above = case.weight.dequantize(torch.float64), numbers(2, 4, N, dtype=torch.float64)
    torch.testing.assert_close(torch.func.vjp(f, x, bias)[1](above), (above @ weight, above.sum((0, 1))))
    torch.testing.assert_close(torch.func.jvp(f, (x, bias), (x, bias))[1], x @ weight.mT + bias)


def test_the_bias_of_rounded_tokens_has_gradients_in_both_directions() -> None:
    f, (bias,) = Case("codes_linear", SCHEMES[3], activation=ACTIVATIONS[0]).bind()
    above = numbers(4, N)
    torch.testing.assert_close(torch.func.vjp(f, bias)[1](above), (above.sum(0),))
    torch.testing.assert_close(torch.func.jvp(f, (bias,), (bias,))[1], bias.expand(4, N))


# ---- what has none -------------------------------------------------------------------------------------------------


def _without() -> dict[str, tuple[Callable[[Tensor], Tensor], Tensor, str]]:
    """Calls of one float tensor that has no gradient, that tensor, and the words that say so."""
    weight, activation = QTensor.quantize(numbers(N, K), Scheme.parse(SCHEMES[0])), ACTIVATIONS[0]
    packed, zero, scheme = weight.packed, weight.zero_point, str(weight.scheme)
    codes, token_scale, _, _ = ops.quantize(numbers(4, K), activation, "range")
    x, scale, rest, scales = numbers(4, K), weight.scale, (None, None, scheme, "canonical"), "call requires_grad_"
    of_codes = *rest, activation, K, x.dtype
    experts = QTensor.quantize(numbers(E, N, K), Scheme.parse(SCHEMES[0]))
    many = experts.packed, experts.zero_point
    whole = QTensor.quantize(numbers(N, K), Scheme.parse(SCHEMES[2]))
    nv = str(whole.scheme), "canonical"
    return {
        "linear": (lambda s: ops.linear(x, packed, s, zero, *rest), scale, scales),
        "outer": (lambda s: ops.linear(x, whole.packed, whole.scale, None, s, None, *nv), whole.outer, scales),
        "grouped": (lambda s: ops.grouped_linear(numbers(E, 4, K), many[0], s, many[1], *rest), experts.scale, scales),
        "quantized": (lambda s: ops.quantized_linear(x, packed, s, zero, *rest, activation, None), scale, scales),
        "input_scale": (
            lambda s: ops.quantized_linear(x, packed, scale, zero, *rest, activation, s), torch.tensor(0.03), scales,
        ),
        "codes": (lambda s: ops.codes_linear(codes, token_scale, packed, s, zero, *of_codes), scale, "floats"),
        "tokens": (lambda s: ops.codes_linear(codes, s, packed, scale, zero, *of_codes), token_scale, "floats"),
        "dequantize": (lambda s: ops.dequantize(packed, s, zero, None, *rest[2:], K, torch.float32), scale, scales),
        "embedding": (
            lambda s: ops.embedding(torch.tensor([1]), packed, s, zero, None, *rest[2:], K, torch.float32), scale, scales,
        ),
        "quantize": (lambda w: ops.quantize(w, scheme, "range")[1], numbers(N, K), r"w.detach\(\)"),
        "norm": (lambda x: ops.rms_norm_quantize(x, None, 1e-5, activation)[1], x, "floats"),
        "norm's weight": (lambda w: ops.rms_norm_quantize(x, w, 1e-5, activation)[1], torch.ones(K), "floats"),
    }  # fmt: skip


@pytest.mark.parametrize("name", _without())
def test_what_has_no_gradient_says_so_in_both_directions(name: str) -> None:
    f, tensor, words = _without()[name]
    with pytest.raises(RuntimeError, match=words):
        f(tensor.clone().requires_grad_()).float().sum().backward()
    with pytest.raises(RuntimeError, match=words), forward_ad.dual_level():
        f(forward_ad.make_dual(tensor, torch.ones_like(tensor)))


def test_an_embedding_that_is_trained_is_told() -> None:
    table = QEmbedding(QTensor.quantize(numbers(N, K), Scheme.parse(SCHEMES[0])))
    table.weight.requires_grad_()
    with pytest.raises(RuntimeError, match=r"requires_grad_\(False\)"):
        table(torch.tensor([1, 2])).sum().backward()
