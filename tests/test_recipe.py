"""Recipes: every way to say what becomes of a layer, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowbit import SCHEMES, Recipe, Rule, Scheme, Target, api, quantize_
from tests.models import llama

SHIPPED = sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("name", api.__all__)
def test_every_factory_is_a_recipe_by_its_name(name):
    assert Recipe.parse(name).rules == (Rule("*", getattr(api, name)()),)
    assert Recipe.of({"*": name}).rules == (Rule("*", getattr(api, name)()),)


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_is_a_recipe_by_its_name(name):
    assert Recipe.of(name).rules[0].target.weight == SCHEMES[name]
    assert Recipe.of(SCHEMES[name]).rules == Recipe.of(name).rules


def test_names_take_a_group_size_and_symmetry():
    assert Recipe.of("int4_g48").rules[0].target.weight == Scheme("uint4", 48, zero_point="int")
    assert Recipe.of("int3_sym_g32").rules[0].target.weight == Scheme("int3", 32)
    assert Recipe.of("nf4_row").rules[0].target.weight == Scheme("nf4")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_recipe_quantizes_a_model_and_survives_a_round_trip(path):
    recipe = Recipe.from_file(path)
    assert Recipe.from_text(recipe.to_yaml()).rules == recipe.rules
    assert Recipe.from_text(recipe.to_json()).rules == recipe.rules
    plan = quantize_(llama(), recipe)
    assert plan.changed
    assert path.read_text().startswith("#"), "a recipe says when to pick it"


def test_shipped_recipes_are_found_by_name():
    assert Recipe.parse("memory_bound_chat").rules == Recipe.from_file(SHIPPED[0]).rules


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rules: 3", "needs a list 'rules'"),
        ("- a", "needs a list 'rules'"),
        ("rules: [{match: '*'}]", "needs 'match' and 'weight'"),
        ("rules: [{match: '*', weight: int99}]", "did you mean"),
        ("rules: [{match: '*', weight: int4, grup: 3}]", "unknown field grup"),
        ("rules: [{match: '*', weight: int4, rounder: magic}]", "no rounder named 'magic'"),
        ("rules: [{match: '*', weight: int4, scales: best}]", "scales must be one of"),
        ("rules: [{match: 're:(', weight: int4}]", "no regular expression"),
        ("rules: []", "at least one rule"),
        ("a: [", "not YAML"),
    ],
)
def test_a_bad_recipe_is_one_clear_error(text, message):
    with pytest.raises(ValueError, match=message):
        Recipe.from_text(text, "mine")


def test_a_file_that_cannot_be_read_is_one_clear_error(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        Recipe.of(str(tmp_path / "absent.yaml"))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="cannot be read"):
        Recipe.of(tmp_path / "binary.yaml")


def test_targets_refuse_what_means_nothing():
    with pytest.raises(TypeError, match="a target is a scheme"):
        Target.of(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no zero point"):
        Target(SCHEMES["int8"], SCHEMES["int4"])
    with pytest.raises(ValueError, match="has 2 rules"):
        Recipe.of({"*": Recipe.of({"a": "int4", "b": "int8"})})


def test_activation_by_name_has_float32_scales():
    target = Target.of({"weight": "int4", "activation": "int8"})
    assert target.activation == Scheme("int8", scale="fp32")
    assert Target.of(target.to_dict()) == target


def test_a_scheme_that_is_named_wrongly_says_what_is_wrong():
    with pytest.raises(ValueError, match="group_size must be"):
        Recipe.parse("int4_g0")
