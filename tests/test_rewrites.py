"""AWQ and SmoothQuant: losses are those of the definition, the float model keeps its output, and what comes of it is saved,
resumed and shared among processes like everything else."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lowbit
from lowbit import QLinear, Recipe, quantize_, quantize_folder, rewrite_
from lowbit.evals import quantizing
from lowbit.grid import to_codes, to_values
from lowbit.inserted import Multiply
from lowbit.rewrites.awq import awq
from lowbit.rewrites.noise import input_noise
from lowbit.rewrites.search import Pool, Reader, levelled, losses_of
from lowbit.rewrites.smoothquant import smoothquant
from lowbit.scales import choose
from lowbit.scheme import SCHEMES, Scheme
from lowbit.statistics import Statistics
from tests import test_architectures as architectures
from tests.models import llama, mlp, tokens
from tests.strategies import seeds
from tests.test_calibrate import Experts
from tests.test_ranks import under_torchrun
from tests.test_streaming import IDS, float_folder, in_memory, killed, stored
from tests.test_tracing import apart, stirred

W8A8 = "int8_dynamic_activation_int8_weight"
STATIC = "int8_static_activation_int8_weight"


# ---- what is lost ----------------------------------------------------------------------------------------------------


def inputs(k: int, seed: int, rows: int = 300) -> Tensor:
    """Rows of which few channels are far larger than the others, and one is dead."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator) @ torch.randn(k, k, generator=generator) / k**0.5
    x = x * torch.exp(1.5 * torch.randn(k, generator=generator))
    x[:, seed % k] = 0
    return x


def weight(n: int, k: int, seed: int) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed + 1))


def pool_of(*readers: Reader, count: int | None = None) -> Pool:
    return Pool(count or readers[0].weight.shape[1], lambda: iter(readers))


def reader(w: Tensor, recipe: str, x: Tensor, channels: Tensor | None = None) -> Reader:
    target = Recipe.parse(recipe).rules[0].target
    assert target is not None
    return Reader(w, target, Statistics.of(x), torch.arange(w.shape[1]) if channels is None else channels)


@settings(max_examples=40)
@given(st.sampled_from(sorted(SCHEMES)), seeds, st.integers(1, 9), st.integers(2, 70))
def test_the_loss_is_that_of_the_outputs_themselves(name, seed, n, k):
    """Rounded, multiplied out on the rows themselves in float64, and compared."""
    x, w, scheme = inputs(k, seed % 1000), weight(n, k, seed % 1000), SCHEMES[name]
    s = torch.exp(torch.randn(k, generator=torch.Generator().manual_seed(seed % 1000 + 2)))
    scaled = w * s
    scales = choose(scaled, scheme)
    q = to_values(to_codes(scaled, scheme, scales), scheme, scales).double()
    wide = x.double()
    true = wide @ w.double().T
    lost = (wide / s.double()) @ q.T - true
    (found,) = losses_of(pool_of(reader(w, name, x)), [s.double()]).tolist()
    assert found == pytest.approx(float(lost.square().sum() / true.square().sum()), rel=2e-3, abs=1e-9)


def test_what_each_layer_of_an_input_loses_counts_by_its_own_size():
    """A layer with outputs a thousand times as large is worth no more."""
    x, s = inputs(32, 3), torch.exp(torch.randn(32, generator=torch.Generator().manual_seed(1))).double()
    one, two = reader(weight(6, 32, 4), "int3", x), reader(1000 * weight(9, 32, 5), "int3", x[:100])
    apart, both = [losses_of(pool_of(r), [s]) for r in (one, two)], losses_of(pool_of(one, two), [s])
    torch.testing.assert_close(both, (300 * apart[0] + 100 * apart[1]) / 400)


@pytest.mark.parametrize(("format", "static"), [("int8", False), ("int8", True), ("fp8_e4m3fn", True)])
@pytest.mark.parametrize("spread", [0.0, 1.0, 2.0])
def test_what_rounding_inputs_costs_is_told_from_their_statistics(format, static, spread):
    """Within a half of what rounding normal inputs costs."""
    activation = Scheme(format, scale="fp32")
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2000, 96, generator=generator) * torch.exp(spread * torch.randn(96, generator=generator))
    top = x.abs().amax() if static else x.abs().amax(-1, keepdim=True)
    step = top / activation.fmt.symmetric_max
    true = (activation.fmt.round(x / step) * step - x).square().mean(0).double().sum()
    found = input_noise((x.square().mean(0), x.abs().amax(0)), activation, "static" if static else "token").sum()
    assert float(true) / 1.5 <= float(found) <= float(true) * 1.5


