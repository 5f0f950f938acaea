"""Mixed precision: the knapsack against all choices there are, and each layer's costs against quantizing it alone."""

from __future__ import annotations

import copy
import itertools
import json
import math

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import LinearConstraint, milp

import lowbit
from lowbit import LayerConfig, QLinear, Recipe, Scheme, Sensitivity, allocate, plan, quantize_, sensitivity
from lowbit.command import run
from lowbit.evals import mixed, tables
from lowbit.mixed_precision.knapsack import Option, cheapest
from tests.support.models import exam_and_text, gpt2, llama, mlp, tokens, word_model

SCHEMES = ["int2_g32", "gptq(int3_g32, damping=0.05)", "int4_g32"]


# ---- the knapsack ----------------------------------------------------------------------------------------------------


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[list[Option]], int]:
    """Classes of options whose sizes share divisors and whose costs are often equal, and a capacity that some choice fits."""
    unit = draw(st.sampled_from([1, 3, 4096]))
    costs = st.one_of(st.integers(0, 6).map(float), st.floats(0, 1))
    options = st.builds(Option, st.integers(0, 12).map(lambda n: n * unit), costs)
    classes = draw(st.lists(st.lists(options, min_size=1, max_size=4), max_size=5))
    least, most = (sum(best(o.size for o in options) for options in classes) for best in (min, max))
    return classes, draw(st.integers(least, most + 2))


def taken(classes: list[list[Option]], places: tuple[int, ...] | list[int]) -> Option:
    chosen = [options[i] for options, i in zip(classes, places, strict=True)]
    return Option(sum(option.size for option in chosen), math.fsum(option.cost for option in chosen))


