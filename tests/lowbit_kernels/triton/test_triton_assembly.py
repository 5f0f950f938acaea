"""Triton's assembly, run line by line: what it makes of every code of every format is what the format says."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowbit.decoding import INTEGERS, TABLE, Decoding
from lowbit.formats import FORMATS, Format
from lowbit.packing import pack
from lowbit_kernels.triton.assembly import assembly, bytes_as_floats
from tests.support.strategies import formats, random_formats

DTYPES = (torch.float16, torch.bfloat16)


def _permuted(a: int, b: int, selector: int) -> int:
    pool = (b << 32 | a).to_bytes(8, "little")
    return int.from_bytes(bytes(pool[selector >> 4 * i & 7] for i in range(4)), "little")


def _fused(a: int, b: int, c: int) -> int:
    x, y, z = (torch.tensor([v & 0xFFFF, v >> 16], dtype=torch.uint16).view(torch.bfloat16).double() for v in (a, b, c))
    low, high = (x * y + z).to(torch.bfloat16).view(torch.uint16).tolist()
    return int(high) << 16 | int(low)


OPERATIONS: dict[str, Callable[..., int]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "add.u32": lambda a, b: a + b,
    "shl.b32": lambda a, b: a << b,
    "shr.b32": lambda a, b: a >> b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "lop3.b32": lambda a, b, c, table: {0x6A: (a & b) ^ c, 0xEA: (a & b) | c}[table],
    "prmt.b32": _permuted,
    "fma.rn.bf16x2": _fused,
}


def executed(lines: str, given: list[int]) -> list[int]:
    """The registers $0 ... $7 after ``lines`` of PTX, whose inputs are $8, $9, ..."""
    registers = {f"${8 + i}": value for i, value in enumerate(given)}
    for line in lines.strip("{}\n").split("\n"):
        name, rest = line.rstrip(";").split(" ", 1)
        if name != ".reg":
            to, *values = re.split(r", ?", rest)
            operands = [registers[v] if v in registers else int(v, 0) for v in values]
            registers[to] = OPERATIONS[name](*operands) & 0xFFFFFFFF
    return [registers[f"${j}"] for j in range(8)]


def inputs(codes: np.ndarray, bits: int) -> list[int]:
    """What the kernel hands over of two words [2, 8] of codes: a register a word of the plane of four bits, or for each half of
    eight bits, and one for both words of a narrower plane."""
    if bits == 8:
        return [int.from_bytes(word[half : half + 4].tobytes(), "little") for half in (0, 4) for word in codes]
    packed = pack(torch.from_numpy(codes), bits).numpy()
    found, at = [], 0
    for width in (4, 2, 1):
        if bits & width:
            planes = [int.from_bytes(row[at : at + width].tobytes(), "little") for row in packed]
            found += planes if width == 4 else [planes[0] | planes[1] << 16]
            at += width
    return found


def meant(how: Decoding, bits: int, dtype: torch.dtype, half: np.ndarray) -> np.ndarray:
    """The numbers that halves of registers stand for, once the kernel has taken from them or multiplied what is missing."""
    found = torch.from_numpy(half.astype(np.uint16)).view(dtype).double().numpy()
    if how.kind == INTEGERS:
        if bits < 8 or dtype == torch.float16:
            found = found - ((1024 if dtype == torch.float16 else 128) + how.flip)
        return found * how.factor
    return found * (how.factor / 2.0**112 if dtype == torch.float16 else how.factor)


def check(fmt: Format, dtype: torch.dtype, seed: int) -> bool:
    how = fmt.decoding
    lines = assembly(how, fmt.bits, False, dtype)
    random, count = np.random.default_rng(seed), len(fmt.values)
    codes = np.concatenate([random.permutation(count) for _ in range(-(-32 // count))]).astype(np.uint8)
    for pair in codes.reshape(-1, 2, 8) if lines else ():
        registers = np.array(executed(lines, inputs(pair, fmt.bits)), dtype=np.uint32)
        for word, half in enumerate((registers & 0xFFFF, registers >> 16)):
            wanted = np.array([fmt.values[code] for code in pair[word]])
            assert np.array_equal(meant(how, fmt.bits, dtype, half), wanted, equal_nan=True)
    return lines != ""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(fmt=formats | random_formats, seed=st.integers(0, 2**32 - 1))
def test_every_code_of_any_format(dtype, fmt, seed):
    check(fmt, dtype, seed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"e8m0", "nf4", "uint8", "ternary"}))
def test_formats_that_need_no_table_have_an_assembly(name, dtype):
    if FORMATS[name].decoding.kind != TABLE:
        assert check(FORMATS[name], dtype, 0)


def test_no_assembly_where_eight_bits_are_not_exact():
    how = FORMATS["uint8"].decoding
    made = [dtype for dtype in (*DTYPES, torch.float32) if assembly(how, 8, True, dtype)]
    assert made == [torch.float16]


@given(formats | random_formats | st.sampled_from([FORMATS["fp8_e4m3fn"], FORMATS["fp8_e5m2"]]))
def test_bytes_are_converted_by_an_instruction_only_where_it_knows_the_format(fmt):
    lines = bytes_as_floats(fmt.decoding, 90) if fmt.bits == 8 else ""
    assert bool(lines) or fmt not in (FORMATS["fp8_e4m3fn"], FORMATS["fp8_e5m2"])
    if lines:
        known = torch.float8_e4m3fn if "e4m3x2" in lines else torch.float8_e5m2
        numbers = torch.arange(256, dtype=torch.uint8).view(known).double().numpy()
        assert np.array_equal(numbers, np.array(fmt.values), equal_nan=True)
        assert not bytes_as_floats(fmt.decoding, 80)