def test_noise_of_silent_inputs_is_none():
    for scale in ("token", "static"):
        zeros = torch.zeros(7)
        assert torch.equal(input_noise((zeros, zeros), Scheme("int8", 3, scale="fp32"), scale), zeros.double())


# ---- what is chosen --------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(st.sampled_from(sorted(SCHEMES)), seeds, st.booleans(), st.integers(2, 5))
def test_awq_takes_the_best_power_and_never_one_that_is_worse_than_none(name, seed, weights, grid):
    k = 40
    x = inputs(k, seed % 1000)
    readers = [reader(weight(n, k, seed % 1000 + n), name, x) for n in (3, 8)]
    found = awq(pool_of(*readers), grid=grid, weights=weights)
    size = x.double().square().mean(0).sqrt()
    powers = [torch.ones(k).double(), *(levelled(size ** (i / grid)) for i in range(1, grid + 1))]
    losses = losses_of(pool_of(*readers), powers)
    assert found.before == pytest.approx(float(losses[0]))
    assert found.after <= float(losses.min()) * (1 + 1e-5)
    assert found.after <= found.before
    if not weights:
        assert found.after == pytest.approx(float(losses.min()), rel=1e-4)
    assert bool(torch.isfinite(found.divisor).all())
    assert bool((found.divisor > 0).all())
    assert float(found.divisor[seed % 1000 % k]) == 1.0  # the dead one
    assert (found.label == "") == torch.equal(found.divisor, torch.ones(k).double())


def test_layers_of_one_input_are_weighed_together():
    """The best power for two is that of their summed losses, also where channels of one are repeated and some are its own."""
    x, y = inputs(24, 1), inputs(12, 2)
    one = reader(weight(6, 24, 3), "int3", x, torch.arange(12).repeat_interleave(2))
    two = reader(weight(5, 12, 4), "int3", y, torch.tensor([-1, *range(1, 12)]))
    found = awq(pool_of(one, two, count=12), grid=4)
    moments = torch.zeros(12).double().index_add(0, one.channels, x.double().square().mean(0))
    moments += torch.cat([torch.zeros(1), y.square().mean(0)[1:]]).double()
    count = torch.full((12,), 3.0).double()
    count[0] = 2
    expected = {}
    for i in range(5):
        divisor = levelled((moments / count).sqrt() ** (i / 4))
        expected["" if i == 0 else f"alpha {i / 4:.3g}"] = divisor
    losses = losses_of(pool_of(one, two, count=12), list(expected.values()))
    label = list(expected)[int(losses.argmin())]
    assert found.label == label
    torch.testing.assert_close(found.divisor, expected[label], rtol=1e-6, atol=0)
    assert float(two.spread(found.divisor)[0]) == 1.0


@settings(max_examples=25)
@given(seeds, st.floats(0, 1))
def test_smoothquant_is_the_published_formula(seed, alpha):
    """max |x|^alpha / max |w|^(1 - alpha), up to one factor for all channels, which nothing depends on."""
    x, readers = inputs(20, seed % 1000), []
    for n in (4, 7):
        readers.append(reader(weight(n, 20, seed % 1000 + n), W8A8, x))
    found = smoothquant(pool_of(*readers), alpha=alpha)
    w = np.concatenate([r.weight.numpy() for r in readers]).astype(np.float64)
    live = np.arange(20) != seed % 1000 % 20
    published = np.abs(x.numpy()).max(0)[live].astype(np.float64) ** alpha / np.abs(w).max(0)[live] ** (1 - alpha)
    ratio = found.divisor.numpy()[live] / published
    assert ratio == pytest.approx(np.full(len(ratio), ratio[0]), rel=1e-6)
    assert ratio[0] * published.min() == pytest.approx(1 / (ratio[0] * published.max()), rel=1e-6)  # 1 is in the middle
    assert found.label == f"alpha {alpha:.3g}"


def test_smoothquant_s_search_is_at_least_as_good_as_any_alpha():
    for recipe in (W8A8, STATIC, "int8_dynamic_activation_int4_weight"):
        pool = pool_of(reader(weight(9, 48, 5), recipe, inputs(48, 6)))
        best = smoothquant(pool, alpha="auto")
        others = [smoothquant(pool, alpha=alpha) for alpha in (0.0, 0.25, 0.5, 0.75, 1.0)]
        assert best.after <= min(other.after for other in others) + 1e-12
        assert best.after < best.before / 2
        assert best.before == pytest.approx(others[0].before)