@given(problems())
def test_no_choice_is_cheaper(problem):
    classes, capacity = problem
    found = taken(classes, cheapest(classes, capacity))
    every = [taken(classes, places) for places in itertools.product(*(range(len(options)) for options in classes))]
    assert found.size <= capacity
    assert found.cost == pytest.approx(min(option.cost for option in every if option.size <= capacity), abs=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_a_solver_of_integer_programs_finds_nothing_cheaper_for_a_large_model(seed):
    draw = np.random.default_rng(seed)
    classes = []
    for _ in range(60):
        rows, scale = int(draw.integers(64, 4096)), draw.lognormal(-7, 1.5)
        classes.append([Option(rows * (128 * b + 16 + b), float(scale * 4.0**-b * draw.uniform(0.5, 1.5))) for b in (2, 3, 4, 6)])
    capacity = sum(options[1].size for options in classes) + int(draw.integers(0, 10**7))
    sizes = np.array([option.size for options in classes for option in options], dtype=float)
    costs = np.array([option.cost for options in classes for option in options])
    each = np.kron(np.eye(len(classes)), np.ones((1, 4)))
    rules = [LinearConstraint(sizes[None] / capacity, ub=1), LinearConstraint(each, 1, 1)]
    scaled = costs / costs.max()
    solved = milp(scaled, integrality=np.ones(len(sizes)), bounds=(0, 1), constraints=rules, options={"mip_rel_gap": 0})
    found = taken(classes, cheapest(classes, capacity))
    assert found.size <= capacity
    assert found.cost <= costs.max() * solved.fun * (1 + 1e-9)


def test_capacities_below_the_smallest_options_and_empty_classes_are_refused():
    with pytest.raises(ValueError, match="the smallest options take 3 and the capacity is 2"):
        cheapest([[Option(3, 0.0)]], 2)
    with pytest.raises(ValueError, match="every class needs an option"):
        cheapest([[]], 2)
    assert cheapest([], 0) == []


# ---- what a layer costs ----------------------------------------------------------------------------------------------


def divergence(model: torch.nn.Module, other: torch.nn.Module, ids: torch.Tensor) -> float:
    with torch.no_grad():
        p, q = (m(ids).logits.double().log_softmax(-1) for m in (model, other))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("build", [llama, gpt2])
def test_a_layer_costs_what_it_costs_to_quantize_it_alone(build):
    model = build().train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    modules = dict(model.named_modules())
    ids = tokens(6, 12)
    found = sensitivity(model, ids, SCHEMES, compared=99)
    assert found.tokens == ids.numel()
    assert {layer.name for layer in found.layers} == {layer.name for layer in plan(model, "int4_g32").quantized}
    for layer in found.layers[:: max(1, len(found.layers) // 3)]:
        for scheme, cost in layer.costs.items():
            alone = copy.deepcopy(model).eval()
            (carried,) = quantize_(alone, {layer.name: scheme}, calibration=ids).quantized
            assert cost.error == pytest.approx(carried.loss, rel=1e-6)
            assert cost.bits == pytest.approx(carried.bits_per_weight * layer.weights)
            assert cost.kl == pytest.approx(divergence(copy.deepcopy(model).eval(), alone, ids), rel=1e-3, abs=1e-7)
    assert dict(model.named_modules()) == modules
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_part_of_the_data_is_compared_and_padding_is_not():
    model, ids = llama(), tokens(4, 12)
    padded = torch.cat([ids[:, :8], ids[:, :4] * 0], 1)
    mask = torch.arange(12)[None].expand(4, 12) < 8
    whole = sensitivity(model, [{"input_ids": ids[:, :8]}], ["int3_g32"], layers=["*.0.mlp.*"])
    masked = sensitivity(model, [{"input_ids": padded, "attention_mask": mask.long()}], ["int3_g32"], layers=["*.0.mlp.*"])
    assert masked.tokens == whole.tokens == 32
    for a, b in zip(whole.layers, masked.layers, strict=True):
        assert a.costs["int3_g32"].error == pytest.approx(b.costs["int3_g32"].error, rel=1e-3)
        assert a.costs["int3_g32"].kl == pytest.approx(b.costs["int3_g32"].kl, rel=1e-3, abs=1e-7)
    batches = [{"input_ids": row[None]} for row in ids]
    assert sensitivity(model, batches, ["int3_g32"], layers=["*.0.mlp.*"], compared=2).tokens == 24


def test_layers_that_share_a_weight_are_tried_together():
    model, ids = llama(), tokens(4, 12)
    found = sensitivity(model, ids, ["int3_g32", "int8"], layers=["lm_head", "model.embed_tokens", "*.0.mlp.*"])
    (tied,) = [layer for layer in found.layers if len(layer.names) > 1]
    assert set(tied.names) == {"lm_head", "model.embed_tokens"}
    alone = copy.deepcopy(model)
    quantize_(alone, dict.fromkeys(tied.names, "int3_g32"), calibration=ids)
    assert tied.costs["int3_g32"].kl == pytest.approx(divergence(model, alone, ids), rel=1e-3)
    mapping = allocate(found, 5)
    assert mapping["lm_head"] == mapping["model.embed_tokens"]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    quantize_(model, mapping)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_models_without_logits_have_errors_alone():
    model, x = mlp(), torch.randn(64, 40, generator=torch.Generator().manual_seed(0))
    found = sensitivity(model, x, ["int3_g32", Scheme("int4", 32)], compared=0)
    assert found.by == "error"
    assert list(found.configs) == ["int3_g32", "int4:g32:bf16"]
    weight = model[0].weight.detach()
    noise = x @ (lowbit.QTensor.quantize(weight, "int3_g32").dequantize() - weight).T
    expected = noise.square().sum() / (x @ weight.T).square().sum()
    assert found.layers[0].costs["int3_g32"].error == pytest.approx(float(expected), rel=1e-4)
    with pytest.raises(ValueError, match="has no kl under int3_g32"):
        allocate(found, 4, by="kl")


# ---- who gets what ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured() -> Sensitivity:
    return sensitivity(llama(), tokens(6, 12), SCHEMES, compared=2)


@given(bits=st.floats(3.2, 5.5), by=st.sampled_from(["kl", "error"]))
def test_a_mapping_keeps_to_its_budget_and_is_a_recipe(measured, bits, by):
    mapping = allocate(measured, bits, by=by)
    assert set(mapping) == {layer.name for layer in measured.layers}
    assert set(mapping.values()) <= set(SCHEMES)
    assert measured.bits_per_weight(mapping) <= bits + 1e-9
    recipe = Recipe.of(mapping)
    assert Recipe.from_text(recipe.to_yaml()) == recipe
    assert allocate(json.loads(json.dumps(measured.to_dict())), bits, by=by) == mapping
    for layer in measured.layers:  # one layer changed, within the budget, is never better
        for scheme in SCHEMES:
            other = {**mapping, layer.name: scheme}
            if measured.bits_per_weight(other) <= bits:
                assert measured.total(mapping, by) <= measured.total(other, by) + 1e-12


def test_a_model_takes_the_mapping(measured):
    model, mapping = llama(), allocate(measured, 4.4)
    assert len(set(mapping.values())) > 1
    carried = quantize_(model, mapping, calibration=tokens(6, 12))
    weights = sum(math.prod(layer.shape) for layer in carried.quantized)
    stored = sum(layer.bits_per_weight * math.prod(layer.shape) for layer in carried.quantized)
    assert stored / weights == pytest.approx(measured.bits_per_weight(mapping))
    for name, scheme in mapping.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, QLinear)
        assert layer.scheme == Recipe.of({"*": scheme}).rules[0].config.weight


def test_targets_without_a_spelling_go_by_a_name_and_come_back_as_fields():
    target = LayerConfig(Scheme("int8"), Scheme("int8", scale="fp32"))
    with pytest.raises(ValueError, match="give it a name"):
        sensitivity(mlp(), torch.randn(8, 40), [target])
    found = sensitivity(mlp(), torch.randn(64, 40), {"w8a8": target, "small": LayerConfig(Scheme("int4", 32))}, compared=0)
    mapping = allocate(found, 9)
    assert Recipe.of(mapping).rules[0].config == target
    assert found.bits_per_weight(mapping) > 8


def test_what_is_measured_is_printed_and_comes_back_from_json(measured):
    lines = str(measured).splitlines()
    assert all(scheme in lines[0] for scheme in SCHEMES)
    assert len(lines) == 2 + len(measured.layers) + len(measured.notes)
    assert Sensitivity.from_dict(json.loads(json.dumps(measured.to_dict()))) == measured


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: allocate(s, 2), "2 bits a weight are too few: the smallest of int2_g32, .* take 2"),
        (lambda s: allocate(s, float("nan")), "bits must be a positive number"),
        (lambda s: allocate(s, 4, by="luck"), "by must be one of kl, error, got 'luck'"),
        (lambda s: allocate({"format": 0}), "the format is 0"),
        (lambda s: allocate({}), "not what Sensitivity.to_dict gives"),
        (lambda s: s.total({}), "becomes None, which was not measured"),
        (lambda s: sensitivity(mlp(), torch.randn(4, 40), ["int4", "int4"]), "int4 stands twice"),
        (lambda s: sensitivity(mlp(), torch.randn(4, 40), []), "no scheme to try"),
        (lambda s: sensitivity(mlp(), torch.randn(4, 40), ["three_and_a_half_bits"]), "has rules of its own"),
        (lambda s: sensitivity(mlp(), torch.randn(4, 40), ["awq(int4)"]), "changes the whole model and not one layer"),
        (lambda s: sensitivity(mlp(), torch.randn(4, 40), ["int4"], compared=-1), "compared must be"),
        (lambda s: sensitivity(mlp(), torch.full((4, 40), float("inf")), ["int4"]), "NaN or infinity"),
    ],
)
def test_what_makes_no_sense_is_refused(measured, call, message):
    with pytest.raises(ValueError, match=message):
        call(measured)


