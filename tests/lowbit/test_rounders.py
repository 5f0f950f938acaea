"""Rounders: every one lands on the grid under every scheme, does better than round-to-nearest where it says so, and says what
it met. GPTQ is compared with the paper's own formulas, descent with trying every code."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowbit import QTensor
from lowbit.algorithms import ROUNDERS, Rounded
from lowbit.algorithms.coordinate_descent import descend
from lowbit.algorithms.hessian import damped, factored
from lowbit.grid import Scales, grouped, scale_values, to_codes, to_values
from lowbit.layer_config import LayerConfig
from lowbit.scales import choose
from lowbit.scheme import PLAIN_SCALES, SCHEMES, Scheme
from lowbit.statistics import Statistics
from tests.support.published_gptq import published_gptq
from tests.support.strategies import schemes, seeds, weights

every_scheme = st.one_of(schemes(), st.sampled_from(sorted(SCHEMES.values(), key=str)))
rounders = pytest.mark.parametrize("rounder", ROUNDERS)
named = pytest.mark.parametrize("name", SCHEMES)
LOW = [name for name, scheme in SCHEMES.items() if 2 <= scheme.bits <= 6 and scheme.format != "ternary"]
FLOAT_ZEROS = [Scheme(f"uint{b}", g, "float", scale) for b in range(2, 7) for g in (32, 64) for scale in ("bf16", "fp16")]


def correlated(k: int, seed: int, rows: int = 512) -> Statistics:
    """Inputs as layers see them: few directions and few channels are much larger than the others."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, k, generator=generator) * torch.logspace(0, -1.5, k)
    x = hidden @ torch.linalg.qr(torch.randn(k, k, generator=generator)).Q
    return Statistics.of(x * torch.exp(0.7 * torch.randn(k, generator=generator)))


def normal(n: int, k: int, seed: int) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed + 1))


def round_by(rounder: str, w: Tensor, scheme: Scheme, statistics: Statistics | None, **options: object) -> Rounded:
    return ROUNDERS[rounder].round(w, scheme, statistics, **options)


def loss(w: Tensor, scheme: Scheme, rounded: Rounded, gram: Tensor) -> float:
    error = to_values(rounded.codes, scheme, rounded.scales, torch.float64) - w.double()
    return float(((error @ gram.double()) * error).sum())


def fits(w: Tensor, scheme: Scheme) -> bool:
    try:
        choose(w, scheme)
    except ValueError:
        return False
    return True


# ---- on the grid -----------------------------------------------------------------------------------------------------


@rounders
@settings(max_examples=60)
@given(w=weights(min_rows=1), scheme=every_scheme, seed=seeds, rows=st.integers(1, 40))
def test_lands_on_the_grid(rounder, w, scheme, seed, rows):
    """Codes that the format produces, scales of the scheme's dtypes and shapes, finite numbers: also for weights of any size,
    inputs of fewer rows than channels and dead channels."""
    assume(fits(w, scheme))
    k = w.shape[1]
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(seed))
    x[:, ::5] = 0
    codes, scales, _ = round_by(rounder, w, scheme, Statistics.of(x))
    whole = choose(w, scheme)
    assert codes.shape == w.shape
    assert codes.dtype == torch.uint8
    used = set(codes.flatten().tolist())
    assert {scheme.fmt.values[code] for code in used} <= set(scheme.fmt.numbers)
    assert not used & scheme.fmt.unused
    for got, want in itertools.zip_longest(scales, whole):
        assert (got is None) == (want is None)
        assert got is None or (got.shape, got.dtype) == (want.shape, want.dtype)
    dense = QTensor.from_codes(codes, scales, scheme, torch.float32).dequantize()
    assert bool(torch.isfinite(dense).all())
    assert torch.equal(dense, to_values(codes, scheme, scales))
    if scheme.scale in PLAIN_SCALES and scheme.reach > 0:
        assert bool((scales.scale >= 0).all())


