"""A folder read by another class of its architecture: as transformers reads the float folder, layer by layer and name by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import lowbit
from lowbit import CheckpointError, QEmbedding, QLinear, QTensor
from tests.support import models

SCHEMES = (
    "int4",
    "nvfp4",
    {"*embed*": "int8", "*wte": "int8", "*word_emb*": "int8", "*": "int4"},
)
LLAMA = ("LlamaForCausalLM", "LlamaModel", "LlamaForSequenceClassification", "LlamaForTokenClassification")
GPT2 = ("GPT2LMHeadModel", "GPT2Model", "GPT2ForTokenClassification")
BERT = ("BertModel", "BertForSequenceClassification", "BertForTokenClassification")
CASES = [
    *((a, b, tied) for a in LLAMA for b in LLAMA for tied in (True, False) if a != b),
    *((a, b, True) for names in (GPT2, BERT) for a in names for b in names if a != b),
]


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> None:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def config(kind: str, tied: bool) -> Any:
    more: dict[str, Any] = {"pad_token_id": 0, "num_labels": 3, "tie_word_embeddings": tied}
    if kind in LLAMA:
        return transformers.LlamaConfig(**{**models.llama().config.to_dict(), **more})
    if kind in GPT2:
        return transformers.GPT2Config(vocab_size=96, n_positions=64, n_embd=48, n_layer=2, n_head=4, **more)
    return transformers.BertConfig(
        vocab_size=96, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, **more
    )


def made(kind: str, tied: bool, folder: Path) -> Path:
    torch.manual_seed(0)
    getattr(transformers, kind)(config(kind, tied)).eval().save_pretrained(folder)
    return folder


def recipe(scheme: Any, folder: Path) -> Any:
    """``scheme`` for all but heads, and for tied tables too where it names them."""
    if not isinstance(scheme, dict):
        return scheme
    model = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0]).from_pretrained(folder)
    names = {name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)}
    table = next(
        p for p in ("*embed*", "*wte", "*word_emb*") if any(n.endswith(p.strip("*")) or p.strip("*") in n for n in names)
    )
    return {
        table: scheme[table],
        **({"lm_head": "int8"} if "lm_head" in names and model.config.tie_word_embeddings else {}),
        "*": "int4",
    }


def reported(kind: str, folder: Path, **options: Any) -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(1)
    model, info = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True, **options)
    return model.eval(), info


def hidden(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.base_model(models.tokens())[0]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize(("own", "other", "tied"), CASES)
def test_another_class_is_as_of_the_float_folder(own: str, other: str, tied: bool, scheme: Any, tmp_path: Path) -> None:
    floats = made(own, tied, tmp_path / "float")
    source = getattr(transformers, own).from_pretrained(floats)
    lowbit.quantize_(source, recipe(scheme, floats))
    lowbit.save(source, tmp_path / "quantized")
    found, said = reported(other, tmp_path / "quantized")
    like, expected = reported(other, floats)
    assert {name.rpartition(".")[0] for name in said["unexpected_keys"]} == {
        name.rpartition(".")[0] for name in expected["unexpected_keys"]
    }
    assert said["missing_keys"] == expected["missing_keys"]
    assert not said["mismatched_keys"]
    assert torch.equal(hidden(found), hidden(source))
    quantized = {name for name, module in found.base_model.named_modules() if isinstance(module, QLinear | QEmbedding)}
    there = {name for name, _ in found.base_model.named_modules()}  # some classes have no pooler
    assert quantized == {n for n, m in source.base_model.named_modules() if isinstance(m, QLinear | QEmbedding)} & there
    ours, theirs = (dict(m.named_parameters(remove_duplicate=False)) for m in (found, like))
    assert sorted(ours) == sorted(theirs)
    for name, parameter in ours.items():
        assert parameter.numel() == theirs[name].numel()  # a Conv1D has its weight the other way round
        assert not parameter.is_meta
        same = {n for n, p in ours.items() if p is parameter}
        assert same == {n for n, p in theirs.items() if p is theirs[name]} or not tied, name
    for name in expected["missing_keys"]:  # a new head, initialised as transformers does
        assert not isinstance(ours[name], QTensor)
        assert torch.isfinite(ours[name]).all()
        assert torch.equal(ours[name] == 0, theirs[name] == 0)
    found.save_pretrained(tmp_path / "again")
    again, clean = reported(other, tmp_path / "again")
    assert not any(clean[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    x = models.tokens()
    assert torch.equal(again(x)[0], found(x)[0])


@pytest.mark.parametrize("scheme", ["int4"])
@pytest.mark.parametrize(("own", "other", "tied"), CASES)
def test_a_config_quantizes_another_class(own: str, other: str, tied: bool, scheme: Any, tmp_path: Path) -> None:
    """In memory, from the float folder: the same base, and heads that are new stay float."""
    floats = made(own, tied, tmp_path / "float")
    found, said = reported(other, floats, quantization_config=lowbit.Config(scheme))
    like, expected = reported(other, floats)
    assert said["missing_keys"] == expected["missing_keys"]
    lowbit.quantize_(like, scheme)
    assert torch.equal(hidden(found), hidden(like))
    assert not any(isinstance(found.get_parameter(name), QTensor) for name in expected["missing_keys"])


def test_auto_classes_and_shards(tmp_path: Path) -> None:
    floats = made("LlamaForCausalLM", False, tmp_path / "float")
    source = transformers.AutoModelForCausalLM.from_pretrained(floats)
    lowbit.quantize_(source, {"lm_head": "int8", "*": "int4"})
    source.save_pretrained(tmp_path / "quantized", max_shard_size="20KB")
    body = transformers.AutoModel.from_pretrained(tmp_path / "quantized")
    body.save_pretrained(tmp_path / "body")
    wanted = hidden(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "quantized", dtype=torch.float16))
    for folder in (tmp_path / "quantized", tmp_path / "body"):
        for kind in ("AutoModel", "AutoModelForSequenceClassification", "AutoModelForCausalLM"):
            model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float16)
            assert model.dtype == torch.float16
            assert torch.equal(hidden(model), wanted)


def test_experts(tmp_path: Path) -> None:
    """Quantized parameters, which are no layer's."""
    torch.manual_seed(0)
    source = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=4, pad_token_id=0, num_labels=3,
        )
    ).eval()  # fmt: skip
    lowbit.quantize_(source, {"*experts*": "int4", "*": "int8"})
    lowbit.save(source, tmp_path / "quantized")
    assert sum(isinstance(p, QTensor) and p.dim() == 3 for p in source.parameters()) == 2
    for kind in ("AutoModel", "AutoModelForSequenceClassification"):
        found = getattr(transformers, kind).from_pretrained(tmp_path / "quantized")
        assert sum(isinstance(p, QTensor) for p in found.base_model.parameters()) == 6
        assert torch.equal(hidden(found), hidden(source))


