"""Functions that products end in: of every row within the bound of its contract, and the kernel trace says where they were
applied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lowbit
from lowbit import QTensor, Scheme
from lowbit.grid import Scales, to_codes, to_values
from lowbit.scales import choose
from lowbit_kernels.epilogues import EPILOGUES
from lowbit_kernels.layouts import LAYOUTS, Parts
from lowbit_kernels.registry import Kernel, kernels, strict
from lowbit_kernels.triton import blocks
from tests.support.accuracy import EPILOGUES as EXACT
from tests.support.accuracy import linear_bound
from tests.support.row_cases import schemes_of

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
NAMES = [name for name in EPILOGUES if name != "none"]
ACTIVATION = Scheme.parse("int8:row:fp32")


def rows_of(op: str, names: str = "") -> list[Any]:
    found = [row for row in kernels() if row.op == op and (row.devices is None or DEVICE in row.devices) and names in row.name]
    return [pytest.param(row, id=row.name) for row in found if row.available() is None]


def scheme_for(row: Kernel) -> Scheme:
    """One that the row takes, of integers under zero points where it takes them; the weight is 16 x 256."""
    usual = [Scheme.parse(name) for name in ("uint4:g128:zint:bf16", "int8:row:bf16", "fp4_e2m1:g32:e8m0", "fp8_e4m3fn:row:bf16")]
    taken = schemes_of(row)
    return next((scheme for scheme in usual if scheme in taken), taken[0])


def dtype_for(row: Kernel) -> torch.dtype:
    return next(d for d in (torch.bfloat16, torch.float16, torch.float32) if row.dtypes is None or d in row.dtypes)


def checked(row: Kernel, op: str, name: str, x: Tensor, q: QTensor, bias: Tensor | None) -> None:
    scheme, k = q.scheme, x.shape[-1]
    arranged = LAYOUTS[row.layout or "canonical"].arrange(Parts(q.packed, q.scale, q.zero_point), scheme, k)
    parts = [None if part is None else part.to(DEVICE) for part in (x, *arranged, q.outer, bias)]
    more = (str(ACTIVATION), None) if op == "quantized_linear" else ()
    if op == "quantized_linear" and scheme.format.startswith("fp8"):
        more = ("fp8_e4m3fn:row:fp32", None)
    with strict(row.name), lowbit.trace_kernels() as trace:
        y = getattr(torch.ops.lowbit, op)(*parts, str(scheme), row.layout or "canonical", *more, name).cpu()
    within = name in row.epilogues
    assert [r.epilogue for r in trace.counts] == [f"{name} {'within' if within else 'on its result'}"]
    assert f", {name} " in str(trace)
    wide, w = x.double(), q.dequantize(torch.float64)
    if more:
        activation = Scheme.parse(more[0])
        chosen = choose(x.float(), activation, "absmax")
        wide = to_values(to_codes(x.float(), activation, chosen), activation, Scales(chosen.scale), torch.float64)
    shift = None if bias is None else bias.double().unsqueeze(-2) if bias.dim() > 1 else bias.double()
    exact = wide @ w.mT + (0 if shift is None else shift)
    bound = linear_bound(row.contract, wide, w, shift, exact, x.dtype, name, within)
    error = (y.double() - EXACT[name](exact)).abs()
    assert y.dtype == x.dtype
    assert (error <= bound).all(), float((error / bound).max())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("row", rows_of("linear") + rows_of("quantized_linear"))
@pytest.mark.parametrize("biased", [True, False])
def test_a_product_ends_in_a_function(row, name, biased):
    scheme, dtype = scheme_for(row), dtype_for(row)
    torch.manual_seed(0)
    m = max(row.m[0], 1)
    n = max(16, row.multiples[0])
    q = QTensor.quantize(torch.randn(n, 256, dtype=dtype), scheme)
    bias = torch.linspace(-3, 3, n).to(dtype) if biased else None
    checked(row, row.op, name, torch.randn(m, 256).to(dtype) / 8, q, bias)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("row", rows_of("grouped_linear"))
def test_experts_end_in_a_function(row, name):
    torch.manual_seed(0)
    scheme, dtype = scheme_for(row), dtype_for(row)
    n = max(16, row.multiples[0])
    q = QTensor.quantize(torch.randn(2, n, 256, dtype=dtype), scheme)
    bias = torch.linspace(-3, 3, 2 * n).reshape(2, n).to(dtype)
    checked(row, "grouped_linear", name, torch.randn(2, 3, 256).to(dtype) / 8, q, bias)


SCHEMES = (
    "uint4:g32:zint:bf16",
    "int4:row:fp16",
    "fp4_e2m1:g32:e8m0",
    "uint3:g128:zint:bf16",
    "int8:row:bf16",
    "fp6_e3m2:g64:bf16",
)


@pytest.mark.parametrize("row", rows_of("linear", "triton_ge"))
@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(SCHEMES), st.sampled_from(NAMES), st.sampled_from((torch.float16, torch.bfloat16, torch.float32)),
    st.integers(1, 9), st.sampled_from((1, 3)), st.sampled_from((64, 200, 512)), st.sampled_from((1, 2)), st.booleans(),
    st.sampled_from((0.01, 1.0, 30.0)), st.integers(0, 2**32),
)  # fmt: skip
def test_triton_applies_it_before_it_rounds(row, scheme_str, name, dtype, n, m, k, parts, biased, size, seed):
    """In products of one row of x and of several, of sums in one part and in several, and for numbers far from zero."""
    scheme, random = Scheme.parse(scheme_str), torch.Generator().manual_seed(seed)
    if row.groups is not None and row.groups(scheme.group_size) is not None:
        return
    if row.formats is not None and scheme.format not in row.formats:
        return
    q = QTensor.quantize(torch.randn(n, k, generator=random, dtype=torch.float32).to(dtype), scheme)
    x = (torch.randn(min(m, row.m[1] or m), k, generator=random) * size).to(dtype)
    bias = torch.randn(n, generator=random).to(dtype) if biased else None
    block = {"BLOCK_M": 16, "BLOCK_N": 32, "WORDS": 16, "num_warps": 4, "STAGES": 2, "SPLIT_K": parts}
    assert set(EPILOGUES) == row.epilogues
    with blocks.fixed("gemm", block):
        checked(row, "linear", name, x, q, bias)


@pytest.mark.parametrize("name", EPILOGUES)
@pytest.mark.parametrize("op", ["linear", "quantized_linear", "grouped_linear"])
def test_gradients_pass_it(name, op):
    """Where numbers are exact in float32, they are those of torch's own function behind the product."""
    torch.manual_seed(0)
    lead = (2,) if op == "grouped_linear" else ()
    q = QTensor.quantize(torch.randn(*lead, 8, 64), "int4_g32").to(DEVICE)
    x = torch.randn(*lead, 3, 64, device=DEVICE, requires_grad=True)
    bias = torch.randn(*lead, 8, device=DEVICE, requires_grad=True)
    parts, more = (q.packed, q.scale, q.zero_point, None), (str(ACTIVATION), None) if op == "quantized_linear" else ()
    given = (str(q.scheme), "canonical", *more)
    with strict(f"reference_{op}", "reference_dequantize"):
        y = getattr(torch.ops.lowbit, op)(x, *parts, bias, *given, name)
        before = getattr(torch.ops.lowbit, op)(x, *parts, bias, *given)
        wanted = EXACT[name](before)
        assert torch.equal(y, wanted)
        grad = torch.randn_like(y)
        found = torch.autograd.grad(y, (x, bias), grad)
        for a, b in zip(found, torch.autograd.grad(wanted, (x, bias), grad), strict=True):
            torch.testing.assert_close(a, b)


