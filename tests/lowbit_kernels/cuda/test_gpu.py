"""What only a CUDA device can show: the same bytes on it as on a CPU, CUDA graphs, moves, and quantizing there."""

from __future__ import annotations

import copy

import pytest
import torch

import lowbit
from lowbit import SCHEMES, QTensor, quantize_
from lowbit_kernels import cuda, reference, registry
from lowbit_kernels import mma_fragment as lowbit_mma_fragment
from tests.support.accuracy import linear_bound
from tests.support.models import mlp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
]


@pytest.mark.parametrize("name", SCHEMES)
def test_a_gpu_quantizes_and_dequantizes_to_the_bytes_of_a_cpu(name):
    torch.manual_seed(0)
    w = torch.randn(67, 301)
    w[3] = 0
    w[5, 7] = 1e30
    here, there = QTensor.quantize(w, name), QTensor.quantize(w.cuda(), name)
    assert torch.equal(here, there.cpu())
    assert torch.equal(here.dequantize(), there.dequantize().cpu())
    assert torch.equal(here.cuda().dequantize(torch.bfloat16).cpu(), here.dequantize(torch.bfloat16))


@pytest.mark.parametrize("recipe", ["int8", "int4", "int3", "mxfp4", "nvfp4", "int8_dynamic_activation_int8_weight"])
def test_a_cuda_graph_replays_a_quantized_model(recipe):
    model = mlp(torch.bfloat16).cuda()
    quantize_(model, recipe)
    x = torch.randn(4, 40, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        for _ in range(3):
            model(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, model(x))


def test_layers_are_quantized_on_the_device_and_come_back():
    model = mlp()
    there = copy.deepcopy(model)
    quantize_(model, "int4")
    quantize_(there, "int4", device="cuda")
    assert there[0].weight.packed.device.type == "cpu"
    assert torch.equal(there[0].weight, model[0].weight)
    kept = mlp()
    quantize_(kept, "int4", device="cuda", keep_on_device=True)
    assert kept[0].weight.packed.device.type == "cuda"


def test_pinned_memory_and_moves_keep_every_byte():
    q = QTensor.quantize(torch.randn(32, 64), "int4")
    pinned = q.pin_memory()
    assert pinned.is_pinned()
    assert torch.equal(pinned.to("cuda", non_blocking=True).cpu(), q)


def test_the_plan_for_a_device_names_the_kernels_that_run_there():
    model = mlp(torch.bfloat16)
    plan = lowbit.plan(model, "int4", device="cuda")
    model = model.cuda()
    quantize_(model, "int4")
    for layer in plan.quantized:
        module = model.get_submodule(layer.name)
        for m, kernel in layer.kernels.items():
            with lowbit.trace_kernels() as trace:
                module(torch.randn(m, module.in_features, dtype=torch.bfloat16, device="cuda"))
            assert list(trace.kernels()) == [kernel]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own modules, as Inductor imports them
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # torch opens its pool of graphs with one
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_torch_compile_on_the_device(mode):
    model = mlp(torch.bfloat16).cuda()
    quantize_(model, "int4")
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    x = torch.randn(1, 40, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        for _ in range(3):
            y = compiled(x).clone()
        torch.testing.assert_close(y, model(x), rtol=2e-2, atol=2e-2)


def tiles(scheme: str, n: int, k: int) -> QTensor:
    torch.manual_seed(0)
    return QTensor.quantize(torch.randn(n, k, dtype=torch.bfloat16, device="cuda") / k**0.5, scheme).to_layout("mma_fragment")


def row_of_tiles(m: int) -> str:
    """The row that multiplies m rows of x by integers in mma_fragment on this device; the last ones are Hopper's."""
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    if m > 16 and not is_hopper:
        pytest.skip("no row for many rows of x from tiles on this device")
    return next(name for most, name in ROWS_OF_TILES if m <= most or (not is_hopper and name == "cuda_skinny_gemm"))


ROWS_OF_TILES = (
    (2, "cuda_split_int8_gemv_int"),
    (8, "cuda_skinny_gemm"),
    (64, "cuda_mixed_gemm"),
    (10**9, "cuda_mixed_gemm_rounded"),
)


@pytest.mark.parametrize("scheme", ["int4", "int3_sym", "uint5:row:zint:bf16", "int8", "fp8", "mxfp6", "mxint8"])
@pytest.mark.parametrize("k", [256, 392])
def test_parts_of_a_weight_are_dequantized_to_the_same_numbers(scheme, k, monkeypatch):
    """Rows of the identity give every weight as it is, whatever part of the rows of W it comes with."""
    monkeypatch.setattr("lowbit_kernels.cuda._CHUNK", 2 * k * 128)
    w, x = tiles(scheme, 300, k), torch.eye(k, dtype=torch.bfloat16, device="cuda")
    row = {"mxfp6": "cuda_dequant_gemm_mx", "mxint8": "cuda_dequant_gemm_mx"}.get(scheme, "cuda_dequant_gemm")
    bias = torch.zeros(300, dtype=torch.bfloat16, device="cuda")
    expected = w.dequantize(torch.bfloat16)
    with lowbit.strict(row):
        assert torch.equal(torch.nn.functional.linear(x, w).T, expected)
        assert torch.equal(torch.nn.functional.linear(x, w, bias).T, expected)


@pytest.mark.parametrize("scheme", ["int4", "int4_sym", "int8", "int3", "int6", "int5_g32"])
@pytest.mark.parametrize("m", [1, 2, 3, 8, 9, 64, 300])
def test_tiles_give_the_same_bits_in_every_run(scheme, m):
    row = row_of_tiles(m)
    w = tiles(scheme, 2100, 3000)
    x = torch.randn(m, 3000, dtype=torch.bfloat16, device="cuda")
    with lowbit.strict(row):
        y = torch.nn.functional.linear(x, w)
        assert all(torch.equal(torch.nn.functional.linear(x, w), y) for _ in range(100))


@pytest.mark.parametrize(
    "scheme",
    [
        "int4",
        "int4_g32",
        "uint4:row:zint:bf16",
        "int8",
        "int8_g64",
        "int3",
        "int5",
        "int6_sym",
        "mxfp4",
        "nvfp4",
        "fp4",
        "mxint8",
    ],
)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("m", [2, 3, 20, 70])
def test_tiles_take_x_that_is_not_finite(scheme, value, m):
    w = tiles(scheme, 40, 1000)
    x = torch.randn(m, 1000, dtype=torch.float16, device="cuda")
    plain = torch.nn.functional.linear(x, w)
    x[1, 700] = value
    y, exact = torch.nn.functional.linear(x, w), x.double() @ w.dequantize(torch.float64).T
    assert torch.equal(y[::2], plain[::2])
    assert torch.equal(y[1].isnan(), exact[1].isnan())
    assert torch.equal(y[1].sign().nan_to_num(), exact[1].sign().nan_to_num())
    assert not y[1].isfinite().any()


@pytest.mark.parametrize("scheme", ["int4", "int8", "fp8", "nf4", "nvfp4"])
@pytest.mark.parametrize("m", [17, 33, 70, 130, 144, 300])
def test_what_lies_beyond_x_in_shared_memory_does_not_matter(scheme, m):
    """Tiles that x does not fill leave some rows there as they were: NaN of the product before."""
    w = tiles(scheme, 300, 1000)
    x = torch.randn(m, 1000, dtype=torch.bfloat16, device="cuda")
    first = torch.nn.functional.linear(x, w)
    assert first.isfinite().all()
    for rows in (64, 512):
        assert torch.nn.functional.linear(x.new_full((rows, 1000), float("nan")), w).isnan().all()
        assert torch.equal(torch.nn.functional.linear(x, w), first)


@pytest.mark.parametrize("scheme", ["int4", "int8", "mxfp4", "nf4"])
@pytest.mark.parametrize(("m", "columns"), [(9, 16), (30, 32), (60, 64), (128, 128), (300, 256)])
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("shared", [1, 2])
def test_clusters_that_share_columns_of_a_weight(scheme, m, columns, parts, shared):
    """Neither waits for the other, whatever lies in the memory where they meet; the last of them makes the same bits always."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no clusters on this device")
    if (reason := cuda.available()) is not None:
        pytest.skip(reason)
    w = tiles(scheme, 1100, 4000)
    x = torch.randn(m, 4000, dtype=torch.bfloat16, device="cuda")
    how = w.scheme.format, w.scheme.scale, w.scheme.group_size, columns, parts, 0, shared
    multiply = torch.ops.lowbit_cuda.mixed_gemm.default

    def product():
        return multiply(x, w.packed, w.scale, w.zero_point, w.outer, None, *how)

    weights = w.dequantize(torch.float64)
    exact = x.double() @ weights.T
    contract = "exact" if m <= 64 or scheme == "mxfp4" else "weights rounded once"
    first = product()
    assert bool(((first - exact).abs() <= linear_bound(contract, x.double(), weights, None, exact, x.dtype)).all())
    for byte in (0, 0x5A, 0xFF):
        poison = [torch.full((size,), byte, dtype=torch.uint8, device="cuda") for size in (*[1 << 18] * 64, 64 << 20)]
        del poison  # what is asked for next lies there
        assert torch.equal(product(), first)


@pytest.mark.parametrize("scheme", ["int4", "int8", "mxfp4"])
@pytest.mark.parametrize("column_warps", [1, 4, 7, 16])
@pytest.mark.parametrize("tile_warps", [1, 2, 4])
@pytest.mark.parametrize("stages", [0, 6])
def test_warps_that_share_columns_and_tiles(scheme, column_warps, tile_warps, stages):
    """However far a warp goes on from one of its units to the next, it waits for the copy of that one."""
    if (reason := cuda.available()) is not None:
        pytest.skip(reason)
    tiles_of_block = 5
    n = 16 * tiles_of_block * torch.cuda.get_device_properties(0).multi_processor_count
    w = tiles(scheme, n, 8192)
    x = torch.randn(1, 8192, dtype=torch.bfloat16, device="cuda")
    how = cuda.kind_of(w.scheme), column_warps, tile_warps, stages
    y = torch.ops.lowbit_cuda.split_int8_gemv(x, w.packed, w.scale, w.zero_point, w.outer, None, *how)
    weights = w.dequantize(torch.float64)
    exact = x.double() @ weights.T
    assert bool(((y - exact).abs() <= linear_bound("split-int8 (3 limbs)", x.double(), weights, None, exact, x.dtype)).all())


@pytest.mark.parametrize("scheme", ["int4", "int4_sym", "int3", "int8"])
@pytest.mark.parametrize("k", [8704, 28672, 66000])
@pytest.mark.parametrize("m", [1, 2])
def test_rows_of_which_the_ring_holds_a_part(scheme, k, m):
    """More copies than places in shared memory, warps with more units than others, and more of x than fits at a time."""
    w = tiles(scheme, 300, k)
    x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
    with lowbit.strict(row_of_tiles(m)):
        y = torch.nn.functional.linear(x, w).double()
    weights = w.dequantize(torch.float64)
    exact = x.double() @ weights.T
    assert bool(((y - exact).abs() <= linear_bound("split-int8 (3 limbs)", x.double(), weights, None, exact, x.dtype)).all())


@pytest.mark.parametrize("scheme", ["int4", "int8", "mxfp4"])
@pytest.mark.parametrize("m", [1, 5, 16, 100])
def test_layers_in_tiles_follow_one_another_in_a_graph(scheme, m):
    """Each kernel of the graph starts before the one that writes its x has ended."""
    layers = [tiles(scheme, 1024, 1024) for _ in range(30)]
    x = torch.randn(m, 1024, dtype=torch.bfloat16, device="cuda")

    def stack():
        y = x
        for layer in layers:
            y = torch.nn.functional.linear(y, layer)
        return y

    eager = stack()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = stack()
    for _ in range(20):
        y.zero_()
        graph.replay()
        assert torch.equal(y, eager)


@pytest.mark.parametrize("m", [1, 4, 40, 300])
def test_two_streams_do_not_disturb_each_other(m):
    layers = [tiles("int4", 3000, 2000), tiles("int6", 2500, 2000)]
    xs = [torch.randn(m, 2000, dtype=torch.bfloat16, device="cuda") for _ in layers]
    alone = [torch.nn.functional.linear(x, layer) for x, layer in zip(xs, layers, strict=True)]
    streams = [torch.cuda.Stream() for _ in layers]
    torch.cuda.synchronize()
    together = [[], []]
    for _ in range(20):
        for stream, x, layer, found in zip(streams, xs, layers, together, strict=True):
            with torch.cuda.stream(stream):
                found.append(torch.nn.functional.linear(x, layer))
    torch.cuda.synchronize()
    assert all(torch.equal(y, alone[i]) for i in range(2) for y in together[i])


@pytest.mark.slow
@pytest.mark.parametrize("m", [1, 4, 40, 300])
def test_a_weight_of_more_than_two_to_the_31(m):
    n, k = 70016, 32768
    half = QTensor.quantize(torch.randn(n // 2, k, dtype=torch.bfloat16, device="cuda") / k**0.5, "int4")
    w = torch.cat([half, half]).to_layout("mma_fragment")  # the second half repeats the first, beyond 2^31 weights
    x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
    with registry.trace() as trace:
        y = torch.nn.functional.linear(x, w).cpu().double()
    (ran,) = trace.counts
    for first in (0, n // 4, n // 2 - 40):  # tiles add up in an order that depends on where they lie: to the bound, not the bit
        rows, wide = half[first : first + 40].dequantize(torch.float64).cpu(), x.cpu().double()
        exact = wide @ rows.T
        bound = linear_bound(ran.contract, wide, rows, None, exact, x.dtype)
        for start in (first, n // 2 + first):
            assert ((y[:, start : start + 40] - exact).abs() <= bound).all()
    assert y.isfinite().all()


# ---- arriving --------------------------------------------------------------------------------------------------


@pytest.fixture
def every_m_reads_tiles(monkeypatch):
    """Rows that read tiles for every M on this device, whichever it has of its own."""

    def linear_from_tiles(x, packed, scale, zero_point, outer, bias, scheme):
        parts = lowbit_mma_fragment.restore(packed, scale, zero_point, scheme, x.shape[-1])
        return reference.linear(x, *parts, outer, bias, scheme)

    cuda = frozenset({"cuda"})
    row = registry.Kernel(
        "any_from_tiles", "linear", linear_from_tiles, "weights rounded once", devices=cuda, layout="mma_fragment"
    )
    real = registry.kernels()
    monkeypatch.setattr(registry, "kernels", lambda: (*real, row))
    registry._select.cache_clear()
    yield
    registry._select.cache_clear()


@pytest.mark.usefixtures("every_m_reads_tiles")
@pytest.mark.parametrize("recipe", ["int4", "int8", "int3", "mxfp4", "nvfp4"])
def test_weights_lie_in_tiles_on_the_device_and_canonical_elsewhere(recipe, tmp_path):
    model = mlp(torch.bfloat16)
    quantize_(model, recipe)
    layers = [layer for layer in model if isinstance(layer, lowbit.QLinear)]
    plain = copy.deepcopy(model)
    x = torch.randn(3, 40, dtype=torch.bfloat16, device="cuda")
    lowbit.save(model, tmp_path)
    model.cuda()
    y = model(x)
    loaded = lowbit.load(tmp_path, mlp(torch.bfloat16), device="cuda")
    there = mlp(torch.bfloat16).cuda()
    quantize_(there, recipe)
    for other in (model, loaded, there, copy.deepcopy(model)):
        assert {layer.weight.byte_layout for layer in other if isinstance(layer, lowbit.QLinear)} == {"mma_fragment"}
        assert torch.equal(other(x), y)
        for name, part in plain.state_dict().items():
            assert torch.equal(other.state_dict()[name].cpu(), part)
    model.cpu()
    assert {layer.weight.byte_layout for layer in layers} == {"canonical"}
    for layer, kept in zip(model, plain, strict=True):
        assert not isinstance(layer, lowbit.QLinear) or torch.equal(layer.weight.packed, kept.weight.packed)


@pytest.mark.usefixtures("every_m_reads_tiles")
@pytest.mark.parametrize("way", ["cuda", "cpu"])
def test_a_move_takes_little_more_than_the_weights(way):
    model = torch.nn.Sequential(*(torch.nn.Linear(8192, 8192, bias=False, dtype=torch.bfloat16, device="cuda") for _ in range(4)))
    quantize_(model, "int4")
    size = model[0].weight.nbytes
    if way == "cuda":
        model.cpu()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, held = torch.cuda.memory_allocated(), _asked_for()
    model.to(way)
    torch.cuda.synchronize()
    rest = 4 * size if way == "cuda" else 0
    assert torch.cuda.max_memory_allocated() - before <= rest + 2 * size + (128 << 20)
    assert abs(_asked_for() - held - (rest or -4 * size)) < 1 << 20


def _asked_for() -> int:
    """Bytes of all tensors. torch counts a block of its own as allocated whole, which may be 1 MiB larger than what is in it."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


@pytest.mark.parametrize("recipe", ["int4", "int8"])
def test_a_known_call_refuses_what_the_operator_refuses(recipe):
    model = mlp(torch.bfloat16).cuda()
    quantize_(model, recipe)
    layer, x = model[0], torch.randn(1, 40, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        y = layer(x)
        for wrong, error in ((x.cpu(), ValueError), (x.to("meta"), ValueError), (x[:, :39], ValueError), (x.half(), TypeError)):
            with pytest.raises(error):
                layer(wrong)
        assert torch.equal(layer(x), y)
        assert torch.equal(layer(x.expand(2, 3, 40))[1, 2], layer(x.expand(6, 40))[0])
