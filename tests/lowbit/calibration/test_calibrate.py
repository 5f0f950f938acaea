"""Calibrating block by block: each layer's statistics are those of its inputs in a model whose earlier blocks are quantized."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit import LayerConfig, QLinear, QTensor, quantize_
from lowbit.algorithms import ROUNDERS, Rounded, Rounder
from lowbit.algorithms.rtn import rtn
from lowbit.calibration.blocks import call
from lowbit.calibration.data import Calibration
from lowbit.environment import only_device
from lowbit.scheme import SCHEMES
from lowbit.statistics import Statistics
from tests.ecosystem import test_architectures as architectures
from tests.support.models import gpt2, llama, mlp, tokens

INT3 = SCHEMES["int3"]


@pytest.fixture
def seen(monkeypatch) -> list[tuple[Tensor, Statistics]]:
    """What the rounder ``spy`` was given: (weight, statistics) of each layer in turn."""
    found: list[tuple[Tensor, Statistics]] = []

    def spy(weight: Tensor, scheme: Any, statistics: Statistics) -> Rounded:
        found.append((weight.clone(), statistics))
        return rtn(weight, scheme)

    monkeypatch.setitem(ROUNDERS, "spy", Rounder(spy, needs_statistics=True))
    return found


def spying(scheme: str = "int3") -> LayerConfig:
    return LayerConfig(SCHEMES[scheme], rounder="spy")


Kept = Callable[[str, Tensor, Any], Tensor]  # what counts of what a layer of this name reads in a call


def inputs_of(model: nn.Module, name: str, calls: Sequence[Any], kept: Kept = lambda name, x, call: x) -> Tensor:
    """Every row that the layer ``name`` reads in these calls of the whole model, float64 [rows, K]."""
    rows: list[Tensor] = []
    for given in calls:

        def record(module: nn.Module, args: tuple[Tensor, ...], given: Any = given) -> None:
            rows.append(kept(name, args[0].detach(), given))

        hook = model.get_submodule(name).register_forward_pre_hook(record)
        with torch.no_grad():
            model(**given) if isinstance(given, Mapping) else model(*given)
        hook.remove()
    return torch.cat([x.reshape(-1, x.shape[-1]) for x in rows]).double()


def block_of(name: str) -> str:
    parts = name.split(".")
    place = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts))
    return ".".join(parts[: place + 1])


MODELS = ["llama", "gpt2", "opt", "qwen2_moe", "gemma3", "t5", "bart"]


@pytest.mark.parametrize("name", MODELS)
def test_statistics_are_those_of_the_layer_in_a_model_whose_earlier_blocks_are_quantized(name, seen):
    model = architectures.build(name).eval()
    draw = torch.Generator().manual_seed(3)
    calls = [{"input_ids": torch.randint(3, 96, (2, 8 + i), generator=draw)} for i in range(3)]
    if name in ("t5", "bart"):
        calls = [{**call, "decoder_input_ids": call["input_ids"].flip(1)} for call in calls]
    check_statistics(model, calls, seen)


def check_statistics(
    model: nn.Module, calls: Sequence[Any], seen: list[tuple[Tensor, Statistics]], kept: Kept = lambda name, x, call: x
) -> None:
    """Quantize ``model`` on ``calls``: each layer's statistics are those of what it reads in whole runs of a model whose earlier
    blocks are quantized."""
    mixed = copy.deepcopy(model)  # becomes the quantized model a block at a time
    plan = quantize_(model, spying(), calibration=calls)
    recorded = [(weight, statistics) for weight, statistics in seen if statistics is not None]
    together = any("calibrated together" in note or "as one block" in note for note in plan.notes)  # on the float model
    blocks: dict[str, list[Any]] = {}
    for layer in plan.quantized:
        blocks.setdefault(block_of(layer.name), []).append(layer)

    def turn(path: str) -> int:  # what stands in no block comes last
        return 2 if not path.rpartition(".")[2].isdecimal() else 1 if "decoder" in path else 0

    for path in sorted(blocks, key=turn):
        for layer in [layer for layer in blocks[path] if layer.kind != "experts"]:
            stored = mixed.get_submodule(layer.name).weight
            weight = (stored.t() if layer.kind == "conv1d" else stored).detach()
            (statistics,) = [s for w, s in recorded if torch.equal(w, weight)]
            x = inputs_of(mixed, layer.name, calls, kept)
            torch.testing.assert_close(statistics.gram.double(), x.T @ x / len(x), rtol=1e-3, atol=1e-5)
            torch.testing.assert_close(statistics.absmax.double(), x.abs().amax(0), rtol=1e-4, atol=1e-5)
            assert statistics.count == len(x)
            error = (weight.double() - model.get_submodule(layer.name).weight.dequantize().double()) @ x.T
            loss = float(error.square().sum() / (weight.double() @ x.T).square().sum()) if bool(x.any()) else 0.0
            assert layer.loss == pytest.approx(loss, rel=1e-2)
        for layer in [] if together else blocks[path]:
            parent, _, leaf = layer.name.rpartition(".")
            setattr(mixed.get_submodule(parent), leaf, getattr(model.get_submodule(parent), leaf))
    assert len(recorded) == sum(layer.kind != "experts" for layer in plan.quantized)


def test_what_stands_outside_of_blocks_is_calibrated_on_the_quantized_model(seen):
    model = llama(tied=False)
    ids = tokens(4, 10)
    plan = quantize_(model, {"lm_head": spying("int4"), "*": spying()}, calibration=ids)
    assert plan.quantized[-1].name == "lm_head"
    x = inputs_of(model, "lm_head", [{"input_ids": ids}])
    torch.testing.assert_close(seen[-1][1].gram.double(), x.T @ x / len(x), rtol=1e-4, atol=1e-6)


def test_a_tied_head_and_embedding_are_one_and_the_head_s_data_decides(seen):
    model = llama(tied=True)
    plan = quantize_(model, {"lm_head": spying("int4"), "*": spying()}, calibration=tokens(4, 10))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert len(seen) == 15  # the weight of both went to the rounder once
    assert {layer.name for layer in plan.quantized if layer.notes} == set()


def test_a_model_without_blocks_is_one_block_and_the_plan_says_so(seen):
    model = mlp()
    float_model = copy.deepcopy(model)
    x = torch.randn(80, 40)
    plan = quantize_(model, spying(), calibration=x)
    assert plan.notes == ("no stack of blocks was found: calibrated as one block, the whole model",)
    assert "the whole model" in str(plan)
    with torch.no_grad():
        second = float_model[1](float_model[0](x)).double()
    torch.testing.assert_close(seen[1][1].gram.double(), second.T @ second / 80, rtol=1e-5, atol=1e-7)


class Block(nn.Module):
    def __init__(self, k: int = 8) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(k, k), nn.Linear(k, k)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.a(x)) + self.b(x)


class Skipping(nn.Module):
    """Blocks of which the second reads something new."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks[0](x)
        return self.blocks[2](self.blocks[1](y * 2))


