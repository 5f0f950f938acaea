"""What kernels must reach is held against figures: passed, missed, or not measured."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowbit.evals import speed_requirements


def _figures(fraction: float, ratio: float) -> dict:
    row = {"fraction_of_limit": fraction, "no_pdl_fraction_of_limit": fraction, "times_float": ratio, "no_pdl_us": 10.0}
    schemes = {r.label.split(",")[0] for r in speed_requirements.requirements({"rows": []})} - {"int8 times int8"}
    rows = [
        {**row, "scheme": scheme, "n": n, "k": k, "m": m, "us": 10.0 + 0.1 * m}
        for scheme in (*schemes, "int8_dynamic_activation_int8_weight")
        for n, k in ((4096, 4096), (8192, 8192), (28672, 8192))
        for m in (1, 8, 16, 64, 2048)
    ]
    theirs = [
        {"bits": bits, "n": n, "k": k, "m": 1, "us": 10.1 * ratio, "no_pdl_us": 10.1 * ratio}
        for bits in (4, 8)
        for n, k in ((4096, 4096), (8192, 8192), (28672, 8192))
    ]
    return {"rows": rows, "peers": theirs}


def test_bars_are_passed_missed_or_not_measured(tmp_path, capsys):
    assert all(requirement.passed for requirement in speed_requirements.requirements(_figures(0.95, 2.0)))
    missed = speed_requirements.requirements(_figures(0.5, 0.8))
    assert not any(requirement.passed for requirement in missed if "speed at M = 1" not in requirement.label)
    assert all(
        requirement.measured is None and not requirement.passed for requirement in speed_requirements.requirements({"rows": []})
    )
    for found, code, word in (
        (_figures(0.95, 2.0), 0, "pass"),
        (_figures(0.5, 0.8), 1, "miss"),
        ({"rows": []}, 1, "not measured"),
    ):
        (tmp_path / "figures.json").write_text(json.dumps(found))
        with pytest.raises(SystemExit) as end:
            speed_requirements.main([str(tmp_path / "figures.json")])
        assert (int(end.value.code), word in capsys.readouterr().out) == (code, True)


@given(st.floats(0.5, 1.2), st.floats(0.5, 4.0), st.floats(0.5, 3.0), st.floats(0.5, 2.0))
def test_bars_of_a_cpu(fraction, ratio, of_torch, three):
    schemes = ("int4", "int8", "int8_dynamic_activation_int4_weight", "int3", "fp6", "mxfp4", "mxfp6", "mxfp8", "nf4")
    rows = [
        {"scheme": scheme, "n": n, "k": 4096, "m": m, "us": 8.0 / (three if scheme == "int3" else 1.0)}
        | {"fraction_of_limit": fraction, "times_float": ratio}
        for scheme, n, m in itertools.product(schemes, (4096, 11008), (1, 64, 256))
    ]
    theirs = [{"bits": bits, "n": n, "k": 4096, "m": 1, "us": 8.0 * of_torch} for bits in (4, 8) for n in (4096, 11008)]
    figures = {"device": "cpu, 2 threads, avx2", "cold": True, "rows": rows, "peers": theirs}
    cold = speed_requirements.requirements(figures)
    assert len(cold) == 2 * 12 + len(schemes)
    for requirement in cold:
        got = next(
            v
            for word, v in ((": of the limit", fraction), ("torch's", of_torch), ("times int4", three), ("", ratio))
            if word in requirement.label
        )
        assert requirement.measured == pytest.approx(got)
        assert requirement.passed == (requirement.measured >= requirement.minimum)
    warm = speed_requirements.requirements({**figures, "cold": False})
    assert [requirement.minimum for requirement in warm] == [1.5, 2.2]
    assert all(requirement.measured == pytest.approx(of_torch) for requirement in warm)
    assert all(
        requirement.measured is None
        for cold in (True, False)
        for requirement in speed_requirements.requirements({"device": "cpu", "cold": cold, "rows": []})
    )
