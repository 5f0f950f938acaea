"""What goes wrong on other people's machines: each mishap is one line that says what and where, and leaves nothing behind."""

from __future__ import annotations

import functools
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import lowbit
from lowbit.command import run
from lowbit.evals import demo, evaluation
from lowbit.evals.cache import Answers
from lowbit.evals.evaluation import TOY, TOY_DATA
from tests.support.io_faults import room_for, unread

QUESTION = "Which?,one,two,three,four,A\n"
MEGABYTE = 1 << 20


def lines_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    """What a command that fails leaves on stderr; nothing may be on stdout."""
    code = run([*map(str, arguments)])
    captured = capsys.readouterr()
    assert code in (1, 2)
    assert captured.out == ""
    return captured.err.splitlines()


# ---- data ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def exam(tmp_path: Path) -> Path:
    """An exam with a good subject and another one, which the test spoils."""
    (tmp_path / "test").mkdir()
    for subject in ("good", "spoilt"):
        (tmp_path / "test" / f"{subject}_test.csv").write_text(QUESTION)
    return tmp_path


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"Which?,one,two,three,four\n", "row 1: a row is a question, four choices and a letter, got 5 fields"),
        (b"", "holds no questions"),
        (b"\n\n", "row 1"),
        (QUESTION.encode() + b"Qu\xe9?,one,two,three,four,A\n", "utf-8"),
        (QUESTION.encode("utf-16"), "utf-8"),
        (QUESTION.encode() + b"Which?,one,two,three,B\n", "row 2: a row is a question, four choices and a letter, got 5 fields"),
        (QUESTION.encode() + b"Which?,one,two,three,four,E\n", "row 2: the answer must be one of A, B, C, D, got 'E'"),
        (b'"Which?', "row 1: unexpected end of data"),
    ],
    ids=["no letters", "empty", "blank", "latin1", "utf-16", "three choices", "no such letter", "an open quote"],
)
def test_a_table_that_is_spoilt(exam: Path, capsys: pytest.CaptureFixture[str], content: bytes, words: str) -> None:
    path = exam / "test" / "spoilt_test.csv"
    path.write_bytes(content)
    report = exam / "report.json"
    arguments = ("--tasks", "mmlu", "--data", exam, "--recipes", "int8", "--report", report)
    (line,) = lines_of(capsys, "eval", TOY, *arguments)
    assert line.startswith(f"lowbit: error: {path}")
    assert words in line
    assert not report.exists()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("spoilt_test.jsonl", '{"question": "Which?", "choices": ["a", "b", "c", "d"]}\n', "'answer' is missing"),
        ("spoilt_test.jsonl", '{"question": "Which?", "choices": ["a", "b", "c"], "answer": 1}\n', "got 5 fields"),
        ("spoilt_test.jsonl", "{\n", "row 1"),
        ("spoilt_test.jsonl", "[1]\n", "row 1: a row must be an object"),
        ("spoilt_test.jsonl", "", "holds no questions"),
    ],
    ids=["no answer", "three choices", "no JSON", "a list", "empty"],
)
def test_rows_that_are_spoilt(exam: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, words: str) -> None:
    (exam / "test" / "spoilt_test.csv").unlink()
    (exam / "test" / name).write_text(content)
    (line,) = lines_of(capsys, "eval", TOY, "--tasks", "mmlu", "--data", exam, "--recipes", "int8")
    assert f"{exam / 'test' / name}" in line
    assert words in line


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_a_line_of_hundreds_of_megabytes_takes_neither_memory_nor_minutes(exam: Path, ending: str) -> None:
    (exam / "test" / "spoilt_test.csv").unlink()
    path = exam / "test" / f"spoilt_test.{ending}"
    with path.open("wb") as table:
        table.truncate(300 * MEGABYTE)  # zeros that take no room on the disk
    arguments = [str(argument) for argument in ("eval", TOY, "--tasks", "mmlu", "--data", exam, "--recipes", "int8")]
    code = (
        "import re, sys; from lowbit.command import run; code = run(sys.argv[1:]); "
        "print(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1]); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, timeout=120, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (60, 60)),
    )  # fmt: skip
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert str(path) in line
    assert int(done.stdout) < 1 << 20  # KiB


