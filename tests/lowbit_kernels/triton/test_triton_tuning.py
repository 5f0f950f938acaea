"""Blocks: which one a call takes, tables on disk and what is wrong with them, and the loop that measures."""

from __future__ import annotations

import itertools
import json
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lowbit
from lowbit import Scheme, quantize_
from lowbit.command import run
from lowbit.evals import cold_cache, tuning
from lowbit.evals.shapes import SHAPES, outlined
from lowbit_kernels.triton import blocks, tables

INT4, INT8 = Scheme.parse("uint4:g32:zint:bf16"), Scheme.parse("int8:row:bf16")
CPU = torch.device("cpu")
SIZES = st.integers(1, 1 << 18)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    blocks.forget()
    yield
    blocks.forget()


def kept() -> Path:
    return tables.file_of(tables.described(CPU))


def keep(**changes) -> None:
    """A table in which gemv has a block of its own, with some of its fields changed."""
    name = blocks.key("gemv", INT4, 1, 64, 128)
    data = {**tables.described(CPU), "blocks": {name: {"ROWS": 8, "WORDS": 32, "num_warps": 1}}, **changes}
    kept().parent.mkdir(parents=True, exist_ok=True)
    kept().write_text(json.dumps(data))
    blocks.forget()


def chosen(n: int = 64, k: int = 128, scheme: Scheme = INT4, dtype: torch.dtype = torch.float16):
    return dict(blocks.block("gemv", CPU, scheme, dtype, 1, n, k))


# ---- keys and choice -------------------------------------------------------------------------------------------------


@given(SIZES, SIZES, SIZES, SIZES, st.integers(1, 300), st.integers(1, 300))
def test_calls_share_a_key_exactly_if_they_are_of_one_bucket_and_shape_class(n, k, other_n, other_k, m, other_m):
    alike = blocks.bucket(m) == blocks.bucket(other_m) and all(
        (a - 1).bit_length() == (b - 1).bit_length() for a, b in ((n, other_n), (k, other_k))
    )
    assert (blocks.key("gemv", INT4, m, n, k) == blocks.key("gemv", INT4, other_m, other_n, other_k)) == alike


@given(st.integers(1, 300))
def test_a_bucket_holds_its_m(m):
    most = blocks.bucket(m)
    assert m <= most if most else m > max(blocks.BUCKETS)


@settings(max_examples=50)
@given(
    st.sampled_from(tables.KERNELS), st.sampled_from(["int4", "mxfp4", "nf4", "int8", "int3"]), st.integers(1, 200), SIZES,
    st.integers(1, 1 << 15), st.sampled_from([torch.float16, torch.float32]),
)  # fmt: skip
def test_candidates_are_blocks_and_begin_with_the_rule(kernel, name, m, n, k, dtype):
    scheme = lowbit.SCHEMES[name]
    found = blocks.candidates(kernel, scheme, dtype, m, n, k)
    assert found[0] == blocks.fitted(kernel, blocks.rule(kernel, scheme, dtype, m, n, k), scheme, dtype, k, 227 * 1024)
    assert all(tables.is_block(kernel, block) for block in found)
    assert found[0] not in found[1:]
    for block in found if kernel == "gemm" else ():  # both factors of every stage, in what a processor of an H100 has
        weight, x = block["BLOCK_N"] * scheme.bits, block["BLOCK_M"] * 8 * dtype.itemsize
        assert block["STAGES"] * block["WORDS"] * (weight + x) < 227 * 1024


def test_a_measured_block_is_taken_for_its_class_and_no_other():
    assert chosen() == blocks.rule("gemv", INT4, torch.float16, 1, 64, 128)
    keep()
    assert chosen() == {"ROWS": 8, "WORDS": 32, "num_warps": 1} == chosen(33, 65)
    for n, k, scheme, dtype in ((65, 128, INT4, torch.float16), (64, 128, INT8, torch.float16), (64, 128, INT4, torch.float32)):
        assert chosen(n, k, scheme, dtype) == blocks.rule("gemv", scheme, dtype, 1, n, k)
    with blocks.fixed("gemv", {"ROWS": 1, "WORDS": 64, "num_warps": 2}):
        assert chosen()["WORDS"] == 64
    assert chosen()["ROWS"] == 8


