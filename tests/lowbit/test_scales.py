"""Scales and the one formula: error bounds that follow from the format, and the rules of OCP and NVIDIA bit for bit."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import lowbit_kernels.ops  # noqa: F401 - defines the operators
from lowbit.formats import FORMATS
from lowbit.grid import Scales, grouped, scale_values, to_codes, to_values
from lowbit.packing import unpack
from lowbit.scales import METHODS, choose, least_cost, outer_scale, round_scale, squared
from lowbit.scheme import PLAIN_SCALES, SCHEMES, Scheme
from lowbit_kernels import reference
from tests.support import oracle
from tests.support.strategies import FORMS, group_sizes, make_weight, schemes, seeds, weights

U = 2.0**-24  # the relative error of one float32 rounding
TINY = 2.0**-150  # the absolute error of one that underflows

every_scheme = st.one_of(schemes(), st.sampled_from(sorted(SCHEMES.values(), key=str)))
named = pytest.mark.parametrize("name", SCHEMES)


def fits(w: Tensor, scheme: Scheme) -> bool:
    """Whether the scales of ``w`` fit their format: weights where they do not are left to the tests of errors."""
    try:
        choose(w, scheme)
    except ValueError as error:
        if scheme.scale == "fp16" and ("does not fit fp16" in str(error) or "underflows in fp16" in str(error)):
            return False
        raise
    return True


def chosen(w: Tensor, scheme: Scheme, method: str = "range") -> Scales:
    assume(fits(w, scheme))
    return choose(w, scheme, method)


def spread(x: Tensor, scheme: Scheme, k: int) -> Tensor:
    """A number a group [N, G] as a float64 a value [N, K]."""
    return x.double().repeat_interleave(scheme.group(k), -1)[..., :k]


def quantized(w: Tensor, scheme: Scheme, method: str = "range") -> Tensor:
    parts = reference.quantize(w, scheme, method)
    return reference.dequantize(*parts, scheme, w.shape[-1], torch.float32)


def gap_around(t: Tensor, numbers: Tensor) -> Tensor:
    """The distance of the two numbers of the format on both sides of ``t``; the wider one where ``t`` is a number."""
    above = torch.searchsorted(numbers, t.contiguous()).clamp(1, len(numbers) - 1)
    gap = numbers[above] - numbers[above - 1]
    following = numbers[(above + 1).clamp(max=len(numbers) - 1)] - numbers[above]
    return torch.where(t == numbers[above], torch.maximum(gap, following), gap)


# ---- the formula ---------------------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(weights(), every_scheme)
def test_error_is_at_most_half_a_gap(w, scheme):
    """Within the range, |w - dq(q(w))| <= scale * half the gap of the format where w falls, plus float32's roundings:
    of w / s and of + z before the nearest number is taken (twice their size where they cross into the next gap), and
    of (number - z) and of * s after it."""
    k, fmt = w.shape[-1], scheme.fmt
    scales = chosen(w, scheme)
    codes = to_codes(w, scheme, scales)
    got = to_values(codes, scheme, scales).double()
    s = spread(scale_values(scheme, scales), scheme, k)
    z = torch.zeros_like(s) if scales.zero_point is None else spread(scales.zero_point, scheme, k)
    assert bool((got[s == 0] == 0).all())
    ratio = w.double() / torch.where(s == 0, torch.inf, s)
    t = ratio + z
    inside = (s > 0) & (t >= fmt.min) & (t <= fmt.max)
    before = U * (ratio.abs() * (1 + U) + t.abs()) + 2 * TINY
    exact = s * (fmt.decode(codes, torch.float64) - z)
    after = exact.abs() * (2 * U + U * U) + TINY
    gap = gap_around(t, torch.tensor(fmt.numbers, dtype=torch.float64))
    bound = s * (gap / 2 + 2 * before) + after
    error = (w.double() - got).abs()
    assert bool((error <= bound)[inside].all()), (error - bound)[inside].max()


@given(weights(), every_scheme)
def test_values_are_the_formula(w, scheme):
    """(number - zero point) * scale in float32, by numpy; scale * outer is rounded to float32 first."""
    scales = chosen(w, scheme)
    codes = to_codes(w, scheme, scales)
    stored = scales.scale if scheme.scale in PLAIN_SCALES else torch.tensor(FORMATS[scheme.scale].values)[scales.scale.int()]
    s = stored.float().numpy() * np.float32(1 if scales.outer is None else scales.outer)
    z = np.zeros_like(s) if scales.zero_point is None else scales.zero_point.float().numpy()
    s, z = (np.repeat(part, scheme.group(w.shape[-1]), -1)[:, : w.shape[-1]] for part in (s, z))
    want = (np.array(scheme.fmt.values, np.float32)[codes.numpy()] - z) * s
    np.testing.assert_array_equal(to_values(codes, scheme, scales).numpy(), want)


@settings(max_examples=150)
@given(weights(), every_scheme)
def test_quantizing_twice_is_quantizing_once(w, scheme):
    """With the scales held. Not where a number times its scale is below float32's normal range and itself rounds."""
    scales = chosen(w, scheme)
    codes = to_codes(w, scheme, scales)
    again = to_codes(to_values(codes, scheme, scales), scheme, scales)
    numbers = scheme.fmt.numbers
    smallest = min(b - a for a, b in itertools.pairwise(numbers))
    s = spread(scale_values(scheme, scales), scheme, w.shape[-1])
    held = (s == 0) | (s.abs() * smallest >= 2.0**-147)  # an error of 2^-150 is an eighth of that
    assert torch.equal(codes[held], again[held])


