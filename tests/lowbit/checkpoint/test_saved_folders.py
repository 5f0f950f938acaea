"""Whatever is saved over whatever, a folder holds one checkpoint, and every reader sees the same one, at any moment."""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import itertools
import json
import os
import pickle
import weakref
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import lowbit
from tests.lowbit.checkpoint.test_checkpoint_files import Interruption

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LIMITS = {"one file": "1GB", "some shards": "6KB", "two shards": "12KB"}


@pytest.fixture(autouse=True, scope="module")
def _quiet():
    transformers.utils.logging.disable_progress_bar()


def marked(value: int, quantized: bool = True) -> LlamaForCausalLM:
    """A model that says which save it is from."""
    config = LlamaConfig(
        vocab_size=48, hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    torch.manual_seed(value)
    model = LlamaForCausalLM(config).eval()
    torch.nn.init.constant_(model.model.norm.weight, value)
    if quantized:
        lowbit.quantize_(model, "int4_g32")
    return model


def save(model: LlamaForCausalLM, folder: Path, way: str, limit: str) -> None:
    if way == "lowbit.save":
        lowbit.save(model, folder, max_shard_bytes=int(limit.replace("GB", "000000000").replace("KB", "000")))
    else:
        model.save_pretrained(folder, max_shard_size=limit)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def shards(folder: Path) -> set[str]:
    return set(json.loads((folder / INDEX).read_text())["weight_map"].values())


def mark(folder: Path) -> int:
    """Which save the folder holds, by lowbit and by transformers; fails where these differ."""
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    ours = lowbit.load(folder)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[name]), name
    return int(theirs.model.norm.weight[0])


def sweep(states: list) -> list:
    """Every state after every state, itself too: the shortest such sequence."""
    path, left = [], {state: list(states) for state in states}

    def visit(state) -> None:
        while left[state]:
            visit(left[state].pop())
        path.append(state)

    visit(states[0])
    return path


