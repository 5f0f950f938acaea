"""quantize_: what it replaces, what it leaves, what it refuses, and that the model it makes is the one planned."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch import nn

import lowbit
from lowbit import QEmbedding, QLinear, QTensor, Recipe, Scheme, api, quantize_
from tests.support.models import gpt2, llama, mlp, tokens


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens()).logits


def dense_twin(model: nn.Module, quantized: nn.Module) -> nn.Module:
    """``model`` with each weight set to what the quantized one stands for: the same outputs, by plain PyTorch."""
    duplicate = copy.deepcopy(model)
    for name, module in quantized.named_modules(remove_duplicate=False):
        if isinstance(module, QLinear | QEmbedding):
            target = duplicate.get_submodule(name)
            weight = module.weight.dequantize()
            with torch.no_grad():
                target.weight.copy_(weight.t() if type(target).__name__ == "Conv1D" else weight)
    return duplicate


@pytest.mark.parametrize("name", [name for name in api.__all__ if "activation" not in name])
@pytest.mark.parametrize("make", [llama, gpt2])
def test_every_factory_computes_with_the_weights_it_stores(name, make):
    model = make()
    quantized = copy.deepcopy(model)
    plan = quantize_(quantized, getattr(api, name)())
    assert plan.quantized
    assert plan.bytes_after < plan.bytes_before
    torch.testing.assert_close(logits(quantized), logits(dense_twin(model, quantized)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["int8_dynamic_activation_int8_weight", "int8_dynamic_activation_int4_weight"])
def test_dynamic_activations_are_rounded_a_token_at_a_time(name):
    model = mlp()
    x = torch.randn(6, 40)
    quantize_(model, getattr(api, name)())
    first = model[0]
    rounded = QTensor.quantize(x, Scheme("int8", scale="fp32"), method="absmax").dequantize()
    torch.testing.assert_close(first(x), nn.functional.linear(rounded, first.weight.dequantize(), first.bias))
    assert not torch.equal(first(x), nn.functional.linear(x, first.weight.dequantize(), first.bias))
    torch.testing.assert_close(first(x)[2:3], first(x[2:3]))  # a token's scale is its own


def test_replaced_layers_are_still_linear_layers_and_keep_bias_and_mode():
    model = mlp()
    bias = model[0].bias.detach().clone()
    model.train()
    model[2].eval()
    quantize_(model, "int4")
    assert all(isinstance(model[i], nn.Linear) and isinstance(model[i], QLinear) for i in (0, 2, 4))
    assert torch.equal(model[0].bias, bias)
    assert model[2].bias is None
    assert model[0].training
    assert not model[2].training
    assert isinstance(model[0].weight, QTensor)
    assert (model[0].in_features, model[0].out_features) == (40, 70)


def test_plan_is_what_quantize_carries_out_and_touches_nothing():
    model = llama()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    planned = lowbit.plan(model, "int4")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    carried = quantize_(model, "int4")
    assert planned == carried
    for layer in carried.quantized:
        module = model.get_submodule(layer.name)
        assert layer.bits_per_weight == module.weight.bits_per_weight
        assert set(layer.kernels) == {1, 16, 512}
        for m, kernel in layer.kernels.items():
            x = torch.randn(m, module.in_features)
            with lowbit.trace_kernels() as trace:
                module(x)
            assert list(trace.kernels()) == [kernel]
            assert kernel not in dict(layer.refusals[m])
    text = str(carried)
    assert all(layer.name in text for layer in carried.layers)
    assert "the head: name it in a pattern" in text
    assert carried.to_dict()["layers"][0]["reason"]


def test_planned_bytes_are_the_bytes_held():
    for recipe in ("int8", "int4", "int3", "mxfp6", "nvfp4", "nf4"):
        model = mlp()
        plan = quantize_(model, recipe)
        for layer in plan.quantized:
            weight = model.get_submodule(layer.name).weight
            zero_points = 0 if weight.zero_point is None else weight.zero_point.numel() * (8 - weight.scheme.bits) / 8
            assert abs(layer.bytes_after - (weight.nbytes - zero_points)) <= 1, (recipe, layer.name)


def test_the_head_and_embeddings_stay_unless_a_pattern_names_them():
    model = llama(tied=False)
    quantize_(model, "int4")
    assert type(model.lm_head) is nn.Linear
    assert type(model.model.embed_tokens) is nn.Embedding
    model = llama(tied=False)
    quantize_(model, {"lm_head": "int8", "*embed*": "int8", "*": "int4"})
    assert model.lm_head.scheme == lowbit.SCHEMES["int8"]
    assert isinstance(model.model.embed_tokens, QEmbedding)


@pytest.mark.parametrize("pattern", ["lm_head", "*embed_tokens"])
def test_tied_weights_are_quantized_once_and_stay_tied(pattern):
    model = llama(tied=True)
    plan = quantize_(model, {pattern: "int8", "*": "int4"})
    head, embedding = model.lm_head, model.model.embed_tokens
    assert head.weight is embedding.weight
    entry = next(layer for layer in plan.layers if layer.name == "lm_head")
    assert entry.tied_to == "model.embed_tokens"
    assert lowbit.plan(model, "int4").bytes_before == plan.bytes_after
    duplicate = copy.deepcopy(model)
    assert duplicate.lm_head.weight is duplicate.model.embed_tokens.weight
    assert torch.isfinite(logits(model)).all()


def test_tied_weights_cannot_part():
    with pytest.raises(ValueError, match="share one weight"):
        quantize_(llama(tied=True), {"lm_head": "int8", "*embed*": "int4", "*": "int4"})
    with pytest.raises(ValueError, match="share one weight"):
        quantize_(llama(tied=True), {"lm_head": None, "*embed*": "int4", "*": "int4"})


def test_one_module_under_two_names_is_replaced_under_both():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(16, 16)
            self.b = self.a

        def forward(self, x):
            return self.b(self.a(x))

    model = Twice()
    quantize_(model, {"b": "int8"})
    assert model.a is model.b
    assert isinstance(model.a, QLinear)


def test_first_match_wins_and_none_leaves_a_layer():
    model = llama()
    quantize_(model, {"*layers.0*": None, "re:(q|k)_proj$": "int8", "*": api.int4_weight_only(group_size=32)})
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear
    assert model.model.layers[1].self_attn.q_proj.scheme.format == "int8"
    assert model.model.layers[1].mlp.up_proj.scheme.group_size == 32


def test_filter_fn_is_asked_about_each_layer():
    model = llama()
    asked = []

    def only_mlp(module, name):
        asked.append(name)
        return "mlp" in name

    plan = quantize_(model, "int4", filter_fn=only_mlp)
    assert {layer.name for layer in plan.quantized} == {name for name in asked if "mlp" in name}
    assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear


def test_errors_name_the_value_and_the_remedy():
    model = llama()
    with pytest.raises(ValueError, match=r"'\*dwn_proj' matches no layer; the nearest are .*down_proj"):
        quantize_(model, {"*dwn_proj": "int8"})
    with pytest.raises(ValueError, match="never applies"):
        quantize_(model, {"*": "int4", "*o_proj": "int8"})
    with pytest.raises(ValueError, match="did you mean"):
        quantize_(model, "int44")
    with pytest.raises(ValueError, match="nothing would change"):
        quantize_(model, {"*": None})
    with pytest.raises(ValueError, match="no linear layer"):
        quantize_(nn.ReLU(), "int4")
    with pytest.raises(ValueError, match=r"wrap it in nn\.Sequential"):
        quantize_(nn.Linear(4, 4), "int4")
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, got int"):
        quantize_(3, "int4")
    with pytest.raises(TypeError, match="the function int4_weight_only: call it"):
        quantize_(model, api.int4_weight_only)
    for call in (lowbit.plan, quantize_):
        with pytest.raises(ValueError, match="device 'abacus' cannot be used here"):
            call(model, "int4", device="abacus")
    quantize_(model, "int4")
    with pytest.raises(ValueError, match="quantized already"):
        quantize_(model, "int8")


def test_what_is_quantized_already_is_left_and_named():
    model = llama()
    quantize_(model, {"*mlp*": "int4"})
    up = model.model.layers[0].mlp.up_proj
    plan = quantize_(model, "int8")
    assert model.model.layers[0].mlp.up_proj is up
    assert any("quantized already (uint4:g128:zint:bf16)" in layer.reason for layer in plan.skipped)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_raises_before_any_layer_changes(bad):
    model = llama()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] = bad
        model.model.layers[1].mlp.down_proj.weight[0, 0] = bad
    counted = "2 NaN and 0" if bad != bad else "0 NaN and 2"
    with pytest.raises(ValueError, match=rf"model\.layers\.1\.mlp\.down_proj\.weight holds {counted}"):
        quantize_(model, "int4")
    assert not any(isinstance(module, QLinear) for module in model.modules())


def test_layers_that_compute_something_of_their_own_are_left_with_the_reason():
    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    def linear():
        return nn.Linear(8, 8)

    forward, backward, halved_bias = linear(), linear(), linear()
    forward.register_forward_hook(lambda module, args, output: output)
    backward.register_full_backward_hook(lambda module, inward, outward: None)
    nn.utils.parametrize.register_parametrization(halved_bias, "bias", nn.Softplus())
    normed = nn.utils.parametrizations.weight_norm(linear())
    model = nn.Sequential(Scaled(8, 8), linear(), forward, backward, normed, halved_bias, nn.LazyLinear(8), nn.Conv2d(1, 1, 3))
    plan = quantize_(model, "int8")
    assert [layer.name for layer in plan.quantized] == ["1"]
    reasons = {layer.name: layer.reason for layer in plan.skipped}
    assert reasons.keys() == {"0", "2", "3", "4", "5", "6", "7.weight"}
    assert reasons["0"] == "Scaled computes something of its own"
    assert "hooks" in reasons["2"]
    assert reasons["2"] == reasons["3"]
    assert "its weight is not a plain parameter" in reasons["4"]
    assert "its bias is not a plain parameter" in reasons["5"]
    assert "no shape yet: run the model once" in reasons["6"]
    assert "a parameter of Conv2d" in reasons["7.weight"]


def test_a_weight_that_another_module_reads_as_a_parameter_is_left_as_it_is():
    model = nn.Module()
    model.embed, model.head = nn.Embedding(8, 4), nn.ParameterList()
    model.head.append(model.embed.weight)
    model.up = nn.Linear(4, 4)
    plan = quantize_(model, {"embed": "int8", "*": "int4"})
    assert [layer.name for layer in plan.quantized] == ["up"]
    assert plan.layers[0].reason.startswith("tied to head.0, which cannot be quantized")


def test_biases_stay_the_parameters_that_an_optimizer_holds():
    model = mlp()
    bias = model[0].bias
    quantize_(model, "int4")
    assert model[0].bias is bias


def test_quantizing_in_inference_mode_gives_a_model_that_autograd_takes():
    model = mlp()
    with torch.inference_mode():
        quantize_(model, "int4")
    model(torch.randn(2, 40)).sum().backward()
    assert model[0].bias.grad is not None


def test_the_work_of_a_plan_grows_with_the_layers_not_with_their_square():
    def calls(layers: int) -> int:
        with torch.device("meta"):
            model = nn.ModuleList([nn.Linear(2, 2) for _ in range(layers)])
        counted = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal counted
            counted += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            lowbit.plan(model, "int4")
        finally:
            sys.setprofile(None)
        return counted

    calls(100)  # what is done once
    few, many = calls(100), calls(800)
    assert few > 100
    assert many < 8.5 * few


def test_meta_weights_are_planned_but_not_quantized():
    with torch.device("meta"):
        model = mlp()
    assert len(lowbit.plan(model, "int4").quantized) == 3
    with pytest.raises(ValueError, match="meta device"):
        quantize_(model, "int4")


def test_gradients_reach_the_input_and_biases_but_no_weight():
    model = mlp()
    quantize_(model, "int4")
    x = torch.randn(3, 40, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    assert model[0].bias.grad is not None
    assert not model[0].weight.requires_grad


def test_progress_counts_every_layer():
    seen = []
    plan = quantize_(mlp(), "int4", progress=lambda layer, done, total: seen.append((layer.name, done, total)))
    assert seen == [(layer.name, i + 1, 3) for i, layer in enumerate(plan.quantized)]


def test_generate_runs_on_a_quantized_model():
    model = llama()
    quantize_(model, {"lm_head": "int8", "*": "int4"})
    out = model.generate(tokens(1, 4), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert out.shape == (1, 8)


def test_explain_has_a_line_for_every_row_and_names_the_choice():
    model = mlp()
    quantize_(model, "int4")
    explanation = lowbit.explain(model[0], 512)
    text = str(explanation)
    assert explanation.kernel in text
    assert len(text.splitlines()) == 1 + len(explanation.rows)
    assert f"{explanation.kernel}: runs" in text
    with pytest.raises(TypeError, match="quantize_"):
        lowbit.explain(nn.Linear(2, 2))
    for bad in (-1, 1.5):
        with pytest.raises(ValueError, match="m is a number of rows"):
            lowbit.explain(model[0], bad)
    with pytest.raises(ValueError, match=r"float64, got torch\.int8"):
        lowbit.explain(model[0], 1, torch.int8)
    table = lowbit.QEmbedding(model[0].weight)
    with lowbit.trace_kernels() as trace:
        table(torch.arange(3))
    assert list(trace.kernels()) == [lowbit.explain(table, 3).kernel]


def test_a_recipe_object_and_its_file_say_the_same(tmp_path):
    recipe = Recipe.of({"*down_proj": {"weight": "int8", "scales": "mse"}, "lm_head": None, "*": "int4"})
    path = tmp_path / "mine.yaml"
    path.write_text(recipe.to_yaml())
    a, b = llama(), llama()
    quantize_(a, recipe)
    quantize_(b, path)
    assert torch.equal(logits(a), logits(b))
