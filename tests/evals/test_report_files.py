"""What the report says of files that are none, and its command."""

from __future__ import annotations

import copy
import io
import json
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit.command import run
from lowbit.evals import report
from lowbit.evals.report import ReportError, charts
from lowbit.evals.report.entries import Runs
from lowbit.evals.report.files import replace_together
from tests.evals.test_report import FEW, assert_harmless, bare, pixels, rendered
from tests.support import synthetic_results
from tests.support.io_faults import room_for, unread

# ---- results that are none -------------------------------------------------------------------------------------------

WHOLE = synthetic_results.result(7, FEW[:2], n=4, layers=1)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@given(st.sampled_from(places(WHOLE)[1:]), JSON)
@settings(max_examples=250, deadline=None)
def test_any_other_value_is_refused_in_a_line_or_shown(place: tuple[Any, ...], value: Any) -> None:
    result = copy.deepcopy(WHOLE)
    above = result
    for key in place[:-1]:
        above = above[key]
    above[place[-1]] = value
    try:
        report.check(result, "some.json")
    except ReportError as error:
        said = str(error)
    else:
        assert_harmless(rendered(result))
        return
    assert re.match(r"some\.json(:| is no result)", said)
    assert "\n" not in said
    assert any(key in said for key in place if isinstance(key, str))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "is no JSON"),
        ("\ud800".encode("utf-16", "surrogatepass"), "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[]", "field format"),
        ('{"format": "other/1"}', "got \"other/1\""),
        ('{"format": "lowbit-eval/1"}', "model is missing"),
        ('{"format": "lowbit-eval/1", "model": "m", "outcomes": []}', "outcomes is empty"),
        ('{"format": "lowbit-eval/1", "model": "m", "outcomes": [{}]}', "outcomes[0].recipe is missing"),
        ('{"format": "lowbit-eval/1", "model": "m", "outcomes": [{"recipe": 3}]}', "outcomes[0].recipe must be a text, got 3"),
    ],
)  # fmt: skip
def test_files_that_are_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | bytes, expected: str
) -> None:
    path = tmp_path / "some.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert run(["report", str(path), "--out", str(tmp_path / "out")]) == 1
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert str(path) in line
    assert expected in line
    assert not (tmp_path / "out").exists()


def test_histograms_must_fit_their_edges() -> None:
    result = copy.deepcopy(WHOLE)
    result["outcomes"][1]["histograms"][0]["after"].pop()
    with pytest.raises(ReportError, match=r"outcomes\[1\]\.histograms\[0\]\.after must have one number fewer than edges"):
        report.check(result, "some.json")


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(synthetic_results.result(8, ("float", "int4"), n=8, layers=1, gemv=False)), encoding="utf-8")
    return path


def test_the_command(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "out"
    assert run(["report", str(small), "--out", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["report"] == str(out / "report.html")
    assert {Path(path).stem for path in said["pictures"]} == set(charts.NAMES)

    (out / "notes.png").write_bytes(b"mine")
    small.write_text(json.dumps(bare()), encoding="utf-8")
    assert run(["report", str(small), str(small), "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {"report.html", "notes.png"}  # pictures of what is no more are gone
    assert "run A" in (out / "report.html").read_text()

    speeds = tmp_path / "gemv.json"
    speeds.write_text(json.dumps(synthetic_results.speeds("NVIDIA H100 80GB HBM3")), encoding="utf-8")
    capsys.readouterr()
    assert run(["report", str(speeds), "--out", str(out)]) == 1
    assert "a report needs at least one result" in capsys.readouterr().err
    assert run(["report", str(small), str(speeds), "--out", str(out)]) == 0
    shown = (out / "report.html").read_text()
    assert "M = 8, 11008 x 4096: NVIDIA H100 80GB HBM3" in shown
    assert "gemv.json" in shown
    assert (out / "speed.png").exists()
    speeds.write_text('{"rows": [{"scheme": "int4", "m": 1, "n": "x"}]}', encoding="utf-8")
    assert run(["report", str(small), str(speeds), "--out", str(out)]) == 1
    assert f'{speeds}: rows[0].n must be a count, got "x"' in capsys.readouterr().err

    assert run(["report", str(small), "--out", str(small)]) == 2
    assert "is a file: give a folder" in capsys.readouterr().err
    assert run(["report", str(tmp_path / "none.json")]) == 2
    assert f"no file {tmp_path / 'none.json'}" in capsys.readouterr().err


def test_a_full_disk_leaves_what_was_there(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, new = tmp_path / "out", tmp_path / "new"
    out.mkdir()
    (out / "report.html").write_text("the last one")
    small.write_text(json.dumps(bare()), encoding="utf-8")
    with room_for(1000):
        for folder in (out, new):
            assert run(["report", str(small), "--out", str(folder)]) == 1
            assert capsys.readouterr().err == f"lowbit: error: {folder} cannot be written: File too large\n"
    assert [(path.name, path.read_text()) for path in out.iterdir()] == [("report.html", "the last one")]
    assert not new.exists()


def test_a_closed_pipe(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small.write_text(json.dumps(bare()), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch, unread() as stdout:
        patch.setattr(sys, "stdout", stdout)
        assert run(["report", str(small), "--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == ""
    assert (tmp_path / "out" / "report.html").read_text().endswith("</html>")


def test_nothing_is_replaced_where_one_file_fails(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(OSError, match=r"b cannot be written: there is a folder of that name"):
        replace_together(tmp_path, {"a": b"new", "b": b"new"})
    assert (tmp_path / "a").read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    with pytest.raises(OSError, match="cannot be written"):
        replace_together(tmp_path / "a" / "folder", {"a": b"new"})


def test_without_matplotlib_it_says_what_brings_it(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("lowbit.evals.report.")]:
        if name.rpartition(".")[2] in ("charts", "page", "drawing", "tradeoff", "bars", "histograms"):
            monkeypatch.delitem(sys.modules, name)
    for name in ("charts", "page"):
        monkeypatch.delattr(report, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'lowbit\[plot\]'"):
        report.write_report([bare()], tmp_path / "out")


def test_drawings_scale_with_the_page() -> None:
    (chart, *_) = charts.draw(Runs.of([synthetic_results.result(9, ("float", "int4"), n=8, layers=1, gemv=False)], ["a"]))
    for drawing, width in ((chart.wide, charts.WIDE), (chart.narrow, charts.NARROW)):
        root = ElementTree.fromstring(drawing)
        assert "width" not in root.attrib
        assert root.attrib["viewBox"].split()[2] == str(width)
    assert pixels(io.BytesIO(chart.png)).width == 2 * charts.WIDE