def mirrored(scheme: Scheme) -> bool:
    """Whether the numbers that a symmetric scale leads to lie symmetrically: those of nf4 do not."""
    inner = [v for v in scheme.fmt.numbers if abs(v) <= scheme.fmt.symmetric_max]
    return scheme.zero_point == "none" and inner == [-v for v in reversed(inner)]


@given(weights(), st.sampled_from([s for s in SCHEMES.values() if mirrored(s)]))
def test_symmetric_schemes_are_odd(w, scheme):
    if scheme.format == "int1":  # has no zero, and 0 is its only tie: also of what underflows over its scale
        w = torch.where(w.abs() <= w.abs().max() * TINY, w.abs().max().clamp(min=1.0), w)
    assert torch.equal(quantized(-w, scheme), -quantized(w, scheme))


@settings(max_examples=300)
@given(every_scheme, st.sampled_from(("normal", "zeros", "constant", "one-hot", "denormal", "huge", "zero rows")), seeds)
def test_every_row_stays_finite(scheme, form, seed):
    n, k = 3, 70
    base = form if form in FORMS else "normal"
    w = torch.from_numpy(make_weight(base, n, k, seed)) * {"zeros": 0.0, "denormal": 2.0**-140, "huge": 1e30}.get(form, 1.0)
    if not fits(w, scheme):
        assert form == "huge"
        return
    got = quantized(w, scheme)
    assert bool(torch.isfinite(got).all())
    if scheme.zero_point != "float" and 0.0 in scheme.fmt.numbers:
        assert bool((got[w == 0] == 0).all())
    if scheme.scale != "e8m0" or 0.0 in scheme.fmt.numbers:  # an e8m0 scale is never 0, so int1 means 2^-127 there
        zero_rows = (w == 0).all(-1)
        assert bool((got[zero_rows] == 0).all())


