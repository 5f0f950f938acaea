"""Small random models of the architectures that people quantize, and something to ask them."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

WORDS = [f"w{i}" for i in range(40)]


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


def word_model(folder: Path) -> Path:
    """A folder with a llama in bf16 and a tokenizer of :data:`WORDS` and the letters A to D."""
    vocabulary = {word: i for i, word in enumerate(["?", *WORDS, *"ABCD"])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?", eos_token="?").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def exam_and_text(folder: Path) -> Path:
    """``folder`` with an exam in :data:`WORDS` and a text."""
    for split in ("dev", "test"):
        write_exam(folder, split, "words", ([WORDS[i], *WORDS[i : i + 4], "ABCD"[i % 4]] for i in range(12)))
    (folder / "text.txt").write_text(" ".join(WORDS[i * i % 40] for i in range(600)), encoding="utf-8")
    return folder


def exam_of_words(folder: Path) -> Path:
    """``folder`` with an exam of two subjects that MMLU has and one that it has not."""
    for split, count in (("dev", 5), ("test", 9)):
        for subject in ("anatomy", "philosophy", "words"):
            rows = ([f"w{i} w{i + 1}?", *(f"w{(i * i + j) % 40}" for j in range(4)), "ABCD"[i % 4]] for i in range(count))
            write_exam(folder, split, subject, rows)
    return folder


def with_tokenizer(folder: Path) -> tuple[nn.Module, Any]:
    """The model of a folder in fp32, and its tokenizer."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(folder)


def write_exam(folder: Path, split: str, subject: str, rows: Iterable[Sequence[str]]) -> None:
    """A table of questions in MMLU's layout."""
    path = folder / split / f"{subject}_{split}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as table:
        csv.writer(table).writerows(rows)
