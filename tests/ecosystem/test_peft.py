"""Adapters of PEFT over quantized layers: trained, saved, loaded, merged into the codes and taken out again."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit import QEmbedding, QLinear
from tests.support import models

SCHEMES = ["int4", "nvfp4", "nf4", "int8_dynamic_activation_int8_weight"]
LAYERS = ["q_proj", "v_proj", "down_proj"]
IDS = torch.randint(0, 40, (4, 8), generator=torch.Generator().manual_seed(0))

METHODS: dict[str, Callable[[], Any]] = {
    "LoRA": lambda: peft.LoraConfig(target_modules=LAYERS, r=4),
    "LoRA of embeddings": lambda: peft.LoraConfig(target_modules=[*LAYERS, "embed_tokens"], r=4),
    "rsLoRA": lambda: peft.LoraConfig(target_modules=LAYERS, r=4, use_rslora=True),
    "DoRA": lambda: peft.LoraConfig(target_modules=LAYERS, r=4, use_dora=True),
    "PiSSA": lambda: peft.LoraConfig(target_modules=LAYERS, r=4, init_lora_weights="pissa"),
    "OLoRA": lambda: peft.LoraConfig(target_modules=LAYERS, r=4, init_lora_weights="olora"),
    "LoHa": lambda: peft.LoHaConfig(target_modules=LAYERS, r=4),
    "LoKr": lambda: peft.LoKrConfig(target_modules=LAYERS, r=4),
    "VeRA": lambda: peft.VeraConfig(target_modules=LAYERS[:2], r=4),
    "AdaLoRA": lambda: peft.AdaLoraConfig(target_modules=LAYERS, init_r=4, target_r=2, total_step=20, tinit=2, tfinal=4),
    "IA3": lambda: peft.IA3Config(target_modules=LAYERS, feedforward_modules=["down_proj"]),
    "BOFT": lambda: peft.BOFTConfig(target_modules=LAYERS, boft_block_size=4),
    "OFT": lambda: peft.OFTConfig(target_modules=LAYERS, oft_block_size=4),
    "HRA": lambda: peft.HRAConfig(target_modules=LAYERS, r=4),
    "RoAd": lambda: peft.RoadConfig(target_modules=LAYERS, group_size=4),
    "MiSS": lambda: peft.MissConfig(target_modules=LAYERS, r=4),
    "FourierFT": lambda: peft.FourierFTConfig(target_modules=LAYERS, n_frequency=20),
    "VB-LoRA": lambda: peft.VBLoRAConfig(target_modules=LAYERS[:2], vector_length=4, num_vectors=8, r=2, topk=2),
    "RandLoRA": lambda: peft.RandLoraConfig(target_modules=LAYERS, r=4),
    "layer norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"], task_type="CAUSAL_LM"),
    "new tokens": lambda: peft.TrainableTokensConfig(token_indices=[1, 2, 3]),
}
PARTS: dict[str, Callable[[], Any]] = {
    "modules_to_save": lambda: peft.LoraConfig(target_modules=LAYERS, r=4, modules_to_save=["lm_head"]),
    "P-tuning": lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8),
}
REWRITING = ("PiSSA", "OLoRA")  # take a part out of the base weight when they start


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(peft|torch|transformers)\b")
        yield


def base(scheme: str) -> Any:
    torch.manual_seed(0)
    model = models.llama(False)
    lowbit.quantize_(model, scheme)
    return model


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def trained(model: Any, method: str) -> tuple[Any, list[float]]:
    """An adapter over ``model`` after a few steps, and the loss of each."""
    torch.manual_seed(1)
    adapted = peft.get_peft_model(model, METHODS[method]()).train()
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=3e-2)
    losses = []
    for _ in range(5):
        loss = adapted(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return adapted.eval(), losses


def layers(model: nn.Module) -> dict[str, QLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QLinear)}


def as_floats(adapted: Any) -> Any:
    """``adapted`` over float layers with the values of its quantized ones."""
    duplicate = copy.deepcopy(adapted)
    for module in list(duplicate.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, QLinear):
                made: nn.Module = nn.Linear(child.in_features, child.out_features, bias=False)
            elif isinstance(child, QEmbedding):
                made = nn.Embedding(*child.weight.shape)
            else:
                continue
            made.weight.data = child.weight.dequantize()
            setattr(module, name, made)
    return duplicate


def assert_rounded(found: nn.Module, before: nn.Module, floats: nn.Module) -> None:
    """The weights of ``found`` are those of ``before`` with the values of ``floats`` written into them."""
    wanted, starts = dict(floats.named_modules()), layers(before)
    for name, layer in layers(found).items():
        expected = starts[name].weight.detach().clone()
        expected.copy_(wanted[name].weight.detach())
        # A product of the adapter that is summed in another order may move a value across the middle of two codes.
        same = layer.weight.dequantize().isclose(expected.dequantize(), rtol=1e-5, atol=0).double().mean()
        assert same > 0.99, (name, float(same))


@pytest.mark.sampled(each="method", count=1)
@pytest.mark.parametrize(
    ("method", "scheme"),
    [
        pytest.param(name, scheme, marks=pytest.mark.works_with("PEFT", name))
        for name in METHODS
        for scheme in (SCHEMES if name in ("LoRA", "DoRA") else SCHEMES[:2])
    ],
)
def test_an_adapter_is_trained_kept_merged_and_taken_out(method: str, scheme: str, tmp_path: Path) -> None:
    model = base(scheme)
    adapted, losses = trained(copy.deepcopy(model), method)
    assert losses[-1] < losses[0] - 0.005
    y = logits(adapted)
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path).eval()
    torch.testing.assert_close(logits(again), y, rtol=0, atol=0)
    for mine, theirs in zip(layers(adapted).values(), layers(model).values(), strict=True):
        assert method in REWRITING or torch.equal(mine.weight, theirs.weight)

    floats = as_floats(adapted)
    for safe in (False, True):
        merged, duplicate = copy.deepcopy(adapted), copy.deepcopy(floats)
        merged.merge_adapter(safe_merge=safe)
        duplicate.merge_adapter(safe_merge=safe)
        assert_rounded(merged, adapted, duplicate)
        apart, back = copy.deepcopy(merged), copy.deepcopy(as_floats(merged))
        apart.unmerge_adapter()
        back.unmerge_adapter()
        assert_rounded(apart, merged, back)
    whole = merged.merge_and_unload() if method == "layer norms" else copy.deepcopy(adapted).merge_and_unload()
    assert type(whole) is type(model)
    assert len(layers(whole)) == len(layers(model))
    torch.testing.assert_close(logits(whole), logits(merged), rtol=1e-4, atol=1e-4)


@pytest.mark.works_with("PEFT", "SHiRA: refused")
def test_what_changes_the_weight_in_each_forward_is_refused() -> None:
    """SHiRA adds what it trains into a copy of the weight, where it would be rounded away."""
    model = base("int4")
    adapted = peft.get_peft_model(model, peft.ShiraConfig(target_modules=LAYERS, r=2)).train()
    loss = adapted(input_ids=IDS, labels=IDS).loss
    with pytest.raises(RuntimeError, match="a quantized weight has no gradient"):
        loss.backward()


@pytest.mark.works_with("PEFT", "prepare_model_for_kbit_training")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_model_is_prepared(scheme: str, dtype: torch.dtype) -> None:
    model = base(scheme).to(dtype)
    codes = {name: layer.weight.detach().clone() for name, layer in layers(model).items()}
    prepared = peft.prepare_model_for_kbit_training(model)
    for name, layer in layers(prepared).items():
        assert not layer.weight.requires_grad
        assert all(torch.equal(a, b) for a, b in zip(parts(layer.weight), parts(codes[name]), strict=True))
    assert prepared.model.norm.weight.dtype == torch.float32
    prepared.gradient_checkpointing_enable()
    _, losses = trained(prepared, "LoRA")
    assert losses[-1] < losses[0]


def parts(weight: Any) -> list[Tensor]:
    return [part for part in (weight.packed, weight.scale, weight.zero_point, weight.outer) if part is not None]


@pytest.mark.works_with("PEFT", "quantize_ of a PeftModel")
@pytest.mark.parametrize("method", ["LoRA", "DoRA", "LoHa", "VeRA", "HRA", "modules_to_save", "P-tuning", "new tokens"])
def test_a_model_with_adapters_is_quantized(method: str, tmp_path: Path) -> None:
    """Adapters stay as they are, float and trainable; the layers below them are quantized."""
    torch.manual_seed(0)
    adapted = peft.get_peft_model(models.llama(False), (METHODS | PARTS)[method]())
    theirs = {name: p.detach().clone() for name, p in adapted.named_parameters() if p.requires_grad}
    assert theirs
    plan = lowbit.quantize_(adapted, "int4")
    assert len(layers(adapted)) == 14
    assert all("an adapter of PEFT" in layer.reason for layer in plan.layers if "default" in layer.name.split("."))
    found = dict(adapted.named_parameters())
    assert all(torch.equal(found[name], value) and found[name].requires_grad for name, value in theirs.items())
    loss = adapted(input_ids=IDS, labels=IDS).loss
    loss.backward()
    y = logits(adapted.eval())
    adapted.save_pretrained(tmp_path)
    torch.manual_seed(0)
    fresh = models.llama(False)
    lowbit.quantize_(fresh, "int4")
    torch.testing.assert_close(logits(peft.PeftModel.from_pretrained(fresh, tmp_path).eval()), y, rtol=0, atol=0)


@pytest.mark.works_with("PEFT", "several adapters")
def test_several_adapters_and_switching_them_off() -> None:
    model = base("int4")
    plain = logits(model)
    adapted, _ = trained(model, "LoRA")
    first = logits(adapted)
    adapted.add_adapter("second", METHODS["LoRA"]())
    adapted.set_adapter("second")
    torch.testing.assert_close(logits(adapted), plain, rtol=0, atol=0)  # new adapters begin at zero
    adapted.set_adapter("default")
    torch.testing.assert_close(logits(adapted), first, rtol=0, atol=0)
    with adapted.disable_adapter():
        torch.testing.assert_close(logits(adapted), plain, rtol=0, atol=0)
    adapted.add_weighted_adapter(["default", "second"], [0.5, 0.5], "both", combination_type="linear")
    adapted.set_adapter("both")
    assert not torch.equal(logits(adapted), first)
