"""What cannot be rotated is refused by name before a weight is changed; norms are known by what they compute."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lowbit
from lowbit import quantize_
from lowbit.calibration.data import Batch
from lowbit.rewrites.emulation import distance, rotated_difference
from lowbit.rewrites.hadamard import Rotation
from lowbit.rewrites.norms import measure_norm
from lowbit.rewrites.residual_stream import find_residual_stream
from lowbit.rewrites.rotation import rotation
from tests.lowbit.rewrites.test_rotation import GPT2, PASSED_BY, SAME, Mixture, build, ids

# ---- what cannot be --------------------------------------------------------------------------------------------------


def refused(model: nn.Module, match: str, batches: list[Batch], **options: Any) -> None:
    modules, before = [*model.modules()], copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=match):
        rotation(model, batches, **options)
    assert [*model.modules()] == modules
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PASSED_BY)
def test_a_model_without_such_a_stream_is_refused_and_left_alone(name: str, dtype: torch.dtype) -> None:
    refused(build(name).to(dtype), PASSED_BY[name][3], [])


def test_the_probe_names_the_first_layer_that_reads_something_else() -> None:
    tokens = Batch((torch.arange(50),), {})
    refused(Mixture(look="mask"), r"would change what the model gives, .* first in layers\.1\.router", [tokens])
    refused(Mixture(look="gate"), "reaches the stream in front of .* otherwise than by being added", [tokens])


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Cubed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight**3, self.bias)


def test_a_layer_that_computes_something_of_its_own_is_tried_before_any_weight_is_changed() -> None:
    tokens = Batch((torch.arange(50),), {})
    for kind in (Doubled, Cubed):
        model = Mixture()
        model.layers[1].router.__class__ = kind
        if kind is Cubed:
            refused(model, r"layers\.1\.router \(Cubed\) is no plain layer", [tokens])
            continue
        with torch.no_grad():
            want = model(*tokens.args)
            rotation(model, [tokens])
            assert float((model(*tokens.args) - want).abs().max() / want.abs().max()) <= SAME


def test_rounding_that_grows_in_float32_is_told_from_a_difference() -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(**{**GPT2, "n_layer": 24, "initializer_range": 1.0})
    model = transformers.GPT2LMHeadModel(config).eval()
    tokens = Batch((), {"input_ids": ids(1, 24)})
    with torch.no_grad():
        assert rotated_difference(model, tokens, None, find_residual_stream(model, tokens), Rotation.of(48)) > SAME
        wide = copy.deepcopy(model).double()
        want = wide(**tokens.kwargs).logits
        rotation(model, [tokens])
        found = model.double()(**tokens.kwargs).logits
        for parameter in wide.parameters():  # what one rounding of each weight to float32 makes of itself in 24 such layers
            parameter *= 1 + 2**-24 * (2 * torch.rand_like(parameter) - 1)
        rounded = wide(**tokens.kwargs).logits
    assert float((found - want).norm()) < 4 * float((rounded - want).norm())


@pytest.mark.parametrize(
    ("before", "after", "want"),
    [
        ([1.0, -4.0], [1.0, -3.0], 0.25),
        ([1.0, -torch.inf], [1.5, -torch.inf], 0.5),
        ([1.0, -torch.inf], [1.0, 2.0], torch.inf),
        ([1.0, 2.0], [1.0, torch.nan], torch.inf),
        ([torch.nan], [torch.nan], torch.inf),
        ([0.0, 0.0], [0.0, 0.5], 0.5),
        ([], [], 0.0),
    ],
)
def test_a_difference_is_one_of_finite_numbers(before: list[float], after: list[float], want: float) -> None:
    assert distance([torch.tensor(before)], [torch.tensor(after)]) == want
    assert distance([torch.tensor(before)], []) == torch.inf


def test_other_models_are_refused_by_name() -> None:
    refused(nn.Sequential(nn.Linear(8, 8)), "give calibration data", [])
    refused(nn.Sequential(nn.Linear(8, 8)), "no residual stream was found", [Batch((torch.ones(2, 8),), {})])
    refused(build("mixtral"), "has none that is a layer of its own", [], online=True)
    quantized = build("llama")
    quantize_(quantized, "int8")
    refused(quantized, "rotate the model before", [])


@pytest.mark.parametrize("options", [{"online": 1}, {"seed": -1}, {"seed": 0.5}, {"turns": 2}])
def test_options_are_checked_with_the_recipe(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="rotation"):
        lowbit.rotation("int4", **options)


# ---- norms -----------------------------------------------------------------------------------------------------------


@given(size=st.integers(2, 40), kind=st.sampled_from(["layer", "rms", "llama", "gemma"]), seed=st.integers(0, 5))
@settings(deadline=None, max_examples=30)
def test_a_norm_is_known_by_what_it_computes(size: int, kind: str, seed: int) -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    made = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "llama": LlamaRMSNorm, "gemma": GemmaRMSNorm}[kind](size)
    torch.manual_seed(seed)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    found = measure_norm(made, size)
    assert found is not None
    assert found.centres == (kind == "layer")
    x = torch.randn(3, size)
    n = found.plain(x - x.mean(-1, keepdim=True) if found.centres else x).double()
    torch.testing.assert_close((n * found.gain + found.bias).float(), made(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("module", [nn.SiLU(), nn.Identity(), nn.Dropout(), nn.Softmax(-1), nn.Tanh(), nn.BatchNorm1d(8).eval()])
def test_other_modules_are_no_norms(module: nn.Module) -> None:
    assert measure_norm(module, 8) is None
