"""AWQ and SmoothQuant on models: the float model keeps its output, and the quantized one loses less."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowbit import QLinear, Recipe, quantize_, rewrite_
from lowbit.grid import to_codes
from lowbit.scales import choose
from lowbit.scheme import SCHEMES
from lowbit.transforms import ChannelScale
from tests.ecosystem import test_architectures as architectures
from tests.lowbit.calibration.test_calibrate import Experts
from tests.lowbit.rewrites.test_reader_map import apart, stirred
from tests.support.models import llama, mlp, tokens

W8A8 = "int8_dynamic_activation_int8_weight"
STATIC = "int8_static_activation_int8_weight"


# ---- the float model -------------------------------------------------------------------------------------------------

MODELS = ["llama", "gpt2", "opt", "mixtral", "qwen2_moe", "gemma2", "gemma3", "phi", "bert", "t5", "bart", "mamba"]


def calls_for(name: str, count: int = 2) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    calls = [{"input_ids": torch.randint(3, 96, (2, 12), generator=draw)} for _ in range(count)]
    return [{**call, "decoder_input_ids": call["input_ids"].flip(1)} for call in calls] if name in ("t5", "bart") else calls


def spiked(model: nn.Module) -> nn.Module:
    """``model`` with channels of very different size, so that there is much to gain."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter *= torch.exp(torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("recipe", ["awq(int3)", f"smoothquant({W8A8}, alpha=0.7)", f"awq(smoothquant({STATIC}, alpha=auto))"])
@pytest.mark.parametrize("name", MODELS)
def test_the_float_model_gives_what_it_gave(name, recipe):
    model = spiked(stirred(architectures.build(name)))
    (call, *_) = calls_for(name)
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        y = model(**call).logits
        plan = rewrite_(model, recipe, calibration=calls_for(name))
        z = model(**call).logits
    assert apart(y, z) <= 1e-5
    assert not any(isinstance(module, QLinear) for module in model.modules())
    chosen = [layer for layer in plan.quantized if any(record.choice for record in layer.rewrites)]
    unreached = [layer for layer in plan.quantized if not layer.rewrites and layer.kind != "experts"]
    assert all("dt_proj" in layer.name for layer in unreached)  # mamba multiplies by its weight without calling it
    assert len(chosen) >= len(plan.quantized) / 2
    after = model.state_dict()
    for layer in chosen:  # each was really multiplied
        stored = next(key for key in (f"{layer.name}.weight", f"{layer.name}.0.weight") if key in after)
        old = before[stored].T if layer.kind == "conv1d" and after[stored].shape != before[stored].shape else before[stored]
        assert not torch.equal(after[stored], old)
        for record in layer.rewrites:
            assert record.after <= record.before or "smoothquant" in record.rewrite
            assert not record.into or record.into in dict(model.named_modules())
        has = isinstance(getattr(model.get_submodule(layer.name), "transform", None), ChannelScale)
        assert has == any(record.choice and not record.into for record in layer.rewrites)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_a_device_takes_a_block_at_a_time(name):
    model = spiked(stirred(architectures.build(name)))
    duplicate = copy.deepcopy(model)
    (call, *_) = calls_for(name)
    with torch.no_grad():
        y = model(**call).logits
        plan = rewrite_(model, "awq(int3)", calibration=calls_for(name), device="cuda")
        assert apart(y, model(**call).logits) <= 1e-5
    assert not any(tensor.is_cuda for tensor in model.state_dict().values())
    expected = rewrite_(duplicate, "awq(int3)", calibration=calls_for(name))
    for layer, other in zip(plan.layers, expected.layers, strict=True):
        assert [record.into for record in layer.rewrites] == [record.into for record in other.rewrites]
        assert [r.after for r in layer.rewrites] == pytest.approx([r.after for r in other.rewrites], rel=1e-2)
    fresh = spiked(stirred(architectures.build(name)))
    quantize_(fresh, "awq(int3)", calibration=calls_for(name), device="cuda", keep_on_device=True)
    for layer in [module for module in fresh.modules() if isinstance(module, QLinear)]:
        tensors = [*layer.parameters(), *layer.buffers()]  # also those of a module in front
        assert all(tensor.is_cuda for tensor in tensors if tensor is not layer.bias)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_tied_heads_are_left_and_the_plan_says_why(name):
    model = llama(tied=True) if name == "llama" else architectures.build(name)
    with torch.no_grad():
        y = model(tokens()).logits
    plan = rewrite_(model, Recipe.of({"lm_head": "int8", "*": "int3"}).rewritten("awq"), calibration=tokens(4, 10))
    with torch.no_grad():
        assert apart(y, model(tokens()).logits) <= 1e-5
    (head,) = [layer for layer in plan.layers if layer.name == "lm_head"]
    assert head.notes == ("awq: another layer reads its weight, which stays as it is",)
    assert head.rewrites == ()


