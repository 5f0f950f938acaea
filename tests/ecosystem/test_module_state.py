"""What torch and transformers do to the parameters of a model works on quantized ones."""

from __future__ import annotations

import copy
import io
import re
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import lowbit
from lowbit import QLinear, QTensor
from tests.support import models

SCHEMES = ["int4", "int3", "nf4", "nvfp4", "mxfp4", "int8_dynamic_activation_int8_weight"]
IDS = torch.arange(6)[None]


def quantized(scheme: str, tied: bool = True) -> nn.Module:
    model = models.llama(tied)
    lowbit.quantize_(model, {"*embed_tokens": "int4", "lm_head": "int4", "*": scheme})
    return model.requires_grad_(False)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_saved_folder_is_loaded_into_a_model_in_memory(scheme: str, tmp_path: Path) -> None:
    """As a Trainer resumes: load_file, then load_state_dict. States of older versions hold the same parts, a byte a code."""
    model, other = quantized(scheme), quantized(scheme)
    for name, parameter in other.named_parameters():
        if not isinstance(parameter, QTensor):
            parameter.data.add_(1 + len(name))
    other.model.layers[0].mlp.up_proj.weight.data += 1
    model.save_pretrained(tmp_path)
    assert not torch.equal(logits(other), logits(model))
    result = other.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert set(result.missing_keys) <= {"lm_head.weight"}
    assert all(name.startswith("model.rotary_emb.") for name in result.unexpected_keys)  # buffers that no state_dict has
    assert torch.equal(logits(other), logits(model))
    layer = model.model.layers[0].mlp.down_proj
    extra_state = f"{layer.scheme} K={layer.in_features}".encode()
    older = {**layer.weight.canonical()._parts(), "_extra_state": torch.tensor(list(extra_state), dtype=torch.uint8)}
    if layer.input_scale is not None:
        older["input_scale"] = layer.input_scale
    again = copy.deepcopy(layer)
    again.weight.data += 1
    again.load_state_dict(older)
    assert torch.equal(again.weight, layer.weight)


@pytest.mark.parametrize("scheme", ["int4", "int3", "nf4", "nvfp4", "mxfp4", "int8"])
@pytest.mark.parametrize("version", [1, 2])
def test_the_parts_of_a_weight_come_one_by_one(scheme: str, version: int, tmp_path: Path) -> None:
    """As from shards that end between them: the weight changes once all are there, and what has not come is missing."""
    layer, other = (QLinear(QTensor.quantize(torch.randn(8, 64), scheme)) for _ in range(2))
    lowbit.save(layer, tmp_path)
    parts, before = load_file(tmp_path / "model.safetensors"), other.weight.clone()
    if version == 1:
        parts["packed"] = parts.pop("weight").squeeze(-1)
    for i, (name, part) in enumerate(parts.items()):
        assert torch.equal(other.weight, before)
        result = other.load_state_dict({name: part}, strict=False)
        assert sorted(result.missing_keys) == sorted("weight" if n == "packed" else n for n in [*parts][i + 1 :])
        assert not result.unexpected_keys
    assert torch.equal(other.weight, layer.weight)
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({name: part})


def test_a_state_of_parts_that_do_not_fit_is_refused_with_the_names() -> None:
    layer = QLinear(QTensor.quantize(torch.randn(8, 64), "int4"))
    before, parts = layer.weight.clone(), layer.weight.canonical()._parts()
    for change, words in (
        ({"scale": parts["scale"][:, :0]}, "size mismatch for scale"),
        ({"packed": parts["packed"][:4]}, "size mismatch for packed"),
        ({"zero_point": None}, r"Missing key\(s\) in state_dict: \"zero_point\""),
        ({"zero_point": parts["zero_point"].expand(8, 2)}, "size mismatch for zero_point"),
        ({"_extra_state": torch.tensor(list(b"int8:row:bf16 K=64"), dtype=torch.uint8)}, "quantized as int8:row:bf16 K=64"),
    ):
        state = {name: part for name, part in {**parts, **change}.items() if part is not None}
        with pytest.raises(RuntimeError, match=words):
            layer.load_state_dict(state)
        assert torch.equal(layer.weight, before)


