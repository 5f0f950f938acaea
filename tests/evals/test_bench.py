"""The benchmarks run, count the right bytes, name the kernel and write what they say; no speed is asserted."""

from __future__ import annotations

import csv
import itertools
import json

import pytest
import torch

from lowbit import quantize_
from lowbit.command import run
from lowbit.evals import cold_cache, figures, gemv, generate, peers, read_limit, tables
from lowbit.evals.cold_cache import Times
from lowbit.evals.shapes import SHAPES, random_model
from lowbit.recipe import Recipe


@pytest.fixture(autouse=True)
def _small_caches(monkeypatch):
    monkeypatch.setitem(cold_cache.COLD, "cpu", 1 << 20)


# ---- gemv ------------------------------------------------------------------------------------------------------------


def test_gemv_counts_bytes_and_names_kernels(capsys, tmp_path):
    arguments = ["bench", "gemv", "--schemes", "int4,int8", "--shapes", "64x256", "--batches", "1,16", "--repeats", "1"]
    assert run([*arguments, "--json", "--report", str(tmp_path / "gemv.json")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "gemv.json").read_text())
    assert {"date", "commit", "versions", "device"} <= set(found)
    assert [(r["m"], r["scheme"]) for r in found["rows"]] == [(m, s) for m in (1, 16) for s in ("float", "int4", "int8")]
    by_scheme = {r["scheme"]: r for r in found["rows"]}
    assert by_scheme["float"]["bytes"] == 64 * 256 * 2
    assert by_scheme["int4"]["bytes"] == 64 * 128 + 64 * 2 * (2 + 1)  # codes, bf16 scales, a byte of zero point
    assert by_scheme["int8"]["bytes"] == 64 * 256 + 64 * 2
    assert all(r["us"] > 0 and r["limit_us"] > 0 and r["kernel"] and r["contract"] for r in found["rows"])
    assert found["failures"] == []
    assert tables.gemv_table([found]).count("\n| `int") == 2


def test_gemv_measures_a_layout_and_a_recipe_with_activations(capsys):
    recipe = "int8_dynamic_activation_int8_weight"
    found = gemv.measure(["int4", recipe], [(512, 512)], (1,), repeats=1, layout="mma_fragment")
    assert [(r["scheme"], r["layout"]) for r in found["rows"]] == [
        ("float", "rows"),
        ("int4", "mma_fragment"),
        (recipe, "mma_fragment"),
    ]
    with pytest.raises(ValueError, match="did you mean"):
        gemv.measure(["int44"], [(64, 64)])


def test_on_a_cpu_a_layer_takes_turns_with_the_reader_and_the_float_layer(monkeypatch):
    asked = []

    def layer_of(layers, x, *, repeats, **_):
        asked.append((type(layers[0]).__name__, repeats))
        return Times(2.0 * len(asked), 0.0, None)

    def reader_of(_, size, repeats):
        asked.append(("reader", repeats))
        return Times(float(len(asked)), 0.0, None)

    monkeypatch.setattr(gemv, "timed", layer_of)
    monkeypatch.setattr(read_limit.ReadLimits, "measured_now", reader_of)
    first, then = gemv.measure(["int8"], [(64, 128)], (1,), "cpu", repeats=9)["rows"]
    assert asked == [("_Float", 3), ("reader", 3)] * 9 + [("QLinear", 3), ("reader", 3), ("_Float", 3)] * 9
    assert (first["us"], first["limit_us"], first["fraction_of_limit"], first["times_float"]) == (18.0, 10.0, 10 / 18, 1)
    assert (then["us"], then["limit_us"], then["float_us"], then["times_float"]) == (62.0, 32.0, 66.0, 66 / 62)
    asked.clear()
    clock = itertools.count()
    monkeypatch.setattr(gemv.time, "perf_counter", lambda: 0.5 * next(clock))
    gemv.measure([], [(64, 128)], (1,), "cpu", repeats=9)
    assert asked == [("_Float", 3), ("reader", 3)] * 3  # as many as are asked for take more than a second
    asked.clear()
    monkeypatch.setattr(gemv.time, "perf_counter", lambda: 5.0 * next(clock))
    gemv.measure([], [(64, 128)], (1,), "cpu", repeats=9)
    assert asked == [("_Float", 3), ("reader", 3)]


@pytest.mark.gpu
def test_on_a_gpu_a_layer_takes_turns_with_the_float_layer():
    first, then, hard, behind = gemv.measure(["int4"], [(256, 256)], (1, cold_cache.CLOCK_BOUND_ROWS + 1), "cuda", repeats=1)[
        "rows"
    ]
    assert not {"float_us"} & {*first, *hard}
    assert first["times_float"] == hard["times_float"] == 1
    assert all(row["times_float"] == row["float_us"] / row["us"] for row in (then, behind))