@pytest.mark.parametrize(
    ("spelled", "message"),
    [
        ("awq(int4, grid=0)", "grid must be a whole number and at least 1, got 0"),
        ("awq(int4, ranges=all)", "ranges must be one of range, mse, got 'all'"),
        ("awq(int4, weights=3)", "weights must be true or false, got 3"),
        ("awq(int4, insert=maybe)", "insert must be true or false, got 'maybe'"),
        ("awq(int4, alpha=1)", "awq has no option alpha; there are grid, ranges, weights, insert"),
        ("smoothquant(int8, alpha=2)", "alpha must be 0 to 1, or auto, got 2"),
        ("smoothquant(int8, alpha=true)", "alpha must be 0 to 1, or auto, got True"),
    ],
)
def test_options_are_checked_before_any_work(spelled, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Recipe.parse(spelled)


@given(st.lists(st.floats(0, 1e30), min_size=1, max_size=9))
def test_levelled_is_finite_and_positive(sizes):
    found = levelled(torch.tensor(sizes, dtype=torch.float64))
    assert bool((torch.isfinite(found) & (found > 0)).all())
    heard = [value for value, size in zip(found.tolist(), sizes, strict=True) if size > 0]
    assert not heard or min(heard) * max(heard) == pytest.approx(1.0, rel=1e-6)


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
    chosen = [layer for layer in plan.changed if any(record.choice for record in layer.rewrites)]
    unreached = [layer for layer in plan.changed if not layer.rewrites]
    assert all("dt_proj" in layer.name for layer in unreached)  # mamba multiplies by its weight without calling it
    assert len(chosen) >= len(plan.changed) / 2
    after = model.state_dict()
    for layer in chosen:  # each was really multiplied
        stored = next(key for key in (f"{layer.name}.weight", f"{layer.name}.0.weight") if key in after)
        old = before[stored].T if layer.kind == "conv1d" and after[stored].shape != before[stored].shape else before[stored]
        assert not torch.equal(after[stored], old)
        for record in layer.rewrites:
            assert record.after <= record.before or "smoothquant" in record.rewrite
            assert not record.into or record.into in dict(model.named_modules())
        has = isinstance(getattr(model.get_submodule(layer.name), "transform", None), Multiply)
        assert has == any(record.choice and not record.into for record in layer.rewrites)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_a_device_takes_a_block_at_a_time(name):
    model = spiked(stirred(architectures.build(name)))
    twin = copy.deepcopy(model)
    (call, *_) = calls_for(name)
    with torch.no_grad():
        y = model(**call).logits
        plan = rewrite_(model, "awq(int3)", calibration=calls_for(name), device="cuda")
        assert apart(y, model(**call).logits) <= 1e-5
    assert not any(tensor.is_cuda for tensor in model.state_dict().values())
    expected = rewrite_(twin, "awq(int3)", calibration=calls_for(name))
    for layer, other in zip(plan.layers, expected.layers, strict=True):
        assert [record.into for record in layer.rewrites] == [record.into for record in other.rewrites]
        assert [r.after for r in layer.rewrites] == pytest.approx([r.after for r in other.rewrites], rel=1e-2)
    fresh = spiked(stirred(architectures.build(name)))
    quantize_(fresh, "awq(int3)", calibration=calls_for(name), device="cuda", keep_on_device=True)
    for layer in [module for module in fresh.modules() if isinstance(module, QLinear)]:
        tensors = [*layer.parameters(), *layer.buffers()]  # also those of a module in front
        assert all(tensor.is_cuda for tensor in tensors if tensor is not layer.bias)


@pytest.mark.gpu
def test_the_search_on_a_device_is_that_of_the_processor():
    for recipe in ("awq(int4)", f"smoothquant({STATIC}, alpha=auto)", "awq(nvfp4, weights=true)"):
        x, w, found = inputs(256, 5), weight(128, 256, 6), []
        parsed = Recipe.parse(recipe)
        (rewrite,), target = parsed.rewrites, parsed.rules[0].target
        assert target is not None
        for device in ("cpu", "cuda"):
            there = Reader(w.to(device), target, Statistics.of(x.to(device)), torch.arange(256, device=device))
            found.append(rewrite.method.run(pool_of(there), **dict(rewrite.options)))
        assert found[1].before == pytest.approx(found[0].before, rel=1e-3)
        assert found[1].after == pytest.approx(found[0].after, rel=1e-2)


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
    assert [layer.rewrites[0].into for layer in plan.changed] == [
        *(f"model.layers.{i}.input_layernorm" for i in (0, 1)), "model.norm",
    ]  # fmt: skip


def test_without_modules_only_what_can_be_folded_is():
    model = spiked(stirred(architectures.build("gpt2")))
    plan = rewrite_(model, "awq(int3, insert=false)", calibration=calls_for("gpt2"))
    assert not any(isinstance(module, Multiply) for module in model.modules())
    assert {layer.name.rpartition(".h.")[2][2:] for layer in plan.changed if not layer.rewrites} == {"mlp.c_proj"}


def test_a_recipe_without_rewrites_rewrites_nothing():
    with pytest.raises(ValueError, match="the recipe 'int4' has no rewrites: give one"):
        rewrite_(mlp(), "int4")


# ---- quantized -------------------------------------------------------------------------------------------------------


def loss_of(model: nn.Module, recipe: Any, name: str, rounds: int = 3) -> float:
    """How far the outputs of a quantized copy are from those of ``model``."""
    twin, calls = copy.deepcopy(model), calls_for(name, rounds)
    quantize_(twin, recipe, calibration=calls)
    with torch.no_grad():
        pairs = [(model(**call).logits.double(), twin(**call).logits.double()) for call in calls]
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
    twin = copy.deepcopy(model)
    plan = quantize_(model, "awq(int8)", calibration=tokens(4, 10))
    (q,) = [layer for layer in plan.changed if layer.name == "model.layers.0.self_attn.q_proj"]
    assert q.rewrites[0].choice
    norm, old = (m.model.layers[0].input_layernorm.weight.detach().double() for m in (model, twin))
    layer, before = model.model.layers[0].self_attn.q_proj, twin.model.layers[0].self_attn.q_proj.weight.detach().double()
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
    for layer in plan.changed:
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
        twin = copy.deepcopy(model)
        plan = quantize_(twin, recipe, calibration=data)
        for tensor in twin.state_dict().values():
            assert not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
        with torch.no_grad():
            assert bool(torch.isfinite(twin(data)).all())
        silent = [layer for layer in plan.changed if "experts.2" in layer.name]
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
        twin = copy.deepcopy(model)
        quantize_(twin, recipe, calibration=torch.randn(60, 40))
        dense = twin[2].weight.dequantize()
        assert bool(torch.isfinite(dense).all())
        assert not bool(dense[5].any())


# ---- files, processes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "gemma3", "mamba"])
def test_modules_in_front_are_saved_and_loaded(name, tmp_path):
    model = spiked(stirred(architectures.build(name)))
    quantize_(model, "awq(int3)", calibration=calls_for(name))
    lowbit.save(model, tmp_path / "out")
    (call, *_) = calls_for(name)
    fresh = architectures.build(name)
    with torch.no_grad():
        y = model(**call).logits
        for again in (
            lowbit.load(tmp_path / "out"),
            lowbit.load(tmp_path / "out", model=fresh),
            type(model).from_pretrained(tmp_path / "out").eval(),
        ):
            assert torch.equal(again(**call).logits, y)
    inserted = [n for n, module in model.named_modules() if isinstance(module, Multiply)]
    assert bool(inserted) == (name != "gemma3")


def told(plan: lowbit.Plan) -> list[Any]:
    return [(layer.loss, layer.notes, layer.rewrites) for layer in plan.layers]


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("llama", "awq(int3)"),
        ("gpt2", "awq(gptq(int3))"),
        ("opt", f"smoothquant({STATIC}, alpha=auto)"),
        ("qwen2_moe", f"awq(smoothquant({W8A8}))"),
        ("t5", "awq(int4)"),
        ("mamba", "awq(int4)"),
    ],
)
def test_from_disk_to_disk_the_bytes_are_the_same(name, recipe, tmp_path):
    source = float_folder(tmp_path / "in", name)
    data = calls_for(name) if name == "t5" else IDS
    expected = in_memory(source, tmp_path / "memory", recipe, data)
    plan = quantize_folder(source, tmp_path / "disk", recipe, calibration=data)
    assert stored(tmp_path / "disk") == stored(tmp_path / "memory")
    assert told(plan) == told(expected)


