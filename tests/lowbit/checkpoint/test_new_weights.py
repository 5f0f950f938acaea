"""What a float model has beyond its files, or its files beyond it, by design: new heads, settings, families, names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import lowbit
from lowbit import CheckpointError, QLinear
from lowbit.command import run
from lowbit.pretrained import loading_report
from lowbit.pretrained.float_folder import outline_of
from tests.ecosystem import test_architectures as architectures
from tests.lowbit.checkpoint.test_float_folders import (
    FILE,
    UP,
    _quiet,  # noqa: F401 - for every test
    altered,
    arrived,
    refusal,
    renamed,
)
from tests.support import strategies  # noqa: F401 - its hypothesis profile
from tests.support.models import llama, tokens


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of float models by name."""
    home = tmp_path_factory.mktemp("floats")
    llama(tied=False).save_pretrained(home / "llama")
    small = architectures.SMALL
    bert, roberta = transformers.BertConfig(**small), transformers.RobertaConfig(**small)
    made = {
        "pretraining": transformers.BertForPreTraining(bert),
        "classification": transformers.BertForSequenceClassification(bert),
        "roberta": transformers.RobertaForMaskedLM(roberta),
    }
    for name, model in made.items():
        model.save_pretrained(home / name)
    return home


def left(model: nn.Module) -> list[str]:
    """The linear layers that are float."""
    return [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and not isinstance(m, QLinear)]


@pytest.mark.parametrize(
    ("kind", "name", "options", "new"),
    [
        (transformers.AutoModelForSequenceClassification, "llama", {"num_labels": 3}, ["score"]),
        (transformers.AutoModelForTokenClassification, "llama", {}, ["score"]),
        (transformers.AutoModel, "llama", {}, []),
        (transformers.BertForSequenceClassification, "pretraining", {}, ["classifier"]),
        (transformers.BertForQuestionAnswering, "pretraining", {}, ["qa_outputs"]),
        (transformers.RobertaModel, "roberta", {}, ["pooler.dense"]),
        (
            transformers.BertForSequenceClassification,
            "classification",
            {"num_labels": 5, "ignore_mismatched_sizes": True},
            ["classifier"],
        ),
    ],
)
def test_a_head_that_is_new_stays_float(kind, name, options, new, floats):
    model = arrived(kind, floats / name, **options)
    assert left(model) == new
    assert getattr(transformers, type(model).__name__) is type(model)
    plan = {layer.name: layer for layer in model.hf_quantizer.plan.layers}
    assert all(plan[name].config is None and plan[name].reason for name in new)
    assert all(plan[name].bytes_after == plan[name].bytes_before for name in new)


def test_a_head_that_is_new_is_not_quantized_by_name(floats):
    with pytest.raises(ValueError, match=r"score has random numbers, .* and pattern 'score' would quantize them: train it first"):
        arrived(transformers.AutoModelForSequenceClassification, floats / "llama", {"score": "int8", "*": "int4"})


@pytest.mark.parametrize("options", [{"num_hidden_layers": 3}, {"attention_bias": True}, {"intermediate_size": 200}], ids=str)
def test_settings_that_the_files_do_not_have(options, floats):
    with pytest.raises(CheckpointError, match=r"missing from the files: model\.layers|of another shape in the files: model"):
        arrived(transformers.AutoModelForCausalLM, floats / "llama", **options)
    with pytest.raises(CheckpointError, match=r"missing from the files: model\.layers|of another shape in the files: model"):
        arrived(transformers.AutoModelForSequenceClassification, floats / "llama", **options)


def test_fewer_layers_than_the_files_have_may_be_asked_for(floats):
    assert len(arrived(transformers.AutoModelForCausalLM, floats / "llama", num_hidden_layers=1).model.layers) == 1


def test_another_family(floats):
    with pytest.raises(CheckpointError, match=r"not those of a GPT2LMHeadModel, .* missing from the files: transformer\.h\.0"):
        arrived(transformers.GPT2LMHeadModel, floats / "llama")


