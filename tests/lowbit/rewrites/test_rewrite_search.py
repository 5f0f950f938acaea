"""What AWQ and SmoothQuant choose: losses are those of the definition, and no choice is worse than none."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowbit import Recipe
from lowbit.grid import to_codes, to_values
from lowbit.rewrites.awq import awq
from lowbit.rewrites.noise import input_noise
from lowbit.rewrites.search import Pool, Reader, centred_scale, losses_of
from lowbit.rewrites.smoothquant import smoothquant
from lowbit.scales import choose
from lowbit.scheme import SCHEMES, Scheme
from lowbit.statistics import Statistics
from tests.support.strategies import seeds

W8A8 = "int8_dynamic_activation_int8_weight"
STATIC = "int8_static_activation_int8_weight"


# ---- what is lost ----------------------------------------------------------------------------------------------------


def inputs(k: int, seed: int, rows: int = 300) -> Tensor:
    """Rows of which few channels are far larger than the others, and one is dead."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator) @ torch.randn(k, k, generator=generator) / k**0.5
    x = x * torch.exp(1.5 * torch.randn(k, generator=generator))
    x[:, seed % k] = 0
    return x


def weight(n: int, k: int, seed: int) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed + 1))


def pool_of(*readers: Reader, count: int | None = None) -> Pool:
    return Pool(count or readers[0].weight.shape[1], lambda: iter(readers))


def reader(w: Tensor, recipe: str, x: Tensor, channels: Tensor | None = None) -> Reader:
    target = Recipe.parse(recipe).rules[0].config
    assert target is not None
    return Reader(w, target, Statistics.of(x), torch.arange(w.shape[1]) if channels is None else channels)


@settings(max_examples=40)
@given(st.sampled_from(sorted(SCHEMES)), seeds, st.integers(1, 9), st.integers(2, 70))
def test_the_loss_is_that_of_the_outputs_themselves(name, seed, n, k):
    """Rounded, multiplied out on the rows themselves in float64, and compared."""
    x, w, scheme = inputs(k, seed % 1000), weight(n, k, seed % 1000), SCHEMES[name]
    s = torch.exp(torch.randn(k, generator=torch.Generator().manual_seed(seed % 1000 + 2)))
    scaled = w * s
    scales = choose(scaled, scheme)
    q = to_values(to_codes(scaled, scheme, scales), scheme, scales).double()
    wide = x.double()
    true = wide @ w.double().T
    lost = (wide / s.double()) @ q.T - true
    (found,) = losses_of(pool_of(reader(w, name, x)), [s.double()]).tolist()
    assert found == pytest.approx(float(lost.square().sum() / true.square().sum()), rel=2e-3, abs=1e-9)


def test_what_each_layer_of_an_input_loses_counts_by_its_own_size():
    """A layer with outputs a thousand times as large is worth no more."""
    x, s = inputs(32, 3), torch.exp(torch.randn(32, generator=torch.Generator().manual_seed(1))).double()
    one, two = reader(weight(6, 32, 4), "int3", x), reader(1000 * weight(9, 32, 5), "int3", x[:100])
    apart, both = [losses_of(pool_of(r), [s]) for r in (one, two)], losses_of(pool_of(one, two), [s])
    torch.testing.assert_close(both, (300 * apart[0] + 100 * apart[1]) / 400)


@pytest.mark.parametrize(("format", "static"), [("int8", False), ("int8", True), ("fp8_e4m3fn", True)])
@pytest.mark.parametrize("spread", [0.0, 1.0, 2.0])
def test_what_rounding_inputs_costs_is_told_from_their_statistics(format, static, spread):
    """Within a half of what rounding normal inputs costs."""
    activation = Scheme(format, scale="fp32")
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2000, 96, generator=generator) * torch.exp(spread * torch.randn(96, generator=generator))
    top = x.abs().amax() if static else x.abs().amax(-1, keepdim=True)
    step = top / activation.fmt.symmetric_max
    true = (activation.fmt.round(x / step) * step - x).square().mean(0).double().sum()
    found = input_noise((x.square().mean(0), x.abs().amax(0)), activation, "static" if static else "token").sum()
    assert float(true) / 1.5 <= float(found) <= float(true) * 1.5


def test_noise_of_silent_inputs_is_none():
    for scale in ("token", "static"):
        zeros = torch.zeros(7)
        assert torch.equal(input_noise((zeros, zeros), Scheme("int8", 3, scale="fp32"), scale), zeros.double())


# ---- what is chosen --------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(st.sampled_from(sorted(SCHEMES)), seeds, st.booleans(), st.integers(2, 5))
def test_awq_takes_the_best_power_and_never_one_that_is_worse_than_none(name, seed, weights, grid):
    k = 40
    x = inputs(k, seed % 1000)
    readers = [reader(weight(n, k, seed % 1000 + n), name, x) for n in (3, 8)]
    found = awq(pool_of(*readers), grid=grid, weights=weights)
    size = x.double().square().mean(0).sqrt()
    powers = [torch.ones(k).double(), *(centred_scale(size ** (i / grid)) for i in range(1, grid + 1))]
    losses = losses_of(pool_of(*readers), powers)
    assert found.before == pytest.approx(float(losses[0]))
    assert found.after <= float(losses.min()) * (1 + 1e-5)
    assert found.after <= found.before
    if not weights:
        assert found.after == pytest.approx(float(losses.min()), rel=1e-4)
    assert bool(torch.isfinite(found.divisor).all())
    assert bool((found.divisor > 0).all())
    assert float(found.divisor[seed % 1000 % k]) == 1.0  # the dead one
    assert (found.label == "") == torch.equal(found.divisor, torch.ones(k).double())