# ---- the table ------------------------------------------------------------------------------------------------------


def test_the_table_puts_each_mixture_beside_the_straight_line():
    model, data = llama(), lowbit.Calibration(tokens(6, 24))
    rows = mixed.measure(model, data, tokens(8, 16), [("int2_g32", "int4_g32")], [3.0, 4.0], batches=1)
    assert [row["layers"]["int2_g32"] for row in rows[:2]] == [14, 0]
    small, large, *between = rows
    for row, budget in zip(between, [3.0, 4.0], strict=True):
        assert row["bits_per_weight"] <= budget
        share = (row["bits_per_weight"] - small["bits_per_weight"]) / (large["bits_per_weight"] - small["bits_per_weight"])
        assert row["line"] == pytest.approx(small["kl"] + share * (large["kl"] - small["kl"]))
        assert large["kl"] < row["kl"] < row["line"]
    head, rule, *lines = tables.mixed_table([{"model": "tiny", "mixed": rows}]).splitlines()
    assert len(lines) == 4
    assert lines[0].count("|  |") == 1  # ends of the line are not compared with it
    assert {line.count("|") for line in (head, rule, *lines)} == {7}


def test_the_readme_s_mixtures_lie_below_the_line():
    kept = json.loads((tables.RESULTS / "mixed.json").read_text())["mixed"]
    between = [row for row in kept if all(row["layers"].values())]
    assert {row["method"] for row in between} == {f"{small} and {large}" for small, large in mixed.METHODS}
    assert all(row["kl"] < 0.85 * row["line"] for row in between)


