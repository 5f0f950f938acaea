"""torch.compile on a CUDA device: CUDA graphs that torch keeps, of operators and of plain PyTorch; one graph for any batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import lowbit
from lowbit import QLinear, QTensor
from tests.support.accuracy import linear_bound

DEVICE = torch.device("cuda")
N, K = 192, 512

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch's own modules, as Inductor imports them
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),  # torch opens its pool of graphs with one
]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def layer(scheme: str) -> QLinear:
    random = torch.Generator().manual_seed(0)
    weight = QTensor.quantize(torch.randn(N, K, generator=random).bfloat16(), scheme)
    return QLinear(weight, nn.Parameter(torch.randn(N, generator=random).bfloat16())).to(DEVICE)


def rows(m: int, seed: int) -> Tensor:
    return torch.randn(m, K, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


def check(y: Tensor, x: Tensor, module: QLinear) -> None:
    """``y`` is the layer's product within the bound of weights that are rounded once, the widest that is promised."""
    assert module.bias is not None
    w, bias = module.weight.dequantize(torch.float64), module.bias.double()
    exact = x.double() @ w.T + bias
    assert ((y.double() - exact).abs() <= linear_bound("weights rounded once", x.double(), w, bias, exact, y.dtype)).all()


def region(inlined: bool) -> contextlib.AbstractContextManager[None]:
    return lowbit.inline() if inlined else contextlib.nullcontext()


@pytest.mark.parametrize("inlined", [False, True], ids=["operators", "inlined"])
@pytest.mark.parametrize("scheme", ["int4", "int3", "int8", "mxfp4", "nvfp4"])
def test_torch_replays_a_cuda_graph_of_a_layer(scheme: str, inlined: bool) -> None:
    module = layer(scheme)
    compiled = torch.compile(module, fullgraph=True, mode="reduce-overhead", dynamic=False)
    with torch.no_grad(), region(inlined):
        for m in (1, 32):
            for seed in range(4):  # run, recorded, replayed twice with other rows
                torch.compiler.cudagraph_mark_step_begin()
                x = rows(m, seed)
                check(compiled(x).clone(), x, module)
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize("inlined", [False, True], ids=["operators", "inlined"])
@pytest.mark.parametrize("scheme", ["int4", "mxfp4"])
def test_a_dynamic_batch_is_compiled_once(scheme: str, inlined: bool) -> None:
    module = layer(scheme)
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    with torch.no_grad(), region(inlined):
        check(compiled(rows(2, 0)), rows(2, 0), module)
        first = counters["stats"]["unique_graphs"]
        for m in (3, 8, 17, 64, 65, 129, 512):
            x = rows(m, m)
            check(compiled(x), x, module)
    assert counters["stats"]["unique_graphs"] == first == 1
