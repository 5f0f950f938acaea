"""Recipes: every way to say what becomes of a layer, and what is refused."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import lowbit
from lowbit import SCHEMES, LayerConfig, Recipe, Rule, Scheme, api, methods, quantize_
from lowbit.algorithms import ROUNDERS, Rounder
from lowbit.algorithms.rtn import rtn
from lowbit.evals import accuracy_recovery, recipes, rounders, tables
from lowbit.evals.evaluation import TOY, TOY_TEXT, Material
from lowbit.recipe import block_counts
from lowbit.rewrite import Rewrite
from lowbit.rewrites import REWRITES
from tests import ROOT
from tests.support.models import llama

SHIPPED = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("name", api.__all__)
def test_every_factory_is_a_recipe_by_its_name(name):
    assert Recipe.parse(name).rules == (Rule("*", getattr(api, name)()),)
    assert Recipe.of({"*": name}).rules == (Rule("*", getattr(api, name)()),)


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_is_a_recipe_by_its_name(name):
    assert Recipe.of(name).rules[0].config.weight == SCHEMES[name]
    assert Recipe.of(SCHEMES[name]).rules == Recipe.of(name).rules


def test_names_take_a_group_size_and_symmetry():
    assert Recipe.of("int4_g48").rules[0].config.weight == Scheme("uint4", 48, zero_point="int")
    assert Recipe.of("int3_sym_g32").rules[0].config.weight == Scheme("int3", 32)
    assert Recipe.of("nf4_row").rules[0].config.weight == Scheme("nf4")


# ---- what is shipped -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def toy() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """The bundled toy model, 512 tokens of its world, and the log probabilities that it gives behind each."""
    model = transformers.AutoModelForCausalLM.from_pretrained(TOY, dtype="auto").eval()
    ids = transformers.AutoTokenizer.from_pretrained(TOY)(TOY_TEXT.read_text()[:6000], add_special_tokens=False)["input_ids"]
    ids = torch.tensor([ids[:512]])
    return model, ids, log_probabilities(model, ids)


def log_probabilities(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(ids).logits.double().log_softmax(-1)


def divergence(model: nn.Module, ids: torch.Tensor, before: torch.Tensor) -> float:
    """Nats a token by which a model's predictions differ from those before it was quantized."""
    return float((before.exp() * (before - log_probabilities(model, ids))).sum(-1).mean())


@pytest.fixture(scope="module")
def of_integers(toy: tuple[nn.Module, torch.Tensor, torch.Tensor]) -> dict[int, float]:
    """The divergence of plain integers of so many bits."""
    found = {}
    for bits in range(2, 7):
        model = copy.deepcopy(toy[0])
        quantize_(model, f"int{bits}")
        found[bits] = divergence(model, *toy[1:])
    return found


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_recipe_runs_and_loses_what_its_bits_suggest(path, toy, of_integers, tmp_path):
    recipe = Recipe.parse(path.stem)
    assert recipe.rules == Recipe.from_file(path).rules
    assert recipe.name == path.stem
    assert Recipe.from_text(recipe.to_yaml()).rules == recipe.rules
    assert Recipe.from_text(recipe.to_json()).rules == recipe.rules
    model, ids, before = toy
    quantized = copy.deepcopy(model)
    changed = quantize_(quantized, recipe, calibration=[ids[:, :64]] if recipe.needs_data else None).quantized
    bits = sum(layer.bits_per_weight * math.prod(layer.shape) for layer in changed)
    bits /= sum(math.prod(layer.shape) for layer in changed)
    lost = divergence(quantized, ids, before)
    # A third of the bits is what exponents, scales of blocks and layers of fewer bits may take from plain integers.
    assert 0 < lost < of_integers[math.floor(2 * bits / 3)]
    loss = -log_probabilities(quantized, ids)[0, :-1].gather(1, ids[0, 1:, None]).mean()
    assert math.isfinite(loss.exp())

    lowbit.save(quantized, tmp_path)
    again = lowbit.load(tmp_path)
    with torch.inference_mode():
        assert torch.equal(again(ids[:, :32]).logits, quantized(ids[:, :32]).logits)


