"""Hypothesis strategies that the tests share: codes, strides, formats, schemes and weights."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from lowbit.formats import FORMATS, Float, Format, Int, Table
from lowbit.scheme import PLAIN_SCALES, Scheme

# Derandomized, so that a run says the same thing twice; drawing a weight takes longer than hypothesis expects.
settings.register_profile(
    "lowbit", deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("lowbit")

bits = st.integers(1, 8)
seeds = st.integers(0, 2**32 - 1)
integer_dtypes = st.sampled_from(
    (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)
)
code_shapes = hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=7).flatmap(
    lambda lead: st.integers(0, 67).map(lambda k: (*lead[:-1], k))
)


@st.composite
def strided(draw: st.DrawFn, x: Tensor) -> Tensor:
    """The numbers of ``x`` (in one case: of its first row) behind other strides."""
    kind = draw(st.sampled_from(("contiguous", "permuted", "sliced", "offset", "expanded")))
    if kind == "permuted":
        order = draw(st.permutations(range(x.dim())))
        return x.permute(order).contiguous().permute([order.index(i) for i in range(x.dim())])
    if kind == "sliced":
        return torch.stack((x, torch.zeros_like(x)), dim=-1).flatten(-2)[..., ::2]
    if kind == "offset":
        return torch.cat((torch.zeros_like(x[..., :1]), x), dim=-1)[..., min(1, x.shape[-1]) :]
    if kind == "expanded" and x.dim() > 1 and x.shape[0]:
        return x[:1].expand(x.shape)
    return x


@st.composite
def codes(draw: st.DrawFn, width: int, shape: tuple[int, ...] | None = None) -> Tensor:
    """Codes of ``width`` bits, uint8, contiguous."""
    shape = draw(code_shapes) if shape is None else shape
    return torch.from_numpy(np.random.default_rng(draw(seeds)).integers(0, 1 << width, shape, dtype=np.uint8))


# ---- formats and schemes -----------------------------------------------------------------------------------------


@st.composite
def _floats(draw: st.DrawFn) -> Format:
    exponent = draw(st.integers(1, 7))
    mantissa = draw(st.integers(0, 7 - exponent))
    specials = draw(st.sampled_from(("none", "ieee", "fn", "fnuz")))
    bias = draw(st.none() | st.integers(max(-8, (1 << exponent) - 128), 20))  # numbers must fit float32
    return Float("made_up", exponent, mantissa, specials, bias)


@st.composite
def _tables(draw: st.DrawFn) -> Format:
    size = 1 << draw(st.integers(1, 5))
    number = st.floats(-1024, 1024, width=16, allow_subnormal=False) | st.sampled_from((0.0, -0.0, 1.0, -1.0))
    values = draw(st.lists(number, min_size=size, max_size=size))
    unused = draw(st.sets(st.integers(0, size - 1), max_size=size - 1))
    return Table("made_up", values, unused)


random_formats = st.one_of(_floats(), _tables(), st.builds(Int, st.just("made_up"), bits, st.booleans()))
"""Formats that nobody has registered: every float family, integers, and tables in any order with repeated numbers."""

formats = st.sampled_from(sorted(FORMATS.values(), key=str))


def _composable() -> list[tuple[str, str, str, bool]]:
    found = []
    scales = (*PLAIN_SCALES, *FORMATS)
    for name, zero, scale, outer in itertools.product(FORMATS, ("none", "int", "float"), scales, (False, True)):
        try:
            Scheme(name, 32, zero, scale, outer)
        except ValueError:
            continue
        found.append((name, zero, scale, outer))
    return found


COMPOSABLE = _composable()
group_sizes = st.sampled_from((-1, 1, 2, 3, 8, 16, 17, 32, 64, 128))


@st.composite
def schemes(draw: st.DrawFn, group: st.SearchStrategy[int] = group_sizes) -> Scheme:
    """Any scheme that may be composed of the registered formats."""
    kind = draw(st.sampled_from(("none", "int", "float"))), draw(st.booleans())  # else the common ones drown the rest
    alike = [c for c in COMPOSABLE if (c[1], c[2] in PLAIN_SCALES) == kind] or COMPOSABLE
    name, zero, scale, outer = draw(st.sampled_from(alike))
    return Scheme(name, draw(group), zero, scale, outer)


# ---- weights -------------------------------------------------------------------------------------------------------

FORMS = ("normal", "heavy", "constant", "one-hot", "magnitudes", "integers", "zero rows", "positive")


def make_weight(form: str, n: int, k: int, seed: int) -> np.ndarray:
    """A float32 weight [n, k] of one of the ``FORMS``."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((n, k))
    if form == "heavy":
        w = rng.standard_t(3, (n, k))
    elif form == "constant":
        w = np.broadcast_to(rng.standard_normal((n, 1)), (n, k))
    elif form == "one-hot":
        w = w * (np.arange(k) == rng.integers(0, max(k, 1), (n, 1)))
    elif form == "magnitudes":  # rows from 1e-30 to 1e30, and within a row half as many decades
        w = w * 10.0 ** (rng.uniform(-15, 15, (n, 1)) + rng.uniform(-15, 15, (n, k)))
    elif form == "integers":  # many ties
        w = rng.integers(-256, 257, (n, k)) / 16
    elif form == "zero rows":
        w = w * rng.integers(0, 2, (n, 1)) * rng.integers(0, 2, (n, k))
    elif form == "positive":
        w = np.abs(w) + 0.5
    return np.ascontiguousarray(w, dtype=np.float32)


@st.composite
def weights(draw: st.DrawFn, largest: float = 2.0**100, min_rows: int = 1) -> Tensor:
    """A finite float32 weight [N, K]: a form above, or any numbers that hypothesis thinks of."""
    n, k = draw(st.integers(min_rows, 5)), draw(st.integers(1, 70))
    if draw(st.booleans()):
        return torch.from_numpy(make_weight(draw(st.sampled_from(FORMS)), n, k, draw(seeds)))
    number = st.floats(-largest, largest, width=32)
    return torch.from_numpy(draw(hnp.arrays(np.float32, (n, min(k, 20)), elements=number)))
