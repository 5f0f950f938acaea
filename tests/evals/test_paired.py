"""Paired statistics against scipy, against other ways to the same number, and against known truth."""

from __future__ import annotations

import itertools
import json
import math
from functools import cache

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit.evals.paired import Paired, corrected, holm, mcnemar, paired_difference, questions_for, tango_interval

COUNTS = st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 60)).filter(any)
interval = cache(tango_interval)


def a_pair(gained: int, lost: int, n: int) -> Paired:
    rest = n - gained - lost
    return paired_difference([True] * lost + [False] * gained + [True] * rest, [False] * lost + [True] * (gained + rest))


# ---- the interval ----------------------------------------------------------------------------------------------------


def test_a_published_interval() -> None:
    # Airway hyper-responsiveness before and after transplantation: Fagerland, Lydersen and Laake (2014), table 6.
    low, high = tango_interval(1, 7, 21)
    assert (round(low, 3), round(high, 3)) == (-0.517, -0.026)


def test_no_flips_still_leave_doubt() -> None:
    low, high = tango_interval(0, 0, 100)
    z2 = 1.959964**2
    assert high == pytest.approx(z2 / (100 + z2), rel=1e-5)
    assert low == -high


@given(COUNTS)
@settings(deadline=None)
def test_intervals_hold_the_estimate_and_mirror(counts: tuple[int, int, int]) -> None:
    gained, lost, n = *counts[:2], sum(counts)
    low, high = tango_interval(gained, lost, n)
    assert -1 <= low <= (gained - lost) / n <= high <= 1
    assert tango_interval(lost, gained, n) == pytest.approx((-high, -low), abs=1e-9)
    wide = tango_interval(gained, lost, n, 0.99)
    assert wide[0] <= low <= high <= wide[1]


def deviations(gained: int, lost: int, n: int, delta: float) -> float:
    """Standard deviations of the estimate from ``delta``, the share of losses found where the likelihood stops rising."""

    def slope(share: float) -> float:
        return gained / (share + delta) + lost / share - 2 * (n - gained - lost) / (1 - 2 * share - delta)

    least, most = max(0.0, -delta), (1 - delta) / 2
    margin = 1e-12 * (most - least)
    share = scipy.optimize.brentq(slope, least + margin, most - margin, xtol=1e-15)
    return (gained - lost - n * delta) / math.sqrt(n * (2 * share + delta * (1 - delta)))


@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 200))
@settings(deadline=None, max_examples=40)
def test_ends_are_where_the_score_is_the_quantile(gained: int, lost: int, same: int) -> None:
    n = gained + lost + same
    low, high = tango_interval(gained, lost, n)
    assert deviations(gained, lost, n, low) == pytest.approx(scipy.stats.norm.ppf(0.975), abs=1e-6)
    assert deviations(gained, lost, n, high) == pytest.approx(scipy.stats.norm.ppf(0.025), abs=1e-6)


def covers(gained: int, lost: int, n: int, difference: float) -> bool:
    low, high = interval(gained, lost, n)
    return low - 1e-12 <= difference <= high + 1e-12


# Flips to be expected among n questions, and how many of them are losses.
FLIPS, LOSSES = (8, 12, 25, 60, 150), (0.5, 0.7, 0.9, 1.0)


@pytest.mark.parametrize("n", [200, 500, 1000])
@pytest.mark.parametrize("flips", FLIPS)
def test_the_interval_covers_in_simulations(n: int, flips: int) -> None:
    rng = np.random.default_rng([n, flips])
    for losses in LOSSES:
        gain, loss = flips * (1 - losses) / n, flips * losses / n
        counts, often = np.unique(rng.multinomial(n, [gain, loss, 1 - gain - loss], size=2000)[:, :2], axis=0, return_counts=True)
        covered = sum(int(k) for (g, x), k in zip(counts.tolist(), often, strict=True) if covers(g, x, n, gain - loss)) / 2000
        assert 0.93 <= covered <= 0.97, losses


def coverage(n: int, gain: float, loss: float) -> float:
    """The chance that the interval covers, summed over all counts that are not absurdly rare."""
    gained, lost = (axis.ravel() for axis in np.meshgrid(likely(n, gain), likely(n, loss), indexing="ij"))
    gained, lost = gained[gained + lost <= n], lost[gained + lost <= n]
    chance = scipy.stats.multinomial.pmf(np.stack([gained, lost, n - gained - lost], -1), n, [gain, loss, 1 - gain - loss])
    taken = chance > 1e-8
    assert chance[taken].sum() == pytest.approx(1, abs=1e-4)
    pairs = zip(gained[taken].tolist(), lost[taken].tolist(), chance[taken].tolist(), strict=True)
    return math.fsum(p for g, x, p in pairs if covers(g, x, n, gain - loss))


