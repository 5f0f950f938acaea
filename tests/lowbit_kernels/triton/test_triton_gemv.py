"""Triton's products of one row of x with four-bit codes, whatever block they work in, within the bound of exact sums."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lowbit_kernels.ops  # noqa: F401 - defines the operators
from lowbit.grid import Scales, to_values
from lowbit.packing import pack
from lowbit.scheme import Scheme
from lowbit_kernels.registry import kernels
from lowbit_kernels.triton import blocks
from tests.support.accuracy import linear_bound

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
ROW = next(row for row in kernels() if row.name == ("triton_gemv" if ON_GPU else "triton_gemv_interpreted"))
pytestmark = pytest.mark.skipif(ROW.available() is not None, reason=str(ROW.available()))

SCHEMES = (
    "uint4:g32:zint:bf16", "uint4:g128:zint:fp16", "uint4:row:zint:fp32", "int4:g64:bf16", "int4:row:bf16", "fp4_e2m1:g32:e8m0",
    "fp4_e2m1:g32:fp8_e4m3fn:outer", "fp4_e2m1:g96:bf16", "fp4_e2m1:g16:fp8_e4m3fn:outer", "int4:g16:fp16",
)  # fmt: skip


@st.composite
def wide_blocks(draw: st.DrawFn) -> dict[str, int]:
    warps = draw(st.sampled_from((1, 2)))
    return {"ROWS": draw(st.sampled_from((1, 2, 4, 8))), "QUADS": 32 * warps * draw(st.sampled_from((1, 2))), "num_warps": warps}


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(SCHEMES), st.integers(1, 9), st.integers(1, 70), wide_blocks(),
    st.sampled_from(("plain", "outlier", "denormal", "zero weights")), st.booleans(), st.integers(0, 2**32),
)  # fmt: skip
def test_sixteen_bytes_a_thread(scheme_str, n, pieces, block, form, biased, seed):
    scheme, k = Scheme.parse(scheme_str), 32 * pieces
    assert blocks.supports_wide(scheme, torch.float16, k)
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(16, (n, k), dtype=torch.uint8, generator=random)
    groups = scheme.groups(k)
    scale = torch.rand(n, groups, generator=random) + 0.1
    stored = scale.to(scheme.scale_dtype) if scheme.scale_dtype != torch.uint8 else torch.randint(
        40, 60, (n, groups), dtype=torch.uint8, generator=random
    )  # fmt: skip
    zero = torch.randint(16, (n, groups), dtype=torch.uint8, generator=random) if scheme.zero_point == "int" else None
    if form == "zero weights" and zero is not None:  # each code is its zero point: nothing of x may be left
        codes = zero.repeat_interleave(scheme.group(k), 1)[:, :k].contiguous()
    outer = torch.tensor(0.25) if scheme.outer else None
    x = torch.randn(1, k, generator=random).to(torch.float16)
    if form == "outlier":
        x[0, k // 2] = 1000
    if form == "denormal":
        x *= torch.finfo(torch.float16).smallest_normal / 8
    bias = torch.randn(n, generator=random).to(torch.float16) if biased else None
    parts = (pack(codes, 4), stored, zero, outer, bias)
    with blocks.fixed("gemv", block):
        y = ROW.run(*(None if part is None else part.to(DEVICE) for part in (x, *parts)), scheme).cpu()
    w = to_values(codes, scheme, Scales(stored, zero, outer), torch.float64)
    shift = None if bias is None else bias.double()
    exact = x.double() @ w.T + (0 if shift is None else shift)
    if not torch.isfinite(exact.half()).all():
        return
    error, bound = (y.double() - exact).abs(), linear_bound("exact", x.double(), w, shift, exact, torch.float16)
    assert ((error <= bound) | (error == 0)).all()