# ---- models ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def without_tokenizer(tmp_path: Path) -> Path:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(TOY / name, tmp_path / name)
    return tmp_path


def test_a_model_without_a_tokenizer(without_tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = lines_of(capsys, "eval", without_tokenizer, "--tasks", "mmlu", "--data", TOY_DATA, "--recipes", "int8")
    assert f"{without_tokenizer} " in line
    assert "no tokenizer that can be read" in line
    out = without_tokenizer / "out"
    assert run(["quantize", str(without_tokenizer), "--recipe", "int8", "-o", str(out)]) == 0
    assert "no tokenizer beside the weights" in capsys.readouterr().err
    files = ["README.md", "config.json", "generation_config.json", "model.safetensors"]
    assert sorted(path.name for path in out.iterdir()) == files


@pytest.mark.parametrize("name", ["fifo", "device"])
def test_what_is_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    path = tmp_path / name
    path.symlink_to("/dev/zero") if name == "device" else os.mkfifo(path)
    (line,) = lines_of(capsys, "inspect", path)
    assert line == f"lowbit: error: {path}: is no regular file"


# ---- a full disk -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "older"), [(1 << 10, False), (MEGABYTE, True)], ids=["even the tokenizer", "the weights"])
def test_a_disk_without_room_for_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str], size: int, older: bool) -> None:
    out = tmp_path / "out"
    if older:
        assert run(["quantize", str(TOY), "--recipe", "int4", "-o", str(out)]) == 0
        capsys.readouterr()
    before = {path.name: path.read_bytes() for path in out.glob("*")}
    with room_for(size):
        *_, line = lines_of(capsys, "quantize", TOY, "--recipe", "int8", "-o", out)
    assert str(out) in line
    assert "File too large" in line
    assert {path.name: path.read_bytes() for path in out.glob("*")} == before
    assert out.exists() == older


def test_a_disk_without_room_for_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    with room_for(16):
        (line,) = lines_of(capsys, "bench", "host", "--schemes", "int8", "--batches", "1", "--report", report)
    assert line == f"lowbit: error: {report}: File too large"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("size", "file"), [(16, "weights-"), (2048, "answers-")])
def test_a_disk_without_room_for_an_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, size: int, file: str
) -> None:
    monkeypatch.setattr(evaluation, "_file_bytes", lambda model: 0)  # temporary files lie on another disk
    out = tmp_path / "out"
    arguments = ("eval", TOY, "--tasks", "mmlu", "--data", TOY_DATA, "--recipes", "", "--limit", 2, "--out", out)
    with room_for(size):
        (line,) = lines_of(capsys, *arguments)
    assert line.startswith(f"lowbit: error: {out / 'cache'}")
    assert file in line
    assert line.endswith(": File too large")
    assert {path.name for path in out.iterdir()} == {"cache"}
    assert [path for path in out.rglob(".*") if path.is_file()] == []  # nothing of a temporary name

    assert run([*map(str, arguments)]) == 0  # with room it goes on
    again = tmp_path / "again"
    assert run([*map(str, arguments[:-1]), str(again)]) == 0
    found, expected = (json.loads((folder / "eval.json").read_text())["outcomes"][0]["tasks"] for folder in (out, again))
    assert found == expected


def test_answers_that_were_cut_short_are_asked_again(tmp_path: Path) -> None:
    path, answers = tmp_path / "answers.jsonl", {"a": (-1.5, True), "b": "words\n", "c": -0.25}
    with Answers(path) as store:
        for key, answer in answers.items():
            store[key] = answer
    content = path.read_bytes()
    assert content.count(b"\n") == 3
    for stop in range(len(content)):
        path.write_bytes(content[:stop])
        with Answers(path) as store:
            assert {key: store[key] for key in answers if key in store} == dict(
                [*answers.items()][: content[: stop + 1].count(b"\n")]
            )
            for key, answer in answers.items():
                store[key] = answer
        with Answers(path) as store:
            assert {key: store[key] for key in answers} == answers
    path.write_bytes(b"null\n3\n[[], 1]\n\xff\n" + content)
    with Answers(path) as store:
        assert {key: store[key] for key in answers} == answers


