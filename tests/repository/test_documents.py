"""Every example of the documents runs, page by page; the site builds, and every public name has its place in it."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest

import lowbit
from lowbit.command import run
from tests import ROOT
from tests.support.models import exam_of_words, word_model

PAGES = sorted((ROOT / "docs").rglob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
KINDS = {"python", "sh", "text", "yaml"}  # text is shown, all else runs


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a reader's files lie: a model, a text and questions."""
    word_model(tmp_path / "model")
    exam_of_words(tmp_path / "mmlu")
    (tmp_path / "text.txt").write_text(" ".join(f"w{i * i % 40}" for i in range(3000)), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lowbit.evals.tasks._has_address", lambda *_: False)
    return tmp_path


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # by PEFT, of transformers
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT / "docs").as_posix())
def test_the_examples_of_a_page_run_in_their_order(page: Path, folder: Path) -> None:
    module = types.ModuleType("example")  # what is defined in an example has a module, as a reader's script is one
    for match in BLOCK.finditer(page.read_text(encoding="utf-8")):
        kind, text = match.groups()
        assert kind in KINDS, f"a block of {page.name} is {kind or 'nothing'}: {', '.join(sorted(KINDS))} are known"
        if kind == "python":
            exec(compile(text, page.name, "exec"), module.__dict__)
        if kind == "sh":
            for line in text.splitlines():
                program, *arguments = shlex.split(line, comments=True)
                assert program == "lowbit", f"{page.name}: {line} is no command of lowbit's: write it in a block of text"
                assert run(arguments) == 0, line


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs_from_its_first_cell_to_its_last(path: Path, folder: Path) -> None:
    module = types.ModuleType("notebook")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    for i, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], "outputs are of the machine that ran it last: clear them"
            exec(compile("".join(cell["source"]), f"{path.name}[{i}]", "exec"), module.__dict__)


def test_every_public_name_stands_in_the_reference() -> None:
    reference = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "reference").glob("*.md"))
    named = set(re.findall(r"\w+", reference))
    absent = {name for name in lowbit.__all__ if name not in named and not name.startswith("__")} - {"FORMATS", "SCHEMES"}
    assert not absent, f"docs/reference leaves out {', '.join(sorted(absent))}"


def test_every_public_name_has_a_docstring_that_names_its_arguments() -> None:
    for name in lowbit.__all__:
        value = getattr(lowbit, name)
        if not callable(value):
            continue
        text = inspect.getdoc(value) or ""
        assert text.strip(), f"{name} has no docstring"
        if inspect.isfunction(value):
            unnamed = [one for one in inspect.signature(value).parameters if not re.search(rf"\b{one}\b", text)]
            assert not unnamed, f"the docstring of {name} says nothing of {', '.join(unnamed)}"


def test_the_site_builds(tmp_path: Path) -> None:
    """Strictly: a link that leads nowhere, a page that no menu has and a name without a docstring fail it."""
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "quantize_" in (tmp_path / "site" / "reference" / "index.html").read_text(encoding="utf-8")
