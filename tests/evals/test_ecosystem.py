"""The table of libraries: read from pytest's report, and written into its document."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowbit.evals.ecosystem import LIBRARIES, cells
from lowbit.evals.tables import ecosystem_table

CASE = '<testcase name="{}"><properties><property name="works_with" value="{}"/></properties>{}</testcase>'


def report(folder: Path, *cases: tuple[str, str]) -> Path:
    inner = "".join(CASE.format(i, value, outcome) for i, (value, outcome) in enumerate(cases))
    path = folder / "report.xml"
    path.write_text(f"<testsuites><testsuite>{inner}<testcase name='other'/></testsuite></testsuites>", encoding="utf-8")
    return path


def test_cells_and_their_table(tmp_path: Path) -> None:
    found = cells(
        report(
            tmp_path, ("PEFT / DoRA", ""), ("PEFT / DoRA", "<skipped/>"), ("PEFT / SHiRA: refused", ""),
            ("torch / a / b", "<failure/>"), ("TRL / x", "<skipped/>"),
        )
    )  # fmt: skip
    assert [(c["library"], c["what"], c["passed"], c["skipped"], c["failed"]) for c in found] == [
        ("torch", "a / b", 0, 0, 1), ("TRL", "x", 0, 1, 0), ("PEFT", "DoRA", 1, 1, 0), ("PEFT", "SHiRA: refused", 1, 0, 0),
    ]  # fmt: skip
    packages = dict.fromkeys(LIBRARIES.values(), "1.2")
    lines = ecosystem_table([{"date": "d", "commit": "c", "packages": packages, "cells": found}]).splitlines()
    assert lines[4:] == [
        "| torch 1.2 | a / b | fails | 0 | 0 |",
        "| TRL 1.2 | x | not run | 0 | 1 |",
        "| PEFT 1.2 | DoRA | works | 1 | 1 |",
        "| PEFT 1.2 | SHiRA | refused, with the remedy | 1 | 0 |",
    ]


def test_a_library_without_a_place_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'Keras' is no library of this table"):
        cells(report(tmp_path, ("Keras / x", "")))
