"""What flows between blocks, batch by batch, while they are calibrated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["BlockInputs", "ActivationStore"]


@dataclass(frozen=True)
class BlockInputs:
    """What a block reads of the output of the one before, by its place there.

    ``values``: of the quantized one; ``float_values``: of the float one, where both run side by side and give different things.
    """

    values: dict[int, Any]
    float_values: dict[int, Any] | None = None

    @property
    def float_leaves(self) -> dict[int, Any]:
        """What the float block reads."""
        return self.values if self.float_values is None else self.float_values


class ActivationStore:
    """The inputs of each block of a stack, in memory: those of a batch take the place of the same batch's of the block before.

    ``stack`` is the number of a stack, ``block`` of a block in it.
    """

    def __init__(self) -> None:
        self._inputs: dict[int, tuple[int, int, BlockInputs]] = {}

    def put(self, stack: int, block: int, batch: int, inputs: BlockInputs) -> None:
        self._inputs[batch] = stack, block, inputs

    def get(self, stack: int, block: int, batch: int) -> BlockInputs:
        stored = self._inputs[batch]
        assert stored[:2] == (stack, block)
        return stored[2]

    def latest(self, stack: int, block: int, batches: int) -> int:
        """The last block up to ``block`` whose inputs are all there; 0 where they are of none."""
        return 0

    def drop(self, stack: int, block: int) -> None:
        """These inputs are not needed any more."""
