"""8-bit x times 8-bit weights on a CUDA device: codes to the bit, sums to the last rounding, and x of every kind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lowbit
from lowbit import QTensor, Scheme, quantize_
from lowbit.grid import Scales, to_codes, to_values
from lowbit.scales import choose
from lowbit_kernels import cuda
from tests.support.models import mlp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
]
INT8 = Scheme.parse("int8:row:fp32")
FP8 = Scheme.parse("fp8_e4m3fn:row:fp32")


@pytest.fixture(autouse=True, scope="module")
def _library() -> None:
    """Loaded, so that its operators can be called by name; where there is a GPU, its absence is a failure."""
    assert cuda.available() is None, cuda.available()


def weight(scheme: Scheme, n: int, k: int) -> QTensor:
    return QTensor.quantize(torch.randn(n, k, generator=torch.Generator().manual_seed(n + k)), scheme)


def product(x: Tensor, w: QTensor, activation: Scheme, bias: Tensor | None = None, static: Tensor | None = None) -> Tensor:
    w = w.cuda()
    parts = (w.packed, w.scale, w.zero_point, w.outer)
    with lowbit.strict(f"cuda_w{4 if w.scheme.format == 'int4' else 8}a8_gemm_{w.scheme.format}"):
        return torch.ops.lowbit.quantized_linear(
            x.cuda(), *parts, None if bias is None else bias.cuda(), str(w.scheme), "canonical", str(activation), static
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("m", [1, 2, 7, 8, 9, 16, 17, 63, 64, 65, 127, 128, 129, 300])
def test_int8_differs_from_integers_by_roundings_alone(m: int, dtype: torch.dtype) -> None:
    n, k = 130 + m % 3, 1000 + m
    w, x = weight(INT8, n, k), torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype)
    x[m // 2, 5] = 1000
    y = product(x, w, INT8).cpu().double()
    chosen = choose(x.float(), INT8, "absmax")
    codes = to_codes(x.float(), INT8, chosen).view(torch.int8).long()
    sums = codes @ w.packed.view(torch.int8).long().T
    exact = sums.double() * chosen.scale.double() * w.scale.double().T
    # Four roundings in fp32, and one to the dtype of y.
    assert ((y - exact).abs() <= (torch.finfo(dtype).eps / 2 + 4 * 2.0**-24) * 1.001 * exact.abs() + 2.0**-25).all()


@pytest.mark.parametrize("activation", [INT8, FP8], ids=str)
@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1.0, 1e30, 2e38])
@pytest.mark.parametrize("static", [False, True])
def test_codes_of_x_are_those_of_the_reference(activation: Scheme, scale: float, static: bool) -> None:
    """Multiplied by the unit matrix, every code of x comes out times its scale."""
    k = 300
    x = torch.randn(40, k, generator=torch.Generator().manual_seed(0)).clamp(-1.5, 1.5) * scale
    x[3], x[5, :7] = 0, -0.0
    given = torch.tensor(scale / 100, dtype=torch.float32) if static else None
    unit = QTensor.quantize(torch.eye(k), activation)
    y = product(x, unit, activation, static=None if given is None else given.cuda()).cpu()
    chosen = choose(x, activation, "absmax") if given is None else Scales(given.expand(40, 1))
    values = to_values(to_codes(x, activation, chosen), activation, chosen)
    # The unit's code times its scale is 1 to one rounding, and there are three more.
    assert ((y - values).abs() <= 2.0**-21 * values.abs() + 2.0**-140).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("one_kernel", [False, True])
def test_every_quotient_of_two_numbers_of_x_is_rounded_as_by_a_division(dtype: torch.dtype, one_kernel: bool) -> None:
    """All magnitudes up to a row's largest that are not too small for its scale, for each mantissa that the largest may have."""
    bits = 8 if dtype is torch.bfloat16 else 11
    largest = torch.arange(2 ** (bits - 1), 2**bits, dtype=torch.float32)
    numbers = torch.cat([largest * 2.0**-shift for shift in range(10)])
    columns = 64
    unit = QTensor.quantize(torch.eye(columns), INT8).cuda()
    for few in numbers.split(columns - 1):
        x = torch.cat([largest[:, None], few.expand(len(largest), -1)], 1)
        x = torch.where(x <= largest[:, None], x, 0.0)
        x = torch.nn.functional.pad(x, (0, columns - x.shape[1])).to(dtype)
        codes = to_codes(x.float(), INT8, choose(x.float(), INT8, "absmax")).view(torch.int8)
        for rows, wanted in zip(x.split(128), codes.split(128), strict=True):
            y = by_codes(rows.cuda(), unit, int(one_kernel)).cpu().double()
            assert torch.equal((y / (rows[:, :1].double() / 127)).round(), wanted.double())


