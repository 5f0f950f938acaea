"""The benchmarks run, count the right bytes, and name the kernel; no speed is asserted."""

from __future__ import annotations

import json

import pytest

from lowbit.command import run
from lowbit.evals import gemv, tables


def test_gemv_counts_bytes_and_names_kernels(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(gemv, "_COLD", {"cpu": 1 << 20})
    arguments = ["bench", "gemv", "--schemes", "int4,int8", "--shapes", "64x256", "--batches", "1,16", "--repeats", "1"]
    assert run([*arguments, "--json", "--report", str(tmp_path / "gemv.json")]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures == json.loads((tmp_path / "gemv.json").read_text())
    assert {"date", "commit", "versions", "device"} <= set(figures)
    assert [(r["m"], r["scheme"]) for r in figures["rows"]] == [(m, s) for m in (1, 16) for s in ("float", "int4", "int8")]
    by_scheme = {r["scheme"]: r for r in figures["rows"]}
    assert by_scheme["float"]["bytes"] == 64 * 256 * 2
    assert by_scheme["int4"]["bytes"] == 64 * 128 + 64 * 2 * (2 + 1)  # codes, bf16 scales, a byte of zero point
    assert by_scheme["int8"]["bytes"] == 64 * 256 + 64 * 2
    assert all(r["us"] > 0 and r["limit_us"] > 0 and r["kernel"] for r in figures["rows"])
    assert tables.gemv_table([figures]).count("\n| 64 x 256 |") == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "4096"], "as in 4096x4096"),
        (["--device", "cuda"], "no CUDA device"),
        (["--schemes", "int44"], "did you mean"),
    ],
)
def test_a_benchmark_of_nothing_is_one_clear_error(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert run(["bench", "gemv", *arguments]) != 0
    assert message in capsys.readouterr().err


def test_memory_is_reported(capsys):
    assert run(["bench", "memory", "--size", "64", "--layers", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["largest_layer_bytes"] == 64 * 64 * 2
