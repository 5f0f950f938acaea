"""torch.compile makes one graph of a quantized module and keeps it for every batch; torch.export writes it down."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend

import lowbit
from lowbit import QEmbedding, QLinear, QTensor, Scheme
from tests.lowbit.test_modules import Holder
from tests.lowbit.test_tensor import make

BATCHES = (2, 3, 17, 512, 1)

pytestmark = [  # of torch's own, while it compiles and exports
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]


class Matmul(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t() + (x.expand(2, *x.shape) @ self.weight.t())[0]


class Sliced(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x[:, :16], self.weight[1:5, :16]) + F.linear(x, self.weight)[:, :4]


class Lookup(Holder):
    def forward(self, index: Tensor) -> Tensor:
        return F.embedding(index, self.weight)


class Experts(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x.expand(3, *x.shape), self.weight.transpose(1, 2)) + F.linear(x, self.weight[1])


def rows(m: int) -> Tensor:
    return torch.randn(m, 40, generator=torch.Generator().manual_seed(m))


def indices(m: int) -> Tensor:
    return torch.arange(m) % 6


def bias() -> nn.Parameter:
    return nn.Parameter(torch.randn(6, generator=torch.Generator().manual_seed(9)))


CASES: dict[str, tuple[Callable[[str], nn.Module], Callable[[int], Tensor]]] = {
    "QLinear": (lambda s: QLinear(make(s, 6, 40), bias()), rows),
    "two layers": (lambda s: nn.Sequential(QLinear(make(s, 6, 40)), nn.GELU(), QLinear(make(s, 4, 6))), rows),
    "dynamic activation": (lambda s: QLinear(make(s, 6, 40), bias(), Scheme.parse("int8")), rows),
    "static activation": (lambda s: QLinear(make(s, 6, 40), None, Scheme("int8", scale="fp32"), torch.tensor(0.05)), rows),
    "QEmbedding": (lambda s: QEmbedding(make(s, 6, 40)), indices),
    "parameter, F.linear": (lambda s: Holder(make(s, 6, 40)), rows),
    "parameter, matmul": (lambda s: Matmul(make(s, 6, 40)), rows),
    "parameter, slices": (lambda s: Sliced(make(s, 6, 40)), rows),
    "parameter, embedding": (lambda s: Lookup(make(s, 6, 40)), indices),
    "parameter, experts": (lambda s: Experts(make(s, 3, 6, 40)), rows),
}
SCHEMES = ("int4", "nvfp4")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Counting:
    """A backend that counts how often it is asked to compile."""

    def __init__(self, inner: str) -> None:
        self.inner, self.compilations = lookup_backend(inner), 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.compilations += 1
        return self.inner(graph, inputs)


@pytest.mark.works_with("compile", "fullgraph")
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("case", CASES)
def test_one_graph_and_two_compilations(case: str, scheme: str) -> None:
    build, inputs = CASES[case]
    module, backend = build(scheme), Counting("aot_eager")
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
    for m in BATCHES:
        x, y = inputs(m), inputs(m)
        if x.is_floating_point():
            out, expected = compiled(x.requires_grad_()), module(y.requires_grad_())
            out.square().sum().backward()
            expected.square().sum().backward()
            # Kernels that add up in other orders may serve the two: 40 terms of K, and 24 of the rows of all experts.
            torch.testing.assert_close(x.grad, y.grad, rtol=1.3e-6, atol=(40 + 24) * 2.0**-24 * float(y.grad.abs().max()))
        else:
            out, expected = compiled(x), module(y)
        torch.testing.assert_close(out, expected)
    assert backend.compilations <= 2
    with torch.inference_mode():
        torch.testing.assert_close(compiled(inputs(3)), module(inputs(3)))


def test_gradient_of_the_bias_through_compile() -> None:
    module = QLinear(make("int4", 6, 40), bias())
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    gradients = []
    for call in (module, compiled):
        module.zero_grad()
        call(rows(3)).square().sum().backward()
        gradients.append(module.bias.grad.clone())
    torch.testing.assert_close(*gradients)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="inductor needs a C++ compiler")
def test_inductor() -> None:
    module = nn.Sequential(QLinear(make("int4", 6, 40), bias()), nn.GELU(), QLinear(make("nvfp4", 4, 6))).eval()
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for m in (2, 17):
            torch.testing.assert_close(compiled(rows(m)), module(rows(m)))


@pytest.mark.works_with("compile", "export")
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("case", ["QLinear", "dynamic activation", "static activation", "QEmbedding", "parameter, F.linear"])
def test_export_with_a_dynamic_batch(case: str, scheme: str) -> None:
    build, inputs = CASES[case]
    module = build(scheme)
    exported = torch.export.export(module, (inputs(4),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    decomposed = exported.run_decompositions()
    assert sum("lowbit" in str(node.target) for node in decomposed.graph.nodes) == 1
    file = io.BytesIO()
    torch.export.save(decomposed, file)
    file.seek(0)
    for program in (exported, decomposed, torch.export.load(file)):
        for m in (1, 2, 17):
            torch.testing.assert_close(program.module()(inputs(m)), module(inputs(m)))


# ---- inlined -----------------------------------------------------------------------------------------------------------


class Recording(Counting):
    """Keeps what it is asked to compile."""

    def __init__(self, inner: str) -> None:
        super().__init__(inner)
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs.append(graph)
        return super().__call__(graph, inputs)

    def operators(self) -> set[str]:
        """Those of lowbit in the last graph."""
        return {str(node.target) for node in self.graphs[-1].graph.nodes if "lowbit" in str(node.target)}


@pytest.mark.sampled(count=3)
@pytest.mark.works_with("compile", "inline()")
@pytest.mark.parametrize("scheme", [*SCHEMES, "int8", "int3_sym", "nf4"])
@pytest.mark.parametrize("case", ["QLinear", "two layers", "static activation"])
def test_inlined_layers_are_plain_pytorch(case: str, scheme: str) -> None:
    build, inputs = CASES[case]
    module, backend = build(scheme), Recording("aot_eager")
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
    with torch.no_grad():
        with lowbit.inline():
            torch.testing.assert_close(compiled(inputs(2)), module(inputs(2)))
            first = backend.compilations
            for m in (3, 17, 512):
                torch.testing.assert_close(compiled(inputs(m)), module(inputs(m)))
        assert backend.compilations == first, "another batch was compiled anew"
        assert backend.operators() == set()
        for m in (2, 3):  # outside of the block the operators are back
            torch.testing.assert_close(compiled(inputs(m)), module(inputs(m)))
        assert backend.operators()


@pytest.mark.sampled(count=3)
@pytest.mark.parametrize("scheme", ["int4", "int3", "int8", "fp6", "fp6_e3m2", "mxfp4", "nvfp4"])
def test_a_compiler_sees_through_tiles(scheme: str) -> None:
    weight = QTensor.quantize(torch.randn(20, 96, generator=torch.Generator().manual_seed(1)), scheme).to_layout("mma_fragment")
    module = QLinear(weight)
    assert module.weight.byte_layout == "mma_fragment"
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad(), lowbit.inline():
        for m in (2, 5):
            x = torch.randn(m, 96, generator=torch.Generator().manual_seed(m))
            torch.testing.assert_close(compiled(x), F.linear(x, weight.dequantize()))


@pytest.mark.parametrize("scheme", [*SCHEMES, "int8", "uint5:g48:zfloat:fp16"])
def test_inlined_layers_give_what_the_operators_give(scheme: str) -> None:
    module = QLinear(make(scheme, 6, 40), bias())
    x, y = (rows(3).requires_grad_() for _ in range(2))
    with lowbit.inline():
        inlined = module(x)
        with lowbit.trace_kernels() as trace:
            module(x)
    plain = module(y)
    assert not trace.counts
    torch.testing.assert_close(inlined, plain)
    above = rows(3)[:, : inlined.shape[1]]  # the same for both: one that came from the outputs would carry their difference
    inlined.backward(above)
    plain.backward(above)
    torch.testing.assert_close(x.grad, y.grad)