def test_every_shipped_recipe_says_when_to_pick_it_under_a_name_of_its_own():
    assert len(SHIPPED) >= 15
    assert recipes.names() == [path.stem for path in SHIPPED]
    said = [recipes.when(path.stem) for path in SHIPPED]
    assert len(set(said)) == len(said)
    assert all("|" not in line and len(line) < 120 for line in said)
    taken = {*SCHEMES, *api.__all__}
    assert [path.stem for path in SHIPPED if path.stem in taken] == []


def test_experts_that_are_layers_become_small_and_routers_stay():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.gate = nn.Linear(64, 64), nn.Linear(64, 4)
            self.experts = nn.ModuleList(nn.ModuleDict({"up_proj": nn.Linear(64, 96)}) for _ in range(4))
            self.shared_expert = nn.Linear(64, 96)

    carried = quantize_(nn.ModuleDict({"layers": nn.ModuleList([Block(), Block()])}), "mixture_of_experts")
    bits = {layer.name.split(".", 2)[2]: layer.bits_per_weight for layer in carried.layers}
    assert bits["gate"] == bits["shared_expert"] == 32
    assert bits["experts.3.up_proj"] < 5 < bits["q_proj"] < 9


def test_every_recipe_is_measured_and_has_its_line(toy, tmp_path):
    material = Material.read(limit=2, chunks=1, context=64)
    rows = recipes.measure(["nearly_lossless", "four_bits_calibrated", "first_and_last_kept"], material, rows=2)
    assert [row["recipe"] for row in rows] == ["float", "first_and_last_kept", "nearly_lossless", "four_bits_calibrated"]
    assert rows[0]["when"] == ""
    assert rows[0]["exam"]["difference"] is None
    lines = tables.recipes_table([{"recipes": rows}]).splitlines()
    assert len(lines) == 2 + len(rows)
    assert all(recipes.when(row["recipe"]) in "".join(lines) for row in rows[1:])
    kept = json.loads((tables.RESULTS / "recipes.json").read_text())
    measured = [row["recipe"] for row in kept["recipes"]]
    assert sorted([*measured, *recipes.MIXTURES]) == sorted(["float", *recipes.names()])
    assert [row["recipe"] for row in kept["mixtures"]["recipes"]] == ["float", *recipes.MIXTURES]
    assert 4 < kept["mixtures"]["recipes"][1]["bits_per_weight"] < 5  # most weights are experts


@pytest.mark.parametrize("recipe", recipes.MIXTURES)
def test_a_recipe_for_mixtures_is_measured_on_no_dense_model(recipe, toy):
    with pytest.raises(ValueError, match=r"cannot be measured on .* matches nothing in this model"):
        recipes.measure([recipe], Material.read(limit=1, chunks=1, context=64), rows=2)
    with pytest.raises(SystemExit, match="give --mixture"):
        recipes.main(["--recipes", recipe])


def test_every_rounder_is_measured_and_has_its_line(toy):
    material = Material.read(limit=1, chunks=1, context=64, compared=2)
    rows = rounders.measure(["int3", "gptq(int3)"], material, rows=8)  # of fewer it learns what does not hold elsewhere
    assert [row["recipe"] for row in rows] == ["float", "int3", "gptq(int3)"]
    assert rows[0]["divergence"] is None
    assert 0 < rows[2]["divergence"]["kl"] < rows[1]["divergence"]["kl"]
    head, rule, *lines = tables.rounders_table([{"rounders": rows}]).splitlines()
    assert {line.count("|") for line in (head, rule, *lines)} == {head.count("|")}
    kept = json.loads((tables.RESULTS / "rounders.json").read_text())
    assert [row["recipe"] for row in kept["rounders"]] == ["float", *rounders.RECIPES]