def test_a_kernel_that_is_named_is_the_one_that_is_measured():
    found = gemv.measure(["int4"], [(64, 128)], (1, 3), "cpu", repeats=1, kernels=["reference_linear"])
    assert {row["kernel"] for row in found["rows"] if row["scheme"] == "int4"} == {"reference_linear"}
    assert found["kernels"] == ["reference_linear"]
    (failure,) = gemv.measure(["int4"], [(64, 128)], (1,), "cpu", repeats=1, kernels=["cpu_quantize"])["failures"]
    assert "none takes" in failure["error"]


def test_a_recipe_in_a_file_goes_by_its_name(tmp_path):
    (tmp_path / "mine.yaml").write_text('name: eight\nrules:\n  - match: "*"\n    weight: int8\n', encoding="utf-8")
    found = gemv.measure([str(tmp_path / "mine.yaml")], [(64, 128)], (1,), "cpu", repeats=1)
    assert [row["scheme"] for row in found["rows"]] == ["float", "eight"]


def test_what_cannot_be_measured_is_a_failure_with_its_reason():
    found = gemv.measure(["int4"], [(64, 256)], (1,), repeats=1, layout="spiral")
    assert [r["scheme"] for r in found["rows"]] == ["float"]
    assert "no layout named 'spiral'" in found["failures"][0]["error"]


def test_a_run_that_is_ended_early_leaves_the_shapes_that_are_done():
    kept = []
    gemv.measure(["int4"], [(64, 256), (256, 64)], (2, 1), repeats=1, keep=lambda found: kept.append(len(found["rows"])))
    assert kept == [4, 8]


