"""Signal to quantization noise of every named scheme against the independent float64 implementation."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch

from lowbit.scheme import SCHEMES, Scheme
from lowbit_kernels import reference

N, K = 192, 1024


def draw(kind: str) -> np.ndarray:
    rng = np.random.default_rng(20)
    return (rng.standard_normal((N, K)) if kind == "gaussian" else rng.standard_t(4, (N, K))).astype(np.float32)


WEIGHTS = {kind: draw(kind) for kind in ("gaussian", "heavy")}


def values_of(w: np.ndarray, scheme: Scheme, method: str = "range") -> np.ndarray:
    parts = reference.quantize(torch.from_numpy(w), scheme, method)
    return reference.dequantize(*parts, scheme, w.shape[1], torch.float32).numpy()


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("name", SCHEMES)
def test_sqnr_is_that_of_the_definition(name, kind):
    scheme, w = SCHEMES[name], WEIGHTS[kind]
    want = oracle.quantize(
        w.astype(np.float64), scheme.format, scheme.group_size, scheme.zero_point, scheme.scale, scheme.outer
    ).values
    assert oracle.sqnr(w, values_of(w, scheme)) == pytest.approx(oracle.sqnr(w, want), abs=0.05)


@pytest.mark.parametrize("bits", range(3, 9))
def test_a_bit_is_worth_six_decibels(bits):
    """A check on the scale of the numbers: uniform weights under b bits have the noise of step^2 / 12."""
    w = np.random.default_rng(0).uniform(-1, 1, (64, 1024)).astype(np.float32)
    steps = 2 ** (bits - 1) - 1  # from 0 to the largest number; the rows' largest weights are within 1 % of 1
    ideal = 10 * np.log10((1 / 3) / (1 / steps**2 / 12))
    assert oracle.sqnr(w, values_of(w, Scheme(f"int{bits}", scale="fp32"))) == pytest.approx(ideal, abs=0.2)


@pytest.mark.parametrize("name", [n for n, s in SCHEMES.items() if s.scale != "e8m0"])
def test_searching_the_range_never_costs(name):
    """method="mse" keeps the whole range among its candidates, so no row gets worse."""
    for w in WEIGHTS.values():
        w = w[:4]
        noise = [np.square(values_of(w, SCHEMES[name], m) - w).sum() for m in ("mse", "range")]
        assert noise[0] <= noise[1]