@given(every_scheme, st.sampled_from(FORMS), seeds, st.sampled_from((torch.float64, torch.bfloat16, torch.float16)))
def test_the_dtype_of_a_weight_is_how_it_is_read(scheme, form, seed, dtype):
    w = torch.from_numpy(make_weight(form, 2, 40, seed)).clamp(-1e4, 1e4).to(dtype)
    if dtype == torch.float64:
        assume(scheme.scale == "e8m0")  # powers of two divide exactly, so both dtypes round alike
        w = w.float().double()
    parts = chosen(w.to(torch.float32), scheme)
    for got, want in zip(reference.quantize(w, scheme, "range")[1:], parts, strict=True):
        assert (got is None and want is None) or torch.equal(got, want)


# ---- rows and groups -----------------------------------------------------------------------------------------------


@given(weights(min_rows=2), every_scheme, st.data())
def test_slicing_commutes_with_dequantizing(w, scheme, data):
    k, group = w.shape[-1], scheme.group(w.shape[-1])
    scales = chosen(w, scheme)
    codes = to_codes(w, scheme, scales)
    whole = to_values(codes, scheme, scales)
    first = data.draw(st.integers(0, scheme.groups(k) - 1))
    last = data.draw(st.integers(first + 1, scheme.groups(k)))
    row = data.draw(st.integers(0, w.shape[0] - 1))
    zero = scales.zero_point
    part = Scales(scales.scale[row:, first:last], None if zero is None else zero[row:, first:last], scales.outer)
    columns = slice(first * group, min(last * group, k))
    narrow = scheme if scheme.group_size != -1 else scheme.replace(group_size=group)
    assert torch.equal(to_values(codes[row:, columns], narrow, part), whole[row:, columns])


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=25)
@given(weights(min_rows=2), every_scheme, st.sampled_from((0.0, -0.5, 1.0)))
def test_rows_share_nothing(method, w, scheme, factor):
    """Except the outer scale of the matrix, so the row that changes is not the one with the largest number."""
    assume(not scheme.outer or float(w[1:].abs().max()) >= float(w[0].abs().max()))
    changed = w.clone()
    changed[0] = w[0].flip(0) * factor
    assume(fits(w, scheme) and fits(changed, scheme))
    before, after = (reference.quantize(weight, scheme, method) for weight in (w, changed))
    for old, new in zip(before[:3], after[:3], strict=True):
        assert (old is None and new is None) or torch.equal(old[1:], new[1:])


@given(every_scheme, seeds)
def test_permuting_rows_permutes_outputs(scheme, seed):
    w = torch.from_numpy(make_weight("normal", 7, 48, seed))
    order = torch.from_numpy(np.random.default_rng(seed).permutation(7))
    x = torch.zeros(9, 48, dtype=torch.float64)
    x[torch.arange(9), torch.arange(9)] = 1
    x[torch.arange(9), torch.arange(9) + 30] += 1  # the sum of two numbers has no order
    whole, permuted = reference.quantize(w, scheme, "range"), reference.quantize(w[order], scheme, "range")
    y = torch.ops.lowbit.linear(x, *whole, None, str(scheme), "canonical")
    assert torch.equal(torch.ops.lowbit.linear(x, *permuted, None, str(scheme), "canonical"), y[:, order])


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0), (2, 0, 5), (0, 3, 5), (2, 3, 0), (2, 2, 3, 5)])
@pytest.mark.parametrize("name", ["int8", "int4", "int3", "mxfp4", "nvfp4"])
def test_shapes_of_empty_and_stacked_weights(name, shape):
    scheme = SCHEMES[name]
    parts = reference.quantize(torch.ones(shape), scheme, "range")
    *lead, n, k = shape
    assert parts[0].shape == (*lead, n, scheme.row_bytes(k))
    assert parts[1].shape == (*lead, n, scheme.groups(k))
    assert (parts[3].shape == tuple(lead)) if scheme.outer else parts[3] is None
    assert reference.dequantize(*parts, scheme, k, torch.float32).shape == shape
    assert choose(torch.ones(shape), scheme).scale.shape == parts[1].shape