class Changing(Skipping):
    """Blocks between which the tensor is changed in place: the very tensor, with other numbers."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks[0](x)
        return self.blocks[2](self.blocks[1](y.mul_(2)))


class Repeating(Skipping):
    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return x


@pytest.mark.parametrize(
    ("make", "why"),
    [(Skipping, "does not read what the one before gave"), (Changing, "does not read"), (Repeating, "more than once")],
)
def test_blocks_that_are_no_chain_are_calibrated_together_and_the_plan_says_why(make, why, seen):
    model = make()
    duplicate = copy.deepcopy(model)
    x = torch.randn(20, 8)
    plan = quantize_(model, spying(), calibration=x)
    assert any(why in note for note in plan.notes)
    rows: list[Tensor] = []
    duplicate.blocks[1].b.register_forward_pre_hook(lambda module, args: rows.append(args[0].detach().double()))
    duplicate(x)
    expected = torch.cat(rows)
    torch.testing.assert_close(seen[3][1].gram.double(), expected.T @ expected / len(expected), rtol=1e-4, atol=1e-6)


def test_blocks_in_a_plain_sequential_are_blocks(seen):
    model = nn.Sequential(Block(), Block(), Block())
    plan = quantize_(model, spying(), calibration=torch.randn(20, 8))
    assert plan.notes == ()
    assert len(plan.quantized) == 6


class Experts(nn.Module):
    """A router of which expert 2 never hears."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        chosen = (x.sum(-1) > 0).long()
        for i, expert in enumerate(self.experts):
            if bool((chosen == i).any()):
                y[chosen == i] = expert(x[chosen == i])
        return y


def test_experts_without_tokens_are_rounded_without_data_and_named(seen):
    model = nn.Sequential(Experts(), Experts())
    plan = quantize_(model, spying(), calibration=torch.randn(40, 8))
    unreached = [layer.name for layer in plan.layers if layer.notes]
    assert unreached == [f"{i}.experts.2.{leaf}" for i in (0, 1) for leaf in "ab"]
    assert all(layer.loss is None and "no calibration data reached it" in layer.notes[0] for layer in plan.layers if layer.notes)
    assert all(isinstance(model.get_submodule(layer.name), QLinear) for layer in plan.layers)
    assert len(seen) == 8
    assert sum(statistics.count for _, statistics in seen[:4:2]) == 40


def test_layers_that_read_one_tensor_share_statistics_and_others_do_not(seen):
    quantize_(llama(), spying(), calibration=tokens(4, 10))
    q, k, v, o, gate, up, down = (statistics.gram for _, statistics in seen[:7])
    assert q is k is v
    assert gate is up
    assert len({id(gram) for gram in (q, o, gate, down)}) == 4