def test_an_unknown_one_is_refused_by_name():
    q = QTensor.quantize(torch.randn(8, 64), "int8")
    with pytest.raises(ValueError, match="no epilogue named 'swish'; there are none, relu, silu"):
        torch.ops.lowbit.linear(torch.ones(1, 64), q.packed, q.scale, None, None, None, str(q.scheme), "canonical", "swish")
    with pytest.raises(ValueError, match="no epilogue named 'swish'"):
        lowbit.explain(q, epilogue="swish")


def test_an_explanation_says_where_it_is_applied():
    layer = nn.Sequential(nn.Linear(64, 16))
    lowbit.quantize_(layer, "int8")
    assert "silu on its result: " in str(lowbit.explain(layer[0], 3, epilogue="silu"))
    if not ON_GPU:
        with strict("triton_gemv_interpreted"):
            assert "silu within: triton_gemv_interpreted" in str(lowbit.explain(layer[0], 1, torch.float16, "silu"))
    assert "on its result" not in str(lowbit.explain(layer[0], 3))


def test_a_compiler_passes_it_on():
    q = QTensor.quantize(torch.randn(8, 64), "int8").to(DEVICE)
    x = torch.randn(3, 64, device=DEVICE)

    def product(x: Tensor) -> Tensor:
        return torch.ops.lowbit.linear(x, q.packed, q.scale, None, None, None, str(q.scheme), "canonical", "silu")

    assert torch.equal(torch.compile(product, backend="aot_eager", fullgraph=True)(x), product(x))
    with torch.autocast(DEVICE, torch.bfloat16):
        assert product(x).dtype == torch.bfloat16