def test_a_head_of_its_own_is_divided_by_the_norm_before_it():
    model = spiked(llama(tied=False))
    with torch.no_grad():
        y = model(tokens()).logits
    plan = rewrite_(model, Recipe.of({"lm_head": "int3", "*q_proj": "int3"}).rewritten("awq"), calibration=tokens(4, 10))
    with torch.no_grad():
        assert apart(y, model(tokens()).logits) <= 1e-5
    assert [layer.rewrites[0].into for layer in plan.quantized] == [
        *(f"model.layers.{i}.input_layernorm" for i in (0, 1)), "model.norm",
    ]  # fmt: skip


def test_without_modules_only_what_can_be_folded_is():
    model = spiked(stirred(architectures.build("gpt2")))
    plan = rewrite_(model, "awq(int3, insert=false)", calibration=calls_for("gpt2"))
    assert not any(isinstance(module, ChannelScale) for module in model.modules())
    assert {layer.name.rpartition(".h.")[2][2:] for layer in plan.quantized if not layer.rewrites} == {"mlp.c_proj"}


def test_a_recipe_without_rewrites_rewrites_nothing():
    with pytest.raises(ValueError, match="the recipe 'int4' has no rewrites: give one"):
        rewrite_(mlp(), "int4")


# ---- quantized -------------------------------------------------------------------------------------------------------