def likely(n: int, p: float) -> np.ndarray:
    """Counts among n within six standard deviations of n p, and a few more."""
    width = 6 * math.sqrt(n * p * (1 - p)) + 6
    return np.arange(max(0, math.floor(n * p - width)), min(n, math.ceil(n * p + width)) + 1)


@pytest.mark.parametrize(
    ("flips", "least", "most"),
    [(1, 0.964, 1), (2, 0.964, 1), (3, 0.964, 1), (3.75, 0.934, 0.987), (4.5, 0.928, 0.973), (6.75, 0.928, 0.973)],
)
def test_few_flips_err_on_the_safe_side_or_by_little(flips: float, least: float, most: float) -> None:
    found = [
        coverage(n, flips * (1 - losses) / n, flips * losses / n) for n in (200, 1000) for losses in (0.5, 0.75, 0.85, 0.95, 1)
    ]
    assert least <= min(found)
    assert max(found) <= most


@pytest.mark.parametrize("flips", [7, 7.75, 10, 14, 20, 35])
def test_the_interval_covers_exactly(flips: float) -> None:
    found = [
        coverage(n, flips * (1 - losses) / n, flips * losses / n) for n in (200, 1000) for losses in (0.5, 0.65, 0.8, 0.95, 1)
    ]
    assert min(found) >= 0.93
    assert max(found) <= 0.97


@pytest.mark.parametrize("kept", [12, 20, 40])
def test_the_interval_covers_near_the_edge(kept: int) -> None:
    """Nearly every question lost: a model that quantization broke."""
    for gains in (0, 0.5, 1):
        assert 0.93 <= coverage(500, gains * kept / 500, 1 - kept / 500) <= 0.97


def test_flips_are_counted() -> None:
    paired = paired_difference([True, True, False, False, True], [True, False, True, False, False])
    assert (paired.n, paired.gained, paired.lost) == (5, 1, 2)
    assert paired.difference == pytest.approx(-0.2)
    assert paired.low < -0.2 < paired.high
    assert paired.mcnemar == 1
    fields = json.loads(json.dumps(paired.to_dict(), allow_nan=False))
    names = ["n", "difference", "low", "high", "gained", "lost", "mcnemar", "holm", "questions_for_one_point"]
    assert list(fields) == names
    assert fields["holm"] is None


# ---- tests -----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 400), st.integers(0, 400))
@settings(deadline=None)
def test_mcnemar_is_the_binomial_test(gained: int, lost: int) -> None:
    want = scipy.stats.binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
    assert mcnemar(gained, lost) == pytest.approx(want, rel=1e-9)
    assert mcnemar(gained, lost) == mcnemar(lost, gained)


def test_mcnemar_of_all_there_could_be() -> None:
    assert mcnemar(0, 5) == 0.0625
    assert mcnemar(0, 3000) == 0  # 2 ** -2999, which no float can hold
    assert mcnemar(6900, 7142) == pytest.approx(scipy.stats.binomtest(6900, 14042).pvalue, rel=1e-9)


@given(st.integers(0, 400), st.integers(0, 400))
@settings(deadline=None)
def test_more_uneven_flips_are_less_likely(gained: int, lost: int) -> None:
    more, less = max(gained, lost), min(gained, lost)
    assert mcnemar(more + 1, less) < mcnemar(more, less) or (more == less and mcnemar(more + 1, less) == 1)


P_VALUES = st.lists(st.one_of(st.floats(0, 1), st.sampled_from([0.01, 0.02])), max_size=6)


@given(P_VALUES)
def test_holm_is_closed_testing(p_values: list[float]) -> None:
    """A hypothesis falls where Bonferroni's test rejects each set of hypotheses that it belongs to."""
    everything = range(len(p_values))
    sets = [s for size in everything for s in itertools.combinations(everything, size + 1)]
    want = [max(min(1.0, len(s) * min(p_values[j] for j in s)) for s in sets if i in s) for i in everything]
    assert holm(p_values) == pytest.approx(want)


