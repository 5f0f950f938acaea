"""Quantized layers in ONNX: what onnxruntime computes from the codes is what they stand for, to the rounding of float32."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit import QEmbedding, QLinear, QTensor, Scheme
from tests.support.optional import from_python_311

onnxruntime = from_python_311("onnxruntime")
pytestmark = [  # of torch's own, and onnxscript's, while they export
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

N, K = 128, 256  # so large that the exporter's own optimizer leaves the codes as they are
SCHEMES = ("int8", "int4", "int4_sym", "nf4", "int3", "nvfp4", "mxfp4", "fp8")
X = torch.randn(5, K, generator=torch.Generator().manual_seed(1))
IDS = torch.tensor([[3, 0, 127], [3, 1, 2]])


class Several(nn.Module):
    """A layer of each scheme that reads the same x, one that rounds x to a fixed scale, and a table of rows."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(self._layer(scheme, random) for scheme in SCHEMES)
        self.static = self._layer("int8", random, Scheme("int8", scale="fp32"), torch.tensor(0.03))
        self.table = QEmbedding(QTensor.quantize(torch.randn(N, K, generator=random), "int4"))

    @staticmethod
    def _layer(scheme: str, random: torch.Generator, *rounds: Any) -> QLinear:
        weight = QTensor.quantize(torch.randn(N, K, generator=random) / K**0.5, scheme)
        weight = weight.to_layout("canonical" if scheme in ("int4_sym", "nf4") else "interleaved")
        return QLinear(weight, nn.Parameter(torch.randn(N, generator=random), requires_grad=False), *rounds)

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        return *(layer(x) for layer in self.layers), self.static(x), self.table(ids)


@pytest.fixture(scope="module")
def model() -> Several:
    return Several()


@pytest.fixture(scope="module")
def file(model: Several, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exported with two rows of x, for any number of them."""
    path = tmp_path_factory.mktemp("onnx") / "layers.onnx"
    rows = {0: torch.export.Dim.DYNAMIC}
    with lowbit.inline():
        program = torch.onnx.export(model, (X[:2], IDS), dynamo=True, dynamic_shapes=(rows, rows), verbose=False)
    program.save(str(path))
    return path


@pytest.fixture(scope="module")
def outputs(file: Path) -> list[Tensor]:
    session = onnxruntime.InferenceSession(str(file))
    given = dict(zip((each.name for each in session.get_inputs()), (X.numpy(), IDS.numpy()), strict=True))
    return [torch.from_numpy(y) for y in session.run(None, given)]


def check(y: Tensor, layer: QLinear, x: Tensor) -> None:
    """Each product, sum and weight is rounded once or twice."""
    weight, bias = layer.weight.dequantize(torch.float64), layer.bias.double()
    bound = (K + 8) * 2.0**-24 * (x.abs().double() @ weight.abs().t() + bias.abs())
    assert ((y.double() - (x.double() @ weight.t() + bias)).abs() <= bound).all()


@pytest.mark.sampled(count=4)
@pytest.mark.works_with("torch", "ONNX, by inline()")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_products(model: Several, outputs: list[Tensor], scheme: str) -> None:
    check(outputs[SCHEMES.index(scheme)], model.layers[SCHEMES.index(scheme)], X)


@pytest.mark.works_with("torch", "ONNX, by inline()")
def test_a_fixed_scale_of_x_and_rows_of_a_table(model: Several, outputs: list[Tensor]) -> None:
    check(outputs[-2], model.static, (X / 0.03).round().clamp(-128, 127) * torch.tensor(0.03))
    assert torch.equal(outputs[-1], model.table(IDS))


@pytest.mark.works_with("torch", "ONNX, by inline()")
def test_the_file_holds_codes(model: Several, file: Path) -> None:
    read = onnx.load(str(file))
    assert all(node.domain == "" for node in read.graph.node)
    stored = sum(len(each.raw_data) for each in read.graph.initializer)
    codes = sum(p.nbytes for p in model.parameters())
    assert codes <= stored < 1.1 * codes


@pytest.mark.works_with("torch", "ONNX, by inline()")
@pytest.mark.parametrize(
    ("inlined", "activation", "message"),
    [(False, None, "lowbit.linear"), (True, Scheme("int8", scale="fp32"), "lowbit.quantized_linear")],
    ids=["without inline()", "scales of tokens"],
)
def test_what_onnx_has_no_operator_for_is_named(inlined: bool, activation: Scheme | None, message: str) -> None:
    layer = QLinear(QTensor.quantize(torch.randn(8, 64), "int8"), None, activation)
    with pytest.raises(torch.onnx.OnnxExporterError) as raised, lowbit.inline() if inlined else contextlib.nullcontext():
        torch.onnx.export(layer, (torch.randn(2, 64),), dynamo=True, verbose=False)
    said, error = "", raised.value
    while error is not None:
        said, error = said + str(error), error.__cause__
    assert message in said


def test_layouts_of_a_cpu_are_plain_pytorch_too(model: Several) -> None:
    x = X[:2]
    with lowbit.inline(), torch.no_grad():
        program = torch.export.export(model, (x, IDS)).run_decompositions()
    assert not any("lowbit" in str(node.target) or "view.dtype" in str(node.target) for node in program.graph.nodes)
    for y, wanted in zip(program.module()(x, IDS), model(x, IDS), strict=True):
        torch.testing.assert_close(y, wanted)
