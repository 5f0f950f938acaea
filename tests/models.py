"""Small random models of the architectures that people quantize."""

from __future__ import annotations

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM


def llama(tied: bool = True, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Two layers with grouped-query attention; K of 64 and 172, so that groups of 128 come out short."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=172, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).eval()


def gpt2() -> GPT2LMHeadModel:
    """Conv1D layers, which store their weights transposed, and learned positions."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=96, n_positions=64, n_embd=48, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
    return GPT2LMHeadModel(config).eval()


def mlp(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Linear layers with and without bias, of sizes that no group divides."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 70), nn.ReLU(), nn.Linear(70, 33, bias=False), nn.ReLU(), nn.Linear(33, 5)).to(dtype)


def tokens(rows: int = 2, length: int = 12) -> torch.Tensor:
    """Token ids for the language models above."""
    return torch.randint(3, 96, (rows, length), generator=torch.Generator().manual_seed(1))
