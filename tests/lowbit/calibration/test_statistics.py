"""Statistics: sums against numpy's float64, in any parts; what they say of an output; what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowbit.statistics import Statistics, Tally
from tests.support.strategies import seeds


def rows(seed: int, count: int, k: int) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy((rng.standard_normal((count, k)) * 10.0 ** rng.uniform(-3, 3, k)).astype(np.float32))


@given(seeds, st.integers(1, 40), st.integers(1, 600), st.lists(st.integers(0, 60), max_size=4), st.booleans())
def test_sums_are_numpys_whatever_the_parts(seed, count, k, cuts, bf16):
    """Each product is float32's, of at most 40 rows: relative to sqrt(G_ii G_jj) it is off by 40 roundings at most."""
    x = rows(seed, count, k)
    x = x.bfloat16() if bf16 else x
    tally = Tally(k)
    for part in x.tensor_split(sorted(min(cut, count) for cut in cuts)):
        tally.add(part)
    got = tally.statistics()
    wide = x.double().numpy()
    want = wide.T @ wide / count
    size = np.sqrt(np.outer(np.diag(want), np.diag(want)))
    assert (np.abs(got.gram.numpy() - want) <= (count + 2) * 2.0**-24 * size).all()
    assert torch.equal(got.gram, got.gram.T)
    assert torch.equal(got.absmax, x.float().abs().amax(0))
    assert got.count == count


@given(seeds, st.integers(1, 20), st.integers(1, 20), st.integers(1, 20))
def test_merging_is_adding_rows(seed, first, second, k):
    x = rows(seed, first + second, k)
    both, whole = Statistics.of(x[:first]).merged(Statistics.of(x[first:])), Statistics.of(x)
    assert torch.equal(both.absmax, whole.absmax)
    assert both.count == whole.count == first + second
    size = whole.gram.diagonal().sqrt()
    assert bool(((both.gram - whole.gram).abs() <= 50 * 2.0**-24 * torch.outer(size, size)).all())


@given(seeds, st.integers(1, 30), st.integers(1, 20))
def test_scaled_statistics_are_those_of_scaled_inputs(seed, count, k):
    """By powers of two, so that every number is exact."""
    x = rows(seed, count, k)
    s = torch.from_numpy(2.0 ** np.random.default_rng(seed).integers(-8, 9, k)).float()
    s[::2] *= -1
    got, want = Statistics.of(x).scaled(s), Statistics.of(x / s)
    assert torch.equal(got.absmax, want.absmax)
    torch.testing.assert_close(got.gram, want.gram, rtol=1e-6, atol=0)


@given(seeds, st.integers(1, 40), st.integers(1, 300), st.lists(st.integers(0, 40), max_size=3), st.integers(0, 40))
def test_drift_is_numpys_whatever_the_parts_and_none_where_nothing_else_is_meant(seed, count, k, cuts, alone):
    """Rows of which nobody says what is meant are as they should be. Tolerance as above, with a rounding of the difference."""
    x, float_x = rows(seed, count, k), rows(seed + 1, count, k)
    float_x[:alone] = x[:alone]
    tally, first, last = Tally(k, drifts=True), Tally(k, drifts=True), Tally(k, drifts=True)
    first.add(x[:alone])
    for part, wanted in zip(*(what[alone:].tensor_split(sorted(cuts)) for what in (x, float_x)), strict=True):
        last.add(part, float_x=wanted)
    for tally_of_part in (first, last):
        tally.merge(tally_of_part)
    got, wide = tally.statistics().drift, x.double().numpy()
    apart = float_x.double().numpy() - wide
    want = apart.T @ wide / count
    size = np.sqrt(np.outer(np.square(apart).mean(0), np.square(wide).mean(0)))
    size += np.sqrt(np.outer(np.square(wide).mean(0) + np.square(float_x.double().numpy()).mean(0), np.square(wide).mean(0)))
    assert (np.abs(got.numpy() - want) <= (count + 4) * 2.0**-24 * size).all()
    plain, same = Statistics.of(x), Statistics.of(x, float_x=x)
    assert plain.drift is None
    assert torch.equal(same.drift, torch.zeros(k, k))
    assert torch.equal(same.gram, plain.gram)