def test_a_head_from_disk_to_disk_takes_the_folded_norm_along(tmp_path):
    spiked(llama(tied=False)).save_pretrained(tmp_path / "in")
    recipe = Recipe.of({"lm_head": "int4", "*": "int3"}).rewritten("awq")
    expected = in_memory(tmp_path / "in", tmp_path / "memory", recipe, IDS)
    quantize_folder(tmp_path / "in", tmp_path / "disk", recipe, calibration=IDS)
    assert expected.changed[-1].rewrites[0].into == "model.norm"
    assert expected.changed[-1].rewrites[0].choice
    assert stored(tmp_path / "disk") == stored(tmp_path / "memory")


def test_a_job_that_is_killed_ends_in_the_same_bytes(tmp_path):
    source = tmp_path / "in"
    spiked(stirred(architectures.build("gpt2"))).save_pretrained(source)
    torch.save(IDS, source / "ids.pt")
    recipe = "awq(gptq(int3))"
    expected = quantize_folder(source, tmp_path / "whole", recipe, calibration=lowbit.Calibration(IDS, batch_size=2))
    output = killed(recipe, source, tmp_path / "out", tmp_path / "work", [20, 45, 70, 95, 10**6])
    assert "[9, 9, 9, 9, 0]" in output[-1]
    assert stored(tmp_path / "out") == stored(tmp_path / "whole")
    assert expected.changed[0].rewrites


