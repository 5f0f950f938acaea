"""What compiled kernels know of formats by heart is what the tables of lowbit/formats.py say."""

from __future__ import annotations

import re

import numpy as np

from lowbit.decoding import FLOATS, INTEGERS
from lowbit.formats import FORMATS
from lowbit_kernels.registry import kernels
from tests import ROOT

CUDA = ROOT / "csrc" / "cuda"


def known_formats() -> dict[str, tuple[str, int, bool, float]]:
    """Of each format that a decoder of ``mma_fragment`` was compiled for: its family, bits, sign and factor."""
    text = (CUDA / "bindings" / "format_table.h").read_text(encoding="utf-8")
    found = re.findall(r'\{"(\w+)", Family::(\w+), (\d), (true|false), ([\w.+-]+)\}', text)
    assert len(found) == text.count("Family::")
    return {
        name: (family, int(bits), signed == "true", float.fromhex(factor.removesuffix("f")))
        for name, family, bits, signed, factor in found
    }


def test_the_table_of_the_cuda_bindings() -> None:
    for name, (family, bits, signed, factor) in known_formats().items():
        decoding = FORMATS[name].decoding
        assert bits == FORMATS[name].bits
        if family.startswith("int"):
            assert (decoding.kind, decoding.flip != 0, decoding.factor) == (INTEGERS, signed, factor), name
        elif (found := re.fullmatch(r"e(\d)m(\d)", family)) is not None:
            assert (decoding.kind, decoding.mantissa) == (FLOATS, int(found[2])), name
            assert bits == 1 + int(found[1]) + int(found[2])
        else:
            assert family == name == "nf4"


def test_rows_of_the_layout_take_no_format_beyond_it() -> None:
    rows = [row for row in kernels() if row.layout == "mma_fragment"]
    assert rows
    for row in rows:
        assert row.formats is not None
        assert set(row.formats) <= set(known_formats()), row.name


def test_the_numbers_of_nf4() -> None:
    text = (CUDA / "decode" / "nf4_lut.cuh").read_text(encoding="utf-8")
    numbers = re.search(r"nf4_numbers\[16\] = \{(.*?)\};", text, re.DOTALL)
    assert numbers is not None
    found = np.array([float(number.rstrip("f")) for number in re.findall(r"[-\d.]+f", numbers[1])], np.float32)
    np.testing.assert_array_equal(found, np.array(FORMATS["nf4"].values, np.float32))
