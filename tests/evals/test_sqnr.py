"""Signal to quantization noise of every named scheme against the independent float64 implementation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from evals import results, sqnr, tables
from lowbit.scheme import SCHEMES, Scheme
from lowbit_kernels import reference
from tests.support import oracle

BEGIN, END = "<!-- sqnr:begin -->", "<!-- sqnr:end -->"

N, K = 64, 1024


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
    """A check on the scale of numbers: uniform weights under b bits have the noise of step^2 / 12, and a little more at the end
    that has one integer less: there 1 in 4 * 2^(b-1) weights errs by half a step to a whole one, 7 / 12 of a squared step."""
    w = np.random.default_rng(0).uniform(-1, 1, (64, 1024)).astype(np.float32)
    steps = 2 ** (bits - 1)  # from 0 to the lowest integer; the rows' largest weights are within 1 % of 1
    ideal = 10 * np.log10((steps**2 / 3) / (1 / 12 + (7 / 12 - 1 / 12) / (4 * steps)))
    assert oracle.sqnr(w, values_of(w, Scheme(f"int{bits}", scale="fp32"))) == pytest.approx(ideal, abs=0.2)


@pytest.mark.parametrize("name", [n for n, s in SCHEMES.items() if s.scale != "e8m0"])
def test_searching_the_range_never_costs(name):
    """method="mse" keeps the whole range among its candidates, so no row gets worse."""
    for w in WEIGHTS.values():
        w = w[:4]
        noise = [np.square(values_of(w, SCHEMES[name], m) - w).sum() for m in ("mse", "range")]
        assert noise[0] <= noise[1]


# ---- the table in the README ---------------------------------------------------------------------------------------


def test_the_table_measures_what_the_oracle_measures():
    rows = sqnr.measure(8, 256, seed=5)
    assert {row.name for row in rows} == set(SCHEMES)
    assert [row.bits_per_weight for row in rows] == sorted((row.bits_per_weight for row in rows), reverse=True)
    for row, w in ((row, w.numpy()) for row in rows for w in sqnr.draw(8, 256, seed=5)[:1]):
        scheme = SCHEMES[row.name]
        assert row.scheme == str(scheme)
        want = oracle.quantize(w, scheme.format, scheme.group_size, scheme.zero_point, scheme.scale, scheme.outer)
        assert row.gaussian_db == pytest.approx(oracle.sqnr(w, want.values), abs=0.05)


def test_heavy_tails_are_those_of_student():
    """Half of a t distribution with 4 degrees of freedom lies within 0.7407, and one in a hundred beyond 4.604."""
    heavy = sqnr.draw(512, 1024, seed=0)[1].abs()
    for quantile, inside in ((0.740697, 0.5), (4.604095, 0.99)):
        share = float((heavy < quantile).double().mean())
        assert abs(share - inside) < 5 * (inside * (1 - inside) / heavy.numel()) ** 0.5  # five standard deviations


def test_the_block_of_a_file_is_replaced():
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    once = tables.rewritten(text, "sqnr", "| new |")
    assert once == f"before\n{BEGIN}\n| new |\n{END}\nafter\n"
    assert tables.rewritten(once, "sqnr", "| new |") == once


@pytest.mark.parametrize("text", ["", BEGIN, END + BEGIN, 2 * (BEGIN + END)])
def test_a_file_without_its_marks_is_refused(text):
    with pytest.raises(ValueError, match="must stand"):
        tables.rewritten(text, "sqnr", "")


def test_files_are_replaced_whole(tmp_path):
    path = tmp_path / "deep" / "table.md"
    results.replace_file(path, "one")
    results.replace_file(path, "two")
    assert path.read_text() == "two"
    assert [p.name for p in path.parent.iterdir()] == ["table.md"]
