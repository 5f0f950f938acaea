"""What goes wrong on other people's machines: each mishap is one line that says what and where, and leaves nothing behind."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import lowbit
from lowbit.command import run
from lowbit.evals.evaluation import TOY, TOY_DATA

QUESTION = "Which?,one,two,three,four,A\n"
MEGABYTE = 1 << 20


def lines_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    """What a command that fails leaves on stderr; nothing may be on stdout."""
    code = run([*map(str, arguments)])
    captured = capsys.readouterr()
    assert code in (1, 2)
    assert captured.out == ""
    return captured.err.splitlines()


def in_a_process(*arguments: object, limit: Callable[[], None] | None = None) -> subprocess.CompletedProcess[str]:
    """``lowbit`` as a program of its own, within limits of the operating system."""
    command = [sys.executable, "-c", "from lowbit.command import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, preexec_fn=limit)


def limited(kind: int, size: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(kind, (size, size))


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
    arguments = ("eval", TOY, "--tasks", "mmlu", "--data", exam, "--recipes", "int8")
    done = in_a_process(*arguments, limit=limited(resource.RLIMIT_CPU, 60))
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert str(path) in line
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 1 << 20  # KiB


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
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "generation_config.json", "model.safetensors"]


@pytest.mark.parametrize("name", ["fifo", "device"])
def test_what_is_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    path = tmp_path / name
    path.symlink_to("/dev/zero") if name == "device" else os.mkfifo(path)
    (line,) = lines_of(capsys, "inspect", path)
    assert line == f"lowbit: error: {path}: is no regular file"


# ---- a full disk -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "older"), [(1 << 10, False), (MEGABYTE, True)], ids=["even the tokenizer", "the weights"])
def test_a_disk_without_room_for_a_model(tmp_path: Path, size: int, older: bool) -> None:
    out = tmp_path / "out"
    if older:
        assert run(["quantize", str(TOY), "--recipe", "int4", "-o", str(out)]) == 0
    before = {path.name: path.read_bytes() for path in out.glob("*")}
    done = in_a_process("quantize", TOY, "--recipe", "int8", "-o", out, limit=limited(resource.RLIMIT_FSIZE, size))
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert str(out) in line
    assert "File too large" in line
    assert {path.name: path.read_bytes() for path in out.glob("*")} == before
    assert out.exists() == older


def test_a_disk_without_room_for_a_report(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    arguments = ("bench", "host", "--schemes", "int8", "--batches", "1", "--report", report)
    done = in_a_process(*arguments, limit=limited(resource.RLIMIT_FSIZE, 16))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"File too large: '{report}'" in line
    assert list(tmp_path.iterdir()) == []


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
    line = f"set -o pipefail; {shell.replace('LOWBIT', program)}"
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("command", ["formats", "formats --json"])
def test_a_full_disk_behind_stdout(command: str) -> None:
    done = piped(f"LOWBIT {command} > /dev/full")
    assert (done.returncode, done.stderr) == (1, "lowbit: error: the output cannot be written: No space left on device\n")


def test_streams_that_are_closed() -> None:
    done = piped("LOWBIT formats >&-")
    assert (done.returncode, done.stderr) == (0, "")
    assert piped("LOWBIT inspect /absent 2>&-").returncode == 1
    assert piped("LOWBIT formats | true").stderr == ""


@pytest.mark.parametrize(
    "command",
    [
        f"eval {TOY} --tasks mmlu --data {TOY_DATA} --recipes '' --limit 1",
        f"plan {TOY}",
        "bench host --schemes int8 --batches 1",
    ],
    ids=["eval", "plan", "bench"],
)
def test_a_reader_that_leaves(command: str) -> None:
    done = piped(f"LOWBIT {command} | true")
    assert done.stderr == ""
    assert done.returncode in (0, 1)


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
