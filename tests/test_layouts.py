"""Layouts move bytes without loss, and lie as their index map says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit import QTensor, Scheme, strict, trace_kernels
from lowbit.packing import plane_widths
from lowbit.scheme import SCHEMES
from lowbit_kernels.layouts import LAYOUTS, Parts
from lowbit_kernels.tiles import ROWS, Unit

NAMES = (*SCHEMES, "int4_g48", "int5_row", "uint4:row:zint:bf16", "uint3:g32:zfloat:fp32", "int8_g64", "int4_sym_g16")


def parts_of(scheme: Scheme, *shape: int) -> Parts:
    """Random bytes of the shapes of a weight; padding within a row stays zero, as packing leaves it."""
    q = QTensor.quantize(torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[-1])), scheme)
    return Parts(q.packed, q.scale, q.zero_point)


@settings(deadline=None)
@given(name=st.sampled_from(NAMES), n=st.integers(1, 40), k=st.integers(1, 1100), experts=st.sampled_from([(), (2,)]))
def test_tiles_lose_nothing(name: str, n: int, k: int, experts: tuple[int, ...]) -> None:
    scheme, layout = Scheme.parse(name), LAYOUTS["tiles"]
    parts = parts_of(scheme, *experts, n, k)
    there = layout.arrange(parts, scheme, k)
    assert (there.packed.shape[-2:], there.scale.shape[-1]) == ((n, layout.sizes(scheme, n, k)[0]), layout.sizes(scheme, n, k)[1])
    back = layout.restore(there, scheme, k)
    for before, after in zip(parts, back, strict=True):
        assert (before is None) == (after is None)
        if before is not None and after is not None:
            assert torch.equal(before, after)
            assert before.dtype == after.dtype


@pytest.mark.parametrize("name", ["int8", "int4", "int3", "int6", "int7", "int1"])
def test_a_code_lies_where_the_map_says(name: str) -> None:
    scheme = Scheme.parse(name)
    unit = Unit.of(scheme)
    n, k = 40, 600
    q = QTensor.quantize(torch.randn(n, k, generator=torch.Generator().manual_seed(0)), scheme)
    codes, flat = q.codes(), q.to_layout("tiles").packed.flatten()
    units = -(-k // unit.columns)
    for row, column in [(0, 0), (1, 1), (8, 2), (15, 7), (16, 31), (23, 33), (39, 599), (30, 300), (9, 511), (5, 130)]:
        r, c, step = row % ROWS, column % unit.columns, column % unit.columns // 32
        at = (row // ROWS * units + column // unit.columns) * unit.nbytes
        lane, word, byte = 4 * (r % 8) + c % 8 // 2, r // 8 + 2 * (c % 32 // 16), c % 16 // 8 + 2 * (c % 2)
        found = low = 0
        for width, size in zip(plane_widths(scheme.bits), unit.plane_bytes, strict=True):
            fields = 8 // width
            held = int(flat[at + step // fields * 512 + lane * 16 + word * 4 + byte])
            found |= (held >> (width * (step % fields)) & ((1 << width) - 1)) << low
            low, at = low + width, at + size
        assert found == codes[row, column]


def test_tiles_of_nothing() -> None:
    scheme = Scheme.parse("int4")
    for n, k in ((0, 64), (3, 0)):
        parts = Parts(torch.zeros(n, k // 2, dtype=torch.uint8), *(torch.zeros(n, -(-k // 128)) for _ in range(2)))
        parts = Parts(parts.packed, parts.scale.bfloat16(), parts.zero_point.to(torch.uint8))
        back = LAYOUTS["tiles"].restore(LAYOUTS["tiles"].arrange(parts, scheme, k), scheme, k)
        assert [part.shape for part in back] == [part.shape for part in parts]


@pytest.mark.parametrize("name", ["int8", "int4", "int3", "mxfp4", "nvfp4", "nf4"])
def test_every_operator_takes_a_weight_in_tiles(name: str) -> None:
    """Rows of other layouts restore the canonical bytes, and the receipt says so."""
    q = QTensor.quantize(torch.randn(20, 130, generator=torch.Generator().manual_seed(0)), name)
    tiles = q.to_layout("tiles")
    x = torch.randn(3, 130, generator=torch.Generator().manual_seed(1))
    with trace_kernels() as trace:
        y = torch.nn.functional.linear(x, tiles)
    with strict("reference_linear"):  # the row that takes any layout; a canonical weight may have a quicker one
        assert torch.equal(y, torch.nn.functional.linear(x, q))
    assert {receipt.layout for receipt in trace.counts} == {"tiles restored to canonical"}
    assert "from tiles restored to canonical" in str(trace)
    assert torch.equal(tiles.dequantize(), q.dequantize())
    indices = torch.tensor([3, 19, 3])
    assert torch.equal(torch.nn.functional.embedding(indices, tiles), torch.nn.functional.embedding(indices, q))
    experts = QTensor.quantize(torch.randn(2, 20, 130, generator=torch.Generator().manual_seed(0)), name)
    batch = torch.randn(2, 3, 130)
    assert torch.equal(torch.bmm(batch, experts.to_layout("tiles").mT), torch.bmm(batch, experts.mT))


def test_the_operator_refuses_another_layout_s_bytes() -> None:
    q = QTensor.quantize(torch.randn(20, 130, generator=torch.Generator().manual_seed(0)), "int4")
    parts = (q.packed, q.scale, q.zero_point, q.outer, None, str(q.scheme))
    with pytest.raises(ValueError, match="in the layout tiles has uint8 rows"):
        torch.ops.lowbit.linear(torch.ones(130), *parts, "tiles")
    with pytest.raises(ValueError, match="no layout named 'bricks'; there are canonical, tiles"):
        torch.ops.lowbit.linear(torch.ones(130), *parts, "bricks")