def test_a_scheme_without_a_block_takes_that_of_its_bits():
    keep(blocks={blocks.key("gemv", 4, 1, 64, 128): {"ROWS": 2, "WORDS": 32, "num_warps": 1}})
    assert chosen()["ROWS"] == chosen(scheme=lowbit.SCHEMES["nf4"])["ROWS"] == 2
    assert chosen(scheme=INT8) == blocks.rule("gemv", INT8, torch.float16, 1, 64, 128)


@pytest.mark.parametrize("path", sorted(tables.SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_a_table_in_the_package_is_one(path):
    device = json.loads(path.read_text())["device"]
    assert tables.shipped_file(device) == path
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tables.read(path, {"device": device})


def test_what_was_measured_here_comes_before_what_is_shipped(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "SHIPPED", tmp_path)
    names = [blocks.key("gemv", INT4, 1, n, 128) for n in (64, 128)]
    shipped = {name: {"ROWS": 4, "WORDS": 32, "num_warps": 1} for name in names}
    tables.shipped_file("cpu").write_text(json.dumps({"version": 1, "device": "cpu", "blocks": shipped}))
    keep()
    assert (chosen(64)["ROWS"], chosen(128)["ROWS"]) == (8, 4)


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_table_is_for_one_device_its_versions_and_sources():
    base = tables.described(CPU)
    others = [{**base, name: "another"} for name in base]
    assert len({tables.file_of(each) for each in (base, *others)}) == 1 + len(base)
    assert {"device", "arch", "torch", "triton", "sources"} <= set(base)
    assert tables.file_of(base).parent.parent == tables.folder().parent


def test_the_folder_is_that_of_the_platform(monkeypatch, tmp_path):
    assert tables.folder() == tmp_path / "lowbit"
    for wrong in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", wrong)
        assert tables.folder() == Path.home() / ".cache" / "lowbit"


DAMAGE = [
    ("", "is no JSON"), ("{", "is no JSON"), ("\0\xff", "is no JSON"), ("[]", "holds no blocks"),
    ('{"blocks": 3}', "holds no blocks"),
]  # fmt: skip
FOREIGN = [{"device": "another"}, {"sources": "0"}, {"torch": "1.0"}, {"triton": None}, {"version": 0}, {"arch": "90"}]
NO_BLOCKS = [3, {}, {"ROWS": 3, "WORDS": 32, "num_warps": 1}, {"ROWS": True, "WORDS": 32, "num_warps": 1}, {"ROWS": 4}]


def only_warning(text: str) -> None:
    """Two calls bring one warning, which names the file and what to do, and the rule's blocks."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert chosen() == chosen() == blocks.rule("gemv", INT4, torch.float16, 1, 64, 128)
        chosen(4096)
    (warning,) = caught
    message = str(warning.message)
    assert str(kept()) in message
    assert text in message
    assert "Delete it, or let lowbit tune" in message


@pytest.mark.parametrize(("text", "why"), DAMAGE)
def test_a_damaged_file_is_ignored_with_one_warning(text, why):
    keep()
    kept().write_text(text, encoding="latin-1")
    only_warning(why)


@pytest.mark.parametrize("changes", FOREIGN, ids=str)
def test_a_foreign_file_is_ignored_with_one_warning(changes):
    keep(**changes)
    only_warning(f"is for {next(iter(changes))}")


@pytest.mark.parametrize("block", NO_BLOCKS, ids=str)
@pytest.mark.parametrize("name", ["gemv x m1 1x1", "warp_drive x m1 1x1", ""])
def test_a_file_with_a_block_that_no_kernel_takes_is_ignored_with_one_warning(block, name):
    keep(blocks={name: block})
    only_warning("which no kernel takes")


@settings(max_examples=60)
@given(st.data())
def test_a_file_that_was_cut_or_altered_somewhere_raises_nothing(data):
    keep()
    text = kept().read_bytes()
    at = data.draw(st.integers(0, len(text) - 1))
    kept().write_bytes(
        text[:at] if data.draw(st.booleans()) else text[:at] + data.draw(st.binary(min_size=1, max_size=2)) + text[at + 1 :]
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        blocks.forget()
        assert tables.is_block("gemv", chosen())
    assert len(caught) <= 1


def test_a_folder_in_place_of_the_file_is_ignored_with_one_warning():
    kept().mkdir(parents=True)
    only_warning("")


def test_a_table_is_added_to_and_a_damaged_one_replaced():
    one, two = ({blocks.key("gemv", INT4, 1, n, 64): {"ROWS": 1, "WORDS": 32, "num_warps": 1}} for n in (64, 128))
    holds_for = tables.described(CPU)
    for found, wanted in ((one, one), (two, one | two)):
        tables.merge(kept(), holds_for, found)
        assert tables.read(kept(), holds_for) == wanted
    kept().write_text("{")
    tables.merge(kept(), holds_for, two)
    assert tables.read(kept(), holds_for) == two
    assert [path.name for path in kept().parent.iterdir()] == [kept().name]


# ---- measuring -------------------------------------------------------------------------------------------------------


def test_problems_are_the_layers_of_a_model_each_class_once():
    plan = lowbit.plan(outlined("tiny"), lowbit.recipe.Recipe.parse("int4"), device="cpu")
    found = tuning.problems(plan)
    shapes = {layer.shape for layer in plan.quantized}
    assert {(one.n, one.k) for one in found} == shapes
    assert len(found) == len(set(found)) <= len(plan.quantized)
    assert found[0].n * found[0].k == max(n * k for n, k in shapes)
    assert set(SHAPES) >= {"tiny"}


needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles here")


@needs_interpreter
@pytest.mark.parametrize(("problem", "m", "kernels"), [
    (tuning.Problem(str(INT4), "", 8, 64), 1, {"gemv", "gemm"}),
    (tuning.Problem("int8:row:bf16", "int8:row:fp32", 8, 32), 2, {"w8a8_gemm"}),
])  # fmt: skip
def test_the_loop_measures_keeps_the_best_and_ends_in_time(problem, m, kernels, monkeypatch):
    monkeypatch.setattr(cold_cache, "MIN_GRAPH_CALLS", 1)
    ticks = itertools.count()
    found = tuning.measure([problem], (m,), "cpu", minutes=0.1, repeats=1, clock=lambda: float(next(ticks)))
    assert {row["row"].split("_")[1] for row in found["rows"]} <= {"gemv", "gemm", "w8a8"}
    assert {name.split(" ")[0] for name in found["blocks"]} == kernels
    assert all(tables.is_block(name.split(" ")[0], block) for name, block in found["blocks"].items())
    assert all(row["tried"] >= 1 and row["us"] <= row["us_without"] for row in found["rows"])
    assert sum(row["tried"] for row in found["rows"]) <= 6  # seconds of the clock, of which each measurement takes some
    assert found["finished"] == found["asked"] == 1


@needs_interpreter
def test_no_time_measures_nothing():
    assert tuning.measure([tuning.Problem(str(INT4), "", 8, 64)], (1,), "cpu", minutes=0)["blocks"] == {}


@needs_interpreter
def test_the_command_writes_what_calls_then_take(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(cold_cache, "MIN_GRAPH_CALLS", 1)
    monkeypatch.setattr(tuning, "problems", lambda plan: [tuning.Problem(str(INT4), "", 8, 64)])
    assert run(["tune", "tiny", "--device", "cpu", "--minutes", "0.02", "--batches", "1", "--repeats", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["file"] == str(kept())
    name = blocks.key("gemv", INT4, 1, 8, 64)
    assert chosen(8, 64) == found["blocks"][name]
    layer = torch.nn.Sequential(torch.nn.Linear(64, 8, dtype=torch.float16))
    quantize_(layer, INT4)
    with lowbit.strict("triton_gemv_interpreted"):
        assert layer(torch.ones(1, 64, dtype=torch.float16)).shape == (1, 8)
    for wrong in (["--batches", "0"], ["--batches", "x"], ["--device", "warp"], ["--recipe", "int44"], ["--minutes", "0"]):
        assert run(["tune", "tiny", "--device", "cpu", *wrong]) == 2