def loss_of(model: nn.Module, recipe: Any, name: str, rounds: int = 3) -> float:
    """How far the outputs of a quantized copy are from those of ``model``."""
    duplicate, calls = copy.deepcopy(model), calls_for(name, rounds)
    quantize_(duplicate, recipe, calibration=calls)
    with torch.no_grad():
        pairs = [(model(**call).logits.double(), duplicate(**call).logits.double()) for call in calls]
    return float(sum((a - b).square().sum() for a, b in pairs) / sum(a.square().sum() for a, _ in pairs))


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "gemma3"])
def test_models_lose_less(name):
    model = spiked(stirred(architectures.build(name)))
    assert loss_of(model, "awq(int3)", name) < loss_of(model, "int3", name)
    for recipe in (W8A8, STATIC):
        assert loss_of(model, f"smoothquant({recipe}, alpha=auto)", name) < loss_of(model, recipe, name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_are_rounded_to_the_grid_from_what_norms_leave_them(dtype):
    """The gain is rounded to the model's dtype when it is divided, and the weight multiplied by what it was divided by then; the
    product itself is rounded to no dtype before it is rounded to the grid."""
    model = spiked(stirred(llama(tied=False))).to(dtype)
    duplicate = copy.deepcopy(model)
    plan = quantize_(model, "awq(int8)", calibration=tokens(4, 10))
    (q,) = [layer for layer in plan.quantized if layer.name == "model.layers.0.self_attn.q_proj"]
    assert q.rewrites[0].choice
    norm, old = (m.model.layers[0].input_layernorm.weight.detach().double() for m in (model, duplicate))
    layer, before = model.model.layers[0].self_attn.q_proj, duplicate.model.layers[0].self_attn.q_proj.weight.detach().double()
    assert layer.weight.dtype == dtype
    wanted = (before * (old / norm)).float()
    scales = choose(wanted, SCHEMES["int8"])
    codes = layer.weight.codes()
    expected = to_codes(wanted, SCHEMES["int8"], scales)
    assert float((codes == expected).double().mean()) > 0.999  # products of float64 rounded to float32, and ties


def test_rounders_get_the_statistics_of_what_they_are_given():
    """After the rewrite the loss of each layer is that of its own rounding, measured on what it now reads."""
    model = spiked(stirred(llama(tied=False)))
    rewritten = copy.deepcopy(model)
    rewrite_(rewritten, Recipe.of({"*layers.0*": "int4"}).rewritten("awq"), calibration=tokens(4, 10))
    plan = quantize_(model, Recipe.of({"*layers.0*": "gptq(int4)"}).rewritten("awq"), calibration=tokens(4, 10))
    for layer in plan.quantized:
        x: list[Tensor] = []
        hook = rewritten.get_submodule(layer.name).register_forward_pre_hook(lambda m, args, x=x: x.append(args[0].detach()))
        with torch.no_grad():
            rewritten(tokens(4, 10))
        hook.remove()
        rows = x[0].flatten(0, 1).double()
        w = rewritten.get_submodule(layer.name).weight.detach().double()
        error = model.get_submodule(layer.name).weight.dequantize().double() - w
        assert layer.loss == pytest.approx(float((rows @ error.T).square().sum() / (rows @ w.T).square().sum()), rel=0.02)


def test_the_plan_says_what_was_folded_into_what():
    model = spiked(stirred(architectures.build("gpt2")))
    plan = quantize_(model, "awq(int3)", calibration=calls_for("gpt2"))
    text = str(plan)
    assert "rewritten before: awq" in text
    assert re.search(r"h\.0\.attn\.c_attn .*awq alpha [\d.]+ folded into transformer\.h\.0\.ln_1, [\d.e-]+ -> [\d.e-]+", text)
    assert re.search(r"h\.0\.mlp\.c_proj .*awq alpha [\d.]+ by a module in front of it", text)
    entry = next(layer for layer in plan.to_dict()["layers"] if layer["name"].endswith("h.0.attn.c_attn"))
    assert entry["rewrites"][0]["into"] == "transformer.h.0.ln_1"
    assert set(entry["rewrites"][0]) == {"rewrite", "into", "choice", "before", "after"}


# ---- data that is odd ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["awq(int3)", "awq(gptq(int2))", f"smoothquant({W8A8}, alpha=auto)", f"smoothquant({STATIC})"])
def test_dead_channels_constant_inputs_and_silent_experts_give_finite_numbers(recipe):
    torch.manual_seed(0)
    model = nn.Sequential(Experts(), Experts())
    x = torch.randn(40, 8)
    x[:, 2] = 0
    x[:, 3] = 1.5
    for data in (x, x[:1].expand(40, 8), torch.zeros(5, 8)):
        duplicate = copy.deepcopy(model)
        plan = quantize_(duplicate, recipe, calibration=data)
        for tensor in duplicate.state_dict().values():
            assert not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
        with torch.no_grad():
            assert bool(torch.isfinite(duplicate(data)).all())
        silent = [layer for layer in plan.quantized if "experts.2" in layer.name]
        assert all("no calibration data reached it" in layer.notes[0] and not layer.rewrites for layer in silent)


def test_dead_channels_are_named():
    x = torch.randn(60, 40)
    x[:, 3:6] = 0
    plan = quantize_(mlp(), "awq(int4)", calibration=x)
    assert plan.layers[0].notes == ("awq: 3 of 40 input channels were 0 in every row, and are not divided",)
    assert plan.layers[1].notes == ()


def test_weights_of_zeros_stay_zeros():
    model = mlp()
    with torch.no_grad():
        model[2].weight[:, :40] = 0
        model[2].weight[5] = 0
    for recipe in ("awq(int3)", f"smoothquant({W8A8}, alpha=auto)", "awq(mxfp4)"):
        duplicate = copy.deepcopy(model)
        quantize_(duplicate, recipe, calibration=torch.randn(60, 40))
        dense = duplicate[2].weight.dequantize()
        assert bool(torch.isfinite(dense).all())
        assert not bool(dense[5].any())
