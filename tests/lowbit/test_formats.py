"""Formats: every code of every one, and rounding against ml_dtypes, numpy and exact fractions."""

from __future__ import annotations

import copy
import math
import pickle
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lowbit.formats import FORMATS, Float, Format, Int, Table, get_format
from tests.support import oracle
from tests.support.strategies import formats, random_formats, strided

CASTS = {
    "fp4_e2m1": ml_dtypes.float4_e2m1fn,
    "fp6_e2m3": ml_dtypes.float6_e2m3fn,
    "fp6_e3m2": ml_dtypes.float6_e3m2fn,
    "fp8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp8_e3m4": ml_dtypes.float8_e3m4,
    "fp8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "fp8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}
INTEGERS = {f"{sign}int{bits}": bits for sign in ("", "u") for bits in range(1, 9) if (sign, bits) != ("", 1)}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

any_format = st.one_of(formats, random_formats)
all_formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)


def codes_of(fmt: Format) -> torch.Tensor:
    return torch.arange(len(fmt.values), dtype=torch.uint8)


def used(fmt: Format) -> list[int]:
    return [c for c, v in enumerate(fmt.values) if c not in fmt.unused and math.isfinite(v)]


def probes(fmt: Format, dtype: torch.dtype) -> torch.Tensor:
    """Every number, every midpoint, what lies next to each of them in ``dtype``, and much in between."""
    numbers = torch.tensor(fmt.numbers, dtype=torch.float64)
    points = torch.cat((numbers, (numbers[1:] + numbers[:-1]) / 2)).to(dtype)
    up = torch.nextafter(points, torch.tensor(torch.inf, dtype=dtype))
    down = torch.nextafter(points, torch.tensor(-torch.inf, dtype=dtype))
    random = torch.rand(2000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    between = (fmt.min + random * (fmt.max - fmt.min)).to(dtype)
    zeros = torch.tensor([0.0, -0.0], dtype=dtype)
    x = torch.cat((points, up, down, between, between * between.abs() / fmt.max, zeros))
    exact = x.double()
    return x[torch.isfinite(x) & (exact >= fmt.min) & (exact <= fmt.max)]


# ---- the tables ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASTS)
def test_values_are_those_of_ml_dtypes(name):
    fmt = FORMATS[name]
    theirs = np.arange(len(fmt.values), dtype=np.uint8).view(CASTS[name]).astype(np.float64)
    np.testing.assert_array_equal(np.array(fmt.values), theirs)
    np.testing.assert_array_equal(np.signbit(fmt.values) & ~np.isnan(theirs), np.signbit(theirs) & ~np.isnan(theirs))


@pytest.mark.parametrize("name", INTEGERS)
def test_values_of_integers(name):
    bits = INTEGERS[name]
    whole = np.arange(1 << bits)
    if not name.startswith("u"):
        whole = (whole << (8 - bits)).astype(np.int8) >> (8 - bits)
    assert FORMATS[name].values == tuple(whole)
    assert FORMATS[name].step == 1


@pytest.mark.parametrize("name", [name for name in FORMATS if name.startswith("fp") and not name.endswith("uz")])
def test_a_float_holds_the_numbers_that_its_name_says(name):
    """By the oracle, which computes them from exponent and mantissa, and knows standards' largest numbers by heart."""
    fmt = FORMATS[name]
    finite = np.array([code for code, value in enumerate(fmt.values) if math.isfinite(value)])
    numbers, codes = oracle.element(name, np.array(fmt.values)[finite])
    np.testing.assert_array_equal(numbers, np.array(fmt.values)[finite])
    np.testing.assert_array_equal(codes, finite)
    assert fmt.max == oracle.largest(name)


def test_what_the_oracle_reads_off_a_name_is_what_standards_print():
    assert {name: oracle.float_spec(name) for name in oracle.FLOATS} == oracle.FLOATS
    with pytest.raises(ValueError, match=r"'fp8_e4m3fnuz' says nothing of its numbers: .*oracle\.py have to"):
        oracle.element("fp8_e4m3fnuz", np.zeros(1))


def test_nf4_is_the_quantiles_of_a_normal_distribution():
    np.testing.assert_allclose(FORMATS["nf4"].values, oracle.nf4_levels(), rtol=0, atol=2.0**-22)  # computed in float32


def test_tables_with_names():
    assert FORMATS["int1"].values == (-1, 1)
    assert [FORMATS["ternary"].values[c] for c in (0, 1, 3)] == [0, 1, -1]
    assert FORMATS["mxint8"].numbers == tuple(i / 64 for i in range(-127, 128))
    assert all(fmt.name == name for name, fmt in FORMATS.items())


# ---- codes ---------------------------------------------------------------------------------------------------------


@given(any_format, st.sampled_from(DTYPES[:2]))
def test_every_finite_code_round_trips(fmt, dtype):
    codes = codes_of(fmt)
    numbers = fmt.decode(codes, dtype)
    assert np.array_equal(numbers.numpy(), np.array(fmt.values), equal_nan=True)
    back = fmt.encode(numbers) if fmt.nan is not None else fmt.nearest(numbers.nan_to_num())
    first: dict[tuple[float, float], int] = {}  # a table may say a number twice: then the first code stands for it
    for code in used(fmt):
        first.setdefault((fmt.values[code], math.copysign(1, fmt.values[code])), code)
    for code in used(fmt):
        value = fmt.values[code]
        want = first[value, math.copysign(1, value)]
        assert back[code] == want, f"{value} is code {code}, came back as {int(back[code])}"


@all_formats
def test_named_formats_say_no_number_twice(fmt):
    keys = [(fmt.values[c], math.copysign(1, fmt.values[c])) for c in used(fmt)]
    assert len(set(keys)) == len(keys)


@given(any_format)
def test_negative_zero(fmt):
    code = fmt.encode(torch.tensor([-0.0, 0.0]))
    signs = torch.signbit(fmt.decode(code))
    zeros = {math.copysign(1, fmt.values[c]) for c in used(fmt) if fmt.values[c] == 0}
    if -1 in zeros:
        assert signs[0]
    if 1 in zeros:
        assert not signs[1]
    assert (fmt.negative_zero is not None) == (-1 in zeros)


@given(any_format, st.sampled_from(DTYPES), st.data())
def test_unused_codes_are_never_produced(fmt, dtype, data):
    x = torch.cat((probes(fmt, dtype), torch.tensor([-torch.inf, torch.inf, 3e38, -3e38]).to(dtype)))
    assert set(fmt.nearest(x).tolist()) <= set(used(fmt))


@given(any_format, st.data())
def test_shape_and_stride_do_not_matter(fmt, data):
    x = data.draw(strided(torch.linspace(2 * fmt.min / 3, 2 * fmt.max / 3, 24).reshape(2, 3, 4)))
    codes = fmt.encode(x)
    assert codes.dtype == torch.uint8
    assert torch.equal(codes, fmt.encode(x.flatten()).reshape(x.shape))
    strange = data.draw(strided(codes)).to(data.draw(st.sampled_from((torch.uint8, torch.int32, torch.int64))))
    assert torch.equal(fmt.decode(strange), fmt.decode(strange.flatten()).reshape(x.shape))
    assert fmt.encode(torch.zeros(0, 3)).shape == (0, 3)
    assert fmt.decode(torch.zeros(3, 0, dtype=torch.uint8)).shape == (3, 0)


# ---- rounding ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASTS)
def test_encode_is_the_cast_of_ml_dtypes(name, dtype):
    x = probes(FORMATS[name], dtype)
    # ml_dtypes 0.6 casts float64 by way of float32, which rounds twice, and rounds every float32 subnormal up to 2^-126
    # on its way to e8m0; test_encode_takes_the_nearest holds those to exact fractions.
    single = x.float()
    x, single = x[single == x], single[single == x]
    if name == "e8m0":
        x, single = x[single >= 2.0**-126], single[single >= 2.0**-126]
    theirs = single.numpy().astype(CASTS[name]).view(np.uint8)
    np.testing.assert_array_equal(FORMATS[name].encode(x).numpy(), theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_rint_and_clip(name, dtype):
    fmt, bits = FORMATS[name], INTEGERS[name]
    x = torch.cat((probes(fmt, dtype), torch.tensor([-1e30, -1000.25, 1000.25, 1e30, -torch.inf, torch.inf]).to(dtype)))
    whole = np.clip(np.rint(x.double().numpy()), fmt.min, fmt.max)
    np.testing.assert_array_equal(fmt.encode(x).numpy(), whole.astype(np.int64) & ((1 << bits) - 1))


def nearest_numbers(fmt: Format, x: float) -> list[float]:
    distance = {value: abs(Fraction(value) - Fraction(x)) for value in fmt.numbers}
    return [value for value, d in distance.items() if d == min(distance.values())]


@given(any_format, st.sampled_from((torch.float32, torch.float64)))
def test_round_is_decode_of_nearest(fmt, dtype):
    """In value: without the sign of a zero. Numbers far beyond the format's saturate in both."""
    x = torch.cat((probes(fmt, dtype), torch.tensor([-1e30, 1e30], dtype=dtype)))
    before = x.clone()
    assert torch.equal(fmt.round(x), fmt.decode(fmt.nearest(x), dtype))
    assert torch.equal(x, before)


@settings(max_examples=200)
@given(any_format, st.data())
def test_encode_takes_the_nearest(fmt, data):
    """Against exact fractions, for formats that no other library has; a tie goes to the even multiple of the distance."""
    dtype = data.draw(st.sampled_from(DTYPES))
    around = probes(fmt, dtype).tolist()
    assume(around)  # a format of one number that the dtype does not hold has none
    for x in data.draw(st.lists(st.sampled_from(around), min_size=1, max_size=20)):
        got = fmt.decode(fmt.encode(torch.tensor(x, dtype=dtype)), torch.float64).item()
        nearest = nearest_numbers(fmt, x)
        assert got in nearest
        if len(nearest) == 2:
            multiples = [Fraction(v) / (Fraction(nearest[1]) - Fraction(nearest[0])) for v in nearest]
            even = [v for v, m in zip(nearest, multiples, strict=True) if m.denominator == 1 and m % 2 == 0]
            assert [got] == (even or [min(nearest, key=lambda v: (abs(v), v))])


@given(any_format, st.sampled_from(DTYPES))
def test_beyond_the_range_saturates(fmt, dtype):
    above = torch.tensor([torch.inf, fmt.max + abs(fmt.max) / 2 + 1], dtype=torch.float64).to(dtype)
    below = torch.tensor([-torch.inf, fmt.min - abs(fmt.min) / 2 - 1], dtype=torch.float64).to(dtype)
    assert fmt.decode(fmt.encode(above)).tolist() == [fmt.max] * 2
    assert fmt.decode(fmt.encode(below)).tolist() == [fmt.min] * 2


@all_formats
def test_nan(fmt):
    x = torch.tensor([1.0, torch.nan, -torch.nan])
    if fmt.nan is None:
        with pytest.raises(ValueError, match=f"{fmt.name} has no code for NaN, and x holds 2"):
            fmt.encode(x)
    else:
        assert fmt.decode(fmt.encode(x)).isnan().tolist() == [False, True, True]


@given(any_format)
def test_encode_is_monotone(fmt):
    x = probes(fmt, torch.float32).sort().values
    assert bool((fmt.decode(fmt.nearest(x)).diff() >= 0).all())


# ---- formats as values ---------------------------------------------------------------------------------------------


@given(any_format)
def test_equality_survives_copies(fmt):
    for duplicate in (copy.deepcopy(fmt), pickle.loads(pickle.dumps(fmt)), Format(fmt.name, tuple(fmt.values), fmt.unused)):
        assert duplicate == fmt
        assert hash(duplicate) == hash(fmt)
    assert Format("other", fmt.values, fmt.unused) != fmt


def test_the_same_definition_is_the_same_format():
    assert Float("fp8_e4m3fn", 4, 3, "fn") == FORMATS["fp8_e4m3fn"]
    assert Float("fp8_e5m2", 5, 2, "ieee") == FORMATS["fp8_e5m2"]


def test_tables_that_differ_in_the_sign_of_a_zero():
    """Tensors are kept by the bits of a table: 0 == -0 would give one format the other's."""
    plus, minus = Table("t", (0.0, 1.0, 0.0, -1.0)), Table("t", (0.0, 1.0, -0.0, -1.0))
    assert plus != minus
    signs = [torch.signbit(fmt.decode(torch.arange(4))).tolist() for fmt in (minus, plus)]
    assert signs == [[False, False, True, True], [False, False, False, True]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Table("t", (1, 2, 3)), r"values must hold 2\*\*bits numbers, bits 1\.\.8, got 3"),
        (lambda: Table("t", (math.nan, math.inf)), "no code stands for a finite number"),
        (lambda: Table("t", (0, 1), unused=(0, 1)), "no code stands for a finite number"),
        (lambda: Table("t", (0, 1e39)), "numbers must fit float32, got 0 to 1e[+]39"),
        (lambda: Table("a-b", (0, 1)), "letters, digits and underscores, got 'a-b'"),
        (lambda: Int("i", 9, True), r"bits must be 1\.\.8, got 9"),
        (lambda: Int("i", 0, False), r"bits must be 1\.\.8, got 0"),
        (lambda: Float("f", 5, 3), r"1 \+ exponent \+ mantissa bits must be at most 8, got 1 \+ 5 \+ 3"),
        (lambda: Float("f", 0, 3), "must be at most 8, got"),
        (lambda: Float("f", 4, 3, "nan"), "specials must be none, ieee, fn or fnuz, got 'nan'"),
        (lambda: get_format("fp8_e4m3"), "no format named 'fp8_e4m3'; did you mean .*fp8_e4m3fn"),
        (lambda: get_format("zzz"), "no format named 'zzz'; did you mean .*int4"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()
