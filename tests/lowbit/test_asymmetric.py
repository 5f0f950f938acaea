"""Weights aimed at what the float model gives: the formula, and the run that finds out how far inputs drifted from it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lowbit import LayerConfig, QLinear, quantize_
from lowbit.algorithms import ROUNDERS, Rounded, Rounder
from lowbit.algorithms.gptq import gptq
from lowbit.algorithms.hessian import drift_target, factored
from lowbit.algorithms.rtn import rtn
from lowbit.calibration.topo_order import topological_levels
from lowbit.grid import to_values
from lowbit.scheme import SCHEMES
from lowbit.statistics import Statistics
from tests.ecosystem import test_architectures as architectures
from tests.lowbit.calibration.test_calibrate import Experts, inputs_of
from tests.lowbit.test_rounders import LOW, normal
from tests.support.models import llama, tokens
from tests.support.strategies import seeds


def inputs(k: int, seed: int, rows: int = 512) -> tuple[Tensor, Tensor]:
    """Inputs as layers see them, and those of the float model, which differ from them by a fifth and in the same directions."""
    generator = torch.Generator().manual_seed(seed)
    turn = torch.randn(k, k, generator=generator) * torch.logspace(0, -1.5, k)[:, None]
    x, noise = torch.randn(2, rows, k, generator=generator) @ turn
    return x, x + 0.2 * noise + 0.1 * x.roll(1, -1)


# ---- the formula -----------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.integers(1, 24), st.integers(1, 60), st.sampled_from([0.01, 0.1, 1.0]), seeds)
def test_the_aim_is_the_least_squares_solution(k, rows, damping, seed):
    """Against QR on all rows and on the damping's, in float64: the statistics are float32, whose rounding the damping limits."""
    x, float_x = inputs(k, seed % 1000, rows)
    w = normal(3, k, seed % 1000).double()
    wide, float_wide = x.double(), float_x.double()
    held = (damping * rows * wide.square().mean()).sqrt() * torch.eye(k, dtype=torch.float64)
    want = torch.linalg.lstsq(torch.cat([wide, held]), torch.cat([float_wide @ w.T, held @ w.T])).solution.T
    statistics = Statistics.of(x, float_x=float_x)
    found = drift_target(w, statistics, factored(statistics.gram, damping))
    torch.testing.assert_close(found, want, rtol=0, atol=1e-4 * float(w.abs().max()) * (1 + k / damping * 1e-2))


@pytest.mark.parametrize("name", LOW)
def test_where_nothing_drifted_it_is_plain(name):
    x, _ = inputs(192, 5)
    w = normal(8, 192, 5)
    want = gptq(w, SCHEMES[name], Statistics.of(x))
    for statistics in (Statistics.of(x), Statistics.of(x, float_x=x)):
        assert torch.equal(gptq(w, SCHEMES[name], statistics, asymmetric=True).codes, want.codes)
    drifted = Statistics.of(x, float_x=2 * x)
    assert torch.equal(gptq(w, SCHEMES[name], drifted).codes, want.codes)  # nobody asked
    assert not torch.equal(gptq(w, SCHEMES[name], drifted, asymmetric=True).codes, want.codes)


@pytest.mark.parametrize("name", LOW)
@pytest.mark.parametrize("seed", range(3))
def test_outputs_are_nearer_to_those_of_the_float_model(name, seed):
    scheme, w = SCHEMES[name], normal(16, 192, seed)
    x, float_x = inputs(192, seed)
    statistics = Statistics.of(x, float_x=float_x)

    def error(asymmetric: bool) -> float:
        found = gptq(w, scheme, statistics, asymmetric=asymmetric)
        values = to_values(found.codes, scheme, found.scales, torch.float64)
        return float((float_x.double() @ w.double().T - x.double() @ values.T).square().mean())

    assert error(True) < error(False)


@pytest.mark.parametrize("value", [1, "yes", None])
def test_asymmetric_is_true_or_false(value):
    with pytest.raises(ValueError, match="asymmetric must be true or false"):
        LayerConfig(SCHEMES["int3"], rounder="gptq", options={"asymmetric": value or 0})


