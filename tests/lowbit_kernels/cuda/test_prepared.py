"""Products on a GPU whose weight was checked in an earlier call: the same bits, and every change of the weight is seen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowbit import QLinear, QTensor, quantize_
from lowbit_kernels import cuda

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
]

SCHEMES = ("int8", "int4", "int4_sym", "int3", "int6", "fp6", "fp8", "nf4", "fp4", "mxfp4", "mxfp8", "mxint8", "nvfp4")


def layer_of(scheme: str, n: int = 48, k: int = 320, bias: bool = False, dtype: torch.dtype = torch.bfloat16) -> QLinear:
    model = nn.Sequential(nn.Linear(k, n, bias=bias, dtype=dtype, device="cuda"))
    quantize_(model, scheme)
    made = model[0]
    assert isinstance(made, QLinear)
    return made


def operator(layer: QLinear, x: torch.Tensor) -> torch.Tensor:
    w = layer.weight
    parts = (w.packed, w.scale, w.zero_point, w.outer, layer.bias, w.scheme_str, w.byte_layout)
    return torch.ops.lowbit.linear(x, *parts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m", [0, 1, 2, 5, 8])
@pytest.mark.parametrize("scheme", SCHEMES)
@torch.no_grad()
def test_later_calls_give_the_bits_of_the_operator(scheme: str, m: int, dtype: torch.dtype) -> None:
    if cuda.available() is not None:
        pytest.skip(f"needs the CUDA library: {cuda.available()}")
    layer = layer_of(scheme, bias=m % 2 == 1, dtype=dtype)
    for _ in range(4):
        x = torch.randn(m, 320, dtype=dtype, device="cuda")
        assert torch.equal(layer(x), operator(layer, x))
    apart = torch.randn(m, 640, dtype=dtype, device="cuda")[:, ::2]
    assert torch.equal(layer(apart), operator(layer, apart.contiguous()))
    moved = torch.randn(m * 320 + 1, dtype=dtype, device="cuda")[1:].view(m, 320)  # not on 16 bytes
    assert torch.equal(layer(moved), operator(layer, moved.clone()))


@pytest.mark.parametrize("scheme", ["int4", "fp6"])
@torch.no_grad()
def test_parts_that_are_exchanged_behind_a_layer_are_seen(scheme: str) -> None:
    layer, other = layer_of(scheme, bias=True), layer_of(scheme, bias=True)
    x = torch.randn(1, 320, dtype=torch.bfloat16, device="cuda")
    for _ in range(3):
        layer(x)
    held, theirs = ({**each.weight._parts(), "bias": each.bias} for each in (layer, other))
    for name, part in held.items():
        if part is not None:
            part.data = theirs[name].data
            for _ in range(3):
                assert torch.equal(layer(x), operator(layer, x)), name
    assert torch.equal(layer(x), other(x))
    layer.weight.packed.data = layer.weight.packed.data[:, :-16].contiguous()
    with pytest.raises(RuntimeError, match="packed"):
        layer(x)


@torch.no_grad()
def test_what_does_not_fit_is_refused_after_calls_that_did() -> None:
    layer = layer_of("int8")
    x = torch.randn(1, 320, dtype=torch.bfloat16, device="cuda")
    for _ in range(3):
        layer(x)
    with pytest.raises(ValueError, match="320"):
        layer(x[:, :300])
    ready = torch.ops.lowbit_cuda.split_int8_gemv_prepare(
        x, layer.weight.packed, layer.weight.scale, None, None, None, cuda.kind_of(layer.scheme)
    )
    multiply = torch.ops.lowbit_cuda.prepared_linear
    assert torch.equal(multiply(x, ready), layer(x))
    for wrong in (x[:, :300], x.half(), x.float(), torch.zeros(3, 320, dtype=x.dtype, device="cuda")):
        with pytest.raises(RuntimeError, match="x must have"):
            multiply(wrong, ready)
    for bytes_ in (ready[:-1], torch.zeros_like(ready), ready.cuda()):
        with pytest.raises(RuntimeError, match="prepared"):
            multiply(x, bytes_)


@torch.no_grad()
def test_a_weight_that_has_to_be_copied_is_not_prepared() -> None:
    layer = layer_of("int8")
    x = torch.randn(1, 320, dtype=torch.bfloat16, device="cuda")
    y = layer(x)
    wide = torch.zeros(layer.weight.packed.shape[0], layer.weight.packed.shape[1] + 7, dtype=torch.uint8, device="cuda")
    wide[:, 3:-4] = layer.weight.packed
    strided = QTensor(wide[:, 3:-4], layer.weight.scale, None, None, layer.scheme, (48, 320), torch.bfloat16, "mma_fragment")
    apart = QLinear(strided)
    for _ in range(3):
        assert torch.equal(apart(x), y)


@torch.no_grad()
def test_a_graph_of_prepared_products_gives_the_eager_result() -> None:
    layers = [layer_of("int4", 320, 320) for _ in range(4)]
    x = torch.randn(1, 320, dtype=torch.bfloat16, device="cuda") / 16
    model = nn.Sequential(*layers)
    for _ in range(3):
        expected = model(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = model(x)
    graph.replay()
    assert torch.equal(y, expected)
