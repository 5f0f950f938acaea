"""Perplexity of a causal language model on a text."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

__all__ = ["Perplexity", "chunks_of", "context_of", "perplexity"]

_LOGITS = 1 << 24  # logits of a batch at a time: 32 MiB in bf16, and a model of 128 K tokens still gets whole chunks


@dataclass(frozen=True)
class Perplexity:
    """``value`` = exp(``loss``), the mean negative log likelihood in nats over ``tokens`` predicted tokens of ``chunks``."""

    value: float
    loss: float
    tokens: int
    chunks: int
    context: int


def perplexity(
    model: nn.Module,
    tokenizer: Any,
    text: str,
    *,
    context: int | None = None,
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Perplexity of ``model`` on ``text``.

    The text is tokenised in one piece without special tokens and cut into chunks of ``context`` tokens; a last chunk
    that would be shorter is left out. In each chunk the model predicts every token but the first from those before it,
    and the mean runs over all of them: the protocol of GPTQ's and most later papers' WikiText-2 figures.

    Args:
        model: maps ids [batch, length] to an output with ``.logits`` [batch, length, vocabulary], in any dtype; the loss
            is taken in float32.
        tokenizer: a transformers tokenizer.
        context: tokens in a chunk; the model's own limit, at most 2048, if None.
        limit: chunks at most.
        progress: called with (chunks done, chunks in all) after each batch.

    Raises ``ValueError`` for a context below 2, and for a text of fewer tokens than one chunk.
    """
    context = context_of(model, context)
    chunks = chunks_of(tokenizer, text, context, limit)
    vocabulary = int(getattr(getattr(model, "config", None), "vocab_size", 0)) or len(tokenizer)
    rows = max(1, _LOGITS // (context * vocabulary))
    device = next(model.parameters()).device
    total = 0.0
    with torch.inference_mode():
        for start in range(0, len(chunks), rows):
            ids = chunks[start : start + rows].to(device)
            logits = model(ids).logits
            for row, targets in zip(logits, ids, strict=True):
                total += float(cross_entropy(row[:-1].float(), targets[1:], reduction="sum"))
            if progress is not None:
                progress(start + len(ids), len(chunks))
    tokens = len(chunks) * (context - 1)
    loss = total / tokens
    return Perplexity(math.exp(loss) if loss < 700 else math.inf, loss, tokens, len(chunks), context)


def context_of(model: nn.Module, context: int | None = None) -> int:
    """Tokens in a chunk: ``context``, or the model's own limit and at most 2048.

    Raises ``ValueError`` where ``context`` is below 2 or beyond the model's limit.
    """
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if context is None:
        return min(most or 2048, 2048)
    if context < 2:
        raise ValueError(f"context must be at least 2 tokens, got {context}")
    if most is not None and context > most:
        raise ValueError(f"context must be at most the model's {most} tokens, got {context}")
    return context


def chunks_of(tokenizer: Any, text: str, context: int, limit: int | None = None) -> Tensor:
    """``text`` as ids [chunks, context], without special tokens; ``limit``: chunks at most."""
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1 chunk, got {limit}")
    # verbose=False: the text is longer than the model's context on purpose.
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.long)
    count = len(ids) // context
    if count == 0:
        raise ValueError(f"the text has {len(ids)} tokens, fewer than one chunk of {context}: take a longer one")
    if limit is not None:
        count = min(count, limit)
    return ids[: count * context].view(count, context)