@rounders
@named
def test_zeros_stay_zeros(rounder, name):
    """A weight of zeros, a row of them and a group of them, whatever the other groups would like them to be."""
    scheme = SCHEMES[name]
    w = normal(6, 256, 0)
    w[2] = 0
    w[:4, 128:] = 0
    statistics = correlated(256, 3)
    for weight in (w, torch.zeros(3, 256)):
        rounded = round_by(rounder, weight, scheme, statistics)
        values = to_values(rounded.codes, scheme, rounded.scales)
        group = scheme.group(256)
        empty = (grouped(weight, group) == 0).all(-1)
        if scheme.scale == "e8m0" and scheme.zero_point == "none":  # whose scales are never 0
            assert bool((values.abs() <= 2.0**-126 * scheme.fmt.max).all()) or bool(weight.any())
            continue
        assert bool((grouped(values, group)[empty] == 0).all())


@rounders
@settings(max_examples=15)
@given(every_scheme, st.integers(-20, 20), seeds)
def test_weights_times_a_power_of_two_have_the_same_codes(rounder, scheme, power, seed):
    """And so do weights whose inputs are multiplied by one: neither has a unit."""
    assume(scheme.scale in ("bf16", "fp32") or scheme.scale == "e8m0")
    assume(scheme.format != "e8m0")
    w, statistics = normal(3, 48, seed % 1000), correlated(48, seed % 1000)
    times = 2.0**power
    louder = Statistics(statistics.gram * times, statistics.absmax, 1)
    assume(fits(w, scheme) and fits(w * times, scheme))
    want = round_by(rounder, w, scheme, statistics)
    assert torch.equal(round_by(rounder, w * times, scheme, statistics).codes, want.codes)
    assert torch.equal(round_by(rounder, w, scheme, louder).codes, want.codes)


# ---- better than round-to-nearest ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOW)
@pytest.mark.parametrize("seed", range(3))
def test_output_errs_less_than_rounded_to_nearest(name, seed):
    """Data-aware clip below rtn, and GPTQ below both, as it is by default and without going over its result."""
    scheme = SCHEMES[name]
    w, statistics = normal(16, 192, seed), correlated(192, seed)
    nearest = loss(w, scheme, round_by("rtn", w, scheme, None), statistics.gram)
    clipped = loss(w, scheme, round_by("clip", w, scheme, statistics), statistics.gram)
    swept = loss(w, scheme, round_by("gptq", w, scheme, statistics, passes=0), statistics.gram)
    gone_over = loss(w, scheme, round_by("gptq", w, scheme, statistics), statistics.gram)
    assert gone_over < swept < nearest
    assert gone_over < clipped < nearest


