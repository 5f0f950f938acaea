"""How much memory a job takes, told before it begins."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import Tensor, nn

from ..calibration.data import Batch
from ..calibration.nesting import leaves
from ..layers import Layer
from ..planning import Plan
from ..recipe import block_of

__all__ = ["check_budget", "parse_bytes"]

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
          "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}  # fmt: skip


def parse_bytes(text: int | str) -> int:
    """Bytes from a number or a text such as ``"8GB"`` or ``"512 MiB"``. Raises ``ValueError`` for anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text))
    if found is None or found[2].lower() not in _UNITS or isinstance(text, bool):
        raise ValueError(f"max_memory is a number of bytes or a text such as '8GB', got {text!r:.40}")
    return int(float(found[1]) * _UNITS[found[2].lower()])


def check_budget(
    max_memory: int | str | None, model: nn.Module, layers: Sequence[Layer], plan: Plan, batches: Sequence[Batch]
) -> None:
    """Raise ``ValueError`` where ``max_memory`` is less than :func:`needed`, and say what takes it."""
    if max_memory is None:
        return
    limit = parse_bytes(max_memory)
    parts = needed(model, layers, plan, batches)
    total = sum(parts.values())
    if total > limit:
        said = ", ".join(f"{name} {_spelled(size)}" for name, size in parts.items())
        raise ValueError(
            f"max_memory is {_spelled(limit)}, and the job takes about {_spelled(total)} ({said}): allow more, or smaller batches"
        )


def needed(model: nn.Module, layers: Sequence[Layer], plan: Plan, batches: Sequence[Batch]) -> dict[str, int]:
    """Bytes that a job takes beside the interpreter: of its largest block (its weights and statistics, and what a rounder
    takes for its largest layer: four matrices [K, K] and three [N, K] in float64), and of a batch within it."""
    blocks: dict[object, list[Layer]] = {}
    for entry, layer in zip(plan.layers, layers, strict=True):
        if layer.kind != "embedding":
            blocks.setdefault(block_of(entry.name) if entry.target is None or block_of(entry.name) else entry.name, []).append(
                layer
            )
    targets = {entry.name for entry in plan.changed}
    most: dict[str, int] = {}
    tokens = max(_tokens(batch) for batch in batches)
    for block in blocks.values():
        sizes = [(layer.weight.shape[0], layer.weight.shape[1]) for layer in block if layer.name in targets]
        if not sizes:
            continue
        inputs = {(layer.name.rpartition(".")[0], layer.weight.shape[1]) for layer in block if layer.name in targets}
        found = {
            "weights": sum(layer.weight.nbytes for layer in block),
            "statistics": sum(8 * k * k for _, k in inputs),
            "one layer's rounding": max(8 * (4 * k * k + 3 * n * k) for n, k in sizes),
            "a batch": 4 * 4 * tokens * max(max(size) for size in sizes),
        }
        if sum(found.values()) > sum(most.values()):
            most = found
    return most


def _tokens(batch: Batch) -> int:
    sizes = [leaf.numel() for leaf in leaves([batch.args, batch.kwargs]) if isinstance(leaf, Tensor)]
    return max(sizes, default=1)


def _spelled(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