def test_layers_of_one_input_are_weighed_together():
    """The best power for two is that of their summed losses, also where channels of one are repeated and some are its own."""
    x, y = inputs(24, 1), inputs(12, 2)
    one = reader(weight(6, 24, 3), "int3", x, torch.arange(12).repeat_interleave(2))
    two = reader(weight(5, 12, 4), "int3", y, torch.tensor([-1, *range(1, 12)]))
    found = awq(pool_of(one, two, count=12), grid=4)
    moments = torch.zeros(12).double().index_add(0, one.channels, x.double().square().mean(0))
    moments += torch.cat([torch.zeros(1), y.square().mean(0)[1:]]).double()
    count = torch.full((12,), 3.0).double()
    count[0] = 2
    expected = {}
    for i in range(5):
        divisor = centred_scale((moments / count).sqrt() ** (i / 4))
        expected["" if i == 0 else f"alpha {i / 4:.3g}"] = divisor
    losses = losses_of(pool_of(one, two, count=12), list(expected.values()))
    label = list(expected)[int(losses.argmin())]
    assert found.label == label
    torch.testing.assert_close(found.divisor, expected[label], rtol=1e-6, atol=0)
    assert float(two.spread(found.divisor)[0]) == 1.0


@settings(max_examples=25)
@given(seeds, st.floats(0, 1))
def test_smoothquant_is_the_published_formula(seed, alpha):
    """max |x|^alpha / max |w|^(1 - alpha), up to one factor for all channels, which nothing depends on."""
    x, readers = inputs(20, seed % 1000), []
    for n in (4, 7):
        readers.append(reader(weight(n, 20, seed % 1000 + n), W8A8, x))
    found = smoothquant(pool_of(*readers), alpha=alpha)
    w = np.concatenate([r.weight.numpy() for r in readers]).astype(np.float64)
    live = np.arange(20) != seed % 1000 % 20
    published = np.abs(x.numpy()).max(0)[live].astype(np.float64) ** alpha / np.abs(w).max(0)[live] ** (1 - alpha)
    ratio = found.divisor.numpy()[live] / published
    assert ratio == pytest.approx(np.full(len(ratio), ratio[0]), rel=1e-6)
    assert ratio[0] * published.min() == pytest.approx(1 / (ratio[0] * published.max()), rel=1e-6)  # 1 is in the middle
    assert found.label == f"alpha {alpha:.3g}"


def test_smoothquant_s_search_is_at_least_as_good_as_any_alpha():
    for recipe in (W8A8, STATIC, "int8_dynamic_activation_int4_weight"):
        pool = pool_of(reader(weight(9, 48, 5), recipe, inputs(48, 6)))
        best = smoothquant(pool, alpha="auto")
        others = [smoothquant(pool, alpha=alpha) for alpha in (0.0, 0.25, 0.5, 0.75, 1.0)]
        assert best.after <= min(other.after for other in others) + 1e-12
        assert best.after < best.before / 2
        assert best.before == pytest.approx(others[0].before)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("awq(int4, grid=0)", "grid must be a whole number and at least 1, got 0"),
        ("awq(int4, ranges=all)", "ranges must be one of range, mse, got 'all'"),
        ("awq(int4, weights=3)", "weights must be true or false, got 3"),
        ("awq(int4, insert=maybe)", "insert must be true or false, got 'maybe'"),
        ("awq(int4, alpha=1)", "awq has no option alpha; there are grid, ranges, weights, insert"),
        ("smoothquant(int8, alpha=2)", "alpha must be 0 to 1, or auto, got 2"),
        ("smoothquant(int8, alpha=true)", "alpha must be 0 to 1, or auto, got True"),
    ],
)
def test_options_are_checked_before_any_work(recipe, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Recipe.parse(recipe)


@given(st.lists(st.floats(0, 1e30), min_size=1, max_size=9))
def test_levelled_is_finite_and_positive(sizes):
    found = centred_scale(torch.tensor(sizes, dtype=torch.float64))
    assert bool((torch.isfinite(found) & (found > 0)).all())
    recorded = [value for value, size in zip(found.tolist(), sizes, strict=True) if size > 0]
    assert not recorded or min(recorded) * max(recorded) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.gpu
def test_the_search_on_a_device_is_that_of_the_processor():
    for recipe in ("awq(int4)", f"smoothquant({STATIC}, alpha=auto)", "awq(nvfp4, weights=true)"):
        x, w, found = inputs(256, 5), weight(128, 256, 6), []
        parsed = Recipe.parse(recipe)
        (rewrite,), target = parsed.rewrites, parsed.rules[0].config
        assert target is not None
        for device in ("cpu", "cuda"):
            there = Reader(w.to(device), target, Statistics.of(x.to(device)), torch.arange(256, device=device))
            found.append(rewrite.method.run(pool_of(there), **dict(rewrite.options)))
        assert found[1].before == pytest.approx(found[0].before, rel=1e-3)
        assert found[1].after == pytest.approx(found[0].after, rel=1e-2)
