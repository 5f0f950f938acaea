"""The table of quality: peers' weights and our recipes measured on one model by one harness."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import lowbit
from lowbit.evals import quality, quality_peers, tables
from tests.support.models import exam_and_text, word_model

SMALL = ("--rows", "4", "--context", "16", "--chunks", "6", "--compared", "3")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return exam_and_text(word_model(tmp_path / "in"))


@pytest.fixture
def bench(source: Path) -> Iterator[quality.Bench]:
    with quality.Bench(source, source / "text.txt", source / "text.txt", rows=4, chunks=6, compared=3, context=16) as made:
        yield made


def peer(source: Path, out: Path, made: Any, scheme: str = "int4", monkeypatch: Any = None) -> Path:
    """The folder of a peer that does ``made(model, ids, scheme)``."""
    monkeypatch.setitem(quality_peers.PEERS, "made-up", quality_peers.Peer("torch", ("int4", "w8a8"), made))
    return quality_peers.make("made-up", scheme, source, source / "text.txt", out, rows=4, length=16)


def test_a_peer_that_changes_nothing_is_the_float_model(source, bench, tmp_path, monkeypatch):
    seen = []

    def made(model, ids, scheme):
        seen.append(ids)
        return quality_peers.PeerResult(20)

    row = bench.peer_row(peer(source, tmp_path / "out", made, monkeypatch=monkeypatch))
    whole = bench.float_row()
    assert row["perplexity"] == whole["perplexity"]
    assert row["divergence"]["kl"] == 0
    assert row["divergence"]["agreement"] == 1
    assert row["by"] == f"torch {torch.__version__}"
    rows, numbers = 32 + 16 + 16 + 32 + 48 + 48 + 32, 32 * (32 + 16 + 16 + 32 + 48 + 48) + 48 * 32
    assert row["bits_per_weight"] == pytest.approx(4 + 20 * rows / numbers)  # each row is shorter than a group
    # It saw the rows that ours see.
    assert torch.equal(seen[0], torch.cat([batch.kwargs["input_ids"] for batch in bench.data.batches(bench.model)]))
    peer(source, tmp_path / "out", lambda *args: pytest.fail("made again"), monkeypatch=monkeypatch)


def test_a_peer_that_rounds_is_measured_as_ours_that_does_the_same(source, bench, tmp_path, monkeypatch):
    def made(model, ids, scheme):
        found = lowbit.Scheme("uint4", 128, "int", "fp32")
        for layer in quality_peers._linears(model).values():
            layer.weight.data = lowbit.QTensor.quantize(layer.weight.data, found).dequantize()
        return quality_peers.PeerResult(36)

    theirs = bench.peer_row(peer(source, tmp_path / "out", made, monkeypatch=monkeypatch))
    ours = bench.lowbit_row("int4", "uint4:g128:zint:fp32")
    assert theirs["perplexity"] == pytest.approx(ours["perplexity"], rel=1e-5)
    assert theirs["divergence"]["kl"] == pytest.approx(ours["divergence"]["kl"], rel=1e-3)
    assert theirs["bits_per_weight"] == pytest.approx(ours["bits_per_weight"])


def test_int8_inputs_and_their_factors(source, bench, tmp_path, monkeypatch):
    def plain(model, ids, scheme):
        return quality_peers.PeerResult(16)

    def scaled(model, ids, scheme):
        """Weights divided by what their inputs are multiplied by: the same products, and other roundings of inputs."""
        layers = quality_peers._linears(model)
        factors = {name: torch.ones(layer.in_features) for name, layer in layers.items()}
        for name, layer in layers.items():
            factors[name][0] = 64.0
            layer.weight.data = layer.weight.data / factors[name]
        return quality_peers.PeerResult(16, factors)

    whole = bench.float_row()
    rounded = bench.peer_row(peer(source, tmp_path / "plain", plain, "w8a8", monkeypatch))
    worse = bench.peer_row(peer(source, tmp_path / "scaled", scaled, "w8a8", monkeypatch))
    assert 0 < rounded["divergence"]["kl"] < worse["divergence"]["kl"] < 1
    assert rounded["perplexity"] == pytest.approx(whole["perplexity"], rel=0.05)


def test_what_a_peer_cannot_have_made(source, bench, tmp_path, monkeypatch):
    folder = peer(source, tmp_path / "out", lambda *args: quality_peers.PeerResult(16), monkeypatch=monkeypatch)
    weights = load_file(folder / "model.safetensors")
    save_file({f"other.{name}": tensor for name, tensor in weights.items()}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="holds another model's weights"):
        bench.peer_row(folder)
    reported = json.loads((folder / "peer.json").read_text())
    (folder / "peer.json").write_text(json.dumps({**reported, "length": 8}))
    with pytest.raises(ValueError, match="calibrated on rows of 8 tokens, not 16"):
        bench.peer_row(folder)
    with pytest.raises(SystemExit, match="were asked for: take a longer text"):
        quality_peers.make("made-up", "w8a8", source, source / "text.txt", tmp_path / "more", rows=400, length=16)
    with pytest.raises(SystemExit, match="made-up is measured under int4, w8a8, got int2"):
        quality_peers.make("made-up", "int2", source, source / "text.txt", tmp_path / "more", rows=4, length=16)


def test_the_command_keeps_what_it_measured(source, tmp_path, monkeypatch, capsys):
    folder = peer(source, tmp_path / "peers", lambda *args: quality_peers.PeerResult(16), monkeypatch=monkeypatch)
    where = ["--model", source, "--text", source / "text.txt", "--calibration", source / "text.txt", *SMALL]
    command = [str(word) for word in [*where, "--out", tmp_path / "quality.json"]]
    quality.main([*command, "--peers", str(folder), "--recipes", "int4:int4,int3:gptq(int3, passes=1)"])
    kept = json.loads((tmp_path / "quality.json").read_text())
    assert [row["recipe"] for row in kept["rows"]] == ["float", "int4", "made-up", "gptq(int3, passes=1)"]
    assert all(row["perplexity"] > 1 for row in kept["rows"])
    head, rule, *lines = capsys.readouterr().out.splitlines()[-6:]
    assert {line.count("|") for line in (head, rule, *lines)} == {7}
    monkeypatch.setattr(quality.Bench, "peer_row", lambda *args: pytest.fail("measured again"))
    quality.main([*command, "--peers", str(folder), "--recipes", "int4:int4,int4:hqq(int4)"])
    now = json.loads((tmp_path / "quality.json").read_text())
    assert {row["recipe"] for row in now["rows"]} == {row["recipe"] for row in kept["rows"]} | {"hqq(int4)"}
    with pytest.raises(SystemExit, match="holds figures of other material"):
        quality.main([*command, "--chunks", "5", "--recipes", ""])


def test_the_kept_figures():
    kept = json.loads((tables.RESULTS / "quality.json").read_text())
    rows = {(row["scheme"], row["recipe"]): row for row in kept["rows"]}
    assert kept["material"]["chunks"] == quality.CHUNKS
    assert {("float", "float"), ("int4", "gptq(int4)"), ("int3", "gptq(int3)")} <= set(rows)
