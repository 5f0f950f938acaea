"""Many rows of x on a CPU: weights as panels of numbers, and products of those by the processor's own instruction."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit import QTensor, strict
from lowbit.packing import pack
from lowbit.scheme import PLAIN_SCALES, Scheme
from lowbit_kernels import cpu, cpu_dequant_gemm, reference
from lowbit_kernels.registry import trace
from tests.support.accuracy import linear_bound
from tests.support.cpu_cases import POWERS, SCHEMES, weight

pytestmark = pytest.mark.skipif(cpu.available() is not None, reason=cpu.available() or "")


@pytest.mark.skipif(cpu_dequant_gemm.bf16_dot_available() is not None, reason=cpu_dequant_gemm.bf16_dot_available() or "")
@given(
    scheme=st.sampled_from(SCHEMES),
    shape=st.tuples(st.integers(1, 70), st.integers(1, 40), st.integers(1, 4200)),
    bias=st.sampled_from((None, torch.float32, torch.bfloat16, torch.float16)),
    exponent=st.integers(-130, 90),
    seed=st.integers(0, 99),
)
@settings(max_examples=100, deadline=None)
def test_dots_of_any_shape(
    scheme: Scheme, shape: tuple[int, int, int], bias: torch.dtype | None, exponent: int, seed: int
) -> None:
    m, n, k = shape
    random = torch.Generator().manual_seed(seed)
    parts, w = weight(scheme, n, k)
    x = (torch.randn(m, k, generator=random) * 2.0**exponent).bfloat16()
    shift = None if bias is None else torch.randn(n, generator=random).to(bias)
    exact = x.double() @ w.mT + (0 if shift is None else shift.double())
    y = cpu_dequant_gemm.bf16_dot_gemm(x, *parts, shift, scheme)
    bound = linear_bound("weights rounded once", x.double(), w, None if shift is None else shift.double(), exact, torch.bfloat16)
    assert y.shape == exact.shape
    assert ((y.double() - exact).abs() <= bound).all()


@pytest.mark.skipif(cpu_dequant_gemm.bf16_dot_available() is not None, reason=cpu_dequant_gemm.bf16_dot_available() or "")
@pytest.mark.parametrize(
    ("scheme", "least"),
    [("int4", 14), ("int8", 12), ("int6", 15), ("mxint8", 12), ("int2", 24), ("int3", 24), ("fp8", 3), ("nf4", 3), ("mxfp8", 3)],
)
def test_many_rows_of_bfloat16_take_dots(scheme: str, least: int) -> None:
    q = QTensor.quantize(torch.randn(8, 256, generator=torch.Generator().manual_seed(0)), scheme)
    for m, dtype in ((least - 1, torch.bfloat16), (least, torch.float16), (least, torch.bfloat16), (300, torch.bfloat16)):
        with trace() as record:
            torch.nn.functional.linear(torch.ones(m, 256, dtype=dtype), q)
        assert ([*record.kernels()] == ["cpu_bf16_dot_gemm"]) == (m >= least and dtype == torch.bfloat16)
    with strict("cpu_dequant_gemm"):  # a name that is asked for runs, quicker or not
        torch.nn.functional.linear(torch.ones(9, 256, dtype=torch.bfloat16), q)


@pytest.mark.parametrize("instructions", ["portable", "avx2", "avx512"])
@pytest.mark.parametrize("scheme", [*SCHEMES, *POWERS, *(Scheme(f"uint{b}", 16, "int") for b in range(1, 9))], ids=str)
def test_panels_are_the_numbers_of_the_reference(scheme: Scheme, instructions: str) -> None:
    ranks = ["portable", "avx2", "avx512"]
    if ranks.index(instructions) > ranks.index(torch.ops.lowbit_cpu.instructions()):
        pytest.skip(f"this processor has no {instructions}")
    tables = cpu.number_table(scheme.format), None if scheme.scale in PLAIN_SCALES else cpu.byte_table(scheme.scale)
    for k in (1, 16, 33, 80, 256, 1000, 1040):
        parts = weight(scheme, 9, k)[0]
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            out = torch.empty(9, k, dtype=dtype)
            torch.ops.lowbit_cpu.dequantize(out, *parts, *tables, scheme.group_size, instructions)
            assert torch.equal(out, reference.dequantize(*parts, scheme, k, dtype)), (k, dtype)


@given(
    scheme=st.sampled_from([s for s in (*SCHEMES, *POWERS) if s.scale == "e8m0"]),
    k=st.sampled_from((32, 70, 300)),
    least=st.integers(0, 255),
    width=st.sampled_from((0, 3, 255)),
    seed=st.integers(0, 99),
)
@settings(max_examples=200, deadline=None)
def test_panels_of_any_powers_of_two(scheme: Scheme, k: int, least: int, width: int, seed: int) -> None:
    """Every code under every scale: NaN, numbers beyond those of bfloat16, and below its normal ones."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(1 << scheme.bits, (5, k), dtype=torch.uint8, generator=random)
    scale = torch.randint(least, min(least + width, 255) + 1, (5, scheme.groups(k)), dtype=torch.uint8, generator=random)
    parts = pack(codes, scheme.bits), scale, None, None
    out = torch.empty(5, k, dtype=torch.bfloat16)
    torch.ops.lowbit_cpu.dequantize(out, *parts, cpu.number_table(scheme.format), cpu.byte_table(scheme.scale), scheme.group_size)
    expected = reference.dequantize(*parts, scheme, k, torch.bfloat16)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(0.5), expected.nan_to_num(0.5))