def test_further_questions_go_on_from_the_file(tmp_path, monkeypatch):
    """What is there is kept as it is; shares are of what the row of round-to-nearest, which is there, loses."""
    kept = json.loads((tables.RESULTS / "accuracy_recovery.json").read_text())["accuracy_recovery"]
    names = [recipe for recipe in rounders.RECIPES if "int3" in recipe]
    assert [row["recipe"] for row in kept] == ["float", *names]
    (tmp_path / "accuracy_recovery.json").write_text(json.dumps({"accuracy_recovery": kept[:-1]}))
    asked: list[str] = []

    def measured(what: list[str], rows: int, limit: int | None) -> list[dict]:
        asked.extend(what)
        last = {name: value for name, value in kept[-1].items() if name != "recovered"}
        return [{**kept[0], "value": 0.0}, last]

    monkeypatch.setattr(accuracy_recovery, "measure", measured)
    accuracy_recovery.main(["--keep", "--out", str(tmp_path / "accuracy_recovery.json")])
    assert asked == names[-1:]
    found = json.loads((tmp_path / "accuracy_recovery.json").read_text())["accuracy_recovery"]
    assert found[1:] == kept[1:]
    assert found[1]["recovered"] == 0
    assert 0 < found[-1]["recovered"] < 1


# ---- blocks and optional rules ---------------------------------------------------------------------------------------

STACKS = st.dictionaries(st.sampled_from(["", "model.layers", "encoder.block", "h"]), st.integers(1, 12), min_size=1)


@given(STACKS, st.lists(st.integers(-14, 14), min_size=1))
def test_blocks_are_counted_as_python_counts(stacks, blocks):
    names = [f"{stack}.{i}.mlp.experts.7.up".lstrip(".") for stack, count in stacks.items() for i in range(count)]
    counts = block_counts([*names, "lm_head"])
    assert counts == stacks
    rule = Rule("*", None, tuple(blocks))
    for stack, count in stacks.items():
        wanted = {range(count)[block] for block in blocks if -count <= block < count}
        got = {i for i in range(count) if rule.matches(f"{stack}.{i}.mlp.experts.7.up".lstrip("."), counts)}
        assert got == wanted
    assert not rule.matches("lm_head", counts)


def test_blocks_decide_in_a_model():
    what = "rules: [{match: '*', weight: int8, blocks: [-1]}, {match: '*', weight: int4}]"
    carried = quantize_(llama(), Recipe.from_text(what))
    assert {(layer.name.split(".")[2], layer.config.weight.bits) for layer in carried.quantized} == {("0", 4), ("1", 8)}
    with pytest.raises(ValueError, match=r"pattern '\*' in the blocks 2 matches no layer"):
        quantize_(llama(), Recipe.from_text("rules: [{match: '*', weight: int8, blocks: [2]}]"))


def test_an_optional_rule_may_match_nothing():
    rules = "rules: [{match: '*experts*', weight: int4%s}, {match: '*', weight: int8}]"
    assert len(quantize_(llama(), Recipe.from_text(rules % ", optional: true")).quantized) == 14
    with pytest.raises(ValueError, match="matches no layer"):
        quantize_(llama(), Recipe.from_text(rules % ""))