def test_a_folder_of_figures(capsys, tmp_path):
    arguments = ["bench", "gemv", "--schemes", "int4", "--shapes", "64x256,256x64", "--batches", "1,2", "--repeats", "1"]
    assert run([*arguments, "--out", str(tmp_path / "new"), "--name", "here"]) == 0
    assert "without early starts" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["here.csv", "here.json", "here.png"]
    assert (tmp_path / "new" / "here.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "new" / "here.json").read_text())
    with open(tmp_path / "new" / "here.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(r["scheme"], int(r["m"]), float(r["us"])) for r in rows] == [(r["scheme"], r["m"], r["us"]) for r in found["rows"]]


def test_figures_without_matplotlib_are_a_note(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "draw", lambda path, found: False)
    arguments = ["bench", "gemv", "--schemes", "int4", "--shapes", "64x64", "--batches", "1", "--repeats", "1"]
    assert run([*arguments, "--out", str(tmp_path)]) == 0
    assert "pip install 'lowbit[plot]'" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gemv.csv", "gemv.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "4096"], "as in 4096x4096"),
        (["--device", "cuda"], "device 'cuda' cannot be used here"),
        (["--schemes", "int44"], "did you mean"),
        (["--peers", "int4 tinygemm"], "on cpu there are int4 torch, int8 torch, not int4 tinygemm"),
    ],
)
def test_a_benchmark_of_nothing_is_one_clear_error(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert run(["bench", "gemv", *arguments]) != 0
    assert message in capsys.readouterr().err


def test_memory_is_reported(capsys):
    assert run(["bench", "memory", "--size", "64", "--layers", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["largest_layer_bytes"] == 64 * 64 * 2


# ---- sweeps and limits -----------------------------------------------------------------------------------------------


def test_a_chain_hands_each_result_on_and_starts_anew():
    seen = []
    calls = [lambda x: seen.append(float(x)) or x + 1 for _ in range(40)]
    cold_cache.timed(calls, torch.zeros(()), chained=True, repeats=1)
    assert seen[-40:] == [*map(float, range(32)), *map(float, range(8))]
    seen.clear()
    cold_cache.timed(calls, torch.zeros(()), repeats=1)
    assert set(seen) == {0.0}


def test_walks_count_once_the_clock_has_settled(monkeypatch):
    """A sweep of 60 ms each time, the first ones slow: with 0.2 s before, none of those that took 0.24 s counts."""
    clock, walked = itertools.count(), []
    monkeypatch.setattr(cold_cache.time, "perf_counter", lambda: 0.06 * len(walked) + 1e-9 * next(clock))

    def sweep():
        walked.append(9.0 if len(walked) < 4 else 1.0)
        return walked[-1]

    assert cold_cache._medians([sweep], 3, warm_seconds=0.2) == [1.0]
    assert len(walked) == 7
    walked.clear()
    assert cold_cache._medians([sweep], 3) == [9.0]
    assert len(walked) == 4


def test_walks_that_are_compared_take_turns():
    seen = []

    def sweep(name, us):
        return lambda: seen.append(name) or next(us)

    of_both = [sweep("own", iter((9.0, 1.0, 5.0, 3.0))), sweep("other", iter((9.0, 2.0, 8.0, 4.0)))]
    assert cold_cache._medians(of_both, 3) == [3.0, 4.0]
    assert seen == ["own", "other"] * 4


def test_a_slow_walk_has_some_calls_alone(monkeypatch):
    seen = []
    calls = [lambda x, i=i: seen.append(i) or x for i in range(9)]
    monkeypatch.setattr(cold_cache, "_seconds", lambda calls, x: 0.1)
    cold_cache.timed(calls, torch.zeros(()), repeats=1)
    assert seen == [0, 1, *range(6), *range(6)]


def test_a_walk_into_infinity_is_refused():
    with pytest.raises(RuntimeError, match="not finite"):
        cold_cache.timed([lambda x: x / 0] * 2, torch.ones(3), repeats=1)


def test_a_fraction_compares_like_with_like():
    limit = Times(2.0, 3.0, True)
    late = gemv.row_of(Times(6.0, 6.0, False), limit, 1, 8, 8, 64)
    assert (late["fraction_of_limit"], late["no_pdl_fraction_of_limit"]) == (0.5, 0.5)
    early = gemv.row_of(Times(4.0, 5.0, True), limit, 1, 8, 8, 64)
    assert (early["fraction_of_limit"], early["no_pdl_fraction_of_limit"]) == (0.5, 0.6)
    assert "no_pdl_us" not in gemv.row_of(Times(4.0, 4.0, None), Times(2.0, 2.0, None), 1, 8, 8, 64)


@pytest.mark.gpu
def test_on_a_gpu_readers_may_start_early_and_full_edges_are_slower():
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("kernels start early from 9.0 on")
    limit = read_limit.ReadLimits(torch.device("cuda"), repeats=3)(8 << 20)
    assert limit.pdl
    assert limit.us < limit.no_pdl_us


# ---- peers -----------------------------------------------------------------------------------------------------------


def test_a_peer_is_measured_and_its_errors_are_rows(monkeypatch):
    def prepare(weight):
        if weight.shape[0] == 32:
            raise RuntimeError("no such shape")
        return torch.nn.functional.linear, (weight,)

    monkeypatch.setitem(peers.PEERS, "float", peers.Peer(16, "torch", prepare))
    rows = list(peers.rows_of("float", [(64, 64), (32, 64)], [1], torch.device("cpu"), 1))
    assert (rows[0]["bytes"], rows[0]["relative_error"]) == (64 * 64 * 2, 0)
    assert rows[1]["error"] == "RuntimeError: no such shape"


def test_peers_that_are_missing_late_or_broken_are_named(monkeypatch):
    monkeypatch.setitem(peers.PEERS, "absent", peers.Peer(4, "no-such-package", lambda weight: None))
    rows, failures = peers.measure(["absent"], [(64, 64)], [1], "cuda")
    assert (rows, failures) == ([], [{"peer": "absent", "error": "no-such-package is not installed"}])
    assert peers._lines(["int4 tinygemm"], 0.05) == ([], "not done after 0.05 s")
    assert "ended with 2" in peers._lines(["nobody"], 60)[1]
    with pytest.raises(ValueError, match="there are int4 tinygemm"):
        peers.measure(["nobody"])


def test_the_kernels_of_torch_for_a_cpu_are_measured_beside_ours_over_cold_weights_and_warm():
    for cold in (True, False):
        found = gemv.measure(["int4"], [(128, 256)], (1, 3), repeats=1, others=peers.peers_on("cpu"), cold=cold)
        assert found["cold"] == cold
        assert not found["failures"]
        where = [(row["peer"], row["m"]) for row in found["peers"]]
        assert where == [("int4 torch", 1), ("int4 torch", 3), ("int8 torch", 1), ("int8 torch", 3)]
        for row in found["peers"]:
            four = row["bits"] == 4
            assert row["bytes"] == 128 * 256 * row["bits"] // 8 + 128 * 2 * (4 if four else 1)
            assert row["relative_error"] < (0.2 if four else 0.02)


def test_peers_stand_beside_the_others(monkeypatch):
    row = {"peer": "other", "version": "other 1.0", "bits": 4, "relative_error": 0.1, "m": 1, "n": 64, "k": 256, "bytes": 8192}
    row |= {"us": 9.0, "no_pdl_us": 9.0, "pdl": None}
    monkeypatch.setattr(peers, "measure", lambda *args: ([row], [{"peer": "late", "error": "not done after 1 s"}]))
    found = gemv.measure(["int4"], [(64, 256)], (1,), repeats=1, others=["other", "late"])
    (peer,) = found["peers"]
    assert peer["times_float"] == found["rows"][0]["us"] / 9.0
    assert found["failures"] == [{"peer": "late", "error": "not done after 1 s"}]
    assert "other 1.0" in figures.as_csv(found)
    assert "| other | other 1.0 |" in tables.gemv_table([{**found, "versions": {"torch": "2"}, "date": "today"}])
    assert gemv.table(found).row_count == 3


def test_host_time_stands_beside_a_float_layer(capsys, monkeypatch, tmp_path):
    from lowbit.evals import eager, host_time

    monkeypatch.setattr(host_time, "_ROUNDS", 1)
    monkeypatch.setattr(eager, "_ROUNDS", 1)
    monkeypatch.setattr(eager, "copies_of", lambda size, device: 2)
    schemes = ("float", "int4", "int8_dynamic_activation_int8_weight")
    arguments = ["bench", "host", "--schemes", "int4,int8_dynamic_activation_int8_weight", "--size", "32", "--batches", "1,9"]
    assert run([*arguments, "--json", "--report", str(tmp_path / "host.json")]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures == json.loads((tmp_path / "host.json").read_text())
    assert [(r["m"], r["scheme"]) for r in figures["rows"]] == [(m, s) for m in (1, 9) for s in schemes]
    assert all(r["us"] > 0 and r["stack_us"] > 0 and r["kernel"] for r in figures["rows"])
    assert figures["eager"] == []
    assert run(arguments) == 0
    assert "operator us" in capsys.readouterr().out
    assert run([*arguments, "--shapes", "64x32", "--json"]) == 0
    eager = json.loads(capsys.readouterr().out)["eager"]
    assert [(r["scheme"], r["n"], r["k"]) for r in eager] == [(s, 64, 32) for s in schemes]
    assert all(0 < r["host_us"] <= r["us"] and r["times_float"] > 0 for r in eager)
    assert run(["bench", "host", "--batches", "few"]) != 0
    assert "as in 1,8" in capsys.readouterr().err


@pytest.mark.sampled(count=2)
@pytest.mark.parametrize(("plain", "batch"), [(False, 3), (True, 1), (False, 1), (True, 3)])
def test_a_model_of_random_weights_writes(plain, batch, capsys, tmp_path):
    out = tmp_path / "speed.json"
    arguments = ["bench", "generate", "tiny", "--recipes", "int4,gptq(int4)", "--prompt", "8", "--context", "4", "--steps", "2"]
    arguments += ["--batch", str(batch), "--repeats", "1", "--out", str(out), *(["--plain"] if plain else [])]
    assert run(arguments) == 0
    reported = capsys.readouterr()
    assert "tokens/s" in reported.out
    assert ("model.generate" in " ".join(reported.out.split())) == plain
    assert "recipe=gptq(int4)" in reported.err  # what looks at data is named, and the others go on
    found = json.loads(out.read_text())
    by = {row["recipe"]: row for row in found["rows"]}
    assert set(by) == {"float", "int4"}
    assert all(row["tokens_per_second"] == pytest.approx(1e3 * batch / row["ms_per_token"]) for row in by.values())
    assert f"batch {batch}" in " ".join(reported.out.split())
    assert by["float"]["times_float"] == 1
    assert all(row["tokens_per_second"] > 0 and row["prefill_ms"] > 0 for row in by.values())
    shapes = SHAPES["tiny"]
    assert by["float"]["weight_bytes"] > 2 * shapes["vocab_size"] * shapes["hidden_size"] > by["int4"]["weight_bytes"] / 2


def test_the_weights_that_a_token_reads():
    model = random_model("tiny", torch.device("cpu"), torch.bfloat16)
    table = model.get_input_embeddings().weight
    whole = sum(parameter.nbytes for parameter in model.parameters())
    assert generate.weight_bytes(model) == whole - table.nbytes
    model.lm_head.weight = table  # tied: the head reads it
    assert generate.weight_bytes(model) == whole - table.nbytes
    quantize_(model, generate.with_head(Recipe.parse("int4"), model, "int8"))
    assert str(model.lm_head.scheme) == str(Recipe.parse("int8").rules[0].config.weight)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny", "--recipes", "int44"], "did you mean"),
        (["tiny", "--device", "cuda"], "device 'cuda' cannot be used here"),
        (["./no-such"], "no folder ./no-such"),
    ],
)
def test_generation_of_nothing_is_one_clear_error(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert run(["bench", "generate", *arguments]) != 0
    assert message in " ".join(capsys.readouterr().err.split())
