"""Models of known shapes with random weights, for speeds where no checkpoint is at hand."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["SHAPES", "outlined", "random_model"]

_LLAMA_3: dict[str, Any] = {
    "vocab_size": 128256, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": _LLAMA_3 | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    },
    "llama-3.2-1b": _LLAMA_3 | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True, "rms_norm_eps": 1e-6,
    },
    "tiny": _LLAMA_3 | {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}  # fmt: skip
"""Configurations of transformers' models by name, of Llama where no ``model_type`` is said."""


def outlined(name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The model of :data:`SHAPES` called ``name`` without numbers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{"model_type": "llama", **SHAPES[name]}, dtype=dtype)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def random_model(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    """The model of :data:`SHAPES` called ``name`` with Gaussian weights that keep its activations of order one."""
    model = outlined(name, dtype)
    config = model.config
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
            else:
                parameter.fill_(1)
        rotary = model.model.rotary_emb
        model.model.rotary_emb = type(rotary)(config).to(device)
    model.tie_weights()
    return model.eval()
