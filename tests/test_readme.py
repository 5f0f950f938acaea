"""The README's example runs as it stands, and its generated tables are there."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None
    assert len(block[1].splitlines()) <= 22
    monkeypatch.chdir(tmp_path)
    exec(compile(block[1], "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert "2 of 2 layers quantized" in out
    assert any(contract in out for contract in ("weights rounded once", "exact", "two digits"))


def test_every_generated_table_has_its_figures_in_the_results():
    text = (ROOT / "README.md").read_text()
    for name in re.findall(r"<!-- (\w+):begin -->", text):
        table = text.split(f"<!-- {name}:begin -->")[1].split(f"<!-- {name}:end -->")[0]
        assert "|" in table, f"the table {name!r} is empty: run its script"
        assert list((ROOT / "evals" / "results").glob(f"{name}*.json")), f"no results behind the table {name!r}"


def test_results_say_where_they_come_from():
    for path in (ROOT / "evals" / "results").glob("*.json"):
        data = json.loads(path.read_text())
        assert {"versions", "date"} <= set(data), f"{path.name} needs versions and date"
