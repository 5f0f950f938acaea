"""What is added in its one place is tested without a further line, against an independent oracle."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from tests import ROOT

PICKED_UP = {
    "lowbit/test_formats": "fp7_e3m3",
    "lowbit/test_scales": "fp7",
    "lowbit/test_rounders": "clamped",
    "lowbit/test_symmetric": "clamped",
    "lowbit_kernels/test_kernels": "cpu_row_scaled_gemm",
    "lowbit_kernels/test_epilogues": "cpu_row_scaled_gemm",
    "recipes/test_recipe": "clamped",
    "evals/test_sqnr": "fp7",
}


def test_the_tests_pick_up_a_format_a_scheme_a_rounder_and_a_kernel(tmp_path: Path) -> None:
    """In a process of its own: what is registered stays registered."""
    report = tmp_path / "report.xml"
    files = [str(ROOT / "tests" / f"{name}.py") for name in PICKED_UP]
    chosen = " or ".join(sorted({*PICKED_UP.values(), "test_the_table_measures_what_the_oracle_measures"}))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.support.additions", "-k", chosen, "--junitxml", str(report)]
    done = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:]
    ran = Counter(
        (case.get("classname", "").removeprefix("tests.").replace(".", "/"), name)
        for case in ElementTree.parse(report).iter("testcase")
        for name in PICKED_UP.values()
        if name in case.get("name", "") and case.find("skipped") is None
    )
    assert set(ran) >= set(PICKED_UP.items())
    assert ran["lowbit_kernels/test_kernels", "cpu_row_scaled_gemm"] >= 5