# ---- the run ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def seen(monkeypatch) -> list[Statistics]:
    """What the rounder ``spy``, which asks for the drift, was given for each layer in turn."""
    found: list[Statistics] = []

    def spy(weight: Tensor, scheme: Any, statistics: Statistics) -> Rounded:
        found.append(statistics)
        return rtn(weight, scheme)

    monkeypatch.setitem(ROUNDERS, "spy", Rounder(spy, needs_statistics=True, needs_drift=lambda: True))
    return found


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi", "gemma3"])
def test_statistics_are_those_of_the_finished_model_beside_the_float_one(name, seen):
    """Each layer reads what it will read once all are quantized. Tolerances: products in float32, of 48 rows at a time."""
    model = architectures.build(name).eval()
    before = copy.deepcopy(model)
    calls = [{"input_ids": part} for part in tokens(4, 12).split(2)]
    order: list[str] = []
    quantize_(
        model, LayerConfig(SCHEMES["int3"], rounder="spy"), calibration=calls, progress=lambda e, i, n: order.append(e.name)
    )
    assert len(order) == len(seen) > 6
    for layer, statistics in zip(order, seen, strict=True):
        x, float_x = inputs_of(model, layer, calls), inputs_of(before, layer, calls)
        assert statistics.drift is not None
        torch.testing.assert_close(statistics.gram.double(), x.T @ x / len(x), rtol=1e-4, atol=1e-5 * float(x.square().mean()))
        size = float((float_x - x).square().mean().sqrt() * x.square().mean().sqrt())
        atol = 1e-4 * size + 1e-6 * float(x.square().mean())
        torch.testing.assert_close(statistics.drift.double(), (float_x - x).T @ x / len(x), rtol=1e-3, atol=atol)
    assert sum(bool(statistics.drift.any()) for statistics in seen) >= len(seen) - 4  # all but what reads the first block's input


def test_layers_that_do_not_ask_are_rounded_as_ever(seen):
    """A block in which none asks is calibrated in one piece, also where one behind it asks."""
    recipe = {"*layers.0.*": "gptq(int3)", "*layers.1.*": LayerConfig(SCHEMES["int3"], rounder="spy")}
    model, plain = llama(), llama()
    quantize_(model, recipe, calibration=tokens(4, 10))
    quantize_(plain, {"*layers.0.*": "gptq(int3)"}, calibration=tokens(4, 10))
    for name, module in plain.named_modules():
        if isinstance(module, QLinear):
            assert torch.equal(module.weight.codes(), model.get_submodule(name).weight.codes())
    assert len(seen) == 7
    assert all(bool(statistics.drift.any()) for statistics in seen)


def test_experts_that_hear_other_tokens_are_compared_with_nothing(seen):
    torch.manual_seed(0)
    quantize_(nn.Sequential(Experts(), Experts()), LayerConfig(SCHEMES["int3"], rounder="spy"), calibration=torch.randn(40, 8))
    assert len(seen) == 8
    assert not any(bool(statistics.drift.any()) for statistics in seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rewrite", ["awq", "rotation", "smoothquant"])
def test_behind_a_rewrite(rewrite, dtype):
    """The weights of a rewritten layer wait for their codes in float32, and run in the model's dtype until then."""
    recipe = f"{rewrite}(gptq({{}}, asymmetric=true))"
    scheme = "int8_dynamic_activation_int8_weight" if rewrite == "smoothquant" else "int4_g32"
    model, ids = llama(dtype=dtype), tokens(6, 12)
    with torch.no_grad():
        want = model(ids).logits.float()
        plan = quantize_(model, recipe.format(scheme), calibration=ids)
        far = float((model(ids).logits.float() - want).norm() / want.norm())
    assert all(layer.loss is not None for layer in plan.quantized)
    assert far < 0.25


# ---- the order -------------------------------------------------------------------------------------------------------


class Tangled(nn.Module):
    """What layers give comes to others through views, in-place operators and indices; ``never`` is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.never, self.last, self.b, self.a, self.c, self.side = (nn.Linear(4, 4) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.zeros_like(x)
        kept[1:].add_(self.a(x)[1:])
        y = torch.empty_like(x)
        y.index_copy_(0, torch.arange(len(x)), self.b(kept.view(2, -1).view(-1, 4)))
        z = torch.cat(self.c(y).split(1))
        return self.last(z + self.side(x))


def test_the_order_is_that_of_reading():
    block = Tangled()
    names = ("never", "last", "b", "a", "c", "side")
    modules = {name: block.get_submodule(name) for name in names}
    with torch.no_grad():
        assert topological_levels(modules, lambda: block(torch.randn(6, 4))) == [["a", "side"], ["b"], ["c"], ["never", "last"]]
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in block.modules())
    assert topological_levels(modules, lambda: None) == [list(names)]


@pytest.mark.parametrize(
    ("name", "leaves"),
    [
        ("llama", [{"q_proj", "k_proj", "v_proj"}, {"o_proj"}, {"gate_proj", "up_proj"}, {"down_proj"}]),
        ("gpt2", [{"c_attn"}, {"c_proj"}, {"c_fc"}, {"c_proj"}]),
    ],
)
def test_the_order_of_a_block(name, leaves):
    model = architectures.build(name).eval()
    block = next(module for path, module in model.named_modules() if path.endswith(".0"))
    modules = {path: module for path, module in block.named_modules() if hasattr(module, "weight") and module.weight.dim() == 2}
    with torch.no_grad():
        found = topological_levels(modules, lambda: model(tokens(1, 5)))
    assert [{path.rpartition(".")[2] for path in step} for step in found] == leaves
