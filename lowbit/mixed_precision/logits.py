"""How far the predictions of a model that was changed in one place are from its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ..calibration.blocks import call
from ..calibration.data import Batch
from ..calibration.padding import Padding

__all__ = ["divergences", "logits_of", "token_logits"]

_LOGITS = 1 << 22  # that are looked at at a time: 16 MiB for each of the two models
Change = Callable[[], AbstractContextManager[None]]


def divergences(
    model: nn.Module, batches: Sequence[Batch], changes: Sequence[Change], progress: Callable[[int, int], None] | None = None
) -> tuple[list[float], int]:
    """The mean KL(model || changed model) over predicted tokens, for each of ``changes``; and how many tokens those were.

    A change is made where the context manager that it gives is entered, and unmade behind it. The logits of one batch are
    kept at a time. Logarithms are float32, sums over tokens float64. Padding does not count. Raises ``ValueError`` for a model
    without logits, and for one whose own logits are not finite.
    """
    totals, tokens = [0.0] * len(changes), 0
    padding = Padding(model)
    for number, batch in enumerate(batches):
        float_logits = token_logits(call(model, batch), batch, padding)
        if not bool(torch.isfinite(float_logits).all()):
            raise ValueError(f"batch {number}: the model's own logits are not finite: look at the model on this text")
        for i, change in enumerate(changes):
            with change():
                totals[i] += _divergence(float_logits, token_logits(call(model, batch), batch, padding))
            if progress is not None:
                progress(number * len(changes) + i + 1, len(batches) * len(changes))
        tokens += len(float_logits)
    return [max(total / max(tokens, 1), 0.0) if total == total else total for total in totals], tokens


def logits_of(output: Any) -> Tensor:
    """The logits [..., vocabulary] in what a model gave: its field of this name, or itself. Raises ``ValueError``."""
    found = getattr(output, "logits", output)
    if not isinstance(found, Tensor) or found.dim() < 2 or not found.is_floating_point():
        raise ValueError(f"KL needs a model that gives logits, got {type(output).__name__}: leave it out with compared=0")
    return found


def token_logits(output: Any, batch: Batch, padding: Padding) -> Tensor:
    """:func:`logits_of` as [tokens, vocabulary], without padding."""
    logits = logits_of(output)
    return padding.without_padding(logits, batch).reshape(-1, logits.shape[-1])


def _divergence(float_logits: Tensor, other: Tensor) -> float:
    """The sum over rows of KL(own || other) of their softmax; NaN where ``other`` is not finite."""
    total = 0.0
    for x, y in zip(float_logits.split(rows := max(1, _LOGITS // float_logits.shape[-1])), other.split(rows), strict=True):
        p, q = x.float().log_softmax(-1), y.float().log_softmax(-1)
        total += float((p.exp() * (p - q)).sum(-1, dtype=torch.float64).sum())
    return total
