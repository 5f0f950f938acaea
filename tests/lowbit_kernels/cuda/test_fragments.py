"""Every code of every format through the tensor cores, and scales that 16 bits cannot hold: what random weights seldom have."""

from __future__ import annotations

import math
import shutil

import pytest
import torch

from lowbit.formats import FORMATS
from lowbit.grid import Scales, to_values
from lowbit.packing import pack
from lowbit.scheme import Scheme
from lowbit_kernels import registry
from lowbit_kernels.layouts import LAYOUTS, Parts
from tests.support.accuracy import linear_bound

FAMILIES = ("skinny_gemm", "split_int8_gemv")  # of tensor cores: 16-bit floats and integers
GEMM, ROUNDED = "mixed_gemm", "mixed_gemm_rounded"  # 16-bit floats again, in groups of warps
ROWS = {f: [row for row in registry.kernels() if row.name.startswith(f"cuda_{f}")] for f in (*FAMILIES, GEMM, ROUNDED)}
PLAIN, MX = (
    sorted((f, name) for f in families for row in ROWS[f] if scale in row.scales and row.m[1] for name in row.formats)
    for scale, families in (("fp32", (*FAMILIES, GEMM)), ("e8m0", FAMILIES))
)
CONTRACTS = {"skinny_gemm": "exact", "split_int8_gemv": "split-int8 (3 limbs)", GEMM: "exact", ROUNDED: "weights rounded once"}
DTYPES = (torch.bfloat16, torch.float16)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
]


def product(family, x, codes, scheme, scale, zero=None, outer=None):
    """(what the kernel makes of x on the device, the weights in float64 on the CPU)."""
    name = scheme.scale + ("+outer" if scheme.outer else "")
    row = next(row for row in ROWS[family] if scheme.format in row.formats and name in row.scales)
    if (reason := row.available()) is not None:
        if shutil.which("nvcc") is None:
            pytest.skip(f"no nvcc to build it with, and {row.name} is unavailable: {reason}")
        pytest.fail(f"nvcc is here, and {row.name} is unavailable: {reason}")
    if row.arch > 10 * torch.cuda.get_device_capability()[0]:
        pytest.skip(f"{row.name} is for Hopper alone")
    parts = LAYOUTS["mma_fragment"].arrange(Parts(pack(codes, scheme.bits), scale, zero), scheme, codes.shape[1])
    there = [None if part is None else part.cuda() for part in (*parts, outer)]
    y = torch.cat([row.run(some.cuda(), *there, None, scheme).cpu() for some in x.split(row.m[1] or len(x))])
    return y.double(), to_values(codes, scheme, Scales(scale, zero, outer), torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("family", "name"), PLAIN)
def test_every_code_in_every_column_of_a_unit(family, name, dtype):
    values = FORMATS[name].values
    finite = torch.tensor([code for code, value in enumerate(values) if math.isfinite(value)], dtype=torch.uint8)
    n, k = 32, 512
    codes = finite[(7 * torch.arange(n)[:, None] + torch.arange(k)) % len(finite)]
    unsigned = name.startswith("uint")
    scheme = Scheme(name, -1, "int" if unsigned else "none", "fp32")
    for zero in (0, 1, len(values) - 1) if unsigned else (None,):
        zeros = None if zero is None else torch.full((n, 1), zero, dtype=torch.uint8)
        y, weights = product(family, torch.eye(k, dtype=dtype), codes, scheme, torch.ones(n, 1), zeros)
        assert torch.equal(y.T, weights.to(dtype).double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["fp8_e4m3fn", "fp8_e5m2"])
@pytest.mark.parametrize("scale", ["fp32", "e8m0"])
def test_codes_that_are_no_finite_number(name, dtype, scale):
    codes = torch.zeros(256, 64, dtype=torch.uint8)
    codes[:, 5] = torch.arange(256)
    x = torch.zeros(2, 64, dtype=dtype)
    x[0, 5], x[1, 5] = 1, -1
    scheme = Scheme(name, 32, "none", scale)
    stored = torch.ones(256, 2) if scale == "fp32" else torch.full((256, 2), 127, dtype=torch.uint8)
    y, weights = product("skinny_gemm", x, codes, scheme, stored)
    expected = weights[:, 5].to(dtype).double()
    assert torch.equal(y.nan_to_num(nan=-1e9), torch.stack((expected, -expected)).nan_to_num(nan=-1e9))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("family", "name"), MX)