# ---- the command line ------------------------------------------------------------------------------------------------


def test_from_a_model_to_a_recipe_on_the_command_line(tmp_path, capsys):
    model, text = word_model(tmp_path / "model"), exam_and_text(tmp_path) / "text.txt"
    table, recipe = tmp_path / "table.json", tmp_path / "recipe.yaml"
    schemes = "int3_g16,gptq(int4_g16, damping=0.02)"
    arguments = ["sensitivity", model, "-s", schemes, "--calibration", text, "--rows", 4, "--length", 32, "--report", table]
    assert run([*map(str, arguments)]) == 0
    assert "gptq(int4_g16, damping=0.02)" in capsys.readouterr().out
    found = Sensitivity.from_dict(json.loads(table.read_text()))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
    data = lowbit.Calibration(text, rows=4, length=32)
    assert found == sensitivity(loaded, data, ["int3_g16", "gptq(int4_g16, damping=0.02)"])
    assert run(["allocate", str(table), "--bits", "4.7", "-o", str(recipe), "--json"]) == 0
    assert recipe.read_text(encoding="utf-8").startswith("# Mixed precision of lowbit allocate --bits 4.7: ")
    printed = json.loads(capsys.readouterr().out)
    assert printed["layers"] == allocate(found, 4.7)
    assert printed["bits_per_weight"] == found.bits_per_weight(printed["layers"]) <= 4.7
    assert Recipe.from_file(recipe).rules == Recipe.of(printed["layers"]).rules
    assert run(["plan", str(model), "-r", str(recipe), "--device", "cpu"]) == 0
    assert "7 of 9 layers quantized" in capsys.readouterr().out
    assert run(["allocate", str(table), "--bits", "4.7"]) == 0
    assert Recipe.from_text(capsys.readouterr().out).rules == Recipe.from_file(recipe).rules
    for code, arguments, line in [
        (2, ["sensitivity", model], "give one with --calibration FILE"),
        (1, ["allocate", recipe], "cannot be read"),
        (2, ["allocate", table, "--bits", 2], "2 bits a weight are too few"),
    ]:
        assert run([*map(str, arguments)]) == code
        assert line in capsys.readouterr().err