@named
def test_stacked_weights_are_quantized_one_by_one(name):
    scheme = SCHEMES[name]
    w = torch.from_numpy(make_weight("heavy", 12, 40, 3)).reshape(2, 2, 3, 40)
    stacked = quantized(w, scheme)
    for i, j in itertools.product(range(2), range(2)):
        assert torch.equal(stacked[i, j], quantized(w[i, j], scheme))


def test_grouped_fills_the_last_group_with_zeros():
    assert grouped(torch.arange(1, 6), 3).tolist() == [[1, 2, 3], [4, 5, 0]]
    assert grouped(torch.zeros(2, 0), 3).shape == (2, 0, 3)


# ---- rules, bit for bit --------------------------------------------------------------------------------------------

RULES = [name for name, scheme in SCHEMES.items() if scheme.scale not in PLAIN_SCALES]


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=100)
@given(weights())
def test_microscaling_and_nvfp4_are_their_formulas(name, w):
    scheme = SCHEMES[name]
    want = oracle.quantize(w.numpy(), scheme.format, scheme.group_size, scheme.zero_point, scheme.scale, scheme.outer)
    packed, scale, zero, outer = reference.quantize(w, scheme, "range")
    k = w.shape[-1]
    np.testing.assert_array_equal(scale.numpy(), want.scale)
    np.testing.assert_array_equal(unpack(packed, scheme.bits, k).numpy(), want.codes)
    np.testing.assert_array_equal(reference.dequantize(packed, scale, zero, outer, scheme, k, torch.float32).numpy(), want.values)
    if scheme.outer:
        np.testing.assert_array_equal(outer.numpy(), want.outer)


@pytest.mark.parametrize("name", [name for name in SCHEMES if name not in RULES])
@settings(max_examples=40)
@given(weights())
def test_plain_scales_are_their_formulas(name, w):
    scheme = SCHEMES[name]
    want = oracle.quantize(w.numpy(), scheme.format, scheme.group_size, scheme.zero_point, scheme.scale, scheme.outer)
    packed, scale, zero, _ = reference.quantize(w, scheme, "range")
    np.testing.assert_array_equal(scale.float().numpy(), want.scale.astype(np.float32))
    np.testing.assert_array_equal(unpack(packed, scheme.bits, w.shape[-1]).numpy(), want.codes)
    if zero is not None:
        np.testing.assert_array_equal(zero.numpy(), want.zero_point)


@given(weights(), st.sampled_from(("uint4", "uint8", "uint2", "uint1")), group_sizes)
def test_an_e8m0_scale_with_a_zero_point_uses_the_codes(w, name, group):
    """The floor rule for a range instead of a magnitude: the range reaches over half of the codes and under twice."""
    scheme = Scheme(name, group, "int", "e8m0")
    x = grouped(w, scheme.group(w.shape[-1])).double()
    extent = x.amax(-1).clamp(min=0) - x.amin(-1).clamp(max=0)
    s = scale_values(scheme, choose(w, scheme)).double()
    normal = extent > 2.0**-110
    top = 2.0 ** math.floor(math.log2(scheme.fmt.max))
    assert bool(((extent / s >= top) & (extent / s < 2 * top))[normal].all())


@given(weights(), st.sampled_from(("uint4", "uint8", "int4", "fp4_e2m1", "nf4")), st.sampled_from(("fp8_e4m3fn", "fp8_e5m2")))
def test_an_outer_scale_reaches_every_group(w, name, scale):
    """No group scale saturates, with a zero point or without."""
    scheme = Scheme(name, 16, "int" if name.startswith("u") else "none", scale, outer=True)
    outer = outer_scale(w.abs().amax(), scheme)
    assume(float(outer) >= 2.0**-126)  # below, float32 has no bits left to be exact with
    x = grouped(w, 16).double()
    if name.startswith("u"):
        wanted = (x.amax(-1).clamp(min=0) - x.amin(-1).clamp(max=0)) / scheme.fmt.max
    else:
        wanted = x.abs().amax(-1) / scheme.fmt.symmetric_max
    assert bool((wanted / outer.double() <= FORMATS[scale].max * (1 + 3 * U)).all())


