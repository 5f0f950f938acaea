"""The command line on tiny mixtures of experts of every kind that transformers has: each command, one after the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import lowbit
from evals.evaluation import _bits_as_loaded, _name, _quantized_bits
from lowbit import QTensor, quantize_
from lowbit.command import run
from tests.lowbit.test_command import parsed
from tests.lowbit.test_experts import MODELS, build, experts_of
from tests.support.models import exam_and_text, word_model


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer, an exam and a text."""
    return exam_and_text(word_model(tmp_path_factory.mktemp("words")))


@pytest.mark.parametrize("name", MODELS)
def test_commands(name: str, words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = build(name, torch.bfloat16)
    folder, text = tmp_path / "float", words / "text.txt"
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(words).save_pretrained(folder)
    experts = {n: tuple(p.shape) for n, p in experts_of(model).items()}
    data = ("--calibration", text, "--rows", 8, "--length", 32)

    def of_experts(entries: list[dict[str, Any]], key: str) -> dict[str, Any]:
        return {entry["name"]: entry[key] for entry in entries if entry["name"] in experts}

    planned = parsed(capsys, "plan", folder, "-r", "gptq(int4)")
    done = parsed(capsys, "quantize", folder, "-r", "gptq(int4)", "-o", tmp_path / "int4", *data)
    assert of_experts(planned["layers"], "config") == of_experts(done["plan"]["layers"], "config")
    assert of_experts(planned["layers"], "config").keys() == experts.keys()
    assert all(loss is not None for loss in of_experts(done["plan"]["layers"], "loss").values())

    held = parsed(capsys, "inspect", tmp_path / "int4")
    listed = {entry["name"]: entry for entry in held["layers"]}
    assert experts.keys() <= listed.keys()
    for n in experts:
        assert listed[n]["scheme"].startswith("uint4")

    health = parsed(capsys, "doctor", tmp_path / "int4", folder, *data)
    assert [finding for finding in health["findings"] if "experts" in finding["layer"]] == []

    report = tmp_path / "costs.json"
    costs = parsed(capsys, "sensitivity", folder, "-s", "int3,int4", *data, "--compared", 1, "--report", report)
    measured = {n: layer["costs"] for layer in costs["layers"] for n in layer["names"]}
    for n in experts:
        assert all(cost["error"] is not None and cost["kl"] is not None for cost in measured[n].values())
    for by in ("kl", "error"):
        parsed(capsys, "allocate", report, "--bits", 4.0, "--by", by, "-o", tmp_path / f"{by}.yaml")
    parsed(capsys, "quantize", folder, "-r", tmp_path / "error.yaml", "-o", tmp_path / "mixed")
    mixed = lowbit.load(tmp_path / "mixed")
    assert all(isinstance(p, QTensor) for p in experts_of(mixed).values())

    outcome = parsed(
        capsys, "eval", folder, "-r", "int4,mixture_of_experts", "--text", text, "--tasks", "perplexity", "--context", 32,
        "--chunks", 2, "-o", tmp_path / "eval",
    )  # fmt: skip
    assert len(outcome["outcomes"]) == 3
    assert json.dumps(outcome)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_evaluations_count_all_experts(name: str) -> None:
    """The bits of a weight are those of all matrices, whether the recipe is carried out or the model comes quantized."""
    recipe = {"*experts*": "int4", "*": "int8"}
    model = build(name)
    assert (_name(model), _bits_as_loaded(model)) == ("float", 32.0)
    found = _quantized_bits(quantize_(model, recipe))
    layers = [p for p in model.parameters() if isinstance(p, QTensor)]
    want = sum(p.bits_per_weight * p.numel() for p in layers) / sum(p.numel() for p in layers)
    assert found == pytest.approx(want, rel=1e-12)
    assert (_name(model), _bits_as_loaded(model)) == ("as loaded", pytest.approx(want, rel=1e-12))


def test_a_recipe_whose_rules_match_nothing_says_so(words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a model without experts, in every command that takes recipes."""
    said = "matches nothing in this model"
    assert run(["plan", str(words), "-r", "mixture_of_experts"]) == 0
    assert said in capsys.readouterr().out
    assert run(["quantize", str(words), "-r", "mixture_of_experts", "-o", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    assert said in printed.out + printed.err
    arguments = ["eval", str(words), "-r", "mixture_of_experts", "--text", str(words / "text.txt"), "--tasks", "perplexity"]
    assert run([*arguments, "--context", "32", "--chunks", "1"]) == 0
    assert said in capsys.readouterr().err
    found = parsed(capsys, *arguments, "--context", "32", "--chunks", "1")
    assert said in found["outcomes"][1]["notes"][0]