def test_further_files_are_part_of_a_save(tmp_path: Path) -> None:
    def beside(folder: Path) -> None:
        (folder / "templates").mkdir()
        (folder / "templates" / "chat.txt").write_text("hello")

    def failing(folder: Path) -> None:
        beside(folder)
        raise OSError(28, "No space left on device")

    out = tmp_path / "out"
    with pytest.raises(OSError, match=f"No space left on device.*{out}"):
        lowbit.save(nn.Linear(3, 4), out, beside=failing)
    assert not out.exists()
    for _ in range(2):  # a folder of an older save is replaced
        lowbit.save(nn.Linear(3, 4), out, beside=beside)
        assert sorted(path.name for path in out.iterdir()) == ["model.safetensors", "templates"]
        assert (out / "templates" / "chat.txt").read_text() == "hello"
    kept = (out / "model.safetensors").read_bytes()
    with pytest.raises(OSError, match="No space left"):
        lowbit.save(nn.Linear(5, 4), out, beside=failing)
    assert (out / "model.safetensors").read_bytes() == kept
    assert torch.equal(lowbit.load(out, model=nn.Linear(3, 4)).weight, lowbit.load(out, model=nn.Linear(3, 4)).weight)


# ---- output that nobody takes ----------------------------------------------------------------------------------------


def piped(shell: str) -> subprocess.CompletedProcess[str]:
    """A shell's line in which LOWBIT stands for the program; the exit code is that of the program."""
    program = f"{sys.executable} -c 'from lowbit.command import main; main()'"
    line = f"{shell.replace('LOWBIT', program)}; exit ${{PIPESTATUS[0]}}"
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    ("line", "code", "stderr"),
    [
        ("LOWBIT list formats | true", 1, ""),
        ("LOWBIT list formats > /dev/full", 1, "lowbit: error: the output cannot be written: No space left on device\n"),
        ("LOWBIT list formats <&- >&- 2>&-", 0, ""),
        ("LOWBIT nonsense 2> /dev/full", 2, ""),
    ],
)
def test_streams_that_take_nothing(line: str, code: int, stderr: str) -> None:
    done = piped(line)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", stderr)


EVAL = ["eval", str(TOY), "--tasks", "mmlu", "--data", str(TOY_DATA), "--recipes", "", "--limit", "1"]


@pytest.mark.parametrize(
    "arguments",
    [
        EVAL,
        ["demo", "--limit", "1"],
        ["plan", str(TOY)],
        ["bench", "host", "--schemes", "int8", "--batches", "1"],
    ],
    ids=lambda arguments: arguments[0],
)
@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["text", "json"])
def test_a_reader_that_leaves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], flags: list[str]
) -> None:
    if arguments[0] == "demo":  # which takes long where it is not cut
        material = demo.Material.read
        monkeypatch.setattr(demo, "run", functools.partial(demo.run, recipes=()))
        monkeypatch.setattr(demo.Material, "read", lambda limit: material(limit=limit, chunks=1))
        monkeypatch.setattr("lowbit.evals.gemv._USUAL", (512, 512))
    report = tmp_path / "report.json"
    if arguments[0] in ("eval", "demo", "bench"):
        arguments = [*arguments, "--report", str(report)]
    with unread() as stdout, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        assert run([*arguments, *flags]) == 1
    assert capsys.readouterr().err == ""
    if "--report" in arguments:  # which was asked for before anybody left
        assert report.read_text().endswith("}\n")


def test_remarks_that_nobody_takes_cost_no_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with unread() as stderr, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        assert run([*EVAL, "--out", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "eval.json").read_text())


# ---- sizes that mean nothing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gemv", "--shapes", "0x4"], "got 0x4"),
        (["gemv", "--shapes", "4x-4"], "got 4x-4"),
        (["gemv", "--shapes", "4"], "got 4 "),
        (["gemv", "--batches", "0"], "and 0"),
        (["gemv", "--schemes", "int44"], "no scheme, recipe or file named 'int44'"),
        (["host", "--batches", "0"], "got 0"),
        (["host", "--schemes", "int44"], "no scheme, recipe or file named 'int44'"),
        (["memory", "--scheme", "int44"], "no scheme, recipe or file named 'int44'"),
    ],
)
def test_benchmarks_of_nothing(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    (line,) = lines_of(capsys, "bench", *arguments)
    assert words in line