@pytest.mark.parametrize("exponents", [(100, 127), (0, 12), (100, 140), (0, 160)])
def test_scales_that_16_bits_cannot_take_in(family, name, dtype, exponents):
    torch.manual_seed(0)
    scheme = Scheme(name, 32, "none", "e8m0")
    finite = torch.tensor([c for c, value in enumerate(FORMATS[name].values) if math.isfinite(value)], dtype=torch.uint8)
    codes, scale = finite[torch.randint(len(finite), (40, 1056))], torch.randint(*exponents, (40, 33), dtype=torch.uint8)
    x = torch.randn(3, 1056).to(dtype)
    y, weights = product(family, x, codes, scheme, scale)
    exact = x.double() @ weights.T
    bound = linear_bound(CONTRACTS[family], x.double(), weights, None, exact, dtype)
    largest = torch.finfo(dtype).max
    fits = exact.abs() < 0.99 * largest
    assert bool(((y - exact).abs() <= bound)[fits].all())
    assert bool((y[~fits].abs() >= 0.98 * largest).all())


MULTIPLIED = [(ROUNDED, "bf16", torch.bfloat16), (ROUNDED, "fp16", torch.float16), (GEMM, "e8m0", torch.bfloat16)]


@pytest.mark.parametrize("name", ["fp4_e2m1", "fp6_e2m3", "fp6_e3m2", "fp8_e4m3fn", "fp8_e5m2"])
@pytest.mark.parametrize(("family", "kind", "dtype"), MULTIPLIED)
@pytest.mark.parametrize("m", [20, 70, 200])
def test_scales_of_many_sizes_that_multiply_operands(name, family, kind, dtype, m):
    """Numbers reach operands as small powers of two, and large scales would overflow together with what undoes that."""
    torch.manual_seed(0)
    scheme = Scheme(name, 32, "none", kind)
    n, k = 200, 2080
    finite = torch.tensor([c for c, value in enumerate(FORMATS[name].values) if math.isfinite(value)], dtype=torch.uint8)
    codes, power = finite[torch.randint(len(finite), (n, k))], torch.randint(-9, 0, (n, k // 32))
    power[16:32] += 12
    power[40, 20] = 12
    power[48:64] = torch.arange(-1, 4).repeat(13)
    power[150:152] += 24
    power[198, -1] = 17
    if dtype is torch.float16:  # weights have to fit in it
        power.clamp_(max=math.floor(math.log2(30000 / FORMATS[name].max)))
    if kind == "e8m0":
        scale = (power + 127).to(torch.uint8)
    else:
        scale = torch.exp2(power.double()).mul(torch.rand(n, k // 32) + 1).to(scheme.scale_dtype)
    x = (torch.randn(m, k) / 64 / FORMATS[name].max).to(dtype)
    y, weights = product(family, x, codes, scheme, scale)
    exact = x.double() @ weights.T
    assert bool(((y - exact).abs() <= linear_bound(CONTRACTS[family], x.double(), weights, None, exact, dtype)).all())


@pytest.mark.parametrize("name", ["fp4_e2m1", "fp6_e2m3", "fp6_e3m2", "fp8_e4m3fn", "fp8_e5m2"])
@pytest.mark.parametrize("m", [1, 30, 128, 300])
def test_large_and_small_scales_leave_other_tiles_their_bits(name, m):
    torch.manual_seed(0)
    scheme = Scheme(name, 32, "none", "e8m0")
    finite = torch.tensor([c for c, value in enumerate(FORMATS[name].values) if math.isfinite(value)], dtype=torch.uint8)
    codes, scale = finite[torch.randint(len(finite), (136, 1000))], torch.randint(110, 128, (136, 32), dtype=torch.uint8)
    x = (torch.randn(m, 1000) / 64 / FORMATS[name].max).to(torch.bfloat16)
    plain, _ = product(GEMM, x, codes, scheme, scale)
    for first, last, low, high in ((17, 18, 128, 160), (135, 136, 128, 160), (64, 80, 130, 145), (40, 48, 20, 40)):
        other = scale.clone()
        other[first:last] = torch.randint(low, high, (last - first, 32), dtype=torch.uint8)
        y, weights = product(GEMM, x, codes, scheme, other)
        exact = x.double() @ weights.T
        assert bool(((y - exact).abs() <= linear_bound("exact", x.double(), weights, None, exact, torch.bfloat16)).all())
        apart = torch.ones(136, dtype=torch.bool)
        apart[first // 16 * 16 : (last + 15) // 16 * 16] = False
        assert torch.equal(y[:, apart], plain[:, apart])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("family", [*FAMILIES, GEMM])
def test_scales_of_nvfp4_that_are_subnormal_or_negative(family, dtype, outer):
    torch.manual_seed(0)
    scheme = Scheme("fp4_e2m1", 16, "none", "fp8_e4m3fn", outer)
    codes = torch.randint(16, (40, 1040), dtype=torch.uint8)
    scale = torch.randint(256, (40, 65), dtype=torch.uint8)
    scale[scale % 128 == 127] = 0
    scale[:8] = scale[:8] % 8
    x = (torch.randn(3, 1040) / 64).to(dtype)
    factor = torch.tensor(0.01) if outer else None
    y, weights = product(family, x, codes, scheme, scale, None, factor)
    exact = x.double() @ weights.T
    assert bool(((y - exact).abs() <= linear_bound(CONTRACTS[family], x.double(), weights, None, exact, dtype)).all())


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(
    "name",
    [
        "fp4_e2m1:g64:bf16",
        "fp4_e2m1:g32:e8m0",
        "fp4_e2m1:g16:fp8_e4m3fn:outer",
        "mxint8:g32:e8m0",
        *(f"int{bits}:g{32 << bits % 3}:bf16" for bits in (2, 3, 4, 5, 6, 8)),
    ],
)
def test_digits_of_x_that_is_not_finite(name, value):
    torch.manual_seed(0)
    scheme = Scheme.parse(name)
    codes, groups = torch.randint(1 << scheme.bits, (40, 1000), dtype=torch.uint8), (40, scheme.groups(1000))
    scale = torch.rand(groups).to(torch.bfloat16) if scheme.scale == "bf16" else torch.randint(1, 126, groups, dtype=torch.uint8)
    x = torch.randn(2, 1000).to(torch.bfloat16)
    parts = codes, scheme, scale, None, torch.tensor(0.5) if scheme.outer else None
    plain, _ = product("split_int8_gemv", x, *parts)
    x[1, 700] = value
    y, weights = product("split_int8_gemv", x, *parts)
    exact = x.double() @ weights.T
    assert torch.equal(y[0], plain[0])
    assert torch.equal(y[1].isnan(), exact[1].isnan())
    assert torch.equal(y[1].sign().nan_to_num(), exact[1].sign().nan_to_num())
    assert not y[1].isfinite().any()


@pytest.mark.parametrize("family", [*FAMILIES, GEMM])
def test_a_group_whose_scale_is_nan_is_nan(family):
    for name, nan in (("fp4_e2m1:g32:e8m0", 255), ("mxint8:g32:e8m0", 255), ("fp4_e2m1:g16:fp8_e4m3fn", 127)):
        scheme = Scheme.parse(name)
        scale = torch.full((33, scheme.groups(64)), 56, dtype=torch.uint8)
        scale[3, 1] = nan
        y, _ = product(family, torch.ones(1, 64, dtype=torch.bfloat16), torch.ones(33, 64, dtype=torch.uint8), scheme, scale)
        assert torch.equal(y[0].isnan(), torch.arange(33) == 3)


@pytest.mark.parametrize(
    ("family", "name", "m"),
    [
        *(("skinny_gemm", name, m) for name in ("nf4:g64:bf16", "fp6_e3m2:g32:e8m0", "fp4_e2m1:g16:fp8_e4m3fn") for m in (8, 16)),
        *(("split_int8_gemv", name, 1) for name in ("fp4_e2m1:g16:fp8_e4m3fn", "fp4_e2m1:g32:e8m0", "fp4_e2m1:g64:bf16")),
    ],
)
def test_the_same_bits_in_every_run(family, name, m):
    torch.manual_seed(0)
    scheme = Scheme.parse(name)
    codes = torch.randint(1 << scheme.bits, (2100, 9000), dtype=torch.uint8)
    groups = (2100, scheme.groups(9000))
    scale = (
        torch.rand(groups).to(torch.bfloat16) if scheme.scale == "bf16" else torch.randint(100, 120, groups, dtype=torch.uint8)
    )
    x = torch.randn(m, 9000).to(torch.bfloat16)
    first, _ = product(family, x, codes, scheme, scale)
    for _ in range(5):
        assert torch.equal(product(family, x, codes, scheme, scale)[0], first)
