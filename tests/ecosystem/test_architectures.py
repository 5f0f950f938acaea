"""transformers' architectures: every product runs quantized or is named in the plan, and a file brings it all back."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import lowbit
from lowbit import QLinear, quantize_

SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
GROUPED: dict[str, Any] = {**SMALL, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CODER: dict[str, Any] = {
    "vocab_size": 96, "d_model": 64, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 112, "decoder_ffn_dim": 112,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 32, "patch_size": 16,
}  # fmt: skip

# Class, configuration and its settings, how many layers are quantized by default.
MODELS: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED, 14),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED, 14),
    "mistral": ("MistralForCausalLM", "MistralConfig", GROUPED, 14),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**GROUPED, "head_dim": 16}, 14),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**GROUPED, "head_dim": 16}, 14),
    "falcon": ("FalconForCausalLM", "FalconConfig", {**SMALL, "bos_token_id": 1, "eos_token_id": 2}, 8),
    "phi": ("PhiForCausalLM", "PhiConfig", GROUPED, 12),
    "opt": ("OPTForCausalLM", "OPTConfig", {**SMALL, "ffn_dim": 112, "word_embed_proj_dim": 32, "pad_token_id": 0}, 14),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": 96, "n_embd": 48, "n_layer": 2, "n_head": 4}, 8),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**GROUPED, "num_local_experts": 4}, 12),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {**GROUPED, "num_experts": 4, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48},
        20,
    ),
    "mamba": ("MambaForCausalLM", "MambaConfig", {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2}, 8),
    "bert": ("BertForMaskedLM", "BertConfig", SMALL, 12),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 96, "d_model": 64, "d_kv": 16, "d_ff": 112, "num_layers": 1},
        14,
    ),
    "bart": ("BartForConditionalGeneration", "BartConfig", {**CODER, "max_position_embeddings": 64}, 16),
    "vit": ("ViTForImageClassification", "ViTConfig", VISION, 12),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**CODER, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 20},
        16,
    ),
}  # fmt: skip


def build(name: str) -> nn.Module:
    model, config, settings, _ = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**settings)).eval()


def output(name: str, model: nn.Module) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 96, (2, 8), generator=draw)
    inputs: dict[str, Tensor] = {"input_ids": ids}
    if name in ("t5", "bart", "whisper"):
        inputs["decoder_input_ids"] = ids
    if name == "vit":
        inputs = {"pixel_values": torch.randn(2, 3, 32, 32, generator=draw)}
    if name == "whisper":
        inputs = {"input_features": torch.randn(2, 8, 40, generator=draw), "decoder_input_ids": ids}
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.parametrize("name", MODELS)
def test_an_architecture_computes_with_its_dequantized_weights_and_comes_back_from_a_file(name: str, tmp_path: Path) -> None:
    model = build(name)
    dense = copy.deepcopy(model)
    plan = quantize_(model, "int8")
    assert len(plan.quantized) == MODELS[name][3]
    for layer in plan.quantized:
        name_of = layer.name if layer.kind == "experts" else f"{layer.name}.weight"
        weight = model.get_parameter(name_of).dequantize()
        with torch.no_grad():
            dense.get_parameter(name_of).copy_(weight.t() if layer.kind == "conv1d" else weight)
    with lowbit.trace_kernels() as trace:
        got = output(name, model)
    assert sum(trace.kernels().values()) >= len(plan.quantized)
    torch.testing.assert_close(got, output(name, dense), rtol=1e-4, atol=1e-4)
    lowbit.save(model, tmp_path)
    assert torch.equal(output(name, lowbit.load(tmp_path).eval()), got)


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_speaks_of_every_weight(name: str) -> None:
    model = build(name)
    plan = lowbit.plan(model, "int4")
    spoken = {f"{n}.weight" for layer in plan.layers for n in layer.names} | {n for layer in plan.layers for n in layer.names}
    assert [n for n, p in model.named_parameters(remove_duplicate=False) if p.dim() > 1 and n not in spoken] == []
    assert plan.bytes_before == sum(p.nbytes for p in model.parameters() if p.dim() > 1)
    assert all(layer.reason for layer in plan.skipped)


def test_a_head_that_shares_its_bias_keeps_sharing_it() -> None:
    model = build("bert")
    quantize_(model, {"*decoder": "int8", "*word_embeddings": "int8", "*": "int4"})
    head = model.cls.predictions
    assert isinstance(head.decoder, QLinear)
    assert head.decoder.weight is model.bert.embeddings.word_embeddings.weight
    assert head.decoder.bias is head.bias


def test_a_static_cache_generates_what_a_growing_one_does() -> None:
    model = build("qwen2")
    quantize_(model, {"lm_head": "int8", "*": "int4"})
    ids = torch.arange(3, 9)[None]
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    grown = model.generate(ids, **settings)
    assert torch.equal(model.generate(ids, cache_implementation="static", **settings), grown)


@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_autocast_reaches_quantized_layers(name: str) -> None:
    model = build(name)
    quantize_(model, "int8")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = output(name, model)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), output(name, model), rtol=0.1, atol=0.1)
