"""Triton's products of several rows of x, whatever group and block they work in and wherever scales lie, within their bounds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lowbit_kernels.ops  # noqa: F401 - defines the operators
from lowbit.grid import Scales, to_values
from lowbit.packing import pack
from lowbit.scheme import Scheme
from lowbit_kernels.registry import Call, kernels
from lowbit_kernels.triton import blocks
from lowbit_kernels.triton.linear import scale_mode
from tests.support.accuracy import linear_bound

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
ROWS = {row.name.removesuffix("_interpreted"): row for row in kernels() if ("interpreted" in row.name) != ON_GPU}
EXACT, ROUNDED = ROWS["triton_gemm"], ROWS["triton_gemm_rounded"]
pytestmark = pytest.mark.skipif(EXACT.available() is not None, reason=str(EXACT.available()))

# Scales of one, two and four bytes with groups that are a part of a block of 128 columns, a block, several, and neither.
SCHEMES = (
    "uint4:g128:zint:bf16", "uint4:g256:zint:fp16", "uint3:g128:zint:fp32", "uint4:g64:zint:fp16", "uint4:g32:zint:fp16",
    "uint5:g8:zint:fp32", "uint4:g48:zint:fp16", "int4:g16:fp16", "int8:g128:bf16", "fp4_e2m1:g32:e8m0",
    "fp4_e2m1:g16:fp8_e4m3fn:outer", "fp6_e2m3:g8:fp8_e4m3fn", "fp8_e4m3fn:g256:e8m0", "uint2:g64:zfloat:fp16",
    "uint7:row:zint:bf16",
)  # fmt: skip


def moved(part: torch.Tensor | None, gap: int, begin: int) -> torch.Tensor | None:
    """``part`` with ``gap`` columns of other numbers behind each row, ``begin`` numbers from where its memory does."""
    if part is None:
        return None
    part, other = part.to(DEVICE), 255 if part.dtype == torch.uint8 else torch.nan
    wide = torch.full((part.shape[0] + begin + 1, part.shape[1] + gap), other, device=DEVICE).to(part.dtype)
    there = wide.flatten()[begin : begin + part.shape[0] * wide.shape[1]].view(part.shape[0], -1)[:, : part.shape[1]]
    there.copy_(part)
    return there


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 5000), st.sampled_from((16, 32)), st.booleans())
def test_x_is_spread_in_pieces_of_a_step(m, k, words, turned):
    from lowbit_kernels.triton.gemm import interleave_x

    x = torch.arange(m * k, dtype=torch.float32, device=DEVICE).view(m, k) + 1
    x = x.t().contiguous().t() if turned else x
    steps = -(-k // (8 * words))
    found = torch.full((m, 8 * steps * words), -1.0, device=DEVICE)
    interleave_x[m, -(-steps * words // 256)](
        x, found, k, steps * words, x.stride(0), x.stride(1), PDL=False, WORDS=words, BLOCK=256, num_warps=4
    )
    whole = torch.nn.functional.pad(x, (0, found.shape[1] - k))
    assert torch.equal(found, whole.view(m, steps, words, 8).transpose(2, 3).flatten(1))


def call_of(scheme_str: str, n: int, k: int) -> Call:
    return Call("linear", "cuda", 90, "canonical", Scheme.parse(scheme_str), torch.bfloat16, 1, n, k)


@pytest.mark.parametrize("size", [1024, 8192])
@pytest.mark.parametrize("scheme_str", ["uint3:g128:zint:bf16", "uint4:g128:zint:bf16"])
def test_one_row_of_x_meets_a_large_weight_of_odd_width_on_the_tensor_cores(scheme_str, size):
    defer_to = ROWS["triton_gemv"].defer_to(call_of(scheme_str, size, size))
    assert defer_to == ("triton_gemm" if "3" in scheme_str and size == 8192 else None)
    assert EXACT.defer_to(call_of(scheme_str, size, size)) is None


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(SCHEMES), st.integers(1, 5), st.integers(1, 40), st.integers(1, 40), st.sampled_from((1, 2, 3)),
    st.sampled_from(("to words", "gaps", "odd")), st.integers(0, 2**32),
)  # fmt: skip
def test_groups_of_every_size_wherever_they_lie(scheme_str, m, n, pieces, parts, lie, seed):
    scheme, k = Scheme.parse(scheme_str), 8 * pieces
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(1 << scheme.bits, (n, k), dtype=torch.uint8, generator=random)
    if scheme.format.startswith("fp8"):
        codes &= 0xF7  # no code is NaN
    size = n, scheme.groups(k)
    gap, begin = {"to words": (-size[1] % 4, 0), "gaps": (3, 0), "odd": (4, 1)}[lie]
    scale = torch.rand(size, generator=random) + 0.1
    if scheme.scale_dtype == torch.uint8:
        scale = torch.randint(*((100, 126) if scheme.scale == "e8m0" else (20, 60)), size, generator=random)
    scale = scale.to(scheme.scale_dtype)
    zero = None
    if scheme.zero_point != "none":
        zero = torch.randint(1 << scheme.bits, size, dtype=torch.uint8, generator=random).to(scheme.zero_point_dtype)
    outer = torch.tensor(0.25) if scheme.outer else None
    x = torch.randn(m, k, generator=random).to(torch.float16)
    row = EXACT if scale_mode(scheme, k, 16, x.dtype) == 0 else ROUNDED
    parts_there = (
        pack(codes, scheme.bits).to(DEVICE),
        moved(scale, gap, begin),
        moved(zero, gap, begin),
        None if outer is None else outer.to(DEVICE),
    )
    # Products of a warp, and of four together.
    block = {"BLOCK_M": 8, "BLOCK_N": 32, "WORDS": 16, "num_warps": 2, "STAGES": 3, "SPLIT_K": parts}
    if parts > 1:
        block |= {"BLOCK_M": 16, "BLOCK_N": 64, "num_warps": 4, "REGISTERS": 128}
    with blocks.fixed("gemm", block):
        y = row.run(x.to(DEVICE), *parts_there, None, scheme).cpu()
    w = to_values(codes, scheme, Scales(scale, zero, outer), torch.float64)
    exact = x.double() @ w.T
    if not torch.isfinite(exact.half()).all():
        return
    error, bound = (y.double() - exact).abs(), linear_bound(row.contract, x.double(), w, None, exact, torch.float16)
    assert ((error <= bound) | (error == 0)).all()