@given(seeds, st.integers(1, 30), st.integers(1, 20))
def test_scaled_drift_is_that_of_scaled_inputs(seed, count, k):
    x, float_x = rows(seed, count, k), rows(seed + 1, count, k)
    s = torch.from_numpy(2.0 ** np.random.default_rng(seed).integers(-8, 9, k)).float()
    got, want = Statistics.of(x, float_x=float_x).scaled(s), Statistics.of(x / s, float_x=float_x / s)
    torch.testing.assert_close(got.drift, want.drift, rtol=1e-6, atol=0)


@given(seeds, st.integers(1, 30), st.integers(1, 6), st.integers(1, 20))
def test_output_error_is_that_of_the_outputs(seed, count, n, k):
    x = rows(seed, count, k)
    rng = np.random.default_rng(seed)
    w, q = (torch.from_numpy(rng.standard_normal((n, k))) for _ in range(2))
    want = float((x.double() @ (w - q).T).square().sum() / (x.double() @ w.T).square().sum())
    # tr(W G W^T) cancels where the outputs are small beside the inputs.
    spread = float(
        (w.abs() @ x.double().abs().square().mean(0).sqrt()).square().sum() * count / (x.double() @ w.T).square().sum()
    )
    assert abs(Statistics.of(x).output_error(w, q) - want) <= 100 * (k + count) * 2.0**-24 * spread * (1 + want)
    assert Statistics.of(x).output_error(w, w) == 0


def test_output_error_of_nothing():
    nothing = Statistics.of(torch.zeros(3, 4))
    assert nothing.output_error(torch.ones(2, 4), torch.zeros(2, 4)) == 0
    half = Statistics.of(torch.tensor([[1.0, 0.0]]))
    assert half.output_error(torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 1.0]])) == float("inf")


def test_dead_channels():
    x = torch.randn(5, 6)
    x[:, [1, 4]] = 0
    assert Statistics.of(x).dead.tolist() == [False, True, False, False, True, False]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_rows_that_are_not_finite_are_named(bad):
    tally = Tally(4)
    tally.add(torch.randn(3, 4), "model.layers.0.up_proj", 0)
    x = torch.randn(2, 5, 4)
    x[1, 3, 2] = x[0, 0, 0] = bad
    with pytest.raises(ValueError, match=r"model\.layers\.0\.up_proj, batch 7: 2 of 10 rows hold NaN or infinity"):
        tally.add(x, "model.layers.0.up_proj", 7)
    assert tally.count == 3
    assert bool(torch.isfinite(tally.gram).all())


def test_refusals():
    with pytest.raises(ValueError, match="up: an input of 1e\\+20 is too large for its square"):
        Statistics.of(torch.full((2, 3), 1e20), "up")
    with pytest.raises(ValueError, match="rows of 4 numbers were expected, got 3"):
        Tally(4).add(torch.randn(2, 3))
    with pytest.raises(ValueError, match="at least 1 row, got 0"):
        Tally(4).statistics()
    with pytest.raises(ValueError, match="same length can be merged, got 4 and 3"):
        Tally(4).merge(Tally(3))
    with pytest.raises(ValueError, match=r"gram must be \[K, K\]"):
        Statistics(torch.zeros(2, 3), torch.zeros(3), 1)
    for s in (torch.tensor([1.0, 0.0]), torch.tensor([1.0, float("nan")]), torch.ones(3)):
        with pytest.raises(ValueError, match="s must be 2 finite numbers other than 0"):
            Statistics.of(torch.randn(3, 2)).scaled(s)
