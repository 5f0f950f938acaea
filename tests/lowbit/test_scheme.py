"""Schemes: every composable one has a name that is read back, and what means nothing is refused with a remedy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lowbit_kernels.ops  # noqa: F401 - defines the operators
from lowbit.formats import FORMATS, Float, Table
from lowbit.grid import Scales, scale_values
from lowbit.packing import packed_size
from lowbit.scheme import PLAIN_SCALES, SCHEMES, Scheme
from tests.support.strategies import COMPOSABLE, make_weight, schemes


@pytest.mark.parametrize("group", [-1, 1, 7, 128])
def test_every_composable_scheme_is_read_back(group):
    names_seen = {}
    for name, zero, scale, outer in COMPOSABLE:
        scheme = Scheme(name, group, zero, scale, outer)
        assert Scheme.parse(str(scheme)) == scheme
        assert names_seen.setdefault(str(scheme), scheme) == scheme, "two schemes, one name"
    assert len(names_seen) == len(COMPOSABLE)


def test_what_is_composable():
    """The rules a second time: an unsigned format has a zero point, a signed one has none, outer is above codes."""
    found = set(COMPOSABLE)
    for name, zero, scale, outer in itertools.product(
        FORMATS, ("none", "int", "float"), (*PLAIN_SCALES, *FORMATS), (False, True)
    ):
        unsigned = name.startswith("uint")
        meaningful = (zero != "none") == unsigned and name != "e8m0"
        meaningful &= zero != "float" or scale in PLAIN_SCALES
        meaningful &= not outer or scale not in (*PLAIN_SCALES, "e8m0")
        assert ((name, zero, scale, outer) in found) == meaningful, (name, zero, scale, outer)


@pytest.mark.parametrize("name", SCHEMES)
def test_names(name):
    scheme = SCHEMES[name]
    assert Scheme.parse(name) == scheme
    assert Scheme.parse(str(scheme)) == scheme
    assert Scheme.parse(f"{name}_g48") == scheme.replace(group_size=48)
    assert Scheme.parse(f"{name}_row") == scheme.replace(group_size=-1)


def test_spelling():
    assert str(SCHEMES["int4"]) == "uint4:g128:zint:bf16"
    assert str(SCHEMES["nvfp4"]) == "fp4_e2m1:g16:fp8_e4m3fn:outer"
    assert str(SCHEMES["int8"]) == "int8:row:bf16"
    assert Scheme.parse("int5_sym_g32") == Scheme("int5", 32)
    assert Scheme.parse("int4_sym") == Scheme("int4", 128)
    assert Scheme.parse("fp4_sym") == SCHEMES["fp4"]  # has no zero point to lose


def test_a_format_will_do_for_its_name():
    assert Scheme(FORMATS["int4"], 32) == Scheme("int4", 32)
    assert Scheme(Float("fp8_e5m2", 5, 2, "ieee")).format == "fp8_e5m2"  # an equal one, although NaN != NaN


def test_names_may_be_added_and_change(monkeypatch):
    with pytest.raises(ValueError, match="no scheme named 'mine'"):
        Scheme.parse("mine")
    for scheme in (Scheme("nf4", 8), Scheme("int4", 16)):
        monkeypatch.setitem(SCHEMES, "mine", scheme)
        assert Scheme.parse("mine") == scheme
        assert Scheme.parse("mine_row") == scheme.replace(group_size=-1)
        assert Scheme.parse("mine_g4") == scheme.replace(group_size=4)
    with pytest.raises(ValueError, match="is the library's own and stays"):
        SCHEMES["int4"] = Scheme("int4", 8)


# ---- what follows --------------------------------------------------------------------------------------------------


@given(schemes(), st.integers(1, 500))
def test_groups_cover_a_row(scheme, k):
    group, groups = scheme.group(k), scheme.groups(k)
    assert group >= 1
    assert (groups - 1) * group < k <= groups * group
    assert group == (k if scheme.group_size == -1 else min(scheme.group_size, k))
    assert scheme.row_bytes(k) == packed_size(scheme.bits, k)
    assert scheme.groups(0) == 0


@given(schemes(), st.integers(1, 500))
def test_bits_per_weight_are_what_is_stored(scheme, k):
    stored = 8 * packed_size(scheme.bits, k)
    stored += scheme.groups(k) * (FORMATS[scheme.scale].bits if scheme.scale in FORMATS else 8 * scheme.scale_dtype.itemsize)
    if scheme.zero_point == "int":
        stored += scheme.groups(k) * scheme.bits
    elif scheme.zero_point == "float":
        stored += scheme.groups(k) * 8 * scheme.zero_point_dtype.itemsize
    assert scheme.bits_per_weight(k) == pytest.approx(stored / k, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("int4", 4 + 20 / 128),  # 4.156
        ("int3", 3 + 19 / 128),  # 3.148
        ("int8", 8 + 16 / 4096),
        ("mxfp4", 4.25),
        ("mxfp6", 6.25),
        ("mxint8", 8.25),
        ("nvfp4", 4.5),
        ("int2", 2 + 18 / 64),
        ("ternary", 2.25),
    ],
)
def test_bits_per_weight_of_names(name, bits):
    assert SCHEMES[name].bits_per_weight(4096) == bits


def test_dtypes():
    assert SCHEMES["int4"].scale_dtype == torch.bfloat16
    assert SCHEMES["int4"].zero_point_dtype == torch.uint8
    assert SCHEMES["mxfp4"].scale_dtype == torch.uint8
    assert SCHEMES["mxfp4"].zero_point_dtype is None
    assert Scheme("uint4", 64, "float", "fp16").zero_point_dtype == torch.float16


# ---- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Scheme("int4", 0), r"group_size must be -1 \(the whole row\) or at least 1, got 0"),
        (lambda: Scheme("int4", -2), "at least 1, got -2"),
        (lambda: Scheme("int4", 128.0), r"group_size must be an int, got 128\.0"),
        (lambda: Scheme("int4", True), "group_size must be an int, got True"),
        (lambda: Scheme("int4", "128"), "group_size must be an int, got '128'"),
        (lambda: Scheme("int4", np.float32(3)), "group_size must be an int, got"),
        (lambda: Scheme("int4", zero_point="int"), r"unsigned integer format \(uint1\.\.uint8\), got int4"),
        (lambda: Scheme("fp4_e2m1", zero_point="float"), "unsigned integer format .*, got fp4_e2m1"),
        (lambda: Scheme("uint4"), "uint4 has no negative numbers: use zero_point='int', or a signed format"),
        (lambda: Scheme("e8m0"), "e8m0 has no negative numbers"),
        (lambda: Scheme("uint4", zero_point="both"), "zero_point must be one of none, int, float, got 'both'"),
        (lambda: Scheme("int4", scale="fp8"), "scale must be bf16, fp16, fp32 or the name of a format, got 'fp8'"),
        (lambda: Scheme("uint4", 16, "float", "fp8_e4m3fn"), "scale must be one of bf16, fp16, fp32"),
        (lambda: Scheme("int4", 16, outer=True), "outer=True stands above scales in a narrow format such as fp8_e4m3fn"),
        (lambda: Scheme("int4", 16, scale="e8m0", outer=True), "use outer=False"),
        (lambda: Scheme("int9"), "no format named 'int9'; did you mean"),
        (lambda: Scheme(4), "no format named 4"),
        (lambda: Scheme(Float("mine", 2, 1)), r"format 'mine' is not in FORMATS: register it with FORMATS\['mine'\] = "),
        (lambda: Scheme(Table("nf4", range(16))), "format 'nf4' is not in FORMATS"),
        (lambda: Scheme.parse("int44"), "no scheme named 'int44'; did you mean .*int4"),
        (lambda: Scheme.parse(""), "no scheme named ''; did you mean int8"),
        (lambda: Scheme.parse("int4:128"), "a canonical name is format:g128:zint:bf16 .*, got 'int4:128'"),
        (lambda: Scheme.parse("int4:g0:bf16"), "at least 1, got 0"),
        (lambda: Scheme.parse("int4:g128:zint:bf16"), "unsigned integer format"),
        (lambda: Scheme.parse("int4_g0"), "at least 1, got 0"),
        (lambda: Scheme.parse("int4:g8:bf16:outer:outer"), "a canonical name is"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_format_of_one_sign_is_refused(monkeypatch):
    monkeypatch.setitem(FORMATS, "below", Table("below", (-1, 0)))
    with pytest.raises(ValueError, match="below has no positive numbers"):
        Scheme("below")
    with pytest.raises(ValueError, match="a scale in below could not be positive"):
        Scheme("int4", scale="below")


# ---- a format of one's own -----------------------------------------------------------------------------------------


def test_one_line_makes_a_format(monkeypatch):
    w = torch.from_numpy(make_weight("normal", 6, 40, 0))
    x = torch.eye(40, dtype=torch.float64)
    for bias in (None, 3):  # the second takes the place of the first: nothing that was kept may speak for it
        monkeypatch.setitem(FORMATS, "fp5_e1m3", Float("fp5_e1m3", 1, 3, bias=bias))
        scheme = Scheme.parse("fp5_e1m3:g16:bf16")
        assert scheme == Scheme(FORMATS["fp5_e1m3"], 16)
        assert scheme.fmt.max == 15 / 4 / 2 ** (bias or 0)
        parts = torch.ops.lowbit.quantize(w, str(scheme), "range")
        packed, scale = parts[:2]
        values = torch.ops.lowbit.dequantize(packed, scale, None, None, str(scheme), "canonical", 40, torch.float64)
        s = scale_values(scheme, Scales(scale)).double().repeat_interleave(16, -1)[:, :40]
        assert bool(((values / s).abs() <= scheme.fmt.max).all())
        clipped = w.double().clamp(-s * scheme.fmt.max, s * scheme.fmt.max)
        assert bool(((values - clipped).abs() <= s * scheme.fmt.max / 15 / 2 * (1 + 30 * 2 * 2.0**-24)).all())
        y = torch.ops.lowbit.linear(x, packed, scale, None, None, None, str(scheme), "canonical")
        assert torch.equal(y, values.t())
    monkeypatch.delitem(FORMATS, "fp5_e1m3")
    with pytest.raises(ValueError, match="no format named 'fp5_e1m3'; did you mean"):
        Scheme.parse("fp5_e1m3:g16:bf16")