@settings(max_examples=30)
@given(weights(largest=2.0**20), every_scheme, seeds)
def test_clip_is_never_worse(w, scheme, seed):
    """In float64, for any inputs: it begins with whole ranges and takes no step up."""
    w = w.double()
    assume(fits(w, scheme) and w.abs().max() < 2.0**40)
    x = torch.randn(9, w.shape[1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    gram = Statistics.of(x).gram
    nearest = loss(w, scheme, round_by("rtn", w, scheme, None), gram)
    scale = float((w.square().sum() * gram.diagonal().sum()).double())
    assert loss(w, scheme, round_by("clip", w, scheme, Statistics.of(x)), gram) <= nearest + 1e-12 * scale
    plain = torch.eye(w.shape[1])
    assert loss(w, scheme, round_by("clip", w, scheme, None), plain) <= loss(w, scheme, round_by("rtn", w, scheme, None), plain)


@pytest.mark.parametrize("scheme", FLOAT_ZEROS, ids=str)
def test_hqq_has_less_weight_error_under_a_float_zero(scheme):
    """Less than rtn by far, and than ranges searched for that error alone."""
    w, plain = normal(16, 192, 5), torch.eye(192)
    nearest, clipped, fitted = (loss(w, scheme, round_by(r, w, scheme, None), plain) for r in ("rtn", "clip", "hqq"))
    assert fitted < clipped <= nearest


@settings(max_examples=100)
@given(weights(largest=2.0**20), every_scheme)
def test_hqq_is_never_worse_in_any_group(w, scheme):
    w = w.double()
    assume(fits(w, scheme) and w.abs().max() < 2.0**40)
    nearest, fitted = (round_by(r, w, scheme, None) for r in ("rtn", "hqq"))
    group = scheme.group(w.shape[1])
    was, now = (
        grouped(to_values(r.codes, scheme, r.scales, torch.float64) - w, group).square().sum(-1) for r in (nearest, fitted)
    )
    assert bool((now <= was * (1 + 1e-12)).all())


# ---- GPTQ is what its paper says -------------------------------------------------------------------------------------


@named
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_is_the_published_one(name, act_order):
    """Every code, in float64, over more columns than a block has; scales from the ranges, held."""
    scheme = SCHEMES[name]
    w, statistics = normal(5, 150, 11).double(), correlated(150, 12)
    got = round_by("gptq", w, scheme, statistics, act_order=act_order, ranges="range", passes=0)
    order = statistics.gram.diagonal().argsort(descending=True, stable=True).tolist() if act_order else list(range(150))
    scales = choose(w, scheme)
    assert torch.equal(got.scales.scale, scales.scale)
    assert torch.equal(got.codes, published_gptq(w, scheme, statistics.gram, scales, 0.01, order))


@settings(max_examples=25)
@given(schemes(), st.integers(1, 40), st.floats(1e-3, 1), seeds)
def test_gptq_is_the_published_one_for_any_scheme(scheme, k, damping, seed):
    w, statistics = normal(3, k, seed % 997).double(), correlated(k, seed % 991)
    assume(fits(w, scheme) and bool((scale_values(scheme, choose(w, scheme)) != 0).all()))
    got = round_by("gptq", w, scheme, statistics, damping=damping, act_order=False, ranges="range", passes=0)
    want = published_gptq(w, scheme, statistics.gram, choose(w, scheme), damping, list(range(k)))
    assert torch.equal(scheme.fmt.decode(got.codes), scheme.fmt.decode(want))


@given(st.integers(1, 30), st.floats(1e-3, 1), seeds)
def test_factor(k, damping, seed):
    """It is what its description says, for columns in any order."""
    gram, order = correlated(k, seed % 1009).gram.double(), torch.randperm(k, generator=torch.Generator().manual_seed(seed))
    want, backwards = damped(gram, damping), order.flip(0)
    factor = factored(gram, damping, order)
    close = {"rtol": 0, "atol": 1e-12 * k / damping}
    assert factor.damping == damping
    assert torch.equal(factor.lower, factor.lower.tril())
    torch.testing.assert_close(factor.lower @ factor.lower.T, want[backwards][:, backwards], **close)
    assert torch.equal(factor.diagonal, factor.lower.diagonal().flip(0))
    upper = factor.lower.T
    all_shares = (upper / upper.diagonal()[:, None]).triu(1).flip(0, 1).T  # of column j, moved by those before it
    assert torch.equal(factor.shares(0, k), all_shares)
    assert torch.equal(factor.shares(k // 2, k), all_shares[:, k // 2 :])
    assert torch.equal(factor.shares(0, k // 2 + 1), all_shares[: k // 2 + 1, : k // 2 + 1])
    torch.testing.assert_close(factor.divide(want), torch.eye(k, dtype=torch.float64), **close)


# ---- descent ---------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(every_scheme, st.integers(1, 150), seeds)
def test_descent_only_goes_down(scheme, k, seed):
    w, gram = normal(3, k, seed % 1013).double(), damped(correlated(k, seed % 1013).gram.double(), 0.01)
    assume(fits(w, scheme))
    scales = choose(w, scheme)
    rounded = Rounded(to_codes(w, scheme, scales), scales)
    was = loss(w, scheme, rounded, gram)
    for _ in range(3):
        rounded = Rounded(*descend(w, scheme, gram, rounded.codes, rounded.scales, 1))
        now = loss(w, scheme, rounded, gram)
        assert now <= was * (1 + 1e-9) + 1e-12
        was = now


@pytest.mark.parametrize("scheme", [*LOW, "uint3:g16:zfloat:fp32", "uint4:row:zfloat:bf16"])
def test_descent_ends_where_no_code_can_move(scheme):
    """Every other code of every weight tried, alone, when nothing moves any more."""
    scheme = Scheme.parse(scheme)
    n, k = 3, 40
    w, gram = normal(n, k, 2).double(), damped(correlated(k, 2).gram.double(), 0.01)
    scales = choose(w, scheme)
    codes = to_codes(w, scheme, scales)
    for _ in range(100):
        before = codes
        codes, scales = descend(w, scheme, gram, codes, scales, 1)
        if torch.equal(before, codes):
            break
    assert torch.equal(before, codes)
    least = loss(w, scheme, Rounded(codes, scales), gram)
    for row, column, number in itertools.product(range(n), range(k), scheme.fmt.numbers):
        other = codes.clone()
        other[row, column] = scheme.fmt.values.index(number)
        assert loss(w, scheme, Rounded(other, scales), gram) >= least * (1 - 1e-12)


@pytest.mark.parametrize("zero_point", ["none", "int", "float"])
def test_scales_after_descent_are_the_best_for_their_codes(zero_point):
    """Of one group alone, against numpy's least squares; the scale is stored in float32."""
    scheme = Scheme("int3" if zero_point == "none" else "uint3", -1, zero_point, "fp32")
    w, gram = normal(4, 24, 8).double(), damped(correlated(24, 8).gram.double(), 0.01)
    codes, scales = descend(w, scheme, gram, *round_by("rtn", w, scheme, None)[:2], 60)
    root = torch.linalg.cholesky(gram).T  # |root e| squared is the loss
    for row in range(4):
        numbers = scheme.fmt.decode(codes[row], torch.float64)
        basis = numbers[:, None] if zero_point == "none" else (numbers - scales.zero_point[row].double())[:, None]
        if zero_point == "float":
            basis = torch.stack((numbers, torch.ones_like(numbers)), 1)
        best = torch.linalg.lstsq(root @ basis, (root @ w[row])[:, None]).solution[:, 0]
        assert float(scales.scale[row]) == pytest.approx(float(best[0]), rel=1e-5)
        if zero_point == "float":
            assert float(-scales.scale[row] * scales.zero_point[row]) == pytest.approx(float(best[1]), rel=1e-4, abs=1e-5)


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_dead_channels_are_told_and_held():
    scheme, w = SCHEMES["int3"], normal(4, 128, 1)
    x = torch.randn(300, 128, generator=torch.Generator().manual_seed(1))
    x[:, 3:50] = 0
    rounded = round_by("gptq", w, scheme, Statistics.of(x))
    assert rounded.notes == ("47 of 128 input channels were 0 in every row: damping alone holds their weights",)
    apart = (to_values(rounded.codes, scheme, rounded.scales) - w).abs()[:, 3:50]
    steps = scale_values(scheme, rounded.scales).abs()
    assert float((apart / steps).mean()) < 0.5  # of the grid: a free weight would be anywhere on its 8 numbers
    whole = round_by("gptq", w, scheme, Statistics.of(x), ranges="range", passes=0)
    assert torch.equal(whole.codes[:, 3:50], to_codes(w, scheme, choose(w, scheme))[:, 3:50])


@named
def test_inputs_that_say_nothing_or_one_thing(name):
    """All zeros: as round-to-nearest. The same row always: finite, and the output of that row is kept better."""
    scheme, w = SCHEMES[name], normal(4, 96, 1)
    nothing = Statistics.of(torch.zeros(10, 96))
    rounded = round_by("gptq", w, scheme, nothing, ranges="range", passes=0)
    assert torch.equal(rounded.codes, to_codes(w, scheme, choose(w, scheme)))
    assert "96 of 96 input channels" in rounded.notes[0]
    constant = Statistics.of(torch.linspace(0.1, 2, 96).expand(50, 96))
    got, nearest = round_by("gptq", w, scheme, constant), round_by("rtn", w, scheme, None)
    assert loss(w, scheme, got, constant.gram) < loss(w, scheme, nearest, constant.gram)


def test_more_damping_is_told():
    """One direction among 96 channels and no damping asked for: the factor needs some, and the notes say how much."""
    scheme, w = SCHEMES["int4"], normal(4, 96, 1)
    constant = Statistics.of(torch.linspace(0.1, 2, 96).expand(50, 96))
    (note,) = round_by("gptq", w, scheme, constant, damping=0.0).notes
    assert re.fullmatch(r"damping 1e-0[456] instead of 0: the inputs are too alike for less", note)
    assert round_by("gptq", w, scheme, correlated(96, 0)).notes == ()


@rounders
def test_fp16_scales_that_overflow(rounder):
    w = normal(4, 64, 0) * 1e7
    with pytest.raises(ValueError, match="does not fit fp16: use scale='fp32'"):
        round_by(rounder, w, Scheme("int4", 32, scale="fp16"), correlated(64, 0))


@pytest.mark.parametrize("scale", sorted(PLAIN_SCALES))
def test_refitted_scales_stay_in_their_format(scale):
    """Beside the largest number that fp16 holds, where a better scale would be infinite."""
    scheme = Scheme("int2", 16, scale=scale)
    w = normal(4, 64, 0)
    w *= 65504 / float(grouped(w, 16).abs().amax())
    for rounder in ROUNDERS:
        rounded = round_by(rounder, w, scheme, correlated(64, 0))
        assert bool(torch.isfinite(rounded.scales.scale).all())


def test_refusals():
    w, scheme, statistics = normal(4, 64, 0), SCHEMES["int4"], correlated(64, 0)
    with pytest.raises(ValueError, match="gptq needs statistics"):
        round_by("gptq", w, scheme, None)
    for rounder in ("gptq", "clip"):
        with pytest.raises(ValueError, match="statistics are of 64 channels and the weight has 32"):
            round_by(rounder, w[:, :32], scheme, statistics)
    spoilt = Statistics(statistics.gram * float("nan"), statistics.absmax, 1)
    with pytest.raises(ValueError, match="NaN or infinity: collect the statistics again"):
        round_by("gptq", w, scheme, spoilt)
    with pytest.raises(ValueError, match="not positive definite"):
        round_by("gptq", w, scheme, Statistics(torch.eye(64) - 1e6 * torch.eye(64).roll(1, 0), statistics.absmax, 1))


@pytest.mark.parametrize(
    ("rounder", "options", "message"),
    [
        ("gptq", {"damping": -0.1}, "damping must be 0 to 1"),
        ("gptq", {"ranges": "best"}, "ranges must be one of output, mse, range, got 'best'"),
        ("gptq", {"passes": -1}, "passes must be a whole number and at least 0, got -1"),
        ("gptq", {"act_order": "yes"}, "act_order must be true or false, got 'yes'"),
        ("clip", {"passes": 0}, "passes must be a whole number and at least 1, got 0"),
        ("hqq", {"p": 0.0}, "p must be above 0 and at most 1, got 0.0"),
        ("hqq", {"beta": 0.0}, "beta must be above 0, got 0.0"),
        ("hqq", {"steps": 1.5}, "steps must be a whole number and at least 0, got 1.5"),
    ],
)
def test_options_are_checked_before_work(rounder, options, message):
    with pytest.raises(ValueError, match=message):
        round_by(rounder, normal(2, 8, 0), SCHEMES["int4"], correlated(8, 0), **options)
    with pytest.raises(ValueError, match=message):
        LayerConfig(SCHEMES["int4"], rounder=rounder, options=options)


@rounders
@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (1, 1)])
def test_empty_weights(rounder, shape):
    w = torch.ones(shape)
    statistics = Statistics.of(torch.ones(2, shape[1]))
    rounded = round_by(rounder, w, SCHEMES["int4"], statistics)
    assert rounded.codes.shape == shape
    assert isinstance(rounded.scales, Scales)