@pytest.mark.parametrize("activation", [INT8, FP8], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("static", [False, True])
def test_x_that_is_not_finite(activation: Scheme, value: float, static: bool) -> None:
    """The row is NaN, under a scale of its own and under a fixed one."""
    w, x = weight(activation, 40, 500), torch.randn(5, 500, generator=torch.Generator().manual_seed(0))
    given = torch.tensor(0.05, device="cuda") if static else None
    plain = product(x, w, activation, static=given)
    x[2, 100] = value
    y = product(x, w, activation, static=given)
    with lowbit.strict("reference_quantized_linear"):
        parts = tuple(part.cuda() if part is not None else None for part in (w.packed, w.scale, w.zero_point, w.outer))
        wanted = torch.ops.lowbit.quantized_linear(x.cuda(), *parts, None, str(w.scheme), "canonical", str(activation), given)
    assert torch.equal(y[[0, 1, 3, 4]], plain[[0, 1, 3, 4]])
    assert torch.equal(y.isnan(), wanted.isnan())
    assert bool(y[2].isnan().all())
    torch.testing.assert_close(y, wanted, rtol=1e-2, atol=1e-2, equal_nan=True)


@pytest.mark.parametrize("scheme", ["int8:row:bf16", "fp8_e4m3fn:row:bf16", "int4:g32:bf16"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 2100, 3000), (64, 2100, 3000), (100, 300, 9000), (300, 2104, 3008)])
def test_the_same_bits_in_every_run(scheme: str, m: int, n: int, k: int) -> None:
    w = weight(Scheme.parse(scheme), n, k).cuda()
    activation = FP8 if w.scheme.format == FP8.format else INT8
    x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
    y = product(x, w, activation)
    assert all(torch.equal(product(x, w, activation), y) for _ in range(100))


@pytest.mark.parametrize("group", ["g32", "g64", "g128", "g256", "row"])
@pytest.mark.parametrize("m", [1, 17, 65, 130, 300])
def test_int4_differs_from_integers_by_roundings_alone(m: int, group: str) -> None:
    n, k = 130 + m % 3, 1000 + m
    w, x = weight(Scheme.parse(f"int4:{group}:bf16"), n, k), torch.randn(m, k, generator=torch.Generator().manual_seed(m))
    chosen = choose(x, INT8, "absmax")
    values = to_values(to_codes(x, INT8, chosen), INT8, chosen, torch.float64)
    exact, sums = values @ w.dequantize(torch.float64).T, values.abs() @ w.dequantize(torch.float64).abs().T
    # A rounding for each group's sum, product and addition, and three at the end.
    assert ((product(x, w, INT8).cpu().double() - exact).abs() <= (k / 32 + 6) * 2.0**-24 * sums).all()


def test_a_row_does_not_depend_on_the_others() -> None:
    w, x = weight(INT8, 300, 2000), torch.randn(300, 2000, dtype=torch.bfloat16)
    y = product(x, w, INT8)
    for m in (1, 16, 64, 128):
        assert torch.equal(product(x[:m], w, INT8), y[:m])