RANKS = """
import sys, torch
from torch import distributed
import lowbit
from tests.test_architectures import build
from tests.test_rewrites import calls_for, spiked, stirred
distributed.init_process_group("gloo")
parts = []
for name, recipe in (("gpt2", "awq(gptq(int3))"), ("opt", "smoothquant(int8_static_activation_int8_weight, alpha=auto)")):
    model = spiked(stirred(build(name)))
    plan = lowbit.quantize_(model, recipe, calibration=calls_for(name, 5))
    parts.append([{l.name: [str(r) for r in l.rewrites] for l in plan.layers}, {k: v for k, v in model.state_dict().items()}])
torch.save(parts, f"{sys.argv[1]}-{distributed.get_rank()}")
distributed.destroy_process_group()
"""


def without_figures(records: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: [record.rpartition(",")[0] for record in found] for name, found in records.items()}


def test_several_processes_make_what_one_makes(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    for count in (1, 2):
        done = under_torchrun(count, script, tmp_path / str(count))
        assert done.returncode == 0, done.stderr
    alone, first, second = (torch.load(tmp_path / name) for name in ("1-0", "2-0", "2-1"))
    for (records, state), (one, ours), (two, theirs) in zip(alone, first, second, strict=True):
        assert one == two
        assert any(records.values())
        assert all(torch.equal(tensor, theirs[key]) for key, tensor in ours.items())
        same = [float((tensor == ours[key]).double().mean()) for key, tensor in state.items() if key.endswith("packed")]
        assert sum(same) / len(same) >= 0.9999
        assert without_figures(records) == without_figures(one)


def test_the_command_line(tmp_path, capsys):
    from lowbit.command import run
    from tests.models import exam_and_text, word_model

    source = exam_and_text(word_model(tmp_path / "in"))
    assert run(["quantize", str(source), "-r", "awq(gptq(int4_g32))", "-o", str(tmp_path / "out")]) == 2
    assert "the rewrite awq looks at data: give a text with --calibration FILE" in capsys.readouterr().err.replace("\n", " ")
    command = ["quantize", str(source), "-r", "awq(gptq(int4_g32))", "--calibration", str(source / "text.txt"), "--rows", "3"]
    assert run([*command, "-o", str(tmp_path / "out"), "--json"]) == 0
    assert '"rewrites"' in capsys.readouterr().out
    assert run(["plan", str(source), "-r", "awq(int4)"]) == 0
    assert "rewritten before: awq" in capsys.readouterr().out


def test_the_bench_times_the_search_and_the_rounder(tmp_path, capsys):
    quantizing.main(["--shapes", "8x16", "--recipes", "awq(gptq(int4, passes=1)),hqq(int4)", "--repeats", "1",
                     "--out", str(tmp_path / "out.json")])  # fmt: skip
    rewritten, plain = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert rewritten["rewrite"] > 0 < rewritten["round"]
    assert "rewrite" not in plain
    assert "awq(gptq(int4, passes=1))" in capsys.readouterr().out
