"""Weights whose rows lie interleaved: no byte is lost, each lies where it should, and products keep their contracts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lowbit import QEmbedding, QLinear, QTensor, quantize_, trace_kernels
from lowbit.packing import pack, plane_widths
from lowbit.scheme import PLAIN_SCALES, SCHEMES, Scheme
from lowbit_kernels import cpu, cpu_dequant_gemm, interleaved, reference
from lowbit_kernels.layouts import LAYOUTS, Parts
from tests.support.accuracy import linear_bound
from tests.support.cpu_cases import hard_rows
from tests.support.processors import needs_split_int8

LAYOUT = LAYOUTS["interleaved"]
NAMES = (*SCHEMES, "int5_row", "uint4:row:zint:bf16", "uint3:g32:zfloat:fp32", "int8_g64", "int7:g64:fp32", "int4_sym_g16")
SPLIT_INT8 = (
    *(Scheme(f"int{bits}", group) for bits in range(2, 9) for group in (32, 96, 256, -1)),
    *(Scheme(f"uint{bits}", group, "int", "fp16") for bits in range(2, 7) for group in (64, 256, -1)),
    Scheme("mxint8", 32, scale="e8m0"),
    Scheme("fp4_e2m1", 32, scale="e8m0"),
    Scheme("fp4_e2m1", 128, scale="fp8_e4m3fn", outer=True),
)


def parts_of(scheme: Scheme, *shape: int) -> Parts:
    q = QTensor.quantize(torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))), scheme)
    return Parts(q.packed, q.scale, q.zero_point)


def is_same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else a.dtype == b.dtype and torch.equal(a, b)


def same(a: Parts, b: Parts) -> bool:
    return all(map(is_same, a, b))


@settings(deadline=None)
@given(
    name=st.sampled_from(NAMES),
    n=st.integers(1, 4).map(lambda blocks: 32 * blocks) | st.integers(1, 70),
    k=st.integers(1, 20).map(lambda units: 32 * units) | st.integers(1, 300),
    experts=st.sampled_from([(), (2,)]),
)
def test_nothing_is_lost(name: str, n: int, k: int, experts: tuple[int, ...]) -> None:
    scheme = Scheme.parse(name)
    parts = parts_of(scheme, *experts, n, k)
    there = LAYOUT.arrange(parts, scheme, k)
    assert all(part is None or part.is_contiguous() for part in there)
    assert [None if part is None else part.shape for part in there] == [None if part is None else part.shape for part in parts]
    assert same(LAYOUT.restore(there, scheme, k), parts)
    if not experts:
        indices = torch.tensor([0, n - 1, n // 2, 0])
        few = Parts(*(None if part is None else part[indices] for part in parts))  # type: ignore[arg-type]
        assert same(Parts(*interleaved.rows(indices, *there, scheme, k)), few)


@settings(deadline=None)
@given(bits=st.integers(1, 8), row=st.integers(0, 63), column=st.integers(0, 95), plane=st.integers(0, 2))
def test_each_field_lies_where_the_docstring_says(bits: int, row: int, column: int, plane: int) -> None:
    """One code has all its bits set: the fields that are found set are its own."""
    widths, narrowest = plane_widths(bits), bits & -bits
    plane %= len(widths)
    fields, n, k = 8 // narrowest, 64, 96
    codes = torch.zeros(n, k, dtype=torch.uint8)
    codes[row, column] = (1 << bits) - 1
    scheme = Scheme(f"uint{bits}", -1, "int", "fp32") if bits > 1 else Scheme("uint1", -1, "int", "fp32")
    flat = interleaved.arrange(pack(codes, bits), torch.ones(n, 1), torch.zeros(n, 1), scheme, k)[0].flatten()
    unit, within = column // (4 * fields), column % (4 * fields)
    p, field = within // fields, within % fields
    of_byte, words = 8 // widths[plane], bits // narrowest
    word = sum(widths[:plane]) // narrowest + field // of_byte
    block = row // 32 * 32 * (k * bits // 8)
    at = block + ((unit * words + word) * 32 + row % 32) * 4 + p
    mask = ((1 << widths[plane]) - 1) << field % of_byte * widths[plane]
    assert int(flat[at]) == mask
    assert int((flat != 0).sum()) == len(widths)


def multiply(x: Tensor, parts: tuple[Tensor | None, ...], scheme: Scheme, limbs: int, interleaves: bool) -> Tensor:
    values, scales = cpu.number_table(scheme.format), None if scheme.scale in PLAIN_SCALES else cpu.byte_table(scheme.scale)
    arguments = (x, *parts, None, values, scales, scheme.group_size, limbs, None, interleaves)
    prepared = torch.ops.lowbit_cpu.split_int8_gemv_prepare(*arguments)
    y = torch.ops.lowbit_cpu.split_int8_gemv(*arguments)
    assert prepared.numel() > 0
    assert torch.equal(torch.ops.lowbit_cpu.prepared_linear(x, prepared).nan_to_num(7), y.nan_to_num(7))
    return y


@needs_split_int8
@pytest.mark.parametrize("instructions", ["avx2", "avx512"])
@pytest.mark.parametrize("scheme", SPLIT_INT8, ids=str)
def test_products_keep_their_contracts(scheme: Scheme, instructions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if instructions == "avx512" and torch.ops.lowbit_cpu.instructions() != "avx512":
        pytest.skip("this processor has no avx512")
    monkeypatch.setenv("LOWBIT_CPU", instructions)
    for k in (32, 96, 512, 704, 2112):
        if scheme.group_size % 32 == 0 and scheme.group_size > k and k != 96:
            continue
        w = torch.randn(96, k, generator=torch.Generator().manual_seed(k))
        w[:, ::31] *= 20
        w[1], w[2], w[3] = 0, w[2].abs(), w[3, :1]
        packed, scale, zero, outer = reference.quantize(w, scheme, "range")
        w = reference.dequantize(packed, scale, zero, outer, scheme, k, torch.float64)
        parts = (*interleaved.arrange(packed, scale, zero, scheme, k), outer)
        for m, dtype in ((1, torch.bfloat16), (3, torch.float16), (7, torch.float32), (16, torch.bfloat16), (1, torch.float32)):
            x = hard_rows(m, k, dtype, 2.0**-140)
            exact = x.double() @ w.mT
            for contract, limbs in {"split-int8 (2 limbs)": 2, "split-int8 (3 limbs)": 3}.items():
                y = multiply(x, parts, scheme, limbs, True)
                error, bound = (y.double() - exact).abs(), linear_bound(contract, x.double(), w, None, exact, dtype)
                assert ((error <= bound) | (exact.abs() + bound > torch.finfo(dtype).max)).all(), (contract, m, k, dtype)
            largest = x.float().abs().amax(-1, keepdim=True) / 127
            rounded = (x.float() / largest).nan_to_num().round().clamp(-128, 127).double() * largest.double()
            exact = rounded @ w.mT
            y = multiply(x, parts, scheme, 1, True)
            error, bound = (y.double() - exact).abs(), linear_bound("exact", rounded, w, None, exact, dtype)
            assert ((error <= bound) | (exact.abs() + bound > torch.finfo(dtype).max)).all(), ("one limb", m, k, dtype)


@needs_split_int8
@settings(deadline=None, max_examples=60)
@given(
    scheme=st.sampled_from(SPLIT_INT8),
    blocks=st.integers(1, 21),
    k=st.sampled_from([128, 512, 2048]),
    m=st.sampled_from([1, 1, 2, 5]),
    limbs=st.integers(1, 3),
    instructions=st.sampled_from(["avx2", ""]),
)
def test_a_block_gives_the_same_bits_wherever_it_lies(
    scheme: Scheme, blocks: int, k: int, m: int, limbs: int, instructions: str
) -> None:
    """Threads take blocks in turns of any length, two of them at once."""
    generator = torch.Generator().manual_seed(blocks)
    w, x = torch.randn(32 * blocks, k, generator=generator), torch.randn(m, k, generator=generator).bfloat16()
    packed, scale, zero, outer = reference.quantize(w, scheme, "range")
    parts = interleaved.arrange(packed, scale, zero, scheme, k)
    with pytest.MonkeyPatch.context() as patch:
        if instructions:
            patch.setenv("LOWBIT_CPU", instructions)
        y = multiply(x, (*parts, outer), scheme, limbs, True)
        for block in {0, blocks // 2, blocks - 1}:
            rows = slice(32 * block, 32 * block + 32)
            alone = tuple(None if part is None else part[rows] for part in parts)
            assert torch.equal(multiply(x, (*alone, outer), scheme, limbs, True), y[:, rows])


@needs_split_int8
@pytest.mark.parametrize("instructions", ["avx2", ""])
@pytest.mark.parametrize(
    "scheme", [Scheme("int8"), Scheme("uint4", 128, "int"), Scheme("fp4_e2m1", 32), Scheme("int3", 32)], ids=str
)
def test_what_has_no_digits_is_multiplied_as_canonical_rows_are(
    scheme: Scheme, instructions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if instructions:
        monkeypatch.setenv("LOWBIT_CPU", instructions)
    parts = reference.quantize(torch.randn(96, 256), scheme, "range")
    there = (*interleaved.arrange(*parts[:3], scheme, 256), parts[3])
    for number in (float("inf"), float("-inf"), float("nan"), 1e-38):
        x = torch.randn(2, 256) if number > 1e-30 or number != number else torch.randn(2, 256) * number
        x[1, 77] = number
        for limbs in (2, 3):
            ours, canonical = (multiply(x, w, scheme, limbs, w is there)[1] for w in (there, parts))
            assert torch.equal(ours.isnan(), canonical.isnan())
            torch.testing.assert_close(ours.nan_to_num(7e30), canonical.nan_to_num(7e30), rtol=1e-5, atol=1e-30)


@needs_split_int8
@settings(max_examples=40, deadline=None)
@given(
    scheme=st.sampled_from(SPLIT_INT8), blocks=st.integers(1, 20), k=st.sampled_from((96, 640, 4096)), m=st.integers(1, 9),
    threads=st.integers(2, 4), limbs=st.integers(1, 3),
)  # fmt: skip
def test_neighbours_and_threads_change_no_bit(scheme: Scheme, blocks: int, k: int, m: int, threads: int, limbs: int) -> None:
    w = torch.randn(32 * blocks, k, generator=torch.Generator().manual_seed(k))
    packed, scale, zero, outer = reference.quantize(w, scheme, "range")
    x, before = torch.randn(m, k, generator=torch.Generator().manual_seed(m)), torch.get_num_threads()

    def part(first: int, past: int) -> tuple[Tensor | None, ...]:
        some = slice(first, past)
        return (*interleaved.arrange(packed[some], scale[some], None if zero is None else zero[some], scheme, k), outer)

    try:
        torch.set_num_threads(threads)
        whole = multiply(x, part(0, 32 * blocks), scheme, limbs, True)
        torch.set_num_threads(1)
        rows = torch.stack([multiply(row, part(32 * (blocks - 1), 32 * blocks), scheme, limbs, True) for row in x])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(whole[:, 32 * (blocks - 1) :], rows)


@needs_split_int8
@settings(max_examples=60, deadline=None)
@given(
    scheme=st.sampled_from(SPLIT_INT8),
    m=st.integers(1, 70),
    blocks=st.integers(1, 5),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
)
def test_kernels_of_many_rows_read_the_same_numbers(scheme: Scheme, m: int, blocks: int, dtype: torch.dtype) -> None:
    """Panels, dot products, dequantize and embedding restore what they read: the same bits as from canonical rows."""
    q = QTensor.quantize(torch.randn(32 * blocks, 192, generator=torch.Generator().manual_seed(m)).to(dtype), scheme)
    there, x = q.to_layout("interleaved"), torch.randn(m, 192).to(dtype)
    assert torch.equal(there.dequantize(), q.dequantize())
    indices = torch.arange(m).reshape(1, -1) % (32 * blocks)
    assert torch.equal(nn.functional.embedding(indices, there), nn.functional.embedding(indices, q))
    products = [cpu_dequant_gemm.dequant_gemm_product] + [cpu_dequant_gemm.bf16_dot_product] * (
        cpu_dequant_gemm.bf16_dot_available() is None and dtype == torch.bfloat16
    )
    for product in products:
        y = product(scheme, True)(x, there.packed, there.scale, there.zero_point, there.outer, None, scheme)
        assert torch.equal(y, product(scheme)(x, q.packed, q.scale, q.zero_point, q.outer, None, scheme))


@needs_split_int8
def test_a_model_is_kept_interleaved_where_that_is_quicker() -> None:
    model = nn.Sequential(nn.Linear(96, 64), nn.Linear(64, 33), nn.Linear(33, 32)).bfloat16()
    quantize_(model, "int4_g32")
    assert [layer.weight.byte_layout for layer in model if isinstance(layer, QLinear)] == [
        "interleaved",
        "canonical",
        "canonical",
    ]
    assert (
        QEmbedding(QTensor.quantize(torch.randn(64, 96), "int4_g32")).weight.byte_layout == "canonical"
    )  # a row is not all over a block
    with trace_kernels() as trace:
        model[0](torch.randn(1, 96).bfloat16())
    assert list(trace.kernels()) == ["cpu_interleaved_split_int8x2_gemv"]


@needs_split_int8
def test_malformed_weights_are_refused() -> None:
    scheme = Scheme("uint4", 32, "int")
    for n, k, group in ((40, 64, 32), (32, 60, 32), (32, 64, 12), (32, 1024, 8)):
        scheme = Scheme("uint4", group, "int")
        packed, scale, zero, outer = reference.quantize(torch.randn(n, k), scheme, "range")
        with pytest.raises(RuntimeError, match="interleaved weights of 4 bits have rows in multiples of 32"):
            multiply(torch.randn(1, k), (packed, scale, zero, outer), scheme, 2, True)