# ---- what is refused -------------------------------------------------------------------------------------------------


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
        ("rules: [{match: '*', weight: int8}, {match: 3, weight: int4}]", "rule 2: match must be a name, got 3"),
        ("rules: [{match: '*', weight: [int4]}]", "rule 1: weight must be a name"),
        ("rules: [{match: '*', weight: int4, scales: [mse]}]", "rule 1: scales must be a name"),
        ("rules: [{match: '*', weight: null, scales: mse}]", "a layer that is left .* takes no scales"),
        ("rules: [{match: '*', weight: int4, blocks: 3}]", "blocks must be a list"),
        ("rules: [{match: '*', weight: int4, blocks: []}]", "blocks must be numbers"),
        ("rules: [{match: '*', weight: int4, blocks: [0, true]}]", "blocks must be numbers"),
        ("rules: [{match: '*', weight: int4, optional: 1}]", "optional must be true or false"),
        ("rules: [{match: '*', weight: int4}]\nrule: 3", "unknown field rule; there are name, rewrites, rules and keep"),
        ("rules: [{match: *down_proj, weight: int4}]", "begins with \\* stands in quotes"),
        ("[" * 100_000, "not YAML"),
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
    with pytest.raises(TypeError, match="a layer config is a scheme"):
        LayerConfig.of(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no zero point"):
        LayerConfig(SCHEMES["int8"], SCHEMES["int4"])
    with pytest.raises(ValueError, match="has 2 rules"):
        Recipe.of({"*": Recipe.of({"a": "int4", "b": "int8"})})


def test_activation_by_name_has_float32_scales():
    target = LayerConfig.of({"weight": "int4", "activation": "int8"})
    assert target.activation == Scheme("int8", scale="fp32")
    assert LayerConfig.of(target.to_dict()) == target


def test_a_scheme_that_is_named_wrongly_says_what_is_wrong():
    with pytest.raises(ValueError, match="group_size must be"):
        Recipe.parse("int4_g0")


# ---- rounders and their options --------------------------------------------------------------------------------------


@pytest.fixture
def careful(monkeypatch) -> None:
    """A rounder with options, of which nothing else has to be known here."""

    def careful(weight, scheme, statistics=None, *, damping=0.01, order="activation", static=True):
        return rtn(weight, scheme)

    monkeypatch.setitem(ROUNDERS, "careful", Rounder(careful, needs_statistics=False))


OPTIONS = st.fixed_dictionaries(
    {}, optional={"damping": st.floats(0, 1), "order": st.sampled_from(["activation", "no"]), "static": st.booleans()}
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(OPTIONS, st.sampled_from(["token", "static"]))
def test_options_survive_yaml_and_json(careful, options, scale):
    activation = Scheme("int8", scale="fp32")
    target = LayerConfig(SCHEMES["int3"], activation, "careful", options=tuple(options.items()), activation_scale=scale)
    assert dict(target.options) == options
    assert hash(target) == hash(LayerConfig.of(target.to_dict()))
    recipe = Recipe.of({"*q_proj": target, "*": "int4"})
    for text in (recipe.to_yaml(), recipe.to_json()):
        assert Recipe.from_text(text).rules == recipe.rules


def test_a_rounder_is_named_around_anything_else(careful):
    target = LayerConfig(SCHEMES["int3"], rounder="careful", options=(("damping", 0.05), ("static", False)))
    assert Recipe.parse("careful(int3, damping=0.05, static=false)").rules == (Rule("*", target),)
    assert Recipe.parse("careful(int3, damping=1e-5)").rules[0].config.options == (("damping", 1e-5),)
    assert Recipe.of({"lm_head": "careful(int3)"}).rules[0].config == LayerConfig(SCHEMES["int3"], rounder="careful")
    shipped = Recipe.parse("three_and_a_half_bits")
    assert any(rule.config.scales == "mse" for rule in shipped.rules)
    changed = shipped.rounded_by("careful", damping=0.5).rules
    assert [(rule.pattern, rule.config.weight) for rule in changed] == [(r.pattern, r.config.weight) for r in shipped.rules]
    assert {rule.config.options for rule in changed} == {(("damping", 0.5),)}
    assert "careful damping=0.05 static=False" in str(target)


def test_what_is_no_option_is_refused_with_those_there_are(careful):
    with pytest.raises(ValueError, match="careful has no option dampening; there are damping, order, static"):
        LayerConfig(SCHEMES["int3"], rounder="careful", options=(("dampening", 1),))
    with pytest.raises(ValueError, match="rtn has no option damping; it takes none"):
        Recipe.parse("rtn(int3, damping=1)")
    with pytest.raises(ValueError, match="must be a number, true, false or a word, got \\[1\\]"):
        Recipe.parse("careful(int3, damping=[1])")
    with pytest.raises(ValueError, match=r"written name=value, got '0\.05'"):
        Recipe.parse("careful(int3, 0.05)")
    with pytest.raises(ValueError, match="chooses scales of its own"):
        LayerConfig(SCHEMES["int3"], rounder="careful", scales="mse")
    with pytest.raises(ValueError, match="no rounder or rewrite named 'careless'"):
        Recipe.parse("careless(int3)")
    with pytest.raises(ValueError, match="activation_scale must be token or static, got 'row'"):
        LayerConfig(SCHEMES["int8"], activation_scale="row")
    with pytest.raises(ValueError, match="goes with an activation scheme"):
        LayerConfig(SCHEMES["int8"], activation_scale="static")
    with pytest.raises(ValueError, match="options must be names and values"):
        Recipe.from_text("rules: [{match: '*', weight: int3, rounder: careful, options: [1]}]")


def test_every_method_is_a_rounder_or_a_rewrite():
    assert set(methods.__all__) <= {*ROUNDERS, *REWRITES}


@pytest.mark.parametrize("name", ROUNDERS)
def test_every_rounder_is_a_method_in_words(name):
    """Whether or not ``lowbit.methods`` has a function for it."""
    known = {option: value for option, value in ROUNDERS[name].options.items() if option != "scales"}
    words = {option: str(value).lower() if isinstance(value, bool) else value for option, value in known.items()}
    recipe = Recipe.parse(f"{name}({', '.join(['int3', *(f'{option}={value}' for option, value in words.items())])})")
    assert recipe.rules[0].config == LayerConfig(SCHEMES["int3"], rounder=name, options=known)


@pytest.mark.parametrize("name", [*ROUNDERS, *REWRITES])
def test_an_option_of_another_kind_is_refused_before_work(name):
    """Also by a method that looks at none of its options itself, as one of a plug-in."""
    known = ROUNDERS[name].options if name in ROUNDERS else REWRITES[name].options
    for option, default in known.items():
        wrong = [3, "yes"] if isinstance(default, bool) else [True, math.inf, math.nan]
        for value in wrong if isinstance(default, (bool, int, float)) else ():
            with pytest.raises(ValueError, match=option):
                Recipe.of("int3").rounded_by(name, **{option: value}) if name in ROUNDERS else Rewrite(name, {option: value})


@pytest.mark.parametrize("name", [name for name in methods.__all__ if name in REWRITES])
def test_every_rewrite_is_one_line(name):
    method, expected = getattr(methods, name), Rewrite(name)
    for what in ("int3", SCHEMES["int3"], api.int3_weight_only(), {"lm_head": None, "*": "int3"}, Recipe.parse("gptq(int3)")):
        recipe = method(what)
        assert recipe.rewrites == (expected,)
        assert recipe.rules == Recipe.of(what).rules
    for option, value in REWRITES[name].options.items():
        assert dict(method("int3", **{option: value}).rewrites[0].options) == {option: value}
    with pytest.raises(ValueError, match=f"{name} has no option nonsense"):
        method("int3", nonsense=1)


@pytest.mark.parametrize("name", [name for name in methods.__all__ if name in ROUNDERS])
def test_every_method_is_a_rounder_in_one_line(name):
    method = getattr(methods, name)
    expected = LayerConfig(SCHEMES["int3"], rounder=name)
    assert method("int3") == method(SCHEMES["int3"]) == method(api.int3_weight_only()) == expected
    recipe = method({"lm_head": None, "*": "int3"})
    assert recipe.rules == (Rule("lm_head", None), Rule("*", expected))
    for option, value in ROUNDERS[name].options.items():
        assert dict(method("int3", **{option: value}).options) == {option: value}
    with pytest.raises(ValueError, match=f"{name} has no option nonsense"):
        method("int3", nonsense=1)
