"""The command: a folder of figures, or an error of one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lowbit.command import run


def test_eval_writes_a_folder(
    model: Path,
    folder: Path,
    material: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text, out = material / "text.txt", tmp_path / "out"
    options = ["--data", folder, "--text", text, "--limit", 4, "--context", 32, "--stride", 16, "--chunks", 6, "--out", out]
    asked = ["-r", "int8,int3_g32", "--tasks", "mmlu,mmlu_philosophy,perplexity"]
    assert run([*map(str, ("eval", model, *asked, *options))]) == 0, capsys.readouterr().err
    assert "int3_g32" in capsys.readouterr().out
    found = json.loads((out / "eval.json").read_text())
    assert (out / "report.html").is_file()
    assert found["format"] == "lowbit-eval/1"
    assert found["tasks"] == ["mmlu", "mmlu_philosophy", "perplexity"]
    assert [outcome["recipe"] for outcome in found["outcomes"]] == ["float", "int8", "int3_g32"]
    for outcome in found["outcomes"]:
        assert outcome["perplexity"]["stride"] == 16
        task = outcome["tasks"]["mmlu"]
        assert {name: row["n"] for name, row in task["subjects"].items()} == {"anatomy": 4, "philosophy": 4, "words": 4}
        (theirs,) = (out / "lm-eval" / outcome["recipe"]).glob("results_*.json")
        reported = json.loads(theirs.read_text())
        results = reported["results"]
        assert task["shots"] == reported["n-shot"]["mmlu_anatomy"] == 0  # MMLU's own number in lm-eval
        assert results["mmlu"]["acc,none"] == task["value"]
        assert results["mmlu_philosophy"]["acc,none"] == outcome["tasks"]["mmlu_philosophy"]["value"]
    assert found["outcomes"][2]["divergence"]["tokens"] > 0
    assert run([*map(str, ("eval", model, "-r", "int8", "--tasks", "mmlu", *options, "--json"))]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["outcomes"][1]["tasks"]["mmlu"]["samples"] == found["outcomes"][1]["tasks"]["mmlu"]["samples"]


@pytest.mark.parametrize(
    ("code", "options", "words"),
    [
        (2, ["--tasks", ","], "--tasks names no task"),
        (2, ["--tasks", "perplexity"], "needs a text"),
        (2, ["--tasks", "mmlu", "--dtype", "int8"], "--dtype must be float32"),
        (2, ["--tasks", "mmlu", "--out", "FOLDER/test/words_test.csv/out"], "cannot be written"),
        (1, ["--tasks", "mmlu_words,mmlu_frobnicate", "--data", "FOLDER"], "no subject 'frobnicate'"),
        (1, ["--tasks", "mmlu_virology", "--data", "FOLDER"], "holds no test/virology_test.csv"),
    ],
)
def test_eval_errors_are_one_line(
    folder: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    code: int,
    options: list[str],
    words: str,
) -> None:
    assert run(["eval", str(model), *(option.replace("FOLDER", str(folder)) for option in options)]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert words in line
