"""Triton's kernels compile for GPUs that are not here. In a process of its own: this one may have turned the compiler off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowbit.evals.triton_targets import CASES, TARGETS
from tests import ROOT

pytest.importorskip("triton", reason="Triton is not built for this system")

PROGRAM = """
import json, sys
from lowbit.evals.triton_targets import TARGETS, measure
cases, targets = json.loads(sys.argv[1]), [TARGETS[i] for i in json.loads(sys.argv[2])]
print(json.dumps(measure(cases, targets, progress=lambda line: None)))
"""


def compiled(cases: list[str], targets: list[int], cache: Path) -> list[dict[str, object]]:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", PROGRAM, json.dumps(cases), json.dumps(targets)]
    ran = subprocess.run(command, env=environment, cwd=cache, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found: list[dict[str, object]] = json.loads(ran.stdout.splitlines()[-1])
    return found


def test_a_sample_compiles_for_nvidia_and_amd(tmp_path: Path) -> None:
    hopper, amd = (i for i, target in enumerate(TARGETS) if str(target) in ("sm_90", "gfx942"))
    rows = compiled(["gemv, int4, bfloat16", "gemm, nf4, M = 8"], [hopper, amd], tmp_path)
    assert len(rows) == 4
    for row in rows:
        assert row["error"] is None
        assert row["kernels"]
        assert row["bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("target", range(len(TARGETS)), ids=lambda i: str(TARGETS[i]))
def test_every_case_compiles(target: int, tmp_path: Path) -> None:
    rows = compiled(list(CASES), [target], tmp_path)
    recorded = json.loads((ROOT / "evals" / "results" / "gpu_targets.json").read_text())["rows"]
    known = {(row["target"], row["case"]) for row in recorded if row["error"]}  # which docs/hardware.md names
    assert all(row["kernels"] for row in rows)
    assert {(row["target"], row["case"]) for row in rows if row["error"]} <= known