def test_the_last_save_is_the_one_that_every_reader_sees(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    states = [(way, limit) for way in ("lowbit.save", "save_pretrained") for limit in LIMITS.values()]
    steps = sweep(states)
    assert {*itertools.pairwise(steps)} == {(a, b) for a in states for b in states}
    models = [marked(1), marked(2)]
    for i, (way, limit) in enumerate(steps):
        save(models[i % 2], tmp_path, way, limit)
        weights = {name for name in names(tmp_path) if "safetensors" in name}
        assert weights == ({SINGLE} if limit == LIMITS["one file"] else {INDEX, *shards(tmp_path)})
        assert not {name for name in names(tmp_path) if name.startswith(".")}
        assert mark(tmp_path) == 1 + i % 2
    assert (tmp_path / "tokenizer.json").exists()


@pytest.mark.parametrize("limit", ["1GB", "8KB"])
def test_a_float_model_over_a_quantized_one_and_the_reverse(tmp_path, limit):
    """transformers alone saves the float model, and leaves an index of shards that are gone."""
    marked(1).save_pretrained(tmp_path, max_shard_size="8KB")
    marked(2, quantized=False).save_pretrained(tmp_path)
    assert int(AutoModelForCausalLM.from_pretrained(tmp_path).model.norm.weight[0]) == 2
    marked(3).save_pretrained(tmp_path, max_shard_size=limit)
    assert mark(tmp_path) == 3


class Moves(Interruption):
    STEPS = ((safetensors.torch, "save_file"), (os, "replace"), (Path, "unlink"))


@pytest.mark.parametrize("old", ["1GB", "8KB"])
@pytest.mark.parametrize("new", ["1GB", "8KB"])
def test_a_save_pretrained_that_fails_leaves_one_whole_set(tmp_path, old, new):
    first, second, outcomes = marked(1), marked(2), []

    def strike() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for nth in range(1, 100):
        first.save_pretrained(tmp_path, max_shard_size=old)
        with pytest.MonkeyPatch.context() as patch:
            interruption = Moves(patch.setattr, nth, strike)
            patch.setattr("transformers.modeling_utils.safe_save_file", safetensors.torch.save_file)
            with contextlib.suppress(OSError):
                second.save_pretrained(tmp_path, max_shard_size=new)
            done = interruption.left > 0
        outcomes.append(mark(tmp_path))
        assert not {name for name in names(tmp_path) if name.startswith(".")}
        if done:
            break
    assert outcomes == sorted(outcomes)
    assert (outcomes[0], outcomes[-1]) == (1, 2)
    assert outcomes.count(1) > 3


def test_variants_stand_side_by_side(tmp_path):
    marked(1).save_pretrained(tmp_path)
    for value, limit in ((2, "8KB"), (3, "1GB"), (4, "8KB")):
        marked(value).save_pretrained(tmp_path, variant="small", max_shard_size=limit)
        found = {name for name in names(tmp_path) if "small" in name}
        if limit == "1GB":
            assert found == {"model.small.safetensors"}
        else:
            places = json.loads((tmp_path / "model.safetensors.index.small.json").read_text())["weight_map"]
            assert found == {"model.safetensors.index.small.json", *places.values()}
        assert mark(tmp_path) == 1


def test_the_arguments_of_save_pretrained(tmp_path, caplog):
    model = marked(1)
    model.save_pretrained(tmp_path / "other process", is_main_process=False)
    assert not (tmp_path / "other process" / "config.json").exists()
    model.save_pretrained(tmp_path / "by place", True, None, False, "8KB")
    assert (tmp_path / "by place" / INDEX).exists()
    (tmp_path / "file").write_text("kept")
    model.save_pretrained(tmp_path / "file")
    assert "should be a directory, not a file" in caplog.text
    assert (tmp_path / "file").read_text() == "kept"
    with pytest.raises(TypeError):
        model.save_pretrained()


def test_a_repository_is_named_after_the_folder(tmp_path, monkeypatch):
    """The files are written elsewhere first, after which nothing may be called."""
    asked, uploaded = [], []

    class Api:
        def create_repo(self, repo_id, **options):
            asked.append(repo_id)
            return self

        repo_id = "somebody/mine"

    monkeypatch.setattr("transformers.modeling_utils.hf_api", Api)
    model = marked(1)
    monkeypatch.setattr(
        type(model), "_upload_modified_files", lambda self, folder, *args, **options: uploaded.extend(os.listdir(folder))
    )
    monkeypatch.setattr(
        "transformers.modeling_utils.create_and_tag_model_card",
        lambda *args, **options: type("Card", (), {"save": lambda self, path: Path(path).write_text("theirs")})(),
    )
    model.save_pretrained(tmp_path / "mine", push_to_hub=True)
    assert asked == ["mine"]
    assert {"config.json", SINGLE, "README.md"} <= set(uploaded)
    assert mark(tmp_path / "mine") == 1


def test_copies_and_pickles_save_the_same_way_and_keep_nothing_alive(tmp_path):
    model = marked(1)
    for i, other in enumerate((copy.deepcopy(model), pickle.loads(pickle.dumps(model)))):
        torch.nn.init.constant_(other.model.norm.weight, 7 + i)
        other.save_pretrained(tmp_path, max_shard_size="8KB")
        other.save_pretrained(tmp_path)
        assert mark(tmp_path) == 7 + i
        assert INDEX not in names(tmp_path)
    alive = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert alive() is None
    finally:
        gc.enable()


def test_streaming_over_another_set(tmp_path):
    marked(1, quantized=False).save_pretrained(tmp_path / "float")
    for value, limit in ((2, 8_000), (3, 1 << 30), (4, 8_000)):
        save(marked(value), tmp_path / "out", "save_pretrained", "1GB" if limit < 1 << 30 else "8KB")
        data = torch.arange(40).reshape(2, 20)
        lowbit.quantize_folder(tmp_path / "float", tmp_path / "out", "int4_g32", calibration=data, max_shard_bytes=limit)
        assert mark(tmp_path / "out") == 1
        assert (SINGLE in names(tmp_path / "out")) == (limit == 1 << 30)