@pytest.mark.works_with("torch", "AveragedModel")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_averages_of_a_frozen_model_are_the_model(scheme: str) -> None:
    model = quantized(scheme)
    mean = AveragedModel(model)
    exponential = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    for averaged in (mean, exponential):
        for _ in range(3):
            averaged.update_parameters(model)
        assert torch.equal(logits(averaged.module), logits(model))


@pytest.mark.works_with("torch", "num_parameters")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_a_model_says_of_itself(scheme: str) -> None:
    plain, model = models.llama(), quantized(scheme)
    assert model.num_parameters() == plain.num_parameters()
    assert model.dtype == plain.dtype
    stored = sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    assert model.get_memory_footprint() == pytest.approx(stored)
    assert [(n, p.shape, p.dtype) for n, p in model.named_parameters()] == [
        (n, p.shape, p.dtype) for n, p in plain.named_parameters()
    ]
    assert model.half().dtype == torch.float16
    assert logits(model).dtype == torch.float16


@pytest.mark.works_with("torch", "parametrize")
def test_a_parametrization_over_a_weight() -> None:
    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    layer, x = QLinear(QTensor.quantize(torch.randn(8, 64), "int4")), torch.randn(3, 64)
    y = layer(x)
    nn.utils.parametrize.register_parametrization(layer, "weight", Doubled())
    torch.testing.assert_close(layer(x), 2 * y, rtol=1e-4, atol=1e-4)
    nn.utils.parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
    assert isinstance(layer.weight, QTensor)
    assert torch.equal(layer(x), y)


@pytest.mark.works_with("torch", "swap_tensors")
@pytest.mark.works_with("torch", "torch.func")
@pytest.mark.parametrize("scheme", ["int4", "nvfp4"])
def test_torch_func_and_swapped_tensors(scheme: str) -> None:
    layer, x = QLinear(QTensor.quantize(torch.randn(8, 64), scheme)), torch.randn(3, 64)
    dense = layer.weight.dequantize()
    y, pull = torch.func.vjp(layer, x)
    torch.testing.assert_close(pull(torch.ones_like(y))[0], torch.ones(3, 8) @ dense, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.func.jacrev(layer)(x[0]), dense, rtol=1e-4, atol=1e-4)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=re.escape("There is a performance drop"))
        torch.testing.assert_close(torch.func.vmap(layer)(x), layer(x), rtol=1e-4, atol=1e-4)
    mine, other = layer.weight, nn.Parameter(QTensor.quantize(torch.randn(8, 64), scheme), requires_grad=False)
    theirs = other.dequantize()
    torch.utils.swap_tensors(mine, other)
    assert layer.weight is mine
    assert torch.equal(mine.dequantize(), theirs)
    torch.testing.assert_close(layer(x), x @ theirs.t(), rtol=1e-4, atol=1e-4)


@pytest.mark.works_with("torch", "pickle, spawn")
def test_a_whole_model_goes_through_a_file(tmp_path: Path) -> None:
    model = quantized("int4")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(logits(again), logits(model))


@pytest.mark.works_with("transformers", ".half(), .float()")
@pytest.mark.parametrize("way", ["in memory", "loaded", "Config"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_model_says_the_same_of_itself_however_it_was_quantized(scheme: str, way: str, tmp_path: Path) -> None:
    model = models.llama()
    if way == "Config":
        model.save_pretrained(tmp_path)
        model = type(model).from_pretrained(tmp_path, quantization_config=lowbit.Config(scheme))
    else:
        lowbit.quantize_(model, scheme)
    if way == "loaded":
        model.save_pretrained(tmp_path)
        model = type(model).from_pretrained(tmp_path)
    assert (model.is_quantized, model.quantization_method, model.hf_quantizer.is_trainable) == (True, "lowbit", True)
    codes = {name: p.detach().clone() for name, p in model.named_parameters() if isinstance(p, QTensor)}
    assert codes
    for cast, dtype in ((model.half, torch.float16), (model.float, torch.float32), (model.bfloat16, torch.bfloat16)):
        assert cast() is model
        assert {p.dtype for p in model.parameters()} == {dtype} == {logits(model).dtype}
        for name, before in codes.items():
            assert torch.equal(model.get_parameter(name).packed, before.packed)
            assert torch.equal(model.get_parameter(name).scale, before.scale)
