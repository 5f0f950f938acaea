"""Which libraries quantized models work with, from the tests that run them: what fills the table of docs/ecosystem.md.

    python -m lowbit.evals.ecosystem --out evals/results/ecosystem.json
    python -m lowbit.evals.tables README.md docs/*.md

A test says by ``pytest.mark.works_with(library, what)`` which cell it holds; where ``what`` ends in ``: refused``, an error
that names the remedy.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from .results import write_result

__all__ = ["LIBRARIES", "cells", "main"]

LIBRARIES = {
    "torch": "torch", "compile": "torch", "FSDP2": "torch", "DDP": "torch", "FSDP1": "torch", "DTensor": "torch",
    "ONNX": "onnxruntime", "transformers": "transformers", "Trainer": "transformers", "TRL": "trl", "PEFT": "peft",
    "Lightning": "lightning", "accelerate": "accelerate", "diffusers": "diffusers",
    "sentence-transformers": "sentence-transformers",
}  # fmt: skip
"""What stands in the first column, and the package whose version it is."""

OUTCOMES = ("failure", "error", "skipped")


def cells(report: Path) -> list[dict[str, Any]]:
    """The cells in pytest's JUnit ``report``: library, what, and how many tests passed, were skipped and failed."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        outcome = next((name for name in OUTCOMES if case.find(name) is not None), "passed")
        for entry in case.iter("property"):
            if entry.get("name") == "works_with":
                library, _, what = (entry.get("value") or "").partition(" / ")
                found.setdefault((library, what), Counter())["failed" if outcome in ("failure", "error") else outcome] += 1
    order = list(LIBRARIES)
    for library, _ in found:
        if library not in LIBRARIES:
            raise ValueError(f"{library!r} is no library of this table: give one of {', '.join(order)}, or add it to LIBRARIES")
    return [
        {"library": library, "what": what, **{key: count[key] for key in ("passed", "skipped", "failed")}}
        for (library, what), count in sorted(found.items(), key=lambda item: (order.index(item[0][0]), item[0][1].lower()))
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Run the tests that hold a cell of docs/ecosystem.md, and keep what came out.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", default="2", help="processes of pytest-xdist")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--slow", "-m", "works_with", "-n", options.jobs, f"--junitxml={report}"]
        code = subprocess.run(command, check=False).returncode
        if code not in (0, 1):  # 1: some test failed, which the table says
            raise SystemExit(f"pytest ended with {code}")
        found = cells(report)
    versions = {package: metadata.version(package) for package in sorted(set(LIBRARIES.values()))}
    write_result(options.out, {"packages": versions, "cells": found})


if __name__ == "__main__":
    main()