def test_sums_of_many_columns_do_not_overflow() -> None:
    k = (1 << 18) + 100
    w = QTensor.quantize(torch.ones(3, k), INT8)
    y = product(torch.ones(2, k), w, INT8)
    torch.testing.assert_close(y.cpu(), torch.full((2, 3), float(k)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("activation", [INT8, FP8], ids=str)
def test_weights_that_lie_anywhere(activation: Scheme) -> None:
    """Rows on one byte, a slice of rows, and a bias."""
    whole, x = weight(activation, 81, 333), torch.randn(20, 333)
    bias = torch.randn(40)
    w = QTensor.quantize(torch.randn(81, 333, generator=torch.Generator().manual_seed(414)), activation)
    y = product(x, w, activation)
    parts = (whole.packed.cuda()[1::2], whole.scale.cuda()[1::2], None, None)
    z = torch.ops.lowbit.quantized_linear(x.cuda(), *parts, bias.cuda(), str(activation), "canonical", str(activation), None)
    torch.testing.assert_close(z, product(x, whole, activation)[:, 1::2] + bias.cuda(), rtol=1e-5, atol=1e-4)
    assert y.shape == (20, 81)


def test_layers_in_a_graph_follow_one_another() -> None:
    model = mlp(torch.bfloat16).cuda()
    quantize_(model, "int8_dynamic_activation_int8_weight")
    x = torch.randn(70, 40, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        with lowbit.trace_kernels() as trace:
            model(x)
        assert set(trace.kernels()) == {"cuda_w8a8_gemm_int8"}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        for _ in range(20):
            x.copy_(torch.randn_like(x))
            graph.replay()
            assert torch.equal(y, model(x))


def test_what_does_not_fit_raises_before_anything_runs() -> None:
    w = weight(INT8, 8, 64).cuda()
    op = torch.ops.lowbit_cuda.w8a8_linear
    x = torch.randn(2, 64, device="cuda")
    lowbit.explain(w)  # loads the library
    with pytest.raises(RuntimeError, match="packed must be uint8"):
        op(x, w.packed[:, :60], w.scale, None, None, "int8")
    with pytest.raises(RuntimeError, match="scale must be on the device of x"):
        op(x, w.packed, w.scale.cpu(), None, None, "int8")
    with pytest.raises(RuntimeError, match="bias must have the dtype"):
        op(x, w.packed, w.scale, torch.zeros(8, dtype=torch.float16, device="cuda"), None, "int8")
    with pytest.raises(RuntimeError, match="input_scale must be one float32"):
        op(x, w.packed, w.scale, None, torch.ones(2, device="cuda"), "int8")


def by_codes(
    x: Tensor, w: QTensor, fused: int, bias: Tensor | None = None, static: Tensor | None = None, blocks: int = 0
) -> Tensor:
    """In two kernels (0) or one: whose clusters of up to 8 blocks split the columns, or whose blocks have 16, 32 or 64 whole rows
    of x and copy W together, ``blocks`` of them."""
    more = {"cluster_size": blocks, "fused": fused}
    return torch.ops.lowbit_cuda.w8a8_linear(x, w.packed, w.scale, bias, static, w.scheme.format, -1, **more)


def ways_of_one_kernel(m: int, k: int) -> list[tuple[int, int]]:
    """What :func:`by_codes` takes for such x, beside two kernels."""
    ways = [(blocks, 0) for blocks in (1, 2, 4, 8)] if m <= 64 else []
    tiles = [rows for rows, most in ((16, 2048), (32, 2048), (64, 1024)) if 384 < k <= most]
    return ways + [(rows, blocks) for rows in tiles for blocks in (1, 2, 8)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        *((1, 300, 8), (3, 128, 1000), (8, 2000, 2048), (9, 130, 3000), (16, 1000, 4096), (20, 257, 600), (64, 1024, 1024)),
        *((100, 700, 1000), (300, 1024, 2048), (600, 130, 520)),
    ],
)
def test_one_kernel_gives_the_bits_of_two(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    w, bias = weight(INT8, n, k).cuda(), torch.randn(n, dtype=dtype, device="cuda")
    usual = torch.randn(m, k, dtype=dtype, device="cuda")
    halves = torch.randint(-253, 254, (m, k), device="cuda").to(dtype) / 2  # codes in the middle between two integers
    halves[:, 0] = 127
    tiny = usual * (2.0**-120 if dtype is torch.bfloat16 else 2.0**-20)
    broken = usual.clone()
    broken[m // 2, k // 2], broken[0] = float("inf"), 0
    for x in (usual, halves, tiny, broken):
        for static in (None, torch.tensor(0.01, device="cuda")):
            wanted = by_codes(x, w, 0, bias, static)
            for fused, blocks in ways_of_one_kernel(m, k):
                found = by_codes(x, w, fused, bias, static, blocks)
                assert torch.equal(found.nan_to_num(7), wanted.nan_to_num(7)), (fused, blocks)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 300, 2000), (16, 1000, 4096), (150, 1000, 1024)])
def test_e4m3_in_one_kernel_differs_by_the_order_of_sums(m: int, n: int, k: int) -> None:
    w, x = weight(FP8, n, k).cuda(), torch.randn(m, k, dtype=torch.float16, device="cuda")
    wanted, sums = by_codes(x, w, 0), x.double().abs() @ w.dequantize(torch.float64).abs().T
    for fused, blocks in ways_of_one_kernel(m, k):
        error = (by_codes(x, w, fused, blocks=blocks).double() - wanted.double()).abs()
        assert (error <= 2.0**-10 * wanted.double().abs() + (k / 128 + 4) * 2.0**-23 * sums).all()


def test_one_kernel_does_not_start_before_its_x_is_there() -> None:
    """Layers of small x in a graph, where kernels start early, against those that run one by one."""
    layers = [weight(INT8, 1024, 1024).cuda() for _ in range(6)]

    def sweep(x: Tensor) -> Tensor:
        for w in layers:
            x = by_codes(x, w, -1)
        return x

    for m in (1, 16, 40, 100, 200, 1000):
        x = torch.randn(m, 1024, dtype=torch.bfloat16, device="cuda")
        sweep(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = sweep(x)
        for _ in range(20):
            x.copy_(torch.randn_like(x))
            graph.replay()
            assert torch.equal(y, sweep(x))
