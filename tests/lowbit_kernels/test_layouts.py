"""Layouts move bytes without loss, and lie as their index map says."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowbit import QTensor, Scheme, strict, trace_kernels
from lowbit.formats import FORMATS
from lowbit.packing import pack
from lowbit.scheme import SCHEMES
from lowbit_kernels.layouts import LAYOUTS, Parts
from lowbit_kernels.mma_fragment import ROWS, Unit

NAMES = (*SCHEMES, "int4_g48", "int5_row", "uint4:row:zint:bf16", "uint3:g32:zfloat:fp32", "int8_g64", "int4_sym_g16")


def parts_of(scheme: Scheme, *shape: int) -> Parts:
    """Random bytes of the shapes of a weight; padding within a row stays zero, as packing leaves it."""
    q = QTensor.quantize(torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[-1])), scheme)
    return Parts(q.packed, q.scale, q.zero_point)


@settings(deadline=None)
@given(name=st.sampled_from(NAMES), n=st.integers(1, 40), k=st.integers(1, 1100), experts=st.sampled_from([(), (2,)]))
def test_tiles_lose_nothing(name: str, n: int, k: int, experts: tuple[int, ...]) -> None:
    scheme, layout = Scheme.parse(name), LAYOUTS["mma_fragment"]
    parts = parts_of(scheme, *experts, n, k)
    there = layout.arrange(parts, scheme, k)
    assert (there.packed.shape[-2:], there.scale.shape[-1]) == ((n, layout.sizes(scheme, n, k)[0]), layout.sizes(scheme, n, k)[1])
    back = layout.restore(there, scheme, k)
    for before, after in zip(parts, back, strict=True):
        assert (before is None) == (after is None)
        if before is not None and after is not None:
            assert torch.equal(before, after)
            assert before.dtype == after.dtype


PLACES = [(0, 0), (1, 1), (8, 2), (15, 7), (16, 31), (23, 33), (39, 599), (30, 300), (9, 511), (5, 130), (12, 230), (7, 190)]


def arranged(name: str, n: int, k: int) -> tuple[Tensor, Tensor, Unit]:
    """Random codes, the bytes of their tiles, and what a unit holds."""
    scheme = Scheme.parse(name)
    codes = torch.randint(1 << scheme.bits, (n, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    parts = Parts(pack(codes, scheme.bits), torch.ones(n, scheme.groups(k)).to(scheme.scale_dtype), None)
    return codes, LAYOUTS["mma_fragment"].arrange(parts, scheme, k).packed.flatten(), Unit.of(scheme)


def words_at(flat: Tensor, unit: Unit, bits: int, k: int, row: int, column: int) -> tuple[list[int], int, int]:
    """The words of the blocks of a run that have a part of a code, the code's byte there, and its step of the run."""
    steps, blocks = 8 // math.gcd(8, bits), bits // math.gcd(8, bits)
    r, c, step = row % ROWS, column % unit.columns, column % unit.columns // 32
    at = (row // ROWS * -(-k // unit.columns) + column // unit.columns) * unit.nbytes + step // steps * blocks * 512
    lane, word = 4 * (r % 8) + c % 8 // 2, r // 8 + 2 * (c % 32 // 16)
    start = at + lane * 16 + word * 4
    words = [int.from_bytes(flat[start + b * 512 : start + b * 512 + 4].numpy().tobytes(), "little") for b in range(blocks)]
    return words, c % 16 // 8 + 2 * (c % 2), step % steps


# How kernels put together what others leave over: (width, block, how far its bits are above where they are used), the highest
# bits first and in the highest bits of a byte.
REST = {
    (3, 3): ((2, 0, 0), (1, 2, 1)),
    (3, 7): ((2, 1, 0), (1, 2, 2)),
    (5, 3): ((3, 0, 0), (2, 3, 3)),
    (5, 6): ((3, 1, 0), (2, 4, 3)),
    (5, 7): ((3, 2, 0), (1, 3, 1), (1, 4, 2)),
    (6, 3): ((2, 0, 0), (2, 1, 2), (2, 2, 4)),
    (7, 7): tuple((1, block, block) for block in range(7)),
}
# The block and the lowest bit of codes that lie whole in a byte.
WHOLE = {
    3: {0: (0, 0), 1: (1, 0), 2: (2, 0), 4: (0, 3), 5: (1, 3), 6: (2, 3)},
    5: {0: (0, 0), 1: (1, 0), 2: (2, 0), 4: (3, 0), 5: (4, 0)},
    **{bits: {step: (step, 0) for step in range(bits // math.gcd(8, bits))} for bits in (6, 7)},
    **{bits: {step: (0, bits * step) for step in range(8 // bits)} for bits in (1, 2, 4, 8)},
}


@pytest.mark.parametrize("bits", range(1, 9))
def test_a_code_lies_where_the_map_says(bits: int) -> None:
    n, k = 40, 600
    codes, flat, unit = arranged(f"int{bits}:g64:bf16", n, k)
    for row, column in PLACES:
        words, byte, step = words_at(flat, unit, bits, k, row, column)
        held = [word >> 8 * byte & 0xFF for word in words]
        if step in WHOLE[bits]:
            block, place = WHOLE[bits][step]
            found = held[block] >> place & ((1 << bits) - 1)
        else:
            found, low = 0, 8
            for width, block, above in REST[bits, step]:
                low -= width
                found |= held[block] >> above & ((1 << width) - 1) << low
            found >>= low
        assert found == codes[row, column]


@pytest.mark.parametrize(("name", "exponent"), [("fp6_e2m3", 2), ("fp6_e3m2", 3)])
def test_six_bits_of_a_float_lie_as_bfloat16_has_them(name: str, exponent: int) -> None:
    """One AND makes it of the codes of even bytes, and of the others a rotation, or a shift for the sign and one for the rest."""
    n, k = 40, 600
    codes, flat, unit = arranged(f"{name}:g64:bf16", n, k)
    bias, size = 2 ** (exponent - 1) - 1, 0x01F0 if exponent == 2 else 0x03E0
    for row, column in PLACES:
        words, byte, step = words_at(flat, unit, 6, k, row, column)
        if step < 3:
            word = words[step]
        else:
            low = [word & 0x000F000F for word in words]
            word = low[0] << 4 | low[1] << 8 | low[2] << 12
        turned = (word >> 5 | word << 27) & 0xFFFFFFFF
        if byte % 2 == 0:
            half = word >> 8 * byte & (0x8000 | size)
        elif exponent == 3:
            half = turned >> 8 * (byte - 1) & (0x8000 | size)
        else:
            half = (word << 6) >> 8 * (byte - 1) & 0x8000 | (word >> 6) >> 8 * (byte - 1) & size
        number = struct.unpack("<f", (half << 16).to_bytes(4, "little"))[0] * 2.0 ** (127 - bias)
        assert number == FORMATS[name].values[codes[row, column]]


def test_tiles_of_nothing() -> None:
    scheme = Scheme.parse("int4")
    for n, k in ((0, 64), (3, 0)):
        parts = Parts(torch.zeros(n, k // 2, dtype=torch.uint8), *(torch.zeros(n, -(-k // 128)) for _ in range(2)))
        parts = Parts(parts.packed, parts.scale.bfloat16(), parts.zero_point.to(torch.uint8))
        back = LAYOUTS["mma_fragment"].restore(LAYOUTS["mma_fragment"].arrange(parts, scheme, k), scheme, k)
        assert [part.shape for part in back] == [part.shape for part in parts]


@pytest.mark.parametrize("name", ["int8", "int4", "int3", "mxfp4", "nvfp4", "nf4"])
def test_every_operator_takes_a_weight_in_tiles(name: str) -> None:
    """Rows of other layouts restore the canonical bytes, and the kernel trace says so."""
    q = QTensor.quantize(torch.randn(20, 130, generator=torch.Generator().manual_seed(0)), name)
    tiles = q.to_layout("mma_fragment")
    x = torch.randn(3, 130, generator=torch.Generator().manual_seed(1))
    with trace_kernels() as trace:
        y = torch.nn.functional.linear(x, tiles)
    with strict("reference_linear"):  # the row that takes any layout; a canonical weight may have a quicker one
        assert torch.equal(y, torch.nn.functional.linear(x, q))
    assert {entry.layout for entry in trace.counts} == {"mma_fragment restored to canonical"}
    assert "from mma_fragment restored to canonical" in str(trace)
    assert torch.equal(tiles.dequantize(), q.dequantize())
    indices = torch.tensor([3, 19, 3])
    assert torch.equal(torch.nn.functional.embedding(indices, tiles), torch.nn.functional.embedding(indices, q))
    experts = QTensor.quantize(torch.randn(2, 20, 130, generator=torch.Generator().manual_seed(0)), name)
    batch = torch.randn(2, 3, 130)
    with strict("reference_linear"):
        assert torch.equal(torch.bmm(batch, experts.to_layout("mma_fragment").mT), torch.bmm(batch, experts.mT))


def test_the_operator_refuses_another_layout_s_bytes() -> None:
    q = QTensor.quantize(torch.randn(20, 130, generator=torch.Generator().manual_seed(0)), "int4")
    parts = (q.packed, q.scale, q.zero_point, q.outer, None, str(q.scheme))
    with pytest.raises(ValueError, match="in the layout mma_fragment must be uint8 rows"):
        torch.ops.lowbit.linear(torch.ones(130), *parts, "mma_fragment")
    with pytest.raises(ValueError, match="no layout named 'bricks'; there are canonical, mma_fragment"):
        torch.ops.lowbit.linear(torch.ones(130), *parts, "bricks")


@pytest.mark.parametrize("name", ["int4", "int3", "nvfp4", "int8", "uint4:g32:zfloat:fp16"])
@pytest.mark.parametrize("there", sorted(LAYOUTS))
@pytest.mark.parametrize("first", sorted(LAYOUTS))
def test_any_layout_can_follow_any_other(first: str, there: str, name: str) -> None:
    """One group or several: a dimension of 1 may have any stride, which bytes are not viewed by."""
    for k in (64, 256):
        q = QTensor.quantize(torch.randn(32, k), name)
        turned = q.to_layout(first).to_layout(there)
        assert torch.equal(turned, q)
        assert torch.equal(turned.dequantize(), q.dequantize())
        for name_of, part in q._parts().items():
            if part.dim():
                assert torch.equal(getattr(turned.canonical(), name_of).view(torch.uint8), part.view(torch.uint8))
