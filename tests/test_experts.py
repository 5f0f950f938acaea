"""Mixtures of experts of transformers: experts quantized in their own parameters, for every way in which a model runs them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import lowbit
from lowbit import QTensor, quantize_

SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EIGHT: dict[str, Any] = {**SMALL, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
LOCAL: dict[str, Any] = {**SMALL, "num_local_experts": 8, "num_experts_per_tok": 2}
ONE: dict[str, Any] = {**LOCAL, "num_experts_per_tok": 1, "head_dim": 16, "intermediate_size_mlp": 96}

# Class, configuration and its settings.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", LOCAL),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**EIGHT, "head_dim": 16}),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {**LOCAL, "head_dim": 16}),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **SMALL, "num_key_value_heads": 4, "moe_intermediate_size": 96, "n_routed_experts": 8, "num_experts_per_tok": 2,
            "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 32, "q_lora_rank": 32,
            "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
        },
    ),
    "llama4": ("Llama4ForCausalLM", "Llama4TextConfig", ONE),
    "granitemoe": ("GraniteMoeForCausalLM", "GraniteMoeConfig", LOCAL),
    "phimoe": ("PhimoeForCausalLM", "PhimoeConfig", LOCAL),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", EIGHT),
}  # fmt: skip
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm", "lowbit")


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    model, config, settings = MODELS[name]
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**settings))
    with torch.no_grad():
        for parameter in made.parameters():  # some are made of zeros, or left as memory was
            if parameter.dim() > 1:
                parameter.normal_(0, 0.05)
    return made.to(dtype).eval()


def logits(model: nn.Module) -> Tensor:
    ids = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(input_ids=ids).logits


def dense(model: nn.Module, quantized: nn.Module) -> nn.Module:
    """``model`` with the numbers that the weights of ``quantized`` stand for."""
    held = dict(quantized.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if isinstance(held[name], QTensor):
                parameter.copy_(held[name].dequantize())
    return model


def experts_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.dim() == 3}


@pytest.mark.parametrize("name", MODELS)
def test_experts_are_quantized_with_the_linear_layers_and_routers_stay(name: str) -> None:
    model = build(name, torch.bfloat16)
    before = {n: (tuple(p.shape), p.nbytes) for n, p in model.named_parameters()}
    plan = quantize_(model, "int4")
    experts = experts_of(model)
    assert len(experts) >= 2
    assert all(isinstance(p, QTensor) and isinstance(p, nn.Parameter) for p in experts.values())
    assert all(tuple(p.shape) == before[n][0] for n, p in model.named_parameters())
    routers = [layer for layer in plan.kept if "router" in layer.name or layer.name.endswith(("gate", "gate.weight"))]
    assert routers
    assert all(layer.reason for layer in routers)
    inside = [n for n in before if "embed" not in n and "lm_head" not in n]
    after = {n: p.nbytes for n, p in model.named_parameters()}
    assert sum(before[n][1] for n in inside) >= 3.5 * sum(after[n] for n in inside)
    entries = {layer.name: layer for layer in plan.changed}
    for n, p in experts.items():
        assert entries[n].bytes_after == round(p.bits_per_weight * p.numel() / 8)
        assert entries[n].kind == "experts"


@pytest.mark.parametrize("scheme", ["int4", "nvfp4", "int3"])
@pytest.mark.parametrize("name", MODELS)
def test_every_implementation_computes_with_the_dequantized_weights(name: str, scheme: str) -> None:
    model = build(name)
    reference = copy.deepcopy(model)
    quantize_(model, scheme)
    decorated, own = name != "llama4", reference.config._experts_implementation
    assert model.config._experts_implementation == ("lowbit" if decorated else own)
    reference.config._experts_implementation = "eager"
    want = logits(dense(reference, model).double())
    for implementation in IMPLEMENTATIONS if decorated else (None,):
        if implementation is not None:
            model.set_experts_implementation(implementation)
        torch.testing.assert_close(logits(model).double(), want, rtol=1e-4, atol=1e-4)


def same(model: nn.Module, other: nn.Module) -> None:
    theirs = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, theirs[name]), name
        assert not isinstance(parameter, QTensor) or parameter.byte_layout == theirs[name].byte_layout  # type: ignore[union-attr]
    assert torch.equal(logits(model), logits(other))


@pytest.mark.parametrize("name", MODELS)
def test_files_bring_experts_back(name: str, tmp_path: Path) -> None:
    """save, load, save_pretrained and from_pretrained, whichever wrote the folder."""
    model = build(name, torch.bfloat16)
    quantize_(model, "int4")
    lowbit.save(model, tmp_path / "a")
    same(model, lowbit.load(tmp_path / "a"))
    same(model, lowbit.load(tmp_path / "a", build(name, torch.bfloat16)))
    loaded = type(model).from_pretrained(tmp_path / "a")
    same(model, loaded)
    assert loaded.config._experts_implementation == model.config._experts_implementation
    loaded.save_pretrained(tmp_path / "b")
    same(model, lowbit.load(tmp_path / "b"))


@pytest.mark.parametrize("name", MODELS)
def test_a_float_folder_is_quantized_while_it_loads_and_from_disk(name: str, tmp_path: Path) -> None:
    model = build(name, torch.bfloat16)
    model.save_pretrained(tmp_path / "float")
    kind = type(model)
    want = kind.from_pretrained(tmp_path / "float").eval()
    plan = quantize_(want, "int4")
    got = kind.from_pretrained(tmp_path / "float", quantization_config=lowbit.Config("int4")).eval()
    assert got.hf_quantizer.plan == plan
    same(want, got)
    ids = torch.randint(3, 96, (4, 8), generator=torch.Generator().manual_seed(2))
    done = lowbit.quantize_folder(tmp_path / "float", tmp_path / "disk", "int4", calibration=ids)
    assert done == plan
    same(want, lowbit.load(tmp_path / "disk"))