class Parting(nn.Module):
    """Two layers that read one tensor, but for inputs that begin with a negative number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x if x[0, 0] > 0 else x * 3)


def test_layers_that_part_later_have_statistics_of_their_own(seen):
    batches = [torch.rand(5, 8) + 0.1, -torch.rand(5, 8)]
    quantize_(nn.Sequential(Parting()), spying(), calibration=batches)
    for (_, statistics), factor in zip(seen, (1, 3), strict=True):
        x = torch.cat([batches[0], batches[1] * factor]).double()
        torch.testing.assert_close(statistics.gram.double(), x.T @ x / 10, rtol=1e-5, atol=1e-7)


def test_padding_does_not_count(seen):
    ids = tokens(2, 10)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    quantize_(llama(), spying(), calibration=[{"input_ids": ids, "attention_mask": mask}])
    assert seen[0][1].count == 16


def test_nan_in_calibration_raises_with_layer_and_batch(seen):
    x = torch.randn(10, 40)
    x[3, 4] = float("nan")
    with pytest.raises(ValueError, match=r"0, batch 1: 1 of 10 rows hold NaN"):
        quantize_(mlp(), spying(), calibration=[torch.randn(10, 40), x])


def test_a_recipe_that_needs_data_says_so_before_anything_changes(seen):
    model = llama()
    with pytest.raises(ValueError, match=r"the rounder spy of model\.layers\.0.* and 13 more layers looks at data"):
        quantize_(model, spying())
    with pytest.raises(ValueError, match="a static activation_scale of model"):
        quantize_(model, LayerConfig(SCHEMES["int8"], lowbit.Scheme("int8", scale="fp32"), activation_scale="static"))
    assert not any(isinstance(module, QLinear) for module in model.modules())


def test_the_model_is_left_as_it_was_but_for_its_layers(seen):
    model = llama().train()
    model.model.layers[1].eval()
    model.config.use_cache = True
    quantize_(model, spying(), calibration=tokens(4, 10))
    assert model.config.use_cache
    assert model.training
    assert not model.model.layers[1].mlp.training
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "forward" not in module.__dict__


def test_calibration_in_inference_mode_gives_a_model_that_autograd_takes(seen):
    model = mlp()
    with torch.inference_mode():
        quantize_(model, spying(), calibration=torch.randn(50, 40))
    model(torch.randn(2, 40)).sum().backward()
    assert model[0].bias.grad is not None


def test_a_static_input_scale_is_the_largest_input_over_the_largest_code():
    model = mlp()
    x = torch.randn(50, 40)
    activation = lowbit.Scheme("int8", scale="fp32")
    quantize_(model, LayerConfig(SCHEMES["int8"], activation, activation_scale="static"), calibration=x)
    assert float(model[0].input_scale) == pytest.approx(float(x.abs().max()) / 127)
    rounded = (x / model[0].input_scale).round().clamp(-127, 127) * model[0].input_scale
    torch.testing.assert_close(
        model[0](x), nn.functional.linear(rounded, model[0].weight.dequantize(), model[0].bias), rtol=1e-4, atol=1e-4
    )
    assert not any(layer.notes for layer in lowbit.plan(mlp(), "int8").layers)


def test_progress_tells_the_loss_of_each_layer_as_it_goes(seen):
    reported: list[tuple[str, float | None, int, int]] = []
    plan = quantize_(
        gpt2(),
        spying(),
        calibration=tokens(),
        progress=lambda layer, done, total: reported.append((layer.name, layer.loss, done, total)),
    )
    assert reported == [(layer.name, layer.loss, i + 1, 8) for i, layer in enumerate(plan.quantized)]
    assert all(loss is not None and loss > 0 for _, loss, _, _ in reported)


@pytest.mark.gpu
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("make", [llama, gpt2, mlp])
def test_a_device_takes_a_block_at_a_time(make, keep):
    model, x = make(), torch.randn(50, 40) if make is mlp else tokens(4, 10)
    duplicate = copy.deepcopy(model)
    expected = quantize_(duplicate, "int4", calibration=x)
    there: set[str] = set()

    def reported(layer: Any, done: int, total: int) -> None:
        floats = (name for name, p in model.named_parameters() if p.is_cuda and not isinstance(p, QTensor))
        first = next((name for name in floats if name.endswith("weight")), "")
        there.add(".".join(first.split(".")[:3]))

    plan = quantize_(model, "int4", calibration=x, device="cuda", keep_on_device=keep, progress=reported)
    for layer, reference in zip(plan.quantized, expected.quantized, strict=True):
        module, other = model.get_submodule(layer.name), duplicate.get_submodule(layer.name)
        assert module.weight.is_cuda == keep
        assert layer.loss == pytest.approx(reference.loss, rel=1e-2)
        assert torch.equal(module.weight.to("cpu").codes(), other.weight.codes())
    assert not any(p.is_cuda for name, p in model.named_parameters() if "norm" in name or "embed" in name)
    if make is llama:
        assert len(there) > 1  # another block each time


def test_only_a_device_that_holds_all_of_a_model_is_its_own():
    model = llama()
    assert only_device(model) == torch.device("cpu")
    assert only_device(model.to("meta")) is None
    assert only_device(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta"))) is None
    assert only_device(nn.ReLU()) is None


def test_data_stays_where_it_is_for_a_model_on_several_devices():
    model = llama()
    (batch,) = Calibration(tokens(2, 4)).batches(model)
    expected = call(model, batch).logits
    model.unused = nn.Linear(1, 1, device="meta")
    assert torch.equal(call(model, batch).logits, expected)