def test_a_state_dict_is_compared_as_well():
    model = llama(tied=False)
    state = model.state_dict()
    config = lowbit.Config("int4")
    found = type(model).from_pretrained(None, config=model.config, state_dict=dict(state), quantization_config=config)
    assert left(found) == ["lm_head"]
    del state[UP]
    with pytest.raises(CheckpointError, match=f"the state_dict: .* missing from the files: {UP}"):
        type(model).from_pretrained(None, config=model.config, state_dict=state, quantization_config=config)


def test_names_that_a_caller_maps(whole, tmp_path):
    folder = altered(whole, tmp_path / "model", renamed("model.", "net."))
    kind = transformers.AutoModelForCausalLM
    assert left(arrived(kind, folder, key_mapping={"^net.": "model."})) == ["lm_head"]


def test_the_head_of_another_task_is_passed_over_with_a_remark(whole, floats, tmp_path, capsys):
    folder = tmp_path / "bert"
    shutil.copytree(floats / "pretraining", folder)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "architectures": ["BertForMaskedLM"]}))
    model, remarks = outline_of(folder)
    assert type(model) is transformers.BertForMaskedLM
    assert remarks == [
        "passed over, as no part of a BertForMaskedLM: bert.pooler.dense.bias, bert.pooler.dense.weight, "
        "cls.seq_relationship.bias and 1 more"
    ]
    both = altered(whole, tmp_path / "both", lambda tensors: {**tensors, "score.weight": torch.zeros(2, 32)})
    assert run(["plan", str(both)]) == 0
    assert capsys.readouterr().err == "lowbit: passed over, as no part of a LlamaForCausalLM: score.weight\n"
    plan = lowbit.quantize_folder(both, tmp_path / "out", "int4", calibration=tokens(1, 8) % 48)
    assert "passed over, as no part of a LlamaForCausalLM: score.weight" in plan.notes


@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_masks_of_older_releases_are_no_weights(prefix, tmp_path):
    torch.manual_seed(0)
    config = transformers.GPTJConfig(vocab_size=96, n_positions=64, n_embd=32, n_layer=1, n_head=4, rotary_dim=4)
    transformers.GPTJForCausalLM(config).save_pretrained(tmp_path)
    tensors = {name.replace("transformer.", prefix): tensor for name, tensor in load_file(tmp_path / FILE).items()}
    home = f"{prefix}h.0.attn"
    masks = {f"{home}.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8), f"{home}.masked_bias": torch.tensor(-1e9)}
    save_file({**tensors, **masks}, tmp_path / FILE, {"format": "pt"})
    assert outline_of(tmp_path)[1] == []
    save_file({**tensors, f"{home}.scale": torch.ones(1)}, tmp_path / FILE, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"h\.0\.attn\.scale"):
        outline_of(tmp_path)


def test_a_plan_without_weights_says_so(whole, tmp_path, capsys):
    shutil.copy(whole / "config.json", tmp_path / "config.json")
    assert run(["plan", str(tmp_path)]) == 0
    assert capsys.readouterr().err == f"lowbit: {tmp_path} holds no weights: told from its config.json alone\n"
    assert "holds neither model.safetensors nor" in refusal("quantize", tmp_path, whole, tmp_path / "out", capsys)[1]


def test_a_loader_that_tells_nothing(whole, monkeypatch):
    """Where transformers no longer reports what it found, nothing is taken on trust."""
    kind = transformers.LlamaForCausalLM
    monkeypatch.setattr(loading_report, "_METHOD", "_no_such_method")
    with pytest.raises(RuntimeError, match="does not tell which tensors it found: use one from"):
        outline_of(whole)
    with pytest.raises(RuntimeError, match="does not tell which tensors it found: use one from"):
        arrived(kind, whole)
