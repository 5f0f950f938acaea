"""Weights without rows or columns, and no rows of x: what nn.Linear, nn.Embedding and torch itself give, for every scheme."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit import QEmbedding, QLinear, QTensor, Scheme
from lowbit.scheme import PLAIN_SCALES, SCHEMES
from lowbit_kernels import cpu
from lowbit_kernels.registry import kernels

pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op:UserWarning")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SIZES = ((32, 0), (3, 0), (0, 64), (0, 0), (0, 7))
BATCHES = ((), (1,), (2, 0, 3), (5, 8))
ACTIVATIONS = (None, *map(Scheme.parse, ("int8:row:fp32", "fp8_e4m3fn:g32:e8m0", "fp4_e2m1:g16:fp8_e4m3fn:outer")))


def numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    """Numbers that every scheme holds as they are."""
    return torch.ones(shape, dtype=dtype)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_those_of_nn_linear(scheme: str, activation: Scheme | None, dtype: torch.dtype) -> None:
    for n, k in SIZES:
        weight = QTensor.quantize(numbers(n, k, dtype=dtype), scheme)
        assert torch.equal(weight.dequantize(), numbers(n, k, dtype=dtype))
        for shift in (None, nn.Parameter(torch.linspace(-3, 3, n).to(dtype))):
            for static in (None, torch.tensor(1.0)) if activation is not None and activation.scale == "fp32" else (None,):
                layer = QLinear(weight, shift, activation, static)
                for batch in BATCHES:
                    x = numbers(*batch, k, dtype=dtype).requires_grad_()
                    y, want = layer(x), nn.functional.linear(x, numbers(n, k, dtype=dtype), shift)
                    assert torch.equal(y, want)
                    assert (y.dtype, y.shape) == (want.dtype, want.shape)
                    if batch == BATCHES[-1]:
                        gradients = [torch.autograd.grad(of.sum(), x)[0] for of in (y, want)]
                        assert torch.equal(*gradients)
                    if batch == (1,):
                        with torch.inference_mode():  # past the dispatcher
                            assert torch.equal(layer(x.detach()), want)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_those_of_nn_embedding(scheme: str, dtype: torch.dtype) -> None:
    for n, k in ((32, 0), (3, 0), (1, 1)):
        table = QEmbedding(QTensor.quantize(numbers(n, k, dtype=dtype), scheme))
        for indices in (torch.tensor([[0, n - 1]]), torch.zeros(0, dtype=torch.int64), torch.tensor(0)):
            assert torch.equal(table(indices), nn.functional.embedding(indices, table.weight.dequantize()))
        with pytest.raises(IndexError, match="embedding indices must be"):
            table(torch.tensor([n]))
    nothing = QEmbedding(QTensor.quantize(numbers(0, 8, dtype=dtype), scheme))
    assert nothing(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0, 8)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_without_columns(scheme: str) -> None:
    for experts, m, n, k in ((2, 3, 4, 0), (0, 3, 4, 8), (2, 0, 4, 8), (2, 3, 0, 8), (0, 0, 0, 0)):
        weight = QTensor.quantize(torch.ones(experts, n, k), scheme)
        parts = weight.packed, weight.scale, weight.zero_point, weight.outer
        for bias in (None, torch.ones(experts, n)):
            y = torch.ops.lowbit.grouped_linear(torch.ones(experts, m, k), *parts, bias, weight.scheme_str, "canonical")
            want = torch.ones(experts, m, k) @ torch.ones(experts, k, n) + (0 if bias is None else 1)
            assert torch.equal(y, want)


@pytest.mark.parametrize("activation", ACTIVATIONS[1:3], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_without_columns(activation: Scheme, dtype: torch.dtype) -> None:
    weight = QTensor.quantize(torch.ones(3, 0), "int8")
    parts = weight.packed, weight.scale, None, None
    for lead in ((2,), (0,), (2, 0), ()):
        codes, scale = torch.ops.lowbit.rms_norm_quantize(torch.ones(*lead, 0, dtype=dtype), None, 1e-6, str(activation))
        assert codes.shape == scale.shape == (*lead, 0)
        for bias in (None, torch.ones(3, dtype=dtype)):
            y = torch.ops.lowbit.codes_linear(
                codes, scale, *parts, bias, weight.scheme_str, "canonical", str(activation), 0, dtype
            )
            assert torch.equal(y, torch.full((*lead, 3), 0.0 if bias is None else 1.0, dtype=dtype))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_files(scheme: str, tmp_path: Path) -> None:
    dtype = DTYPES[len(scheme) % len(DTYPES)]
    for kind, (n, k) in ((kind, size) for kind in ("linear", "embedding") for size in SIZES):
        model = nn.Sequential(nn.Linear(k, n, dtype=dtype) if kind == "linear" else nn.Embedding(n, k, dtype=dtype))
        weight = QTensor.quantize(numbers(n, k, dtype=dtype), scheme)
        shift = nn.Parameter(torch.ones(n, dtype=dtype))
        layer = QLinear(weight, shift) if kind == "linear" else QEmbedding(weight)
        folder = tmp_path / f"{kind}-{n}-{k}"
        lowbit.save(nn.Sequential(layer), folder)
        (loaded,) = lowbit.load(folder, model=model)
        assert torch.equal(loaded.weight.dequantize(), numbers(n, k, dtype=dtype))
        if kind == "linear":
            x = numbers(2, k, dtype=dtype)
            assert torch.equal(loaded(x), nn.functional.linear(x, numbers(n, k, dtype=dtype), shift))


# ---- the operators of the C++ library, which take no other way out ----------------------------------------------------


@pytest.mark.skipif(cpu.available() is not None, reason=cpu.available() or "")
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "name", ["int8:row:bf16", "uint4:g32:zint:bf16", "fp8_e5m2:row:fp32", "fp4_e2m1:g32:e8m0", "uint3:g32:zint:fp16"]
)
def test_products_in_cpp(name: str, interleaved: bool) -> None:
    scheme, ops = Scheme.parse(name), torch.ops.lowbit_cpu
    scales = None if scheme.scale in PLAIN_SCALES else cpu.byte_table(scheme.scale)
    for n, k, m in ((32, 0, 3), (0, 0, 2), (0, 64, 2), (32, 64, 0), (32, 0, 0), (32, 0, 100)):
        q = QTensor.quantize(torch.ones(n, k), scheme).canonical()
        parts, rest = (q.packed, q.scale, q.zero_point, q.outer), (cpu.number_table(scheme.format), scales, scheme.group_size)
        for bias in (None, torch.ones(n)):
            want = torch.full((m, n), 0.0 if bias is None else 1.0)
            x = torch.ones(m, k)
            found = [ops.linear(x, *parts, bias, *rest)] if not interleaved and m <= 64 else []
            if scheme.format in cpu.SPLIT_INT8.formats and cpu._split_int8_available() is None:
                found += [
                    ops.split_int8_gemv(x, *parts, bias, *rest, d, None, interleaved) for d in (1, 2, 3)[: 3 if m <= 64 else 1]
                ]
                if m <= 64:
                    prepared = ops.split_int8_gemv_prepare(x, *parts, bias, *rest, 2, None, interleaved)
                    assert prepared.numel() == 0 or k
            if ops.has_bf16_dot():
                found.append(ops.bf16_dot_gemm(x.bfloat16(), *parts, bias, *rest, interleaved).float())
            assert all(torch.equal(y, want) for y in found)
        out = torch.ones(n, k)
        ops.dequantize(out, *parts, *rest, interleaved=interleaved)
        assert torch.equal(out, q.dequantize()) or interleaved


def test_no_kernel_but_the_reference_takes_a_weight_without_elements() -> None:
    from lowbit_kernels.registry import Call

    for op in ("linear", "quantized_linear", "grouped_linear", "codes_linear", "dequantize", "embedding", "quantize"):
        for n, k in ((0, 8), (8, 0), (0, 0)):
            call = Call(op, "cpu", 0, "canonical", Scheme("int8"), torch.float32, 1, n, k)
            assert [row.name for row in kernels() if row.op == op and row.refusal(call) is None] == [f"reference_{op}"]
