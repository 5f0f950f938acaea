"""Modules that rewrites put into a model: what they compute, and that files bring them back."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit import CheckpointError, QLinear, quantize_
from lowbit.rewrites.hadamard import Rotation
from lowbit.transforms import Hadamard, RMSNorm, TransformedLinear


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24, bias=False), nn.Linear(24, 24))


def rewritten() -> nn.Sequential:
    model = plain()
    model[0] = RMSNorm(1e-5)
    for place, with_bias in ((1, False), (3, True)):
        layer = model[place]
        bias = nn.Parameter(torch.randn(layer.out_features)) if with_bias else layer.bias
        model[place] = TransformedLinear(layer.weight, bias, Rotation.of(layer.in_features, None).module())
    return model


def data(rows: int = 6) -> Tensor:
    return torch.randn(rows, 24, generator=torch.Generator().manual_seed(1))


def test_a_float_model_with_inserted_modules_comes_back_from_a_file(tmp_path: Path) -> None:
    model = rewritten()
    lowbit.save(model, tmp_path)
    for fresh in (plain(), plain().to("meta"), rewritten()):
        again = lowbit.load(tmp_path, model=fresh)
        assert isinstance(again[3], TransformedLinear)
        assert isinstance(again[0], RMSNorm)
        assert torch.equal(again(data()), model(data()))


@pytest.mark.parametrize("recipe", ["int4_g32", "int8_dynamic_activation_int8_weight"])
def test_quantized_layers_keep_what_is_done_to_their_input(recipe: str, tmp_path: Path) -> None:
    model = rewritten()
    dense = copy.deepcopy(model)
    quantize_(model, recipe)
    assert isinstance(model[3], QLinear)
    assert isinstance(model[3].transform, Hadamard)
    if recipe == "int4_g32":
        for place in (1, 3, 4):
            with torch.no_grad():
                dense[place].weight.copy_(model[place].weight.dequantize())
        torch.testing.assert_close(model(data()), dense(data()))
    lowbit.save(model, tmp_path)
    again = lowbit.load(tmp_path, model=plain())
    assert isinstance(again[3].transform, Hadamard)
    assert torch.equal(again(data()), model(data()))


def test_a_quantized_layer_with_a_transform_is_copied_pickled_and_compiled_with_it() -> None:
    model = rewritten()
    quantize_(model, "int8")
    want = model(data())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    fresh = copy.deepcopy(model)
    for module in fresh.modules():
        if isinstance(module, Hadamard):
            module.factor_0.zero_()
    fresh.load_state_dict(model.state_dict())
    for again in (copy.deepcopy(model), torch.load(file, weights_only=False), fresh):
        assert torch.equal(again(data()), want)
    compiled = torch.compile(model[3], backend="aot_eager", fullgraph=True)
    x = torch.randn(5, 48)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model[3](x))


def test_statistics_are_those_of_what_a_layer_multiplies() -> None:
    found, direct = rewritten(), nn.Sequential(plain()[4])
    direct[0] = TransformedLinear(direct[0].weight, direct[0].bias, Rotation.of(24, None).module())
    rotated = nn.Sequential(nn.Linear(24, 24))
    rotated[0].weight, rotated[0].bias = direct[0].weight, direct[0].bias
    x = data(64) * torch.arange(1, 25)
    transform = direct[0].transform
    assert transform is not None
    quantize_(direct, "gptq(int3)", calibration=x)
    quantize_(rotated, "gptq(int3)", calibration=transform(x).detach())
    assert torch.equal(direct[0].weight, rotated[0].weight)
    plan = quantize_(found, "gptq(int3)", calibration=x)
    assert all(layer.loss is not None and 0 < layer.loss < 0.1 for layer in plan.quantized)


def test_an_rms_norm_divides_by_the_root_mean_square() -> None:
    x = data().double()
    want = x / (x.square().mean(-1, keepdim=True) + 0.5).sqrt()
    torch.testing.assert_close(RMSNorm(0.5)(x), want)
    assert RMSNorm(0.5)(x.bfloat16()).dtype == torch.bfloat16


def test_a_transform_keeps_its_numbers_when_the_model_changes_its_dtype() -> None:
    model = rewritten().bfloat16()
    transform = model[3].transform
    assert isinstance(transform, Hadamard)
    assert all(factor.dtype == torch.float32 for factor in transform.factors)
    assert transform(torch.ones(2, 48, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("change", [{"kind": "magic"}, {"orders": None}, {"orders": [3, 5]}])
def test_settings_that_do_not_fit_are_refused_and_leave_the_model(change: dict, tmp_path: Path, monkeypatch) -> None:
    model = rewritten()
    settings = {"kind": "hadamard", **model[3].transform.settings, **change}
    kind = settings.pop("kind")
    monkeypatch.setattr(Hadamard, "settings", property(lambda self: settings))
    monkeypatch.setattr(Hadamard, "kind", kind)
    lowbit.save(model, tmp_path)
    fresh = plain()
    before = [*fresh.modules()]
    with pytest.raises(CheckpointError, match="transform"):
        lowbit.load(tmp_path, model=fresh)
    assert [*fresh.modules()] == before
