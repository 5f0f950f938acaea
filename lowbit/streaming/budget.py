"""How much memory a job takes, told before it begins."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..calibration.data import Batch
from ..calibration.pytree import tree_leaves
from ..layers import Layer
from ..plans import LayerPlan, Plan
from ..recipe import block_of

__all__ = ["Need", "needs", "parse_bytes", "statistics_budget"]

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
          "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}  # fmt: skip


def parse_bytes(text: int | str) -> int:
    """Bytes from a number or a text such as ``"8GB"`` or ``"512 MiB"``. Raises ``ValueError`` for anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text))
    if found is None or found[2].lower() not in _UNITS or isinstance(text, bool):
        raise ValueError(f"max_memory is a number of bytes or a text such as '8GB', got {text!r:.40}")
    return int(float(found[1]) * _UNITS[found[2].lower()])


@dataclass(frozen=True)
class Need:
    """Bytes that a block takes beside the interpreter while its layers are rounded.

    ``weights``: float ones, rounded ones beside them, and a second copy of the float ones where a rounder looks at how far inputs
    drifted; ``matrices``: of its layers' statistics, a Gram matrix for each input and then another one; ``rounding``: what a
    rounder takes for the largest layer beside these, a matrix [K, K] and two [N, K] in float64; ``batch``: of activations.
    """

    weights: int
    matrices: tuple[int, ...]
    rounding: int
    batch: int

    @property
    def fixed(self) -> int:
        """Bytes of all but Gram matrices."""
        return self.weights + self.rounding + self.batch

    def describe(self, statistics: int) -> str:
        """What takes the memory, where Gram matrices take ``statistics`` bytes at a time."""
        parts = {"weights": self.weights, "statistics": statistics, "one layer's rounding": self.rounding, "a batch": self.batch}
        return ", ".join(f"{name} {_format_bytes(size)}" for name, size in parts.items())


def statistics_budget(
    max_memory: int | str | None, layers: Sequence[Layer], plan: Plan, batches: Sequence[Batch], at_once: bool
) -> int | None:
    """Bytes that ``max_memory`` leaves for the statistics of a block; None for any number.

    Raises ``ValueError`` where the largest Gram matrix, or, ``at_once``, all those of a block do not fit, and says what takes
    the memory.
    """
    if max_memory is None:
        return None
    limit, room = parse_bytes(max_memory), parse_bytes(max_memory)
    for need in needs(layers, plan, batches):
        smallest = sum(need.matrices) if at_once else max(need.matrices, default=0)
        if need.fixed + smallest > limit:
            raise ValueError(
                f"max_memory is {_format_bytes(limit)}, and the job takes about {_format_bytes(need.fixed + smallest)} "
                f"({need.describe(smallest)}): "
                "allow more, or smaller batches"
            )
        room = min(room, limit - need.fixed)
    return None if at_once else room


def needs(layers: Sequence[Layer], plan: Plan, batches: Sequence[Batch]) -> list[Need]:
    """What each block takes of which layers are quantized."""
    blocks: dict[object, list[tuple[LayerPlan, Layer]]] = {}
    for entry, layer in zip(plan.layers, layers, strict=True):
        if layer.kind != "embedding":
            largest_alone = entry.config is not None and block_of(entry.name) is None
            blocks.setdefault(entry.name if largest_alone else block_of(entry.name), []).append((entry, layer))
    tokens = max(_tokens(batch) for batch in batches)
    found = []
    for block in blocks.values():
        sizes = {entry.name: layer.weight.shape[-2:] for entry, layer in block if entry.config is not None}
        if sizes:
            # Layers of one module that read as many channels read the same ones, as a rule.
            heard = {entry.name for entry, layer in block if not layer.is_parameter}
            inputs = [k for _, k in {(name.rpartition(".")[0], k) for name, (_, k) in sizes.items() if name in heard}]
            for entry, layer in block:
                if layer.kind == "experts" and entry.config is not None:
                    inputs += [entry.shape[-1]] * entry.shape[0]  # each of its own tokens
            copies = 2 if any(entry.config is not None and entry.config.needs_drift for entry, _ in block) else 1
            found.append(
                Need(
                    weights=copies * sum(layer.weight.nbytes for _, layer in block)
                    + sum(entry.bytes_after for entry, _ in block if entry.config is not None),
                    matrices=tuple(copies * 8 * k * k for k in inputs),
                    rounding=max(8 * (k * k + 2 * n * k) for n, k in sizes.values()),
                    batch=copies * 4 * 4 * tokens * max(max(size) for size in sizes.values()),
                )
            )
    return found


def _tokens(batch: Batch) -> int:
    sizes = [leaf.numel() for leaf in tree_leaves([batch.args, batch.kwargs]) if isinstance(leaf, Tensor)]
    return max(sizes, default=1)


def _format_bytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