# ---- searching and errors ------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(weights(largest=2.0**50), every_scheme)
def test_searching_never_costs(w, scheme):
    """No group is further from w (as float32 sums it) after method="mse" than after "range", and "mse" raises no more."""
    k = w.shape[-1]
    whole = chosen(w, scheme)
    error = [
        grouped(to_values(to_codes(w, scheme, s), scheme, s) - w, scheme.group(k)).square().sum(-1)
        for s in (choose(w, scheme, "mse"), whole)
    ]
    assert bool((error[0] <= error[1]).all())


@settings(max_examples=40)
@given(weights(largest=2.0**50), every_scheme, st.booleans(), st.integers(1, 100))
def test_ranges_tried_together_are_those_tried_one_by_one(w, scheme, ends, count):
    assume(fits(w, scheme))
    found = []
    for at_once in (1, count * max(w.numel(), 1)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lowbit.scales._AT_ONCE", {"cpu": at_once})
            found.append(least_cost(w, scheme, squared, ends=ends))
    assert torch.equal(found[0].scale, found[1].scale)
    assert found[0].zero_point is found[1].zero_point is None or torch.equal(found[0].zero_point, found[1].zero_point)


def test_searching_raises_no_more():
    """4e-8 rounds up to fp16's least number; a shrunk range, which underflows, is a bad candidate and no error."""
    w, scheme = torch.full((1, 4), 7 * 4e-8), Scheme("int4", scale="fp16")
    assert torch.equal(choose(w, scheme, "mse").scale, choose(w, scheme).scale)


def test_scales_that_do_not_fit():
    w = torch.full((1, 32), 3e38)
    with pytest.raises(ValueError, match=r"scale 3\.75e\+37 does not fit fp16: use scale='fp32' \(or 'bf16' for fp16\)"):
        choose(w, Scheme("int4", scale="fp16"))
    with pytest.raises(ValueError, match="does not fit bf16"):
        choose(torch.full((1, 32), torch.finfo(torch.float32).max), Scheme("nf4"))
    with pytest.raises(ValueError, match="does not fit fp32: scale the weights down"):
        choose(torch.full((1, 32), 1e300, dtype=torch.float64), Scheme("int4", scale="fp32"))
    with pytest.raises(ValueError, match="does not fit fp32: scale the weights down"):
        choose(torch.full((1, 32), 1e300, dtype=torch.float64), SCHEMES["nvfp4"])
    with pytest.raises(ValueError, match=r"scale .* underflows in fp16: use scale='bf16' or 'fp32'"):
        choose(torch.full((1, 32), 1e-20), Scheme("int4", scale="fp16"))
    with pytest.raises(ValueError, match="must be finite, and this one holds NaN or infinity"):
        choose(torch.full((1, 32), torch.nan), Scheme("int4"))
    with pytest.raises(ValueError, match="method must be one of range, absmax, mse, got 'max'"):
        choose(w, Scheme("int4"), "max")


@pytest.mark.parametrize("scale", [*PLAIN_SCALES, "fp8_e4m3fn", "fp8_e5m2", "e8m0"])
def test_round_scale_is_to_nearest(scale):
    value = torch.logspace(-1, 2, 999, dtype=torch.float64)
    scheme = Scheme("int4", scale=scale)
    got = scale_values(scheme, Scales(round_scale(value, scheme)[None]), torch.float64)[0]
    bits = {"bf16": 8, "fp16": 11, "fp32": 24, "fp8_e4m3fn": 4, "fp8_e5m2": 3, "e8m0": 1}[scale]  # of the significand
    quantum = 2.0 ** (torch.frexp(value).exponent - bits)
    assert bool(((got - value).abs() <= quantum / 2).all())
