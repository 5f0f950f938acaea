"""Tables of crossovers: how they are measured and written, which row ends where, and which entry a call takes."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowbit import Scheme
from lowbit.evals import cold_cache, crossover
from lowbit.evals.cold_cache import Sweep, Times
from lowbit_kernels import crossovers, registry


@pytest.fixture(autouse=True)
def _small_caches(monkeypatch):
    monkeypatch.setitem(cold_cache.COLD, "cpu", 1 << 20)


def test_segments_prefer_the_registrys_order_unless_another_row_gains():
    measured = {
        1: {"a": 1.0, "b": 3.0},
        8: {"a": 2.0, "b": 1.99},
        16: {"b": 4.0, "c": 3.0},
        64: {"b": 4.0, "c": 3.9},
        256: {"b": 9.0},
    }
    assert crossover.segments(measured) == [(8, "a"), (16, "c"), (None, "b")]
    assert crossover.segments({}) == []


@given(st.floats(0.2, 1.0), st.floats(0.0, 0.15), st.floats(4200.0, 7800.0))
def test_between_two_batches_a_row_ends_where_the_lines_cross(slope, less, crossing):
    """Times that are powers of M are lines between logarithms, so that the crossing is exact."""
    times = {m: {"a": m**slope, "b": crossing ** (less + 0.1) * m ** (slope - less - 0.1)} for m in (1024, 4096, 8192)}
    found = crossover.segments(times)
    if times[8192]["b"] < 0.97 * times[8192]["a"]:
        (last, row), end = found
        assert (row, end) == ("a", (None, "b"))
        assert crossing - 1.01 <= last <= crossing + 0.01
    else:
        assert found == [(None, "a")]


@pytest.mark.parametrize("path", sorted(crossovers.FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_a_table_in_the_package_names_rows_schemes_and_layouts_that_there_are(path):
    rows = {kernel.name: kernel for kernel in registry.kernels()}
    table = crossovers.load(json.loads(path.read_text())["device"], 0)
    assert table is not None
    assert crossovers.file_of(table.device) == path
    for entry in table.entries:
        assert entry.up_to[-1][0] is None
        assert str(Scheme.parse(entry.scheme)) == entry.scheme
        for _, row in entry.up_to:
            assert rows[row].op == entry.op
            assert rows[row].layout == entry.layout


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=3), st.lists(st.floats(0.5, 2.0), min_size=4, max_size=4))
def test_rows_of_hard_work_are_compared_at_one_clock(costs, clocks):
    """However fast the clock is while a row is interleaved with the first one, their ratio is what is kept."""
    at = iter(clocks)

    def timed(calls, x, baseline=None, **how):
        clock = next(at)
        return Times(calls[0] / clock, calls[0] / clock, True, None if baseline is None else baseline.calls[0] / clock)

    sweeps = {str(i): Sweep([cost], None) for i, cost in enumerate([1.0, *costs])}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crossover, "timed", timed)
        found = crossover._against_first(sweeps, repeats=3)
    assert found["0"] == 1.0 / clocks[0]
    assert [found[str(i + 1)] / found["0"] for i in range(len(costs))] == pytest.approx(costs)


def test_a_table_is_measured_written_and_read(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(crossovers, "FOLDER", tmp_path)
    crossovers.load.cache_clear()
    path = tmp_path / "cpu.json"
    arguments = ["--schemes", "int4,fp8", "--shapes", "64x256", "--batches", "1,16", "--device", "cpu", "--repeats", "1"]
    crossover.main([*arguments, "--out", str(path)])
    table = crossovers.load("cpu", 0)
    call = registry.Call("linear", "cpu", 0, "canonical", Scheme.parse("int4"), torch.bfloat16, 1, 64, 256)
    assert [(e.op, e.scheme, e.layout) for e in table.entries] == [
        ("linear", "uint4:g128:zint:bf16", layout := registry.preferred_layout(call)),
        ("linear", "fp8_e4m3fn:row:bf16", "canonical"),
    ]
    assert table.fastest("linear", Scheme.parse("int4"), layout, 1, 64, 256) == table.entries[0].row(1)
    assert table.fastest("linear", Scheme.parse("int3"), "canonical", 1, 64, 256) is None
    assert crossovers.load("an unknown one", 0) == table
    assert crossovers.load("an unknown one", 90) is None
    crossovers.load.cache_clear()


def test_a_call_takes_the_entry_that_is_most_like_it():
    def entry(scheme, n, k, row):
        return crossovers.Entry("linear", str(Scheme.parse(scheme)), "mma_fragment", n, k, ((8, row), (None, row + "_many")))

    entries = (
        entry("int4", 1024, 1024, "small"),
        entry("int4", 8192, 8192, "large"),
        entry("mxfp4", 4096, 4096, "mx"),
        entry("int8", 4096, 4096, "eight"),
    )
    table = crossovers.Crossovers("a GPU", 90, entries)

    def fastest(scheme, m, n, k, layout="mma_fragment"):
        return table.fastest("linear", Scheme.parse(scheme), layout, m, n, k)

    assert fastest("int4", 8, 1024, 2048) == "small"
    assert fastest("int4", 9, 28672, 8192) == "large_many"
    assert fastest("int4_g64", 1, 8192, 8192) == "large"
    assert fastest("mxfp4", 1, 8192, 8192) == "mx"
    assert fastest("nvfp4", 1, 4096, 4096) == "mx"
    assert fastest("int8", 1, 1024, 1024) == "eight"
    assert fastest("int4", 1, 1024, 1024, layout="canonical") is None
    assert fastest("int6", 1, 1024, 1024) is None