@given(P_VALUES, st.randoms(use_true_random=False))
def test_holm_keeps_order(p_values: list[float], random: object) -> None:
    adjusted = holm(p_values)
    assert all(p <= a <= 1 for p, a in zip(p_values, adjusted, strict=True))
    ranked = sorted(zip(p_values, adjusted, strict=True))
    assert [a for _, a in ranked] == sorted(adjusted)
    shuffled = list(enumerate(p_values))
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    again = dict(zip([i for i, _ in shuffled], holm([p for _, p in shuffled]), strict=True))
    assert [again[i] for i in range(len(p_values))] == adjusted


def test_a_run_is_corrected_as_one() -> None:
    run = [a_pair(0, 10, 100), a_pair(3, 3, 100), a_pair(2, 12, 100)]
    found = corrected(run)
    assert [paired.holm for paired in found] == holm([paired.mcnemar for paired in run])
    assert found[0].holm == 3 * run[0].mcnemar
    assert found[2].holm == 2 * run[2].mcnemar
    assert [paired.difference for paired in found] == [paired.difference for paired in run]
    assert corrected([]) == []


def test_false_findings_are_as_rare_as_said() -> None:
    """Ten recipes that cost nothing, on the same 500 questions: in at most one run in twenty any of them seems to."""
    rng = np.random.default_rng(3)
    p_value, runs = cache(mcnemar), 2000
    flips = rng.multinomial(500, [0.04, 0.04, 0.92], size=(runs, 10))
    found = sum(min(holm([p_value(g, x) for g, x, _ in run])) < 0.05 for run in flips.tolist())
    assert found / runs <= 0.05


# ---- how many questions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("difference", [0.01, 0.03])
@pytest.mark.parametrize("rate", [0.03, 0.1, 0.3])
@pytest.mark.parametrize("power", [0.8, 0.95])
def test_so_many_questions_have_the_power(difference: float, rate: float, power: float) -> None:
    flips = round(1000 * rate)
    paired = a_pair(flips // 2, flips - flips // 2, 1000)
    n = 1000 + questions_for(difference, paired, power)
    shares = [(rate - difference) / 2, (rate + difference) / 2, 1 - rate]
    counts = np.random.default_rng(5).multinomial(n, shares, size=20_000)[:, :2]
    p_values = np.minimum(1, 2 * scipy.stats.binom.cdf(counts.min(1), counts.sum(1), 0.5))
    had = np.mean(p_values < 0.05)
    error = math.sqrt(power * (1 - power) / 20_000)
    # Never less. The coarser the counts the more, and most where every flip is a loss.
    assert power - 4 * error <= had
    if n > 1000 and rate > difference:
        assert had <= power + 0.03


def test_questions_that_are_enough_already() -> None:
    flips = a_pair(1000, 1000, 100_000)
    assert flips.questions_for_one_point == questions_for(0.01, flips) == 0
    few = a_pair(3, 5, 200)
    assert few.questions_for_one_point == questions_for(-0.01, few) > 200
    assert questions_for(0.05, few) < questions_for(0.01, few) < questions_for(0.01, few, power=0.9)
    assert questions_for(0.01, few) < questions_for(0.01, few, alpha=0.01)
    # Where nothing flipped, a drop of one point would be a flip in a hundred.
    assert 780 < 200 + questions_for(0.01, a_pair(0, 0, 200)) < 1000


@given(st.floats(0.001, 1), COUNTS, st.floats(0.001, 0.999), st.floats(0.001, 0.999))
def test_questions_are_a_number(difference: float, counts: tuple[int, int, int], power: float, alpha: float) -> None:
    assert questions_for(difference, a_pair(*counts[:2], sum(counts)), power, alpha) >= 0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: paired_difference([True], [True, False]), "got 1 and 2"),
        (lambda: paired_difference([], []), "at least one question"),
        (lambda: tango_interval(3, 3, 5), "counts among 5"),
        (lambda: tango_interval(1, 1, 5, 1.0), "between 0 and 1"),
        (lambda: mcnemar(-1, 2), "got -1 and 2"),
        (lambda: holm([0.5, 1.5]), r"got 1\.5"),
        (lambda: holm([math.nan]), "got nan"),
        (lambda: questions_for(0, a_pair(1, 1, 9)), "not 0, got 0"),
        (lambda: questions_for(0.01, a_pair(1, 1, 9), power=1), "power must be"),
        (lambda: questions_for(0.01, a_pair(1, 1, 9), alpha=0), "alpha must be"),
    ],
)
def test_comparisons_that_mean_nothing(call: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()  # type: ignore[operator]
