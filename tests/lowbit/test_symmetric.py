"""Symmetric integers use their lowest code: the scale of a group, what it costs, and that nothing takes it for positive."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowbit import QTensor
from lowbit.algorithms import ROUNDERS
from lowbit.diagnosis.weights import _clipped
from lowbit.formats import FORMATS
from lowbit.grid import Scales, grouped, scale_values, to_codes, to_values
from lowbit.scales import choose
from lowbit.scheme import PLAIN_SCALES, Scheme
from lowbit.statistics import Statistics
from lowbit_kernels import reference
from tests.support import oracle
from tests.support.strategies import FORMS, group_sizes, make_weight, seeds, weights

BITS = range(2, 9)
symmetric = st.builds(
    Scheme, st.sampled_from([f"int{b}" for b in BITS]), group_sizes, scale=st.sampled_from(sorted(PLAIN_SCALES))
)
drawn = st.builds(
    lambda form, n, k, seed: torch.from_numpy(make_weight(form, n, k, seed)),
    st.sampled_from([f for f in FORMS if f != "magnitudes"]),
    st.integers(1, 4),
    st.integers(1, 140),
    seeds,
)
each_width = pytest.mark.parametrize("bits", BITS)


def values(w: Tensor, scheme: Scheme, method: str = "range") -> Tensor:
    scales = choose(w, scheme, method)
    return to_values(to_codes(w, scheme, scales), scheme, scales)


def fits(w: Tensor, scheme: Scheme) -> bool:
    """Whether the scales of ``w`` fit their format."""
    try:
        choose(w, scheme, "absmax")
    except ValueError:
        return False
    return True


def ends(w: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """How far each group [N, G] reaches below and above 0."""
    low, high = grouped(w, scheme.group(w.shape[-1])).aminmax(dim=-1)
    return low.clamp(max=0).neg(), high.clamp(min=0)


# ---- the scale of a group ------------------------------------------------------------------------------------------


@given(drawn, symmetric)
def test_the_value_of_largest_magnitude_becomes_the_lowest_code(w: Tensor, scheme: Scheme) -> None:
    """And the scale has the sign for it, but where a group reaches equally far both ways: there it is positive and no code is
    without its opposite."""
    scales = choose(w, scheme)
    below, above = ends(w, scheme)
    number = grouped(scheme.fmt.decode(to_codes(w, scheme, scales)), scheme.group(w.shape[-1]))
    lowest = number.amin(-1)
    assert bool((lowest == scheme.fmt.min)[below != above].all())
    assert bool((lowest >= -scheme.fmt.max)[below == above].all())
    assert torch.equal(scales.scale.sign().float(), torch.where(above > below, -1.0, 1.0) * (above + below > 0))


@given(drawn, symmetric)
def test_no_value_errs_by_more_than_a_step(w: Tensor, scheme: Scheme) -> None:
    """By half a step where it lies within half a step of the last code: the value that sets the scale too, since the scale's own
    rounding, to 2^-9, moves the lowest of 2^7 integers by a quarter of a step."""
    scales = choose(w, scheme)
    step = scale_values(scheme, scales).double().repeat_interleave(scheme.group(w.shape[-1]), -1)[:, : w.shape[-1]]
    error = (to_values(to_codes(w, scheme, scales), scheme, scales).double() - w).abs()
    inside = w.double() / torch.where(step == 0, torch.inf, step) <= scheme.fmt.max + 0.5
    slack = 2.0**-22 * w.abs() + 2.0**-140
    assert bool((error <= step.abs() * torch.where(inside, 0.5, 1.25) + slack).all())


@each_width
@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gaussian_weights_lose_less(bits: int, group: int, dtype: torch.dtype) -> None:
    w = torch.randn(128, 1024, generator=torch.Generator().manual_seed(bits)).to(dtype).float()
    scheme = Scheme(f"int{bits}", group)
    new, old = (oracle.sqnr(w.numpy(), values(w, scheme, method).numpy()) for method in ("range", "absmax"))
    finer = 20 * math.log10(2 ** (bits - 1) / (2 ** (bits - 1) - 1))  # what the finer step alone gives: 0.07 dB of 8 bits
    assert new > old + (0.75 * finer if bits < 8 else 0)


@settings(max_examples=150)
@given(drawn, symmetric)
def test_what_is_on_the_grid_stays(w: Tensor, scheme: Scheme) -> None:
    """Rounded values rounded again are the same codes under the same scales, in groups that use the lowest code; and in those
    that reach equally far both ways, where the scale has bits to spare for a product with 7."""
    first = choose(w, scheme)
    codes = to_codes(w, scheme, first)
    q = to_values(codes, scheme, first)
    again = choose(q, scheme)
    number = grouped(scheme.fmt.decode(codes), scheme.group(w.shape[-1]))
    below, above = ends(q, scheme)
    kept = number.amin(-1) == scheme.fmt.min
    kept |= (below == above) & (below == scheme.fmt.max * first.scale.abs().float()) & (scheme.scale != "fp32")
    assert torch.equal(again.scale[kept], first.scale[kept])
    wide = kept.repeat_interleave(scheme.group(w.shape[-1]), -1)[:, : w.shape[-1]]
    assert torch.equal(to_codes(q, scheme, again)[wide], codes[wide])


@each_width
@given(seed=seeds, group=group_sizes, size=st.floats(0.01, 100))
@settings(max_examples=20)
def test_ternary_weights_are_held_as_they_are(bits: int, seed: int, group: int, size: float) -> None:
    """Of -a, 0 and a, up to the rounding of the scale, in every group that has both signs."""
    scheme = Scheme(f"int{bits}", group, scale="fp32")
    w = size * (torch.randint(3, (3, 130), generator=torch.Generator().manual_seed(seed)) - 1).float()
    below, above = ends(w, scheme)
    both = (below == above).repeat_interleave(scheme.group(130), -1)[:, :130]
    torch.testing.assert_close(values(w, scheme)[both], w[both], rtol=2.0**-22, atol=0)


@given(weights(), symmetric, st.sampled_from(("range", "absmax", "mse")))
def test_the_other_sign_is_the_same_codes(w: Tensor, scheme: Scheme, method: str) -> None:
    below, above = ends(w, scheme)
    assume(method != "mse" or bool((below != above).all()))
    assume(fits(w, scheme))
    assert torch.equal(values(-w, scheme, method), -values(w, scheme, method))


def is_scale(name: str) -> bool:
    try:
        Scheme("int4", 32, scale=name, outer=name.startswith("fp8"))
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("scale", sorted(filter(is_scale, {*PLAIN_SCALES, *FORMATS} - {"int1"})))
def test_scales_that_take_no_sign_are_positive(scale: str) -> None:
    """Whatever format they are stored in: one with a sign holds negative ones, and one without the scales of "absmax"."""
    w = torch.randn(8, 96, generator=torch.Generator().manual_seed(0))
    scheme = Scheme("int4", 32, scale=scale, outer=scale.startswith("fp8"))
    found = choose(w, scheme)
    below, above = ends(w, scheme)
    has_sign = scale in PLAIN_SCALES or FORMATS[scale].min == -FORMATS[scale].max or FORMATS[scale].min < -FORMATS[scale].max
    if has_sign:
        number = scale_values(scheme, found)
        assert bool((number[above > below] <= 0).all())
        assert bool((number[below > above] >= 0).all())
    else:
        assert torch.equal(found.scale, choose(w, scheme, "absmax").scale)
        assert scheme.reach == 7


@given(drawn, symmetric)
def test_absmax_is_the_rule_of_symmetric_ranges(w: Tensor, scheme: Scheme) -> None:
    """Bit for bit: the largest magnitude over the largest integer, and the lowest code left out."""
    found = choose(w, scheme, "absmax")
    largest = grouped(w, scheme.group(w.shape[-1])).abs().amax(-1)
    assert torch.equal(found.scale, (largest / torch.tensor(scheme.fmt.max)).to(found.scale.dtype))
    parts = reference.quantize(w, scheme, "absmax")
    assert torch.equal(parts[1], found.scale)


# ---- what is chosen by searching -----------------------------------------------------------------------------------


@each_width
@pytest.mark.parametrize("form", ["normal", "heavy"])
def test_searching_never_costs_more_than_either_rule(bits: int, form: str) -> None:
    w, scheme = torch.from_numpy(make_weight(form, 16, 256, bits)), Scheme(f"int{bits}", 64)
    found = {m: grouped(values(w, scheme, m) - w, 64).square().sum(-1) for m in ("mse", "range", "absmax")}
    assert bool((found["mse"] <= torch.minimum(found["range"], found["absmax"])).all())


def case(bits: int) -> tuple[Tensor, Statistics, Scheme]:
    """A weight [24, 192] with statistics of correlated inputs, and a symmetric scheme."""
    random = torch.Generator().manual_seed(bits)
    w = torch.randn(24, 192, generator=random)
    x = torch.randn(400, 192, generator=random) @ torch.randn(192, 192, generator=random)
    return w, Statistics(x.T @ x / len(x), x.abs().amax(0), len(x)), Scheme(f"int{bits}", 64)


@pytest.mark.parametrize("name", ROUNDERS)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_rounders_take_negative_scales_as_positive_ones(name: str, bits: int) -> None:
    """The negated weight is rounded to the negated values, bit for bit: where a scale had to be positive, those of half of the
    groups would stand still in one of the two."""
    w, statistics, scheme = case(bits)

    def rounded(weight: Tensor) -> tuple[Tensor, Scales]:
        found = ROUNDERS[name].round(weight, scheme, statistics)
        return to_values(found.codes, scheme, found.scales), found.scales

    (one, scales), (other, turned) = rounded(w), rounded(-w)
    assert torch.equal(one, -other)
    assert torch.equal(scales.scale, -turned.scale)
    assert 0.2 < float((scales.scale < 0).float().mean()) < 0.8


@pytest.mark.parametrize("name", ["rtn", "clip", "hqq", "gptq"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_no_method_loses_by_negative_scales(name: str, bits: int) -> None:
    """What each minimizes, the error of outputs where it looks at statistics, is no larger than that of rounding to nearest."""
    w, statistics, scheme = case(bits)
    found = ROUNDERS[name].round(w, scheme, statistics)
    gram = statistics.gram if ROUNDERS[name].uses_statistics else torch.eye(w.shape[-1])
    errors = [q - w for q in (to_values(found.codes, scheme, found.scales), values(w, scheme))]
    one, usual = (float(((error @ gram) * error).sum()) for error in errors)
    assert one <= usual * (1 + 1e-5)


@pytest.mark.parametrize("name", ["hqq", "gptq"])
def test_scales_are_fitted_whatever_their_sign(name: str) -> None:
    """Groups with negative scales do not stay where the search of ranges left them."""
    random = torch.Generator().manual_seed(1)
    w = torch.randn(64, 128, generator=random)
    statistics = Statistics(torch.eye(128), torch.ones(128), 1000)
    scheme = Scheme("int3", 32, scale="fp32")
    options = {"passes": 0} if name == "gptq" else {"steps": 0}
    found, start = (ROUNDERS[name].round(w, scheme, statistics, **o).scales.scale for o in ({}, options))
    for sign in (-1, 1):
        of_sign = start.sign() == sign
        assert float((found != start)[of_sign].float().mean()) > 0.3


def test_the_doctor_counts_clipped_weights_of_both_signs() -> None:
    w = torch.randn(32, 256, generator=torch.Generator().manual_seed(0))
    scheme = Scheme("int3", 64)
    q = QTensor.quantize(w, scheme)
    step = q.scale.float().repeat_interleave(64, -1)
    wanted = ((w / step > 3.5) | (w / step < -4.5)).float().mean()
    assert 0 < _clipped(q, w) == pytest.approx(float(wanted))
    assert _clipped(QTensor.quantize(-w, scheme), -w) == _clipped(q, w)
