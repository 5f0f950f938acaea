"""The README's example runs as it stands, and the documents' tables are there and up to date."""

from __future__ import annotations

import json
import re

from lowbit.evals import tables
from tests import ROOT

WRITTEN = ("design.md", "changelog.md", "command-line.md")  # when the site is built: docs/site/pages.py
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None
    assert len(block[1].splitlines()) <= 22
    monkeypatch.chdir(tmp_path)
    exec(compile(block[1], "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert "2 of 2 layers quantized" in out
    assert any(contract in out for contract in ("weights rounded once", "exact", "split-int8 (2 limbs)"))


def test_every_generated_table_has_its_figures_in_the_results():
    text = "".join(path.read_text() for path in DOCUMENTS)
    names = re.findall(r"<!-- (\w+):begin -->", text)
    assert sorted(names) == sorted(tables.TABLES)
    for name in names:
        table = text.split(f"<!-- {name}:begin -->")[1].split(f"<!-- {name}:end -->")[0]
        assert "|" in table, f"the table {name!r} is empty: run its script"


def test_the_tables_are_those_of_the_results(tmp_path):
    """Whoever changes a figure writes the documents anew."""
    copies = [tmp_path / path.name for path in DOCUMENTS]
    for path, to in zip(DOCUMENTS, copies, strict=True):
        to.write_text(path.read_text())
    tables.main([str(path) for path in copies])
    for path, to in zip(DOCUMENTS, copies, strict=True):
        assert to.read_text() == path.read_text(), f"run python -m lowbit.evals.tables {' '.join(str(p) for p in DOCUMENTS)}"


def test_links_lead_to_files():
    for path in DOCUMENTS:
        for link in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            there = (
                link.startswith("https://") or (path.parent / link).exists() or (path.parent == ROOT / "docs" and link in WRITTEN)
            )
            assert there, f"{path.name} links to {link}"


def test_results_say_where_they_come_from():
    for path in (ROOT / "evals" / "results").glob("*.json"):
        data = json.loads(path.read_text())
        assert {"versions", "date"} <= set(data), f"{path.name} needs versions and date"
