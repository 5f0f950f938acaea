"""Names that a header lists beside its tensors: every reader gives the model that was saved, or one CheckpointError."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import lowbit
from lowbit import CheckpointError
from tests.support import (
    models,
    strategies,  # noqa: F401 - its hypothesis profile
)

FILE = "model.safetensors"
LISTS = ("nonpersistent", "aliases", "quantized", "inserted")
PLACES = (
    "gone", "model.gone.x", "model.layers.0.mlp.gone", "model.layers.7.x", "model.embed_tokens", "model.norm.weight",
    "model.rotary_emb", "model.rotary_emb.inv_freq", "model.rotary_emb.inv_freq.x", "", ".", "model..x", "model.",
)  # fmt: skip


def _outline(folder: Path) -> nn.Module:
    with torch.device("meta"):
        return lowbit.load(folder, model=LlamaForCausalLM(models.llama().config), device="cpu")


READERS: dict[str, Callable[[Path], nn.Module]] = {
    "load": lowbit.load,
    "load into a model": lambda folder: lowbit.load(folder, model=models.llama()),
    "load into an outline": _outline,
    "from_pretrained": AutoModelForCausalLM.from_pretrained,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose header lists names of every kind: tied weights, buffers, inserted modules."""
    folder = tmp_path_factory.mktemp("saved")
    model = models.llama()
    recipe = {"*embed_tokens": "int8", "lm_head": "int8", "*": "int4"}
    lowbit.quantize_(model, lowbit.rotation(recipe, online=True))
    lowbit.save(model, folder)
    return folder


@pytest.fixture(scope="module")
def altered(tmp_path_factory: pytest.TempPathFactory, saved: Path) -> Path:
    folder = tmp_path_factory.mktemp("altered")
    for path in saved.glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture(scope="module")
def logits(saved: Path) -> Tensor:
    with torch.no_grad():
        return lowbit.load(saved)(models.tokens()).logits


def content(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors import safe_open

    with safe_open(folder / FILE, "pt") as file:
        return load_file(folder / FILE), json.loads(file.metadata()["lowbit"])


def loads_equal_or_is_refused(folder: Path, tensors: dict[str, Tensor], header: dict[str, Any], logits: Tensor) -> None:
    save_file(tensors, folder / FILE, {"format": "pt", "lowbit": json.dumps(header)})
    refused: dict[str, str] = {}
    for name, reader in READERS.items():
        try:
            model = reader(folder)
        except CheckpointError as error:
            refused[name] = str(error)
        else:
            with torch.no_grad():
                assert torch.equal(model(models.tokens()).logits, logits), name
    # A buffer that a model computes for itself is not read, whatever the file has there.
    assert set(refused) in (set(), set(READERS), set(READERS) - {"load into a model"})
    assert all(str(folder) in said and "\n" not in said for said in refused.values())


@given(data=st.data())
@settings(max_examples=25)
def test_a_name_that_is_listed_and_not_there(saved: Path, altered: Path, logits: Tensor, data: st.DataObject) -> None:
    tensors, header = content(saved)
    which = data.draw(st.sampled_from(LISTS))
    listed: Any = header[which]
    old = data.draw(st.sampled_from((*sorted(listed), None)))
    new = data.draw(st.sampled_from((*PLACES, None)))
    if isinstance(listed, list):
        header[which] = [name for name in (*(name for name in listed if name != old), new) if name is not None]
    else:
        value = copy.deepcopy(listed[old] if old is not None else next(iter(listed.values())))
        listed.pop(old, None)
        if new is not None:
            listed[new] = value
    if new is not None and data.draw(st.booleans()):
        tensors[new] = torch.zeros(3)
    loads_equal_or_is_refused(altered, tensors, header, logits)


@given(data=st.data())
@settings(max_examples=10)
def test_a_tensor_that_is_gone_or_another(saved: Path, altered: Path, logits: Tensor, data: st.DataObject) -> None:
    tensors, header = content(saved)
    name = data.draw(st.sampled_from(sorted(tensors)))
    tensor = tensors.pop(name)
    kind = data.draw(st.sampled_from(("gone", "renamed", "another shape", "another dtype")))
    if kind != "gone":
        other = {"renamed": tensor, "another shape": tensor.flatten().repeat(2), "another dtype": tensor.to(torch.complex64)}
        tensors[name if kind != "renamed" else f"{name}.x"] = other[kind]
    loads_equal_or_is_refused(altered, tensors, header, logits)


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_a_buffer_that_no_file_holds(saved: Path, altered: Path, reader: Callable[[Path], nn.Module]) -> None:
    tensors, header = content(saved)
    name = header["nonpersistent"][0]
    del tensors[name]
    save_file(tensors, altered / FILE, {"format": "pt", "lowbit": json.dumps(header)})
    with pytest.raises(CheckpointError, match=f"lists the buffer {name}, which no file holds"):
        reader(altered)


def test_buffers_come_from_the_file(saved: Path, altered: Path) -> None:
    """They are what the saved model had, also where they are not what its configuration says."""
    tensors, header = content(saved)
    name = "model.rotary_emb.inv_freq"
    assert name in header["nonpersistent"]
    tensors[name] = tensors[name] * 2
    save_file(tensors, altered / FILE, {"format": "pt", "lowbit": json.dumps(header)})
    for reader in (lowbit.load, AutoModelForCausalLM.from_pretrained):
        assert torch.equal(reader(altered).get_buffer(name), tensors[name])
