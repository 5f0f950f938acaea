"""Packing: every width, shape, stride and dtype, against sums of shifted bits in numpy."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowbit import packing
from lowbit.packing import pack, packed_size, plane_widths, planes, unpack
from tests.support.strategies import bits, code_shapes, codes, integer_dtypes, strided

OPERATIONS = {
    "add": (packing.packed_add, lambda x, y: x + y),
    "sub": (packing.packed_sub, lambda x, y: x - y),
    "and": (lambda a, b, bits: packing.packed_and(a, b), lambda x, y: x & y),
    "or": (lambda a, b, bits: packing.packed_or(a, b), lambda x, y: x | y),
    "xor": (lambda a, b, bits: packing.packed_xor(a, b), lambda x, y: x ^ y),
}


def packed_by_bits(row: np.ndarray, width: int) -> list[int]:
    """The canonical bytes of one row of codes, bit by bit."""
    out, shift = [], 0
    for plane in plane_widths(width):
        stream = [(int(code) >> (shift + i)) & 1 for code in row for i in range(plane)]
        stream += [0] * (-len(stream) % 8)
        out += [sum(bit << i for i, bit in enumerate(stream[start : start + 8])) for start in range(0, len(stream), 8)]
        shift += plane
    return out


def test_plane_widths_divide_a_byte_and_add_up():
    for width in range(1, 9):
        assert sum(plane_widths(width)) == width
        assert all(8 % plane == 0 for plane in plane_widths(width))
        assert list(plane_widths(width)) == sorted(plane_widths(width), reverse=True)


def test_the_first_code_is_in_the_low_nibble():
    a, b = torch.tensor([1, 15, 0]), torch.tensor([2, 0, 9])
    assert torch.equal(pack(torch.stack((a, b), -1), 4)[:, 0], ((a & 0xF) | (b << 4)).to(torch.uint8))


@given(st.data(), bits, integer_dtypes)
def test_round_trip(data, width, dtype):
    top = min(width, 7) if dtype == torch.int8 else width
    x = data.draw(strided(data.draw(codes(top)).to(dtype)))
    packed = pack(x, width)
    assert packed.dtype == torch.uint8
    assert packed.is_contiguous()
    assert packed.shape == (*x.shape[:-1], sum(math.ceil(x.shape[-1] * plane / 8) for plane in plane_widths(width)))
    assert packed.shape[-1] == packed_size(width, x.shape[-1])
    back = unpack(packed, width, x.shape[-1])
    assert back.dtype == torch.uint8
    assert torch.equal(back.to(dtype), x)


@given(st.data(), bits)
def test_unpack_reads_any_stride(data, width):
    x = data.draw(codes(width))
    packed = pack(x, width)
    view = data.draw(strided(packed))
    assert torch.equal(unpack(view, width, x.shape[-1]), unpack(view.contiguous(), width, x.shape[-1]))


@given(st.data(), bits, st.integers(0, 40))
def test_bytes(data, width, k):
    x = data.draw(codes(width, (2, k)))
    assert pack(x, width).tolist() == [packed_by_bits(row, width) for row in x.numpy()]


@given(st.data(), bits)
def test_planes_are_views_in_order(data, width):
    x = data.draw(codes(width, (3, data.draw(st.integers(0, 40)))))
    packed = pack(x, width)
    parts = planes(packed, width, x.shape[-1])
    assert torch.equal(torch.cat(parts, -1), packed)
    assert all(part.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr() for part in parts)


@given(bits)
def test_results_own_their_memory(width):
    x = torch.ones(2, 8, dtype=torch.uint8)
    packed = pack(x, width)
    kept, back = packed.clone(), unpack(packed, width, 8)
    x.zero_()
    assert torch.equal(packed, kept)
    packed.zero_()
    assert torch.equal(back, torch.ones_like(back))


def test_booleans_are_codes():
    flags = torch.tensor([[True, False, True]])
    assert torch.equal(unpack(pack(flags, 1), 1, 3).bool(), flags)


@given(bits, integer_dtypes, st.data())
def test_codes_out_of_range(width, dtype, data):
    info = torch.iinfo(dtype)
    outside = [v for v in (-1, info.min, 1 << width, info.max) if info.min <= v <= info.max and not 0 <= v < 1 << width]
    if not outside:
        return
    worst = data.draw(st.sampled_from(outside))
    x = np.zeros((2, 5), dtype=str(dtype).removeprefix("torch."))
    x[1, 3] = worst
    with pytest.raises(ValueError, match=rf"codes must be 0\.\.{(1 << width) - 1} for {width} bits"):
        pack(torch.from_numpy(x), width)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_numbers_are_no_codes(dtype):
    with pytest.raises(TypeError, match=r"codes must be integers, got .* use FORMATS\[name\]\.encode"):
        pack(torch.zeros(2, 2, dtype=dtype), 4)


@pytest.mark.parametrize("width", [0, 9, -1, None])
def test_widths_out_of_range(width):
    for call in (lambda: pack(torch.zeros(2, dtype=torch.uint8), width), lambda: packed_size(width, 3)):
        with pytest.raises(ValueError, match=re.escape(f"bits must be 1..8, got {width}")):
            call()


def test_a_scalar_has_no_row():
    with pytest.raises(ValueError, match=r"use codes\.reshape\(1\)"):
        pack(torch.tensor(1), 4)


@given(bits, st.integers(0, 40), st.sampled_from((-1, 1)))
def test_rows_of_the_wrong_size(width, k, off):
    size = packed_size(width, k) + off
    if size < 0:
        return
    with pytest.raises(ValueError, match=rf"{k} codes of {width} bits take {size - off} bytes a row"):
        unpack(torch.zeros(2, size, dtype=torch.uint8), width, k)


def test_packed_is_bytes():
    with pytest.raises(TypeError, match="packed must be uint8"):
        unpack(torch.zeros(2, 2, dtype=torch.int32), 4, 4)
    with pytest.raises(TypeError, match="packed must be uint8"):
        packing.packed_add(torch.zeros(2, 2), torch.zeros(2, 2), 4)
    with pytest.raises(ValueError, match="rows must have as many bytes, got 2 and 1"):
        packing.packed_sub(torch.zeros(2, 2, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8), 4)
    with pytest.raises(ValueError, match="no number of 3-bit codes takes 1 bytes"):
        packing.packed_add(torch.zeros(2, 1, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8), 3)


# ---- arithmetic on bytes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPERATIONS)
@given(st.data(), bits, code_shapes)
def test_arithmetic(name, data, width, shape):
    on_bytes, on_codes = OPERATIONS[name]
    lead = data.draw(st.sampled_from((shape[:-1], tuple(1 for _ in shape[:-1]), shape[1:-1])))  # equal and broadcast
    x, y = data.draw(codes(width, shape)), data.draw(codes(width, (*lead, shape[-1])))
    expected = pack(on_codes(x.int(), y.int()) & ((1 << width) - 1), width)
    for a, b, want in (
        (pack(x, width), pack(y, width), expected),
        (pack(y, width), pack(x, width), pack(on_codes(y.int(), x.int()) & ((1 << width) - 1), width)),
    ):
        assert torch.equal(on_bytes(a, b, width), want)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("width", range(1, 9))
def test_arithmetic_on_every_pair(name, width):
    """Every pair of codes, each at every place of a byte."""
    on_bytes, on_codes = OPERATIONS[name]
    size = 1 << width
    for place in range(8 // plane_widths(width)[-1]):
        x = torch.arange(size)[:, None].expand(size, size).flatten().roll(place)
        y = torch.arange(size)[None, :].expand(size, size).flatten().roll(place)
        want = pack(on_codes(x, y) & (size - 1), width)
        assert torch.equal(on_bytes(pack(x, width), pack(y, width), width), want)
