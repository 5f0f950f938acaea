"""Rewrites in recipes: every way to say them, what is refused, and that those of a whole model come before everything."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from lowbit import Config, Recipe, quantize_, quantize_folder
from lowbit.recipe import split_recipes
from lowbit.rewrite import Rewrite
from lowbit.rewrites import REWRITES, Method
from tests.support.models import mlp, word_model


def halved(model: nn.Module, batches: list, *, times: int = 1, said: bool = True) -> list[str]:
    """Weights that are half as large in the first layer and twice in the last, with ReLUs between."""
    with torch.no_grad():
        model[0].weight.mul_(0.5**times)
        model[0].bias.mul_(0.5**times)
        model[2].weight.mul_(2.0**times)
    return [f"{len(batches)} batches"] if said else []


@pytest.fixture(autouse=True)
def methods(monkeypatch):
    monkeypatch.setitem(REWRITES, "halved", Method(halved, "model", needs_data=False))
    monkeypatch.setitem(REWRITES, "looking", Method(halved, "model"))


def test_a_recipe_is_spelled_in_text_python_and_yaml_alike():
    found = Recipe.parse("halved(looking(gptq(int3, damping=0.05)), times=2)")
    assert found.rewrites == (Rewrite("halved", (("times", 2),)), Rewrite("looking"))
    assert found.rules == Recipe.parse("gptq(int3, damping=0.05)").rules
    assert Recipe.from_text(found.to_yaml()) == found
    assert Recipe.from_text(found.to_json()) == found
    assert found.to_dict()["rewrites"] == [{"halved": {"times": 2}}, "looking"]
    assert str(found.rewrites[0]) == "halved(times=2)"
    assert Recipe.parse("int3").rewritten("looking").rewritten("halved", times=2).rewrites == found.rewrites
    assert "rewrites" not in Recipe.parse("int3").to_dict()


def test_commas_in_brackets_part_nothing():
    text = "int4, halved(gptq(int3, damping=0.05), times=2),gptq(int3, passes=0)"
    assert split_recipes(text) == ["int4", "halved(gptq(int3, damping=0.05), times=2)", "gptq(int3, passes=0)"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rewrite("nothing"), "no rewrite named 'nothing'; there are "),
        (lambda: Recipe.parse("nothing(int4)"), "no rounder or rewrite named 'nothing'; there are rtn, clip"),
        (lambda: Rewrite("halved", (("by", 3),)), "halved has no option by; there are times, said"),
        (lambda: Rewrite.of({"halved": 3}), "a rewrite is a name or a name with options"),
        (lambda: Rewrite.of({"halved": {}, "looking": {}}), "a rewrite is a name or a name with options"),
        (lambda: Recipe.parse("halved(halved(int4))"), "rewrites with each method once, and has halved 2 times"),
        (lambda: Recipe.of({"*": "halved(int4)"}), "halved rewrites the whole model and no single layer: write halved("),
        (lambda: Recipe.from_text("{rewrites: halved, rules: []}"), "rewrites must be a list such as [awq], got 'halved'"),
        (lambda: Recipe.from_text("{rewrites: [odd], rules: [{match: '*', weight: int4}]}"), "no rewrite named 'odd'"),
        (lambda: Method(halved, "layer"), "kind must be one of model, block, got 'layer'"),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_the_whole_model_is_rewritten_before_it_is_planned_and_the_plan_says_so():
    model, before = mlp(), mlp()
    plan = quantize_(model, "halved(int8, times=3)")
    assert plan.notes == ("halved(times=3): 0 batches",)
    assert plan.recipe.to_dict()["rewrites"] == [{"halved": {"times": 3}}]
    torch.testing.assert_close(model[0].bias, before[0].bias / 8)
    error = model[0].weight.dequantize() - before[0].weight.detach() / 8
    top = float(before[0].weight.detach().abs().max()) / 8
    # A step where a value as large as the largest has the other sign, and the rounding of the scale.
    assert float(error.abs().max()) <= top * (1 / 128 + 2**-9)
    plan = quantize_(mlp(), "halved(int8, said=false)", calibration=torch.randn(8, 40))
    assert plan.notes[0] == "halved(said=False)"


def test_a_rewrite_that_needs_data_says_so_before_anything_changes(tmp_path):
    model = mlp()
    with pytest.raises(ValueError, match="the rewrite looking looks at data, and there is none: give quantize_ calibration="):
        quantize_(model, "halved(looking(int4))")
    assert torch.equal(model[0].weight, mlp()[0].weight)
    assert Recipe.parse("looking(int4)").needs_data == "the rewrite looking"
    assert Recipe.parse("halved(gptq(int4))").needs_data == "the rounder gptq"
    assert Recipe.parse("halved(int4)").needs_data == ""


def test_a_model_that_is_never_whole_is_not_rewritten_as_a_whole(tmp_path):
    import transformers

    folder = word_model(tmp_path)
    with pytest.raises(ValueError, match="halved rewrites the whole model, which is never in memory here"):
        quantize_folder(folder, tmp_path / "out", "halved(int4)", calibration=[[1, 2, 3]])
    with pytest.raises(ValueError, match="halved rewrites a model that is loaded, and this one only arrives"):
        transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=Config("halved(int4)"))
