"""Which tests run: what does not is counted, and a sample of a product leaves out no value."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.lowbit_kernels.test_kernels import linear_cases
from tests.support.selection import NO_GPU, SLOW, choose, features, values


@dataclass(eq=False)
class Case:
    """As much of pytest's items as choosing looks at."""

    nodeid: str
    params: dict[str, Any] = field(default_factory=dict)
    marks: tuple[pytest.Mark, ...] = ()

    @property
    def callspec(self) -> Case:
        return self

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((mark for mark in self.marks if mark.name == name), None)


def products() -> list[Any]:
    names = ("run", "scheme", "case")
    marks = (pytest.mark.sampled(each="run").mark,)
    return [
        Case(f"test[{param.id}]", dict(zip(names, param.values, strict=True)), (*(mark.mark for mark in param.marks), *marks))
        for param in linear_cases("linear")
    ]


def test_a_sample_holds_every_value_of_every_row() -> None:
    cases = products()
    chosen, left = choose(cases, gpu=True, slow=False)
    assert len(chosen) < len(cases) / 4
    assert {reason: len(others) for reason, others in left.items()} == {SLOW: len(cases) - len(chosen)}
    of_row: dict[str, tuple[set[Any], set[Any]]] = {}
    for case in cases:
        everything, sampled = of_row.setdefault(repr(case.params["run"]), (set(), set()))
        everything |= features(values(case))
        sampled |= features(values(case)) if case in chosen else set()
    assert all(everything == sampled for everything, sampled in of_row.values())
    again, _ = choose(list(reversed(cases)), gpu=True, slow=False)
    assert set(again) == set(chosen)


def test_every_test_runs_or_is_left_for_one_reason() -> None:
    slow, gpu = pytest.mark.slow.mark, pytest.mark.gpu.mark
    few = (pytest.mark.sampled(count=2).mark,)
    marks = {"plain": (), "slow": (slow,), "gpu": (gpu,), "both": (slow, gpu)}
    cases: list[Any] = [Case(name, {}, of) for name, of in marks.items()]
    cases += [Case(f"few[{i}]", {"i": i}, few) for i in range(5)]
    for on_gpu, slowly, run, lacking, late in ((0, 0, 3, 2, 4), (1, 0, 4, 0, 5), (0, 1, 7, 2, 0), (1, 1, 9, 0, 0)):
        chosen, left = choose(cases, gpu=bool(on_gpu), slow=bool(slowly))
        assert (len(chosen), len(left.get(NO_GPU, ())), len(left.get(SLOW, ()))) == (run, lacking, late)


@pytest.mark.parametrize("jobs", [(), ("-n", "1")])
def test_what_does_not_run_is_counted_and_a_whole_run_recorded(jobs: tuple[str, ...], tmp_path: Path) -> None:
    which = ("tests/repository/test_build.py", "-k", "test_the_switch_for_cuda or hopper")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *jobs, "--record", str(tmp_path / "record.json")]
    done = subprocess.run([*command, *which], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    (count,) = re.findall(rf"NOT RUN (\d+) tests: they {re.escape(SLOW)}", done.stdout)
    assert "make test-all " in done.stdout
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["not_run"] == {SLOW: int(count)}
    assert record["tests"] == {"passed": 1, "failed": 0, "error": 0, "skipped": 0}
    assert set(record["only"]) == {"files", "-k"}
    assert record["commit"]