def test_a_rewritten_model(tmp_path: Path) -> None:
    floats = made("LlamaForCausalLM", True, tmp_path / "float")
    source = transformers.AutoModelForCausalLM.from_pretrained(floats)
    lowbit.quantize_(source, lowbit.rotation("int8_dynamic_activation_int4_weight", online=True))
    lowbit.save(source, tmp_path / "quantized")
    for kind in ("AutoModel", "AutoModelForSequenceClassification"):
        assert torch.equal(hidden(getattr(transformers, kind).from_pretrained(tmp_path / "quantized")), hidden(source))


def test_what_is_not_whole_is_refused(tmp_path: Path) -> None:
    floats = made("LlamaForCausalLM", False, tmp_path / "float")
    source = transformers.AutoModelForCausalLM.from_pretrained(floats)
    lowbit.quantize_(source, "int4")
    lowbit.save(source, tmp_path / "quantized", max_shard_bytes=20_000)
    index = tmp_path / "quantized" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    places = content["weight_map"]
    lost = next(home for home in places.values() if home != places["model.rotary_emb.inv_freq"])
    content["weight_map"] = {name: home for name, home in places.items() if home != lost}
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"missing from the file: .*model\."):
        transformers.AutoModel.from_pretrained(tmp_path / "quantized")
    with pytest.raises(CheckpointError, match=r"missing from the file: layers\.2\."):
        transformers.AutoModel.from_pretrained(saved(source, tmp_path / "whole"), num_hidden_layers=3)


def saved(model: nn.Module, folder: Path) -> Path:
    lowbit.save(model, folder)
    return folder
