"""Whether there is enough calibration data: a Gram matrix of too few rows does not tell the channels of a layer apart, and
what is fitted to it is worse than rounding to nearest.

The rule, for t tokens that are no padding and the largest K of the layers whose method looks at data:

* t < K / 16, or fewer than 8 different token ids among at least 8 tokens: an error. So is a text of fewer than 32 tokens.
* t < K: a note of the plan.
* fewer rows than were asked for: a note.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..plans import LayerPlan
from ..recipe import Recipe
from .data import Batch, Calibration
from .pytree import tree_leaves

__all__ = ["data_notes"]

_KINDS = 8  # different token ids
_TEXT = 32  # tokens of a text
_SHARE = 16
_MORE = "give more text or rows (128 rows of 2,048 tokens are usual), or choose a method that looks at no data"


def data_notes(calibration: Calibration, batches: Sequence[Batch], recipe: Recipe, entries: Sequence[LayerPlan]) -> list[str]:
    """What the plan has to say of ``batches`` for the layers of ``entries``. Raises ``ValueError`` where they are not enough."""
    rewritten = any(rewrite.method.needs_data for rewrite in recipe.rewrites)
    rounded = [entry for entry in entries if entry.config is not None and entry.kind != "embedding"]
    needy = [entry for entry in rounded if rewritten or (entry.config is not None and entry.config.uses_data)]
    if not needy:
        return []
    ids, tokens = _ids(batches), sum(map(_tokens, batches))
    kinds = len(torch.cat(ids).unique()) if ids else None
    if calibration.is_text and tokens < _TEXT:
        raise ValueError(f"the calibration text makes {tokens} tokens, and {_TEXT} are the least to calibrate on: {_MORE}")
    if kinds is not None and kinds < _KINDS <= tokens:
        raise ValueError(f"the calibration data repeats {kinds} different tokens, and {_KINDS} are the least: {_MORE}")
    widest = max(needy, key=lambda entry: entry.shape[-1])
    k = widest.shape[-1]
    if tokens * _SHARE < k:
        raise ValueError(
            f"{tokens} tokens cannot calibrate {widest.name}, which reads {k} channels: K / {_SHARE} are the least, {_MORE}"
        )
    found = []
    if tokens < k:
        found.append(
            f"calibrated on {tokens} tokens, fewer than the {k} channels that {widest.name} reads: "
            "what is fitted to them may be worse than rounding to nearest (lowbit doctor says so)"
        )
    rows = sum(map(_rows, batches))
    if calibration.rows is not None and rows < calibration.rows:
        found.append(f"the calibration data holds {rows} rows, and {calibration.rows} were asked for")
    return found


def _first(batch: Batch) -> Tensor | None:
    """What a model reads: the tensor of the largest number of elements, ids before numbers."""
    named = batch.kwargs.get("input_ids")
    if isinstance(named, Tensor):
        return named
    tensors = [leaf for leaf in tree_leaves([batch.args, batch.kwargs]) if isinstance(leaf, Tensor) and leaf.dim()]
    return max(tensors, key=Tensor.numel, default=None)


def _tokens(batch: Batch) -> int:
    x, mask = _first(batch), batch.kwargs.get("attention_mask")
    if x is None:
        return 0
    count = x.numel() // x.shape[-1] if x.is_floating_point() and x.shape[-1] else x.numel()
    return int((mask != 0).sum()) if isinstance(mask, Tensor) and mask.shape == x.shape else count


def _ids(batches: Sequence[Batch]) -> list[Tensor]:
    found = [x for batch in batches if (x := _first(batch)) is not None]
    return [] if any(x.is_floating_point() for x in found) else [x.reshape(-1) for x in found]


def _rows(batch: Batch) -> int:
    x = _first(batch)
    return 1 if x is None or x.dim() < 2 else len(x)
