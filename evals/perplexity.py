"""Perplexity of a causal language model on a text."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

__all__ = ["Perplexity", "context_of", "perplexity", "windows_of"]

_LOGITS = 1 << 24  # logits of a batch at a time: 32 MiB in bf16, and a model of 128 K tokens still gets whole chunks


@dataclass(frozen=True)
class Perplexity:
    """``value`` = exp(``loss``), the mean negative log likelihood in nats over ``tokens`` predicted tokens of ``chunks``
    of ``context`` tokens that begin ``stride`` tokens apart."""

    value: float
    loss: float
    tokens: int
    chunks: int
    context: int
    stride: int


def perplexity(
    model: nn.Module,
    tokenizer: Any,
    text: str,
    *,
    context: int | None = None,
    stride: int | None = None,
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Perplexity of ``model`` on ``text``.

    The text is tokenised in one piece without special tokens and cut into chunks of ``context`` tokens; a last chunk
    that would be shorter is left out. In each chunk the model predicts every token but the first from those before it,
    and the mean runs over all of them: the protocol of GPTQ's and most later papers' WikiText-2 figures.

    With a ``stride`` below the context chunks overlap, and in each but the first the last ``stride`` tokens count alone:
    every token is predicted once, from at least ``context - stride`` tokens before it.

    Args:
        model: maps ids [batch, length] to an output with ``.logits`` [batch, length, vocabulary], in any dtype; the loss
            is taken in float32.
        tokenizer: a transformers tokenizer.
        context: tokens in a chunk; the model's own limit, at most 2048, if None.
        stride: tokens from the beginning of one chunk to that of the next; ``context`` if None.
        limit: chunks at most.
        progress: called with (chunks done, chunks in all) after each batch.

    Raises ``ValueError`` for a context below 2, a stride beyond it, and a text of fewer tokens than one chunk.
    """
    context = context_of(model, context)
    stride = context if stride is None else stride
    chunks = windows_of(tokenizer, text, context, stride, limit)
    vocabulary = int(getattr(getattr(model, "config", None), "vocab_size", 0)) or len(tokenizer)
    rows = max(1, _LOGITS // (context * vocabulary))
    device = next(model.parameters()).device
    losses: list[Tensor] = []  # on the device until the end, so that no batch waits for the one before
    tokens = 0
    with torch.inference_mode():
        for start in range(0, len(chunks), rows):
            ids = chunks[start : start + rows].to(device)
            logits = model(ids).logits
            for i, (row, targets) in enumerate(zip(logits, ids, strict=True), start):
                first = max(1, context - stride) if i else 1
                losses.append(cross_entropy(row[first - 1 : -1].float(), targets[first:], reduction="sum"))
                tokens += context - first
            if progress is not None:
                progress(start + len(ids), len(chunks))
    loss = sum(torch.stack(losses).tolist()) / tokens
    return Perplexity(math.exp(loss) if loss < 700 else math.inf, loss, tokens, len(chunks), context, stride)


def context_of(model: nn.Module, context: int | None = None) -> int:
    """Tokens in a chunk: ``context``, or the model's own limit and at most 2048.

    Raises ``ValueError`` where ``context`` is below 2 or beyond the model's limit.
    """
    max_length = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if context is None:
        return min(max_length or 2048, 2048)
    if context < 2:
        raise ValueError(f"context must be at least 2 tokens, got {context}")
    if max_length is not None and context > max_length:
        raise ValueError(f"context must be at most the model's {max_length} tokens, got {context}")
    return context


def windows_of(tokenizer: Any, text: str, context: int, stride: int | None = None, limit: int | None = None) -> Tensor:
    """``text`` as ids [chunks, context], without special tokens, each chunk ``stride`` tokens behind the one before it
    (``context`` if None); ``limit``: chunks at most."""
    stride = context if stride is None else stride
    if not 1 <= stride <= context:
        raise ValueError(f"stride must be 1 to the context's {context} tokens, got {stride}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1 chunk, got {limit}")
    # verbose=False: the text is longer than the model's context on purpose.
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.long)
    if len(ids) < context:
        raise ValueError(f"the text has {len(ids)} tokens, fewer than one chunk of {context}: take a longer one")
    return ids.unfold(0, context, stride)[:limit]
