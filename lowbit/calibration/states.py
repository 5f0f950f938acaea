"""What flows between blocks, batch by batch, while they are calibrated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Inputs", "States"]


@dataclass(frozen=True)
class Inputs:
    """What a block reads of the output of the one before, by its place there.

    ``leaves``: of the quantized one; ``floats``: of the float one, where both run side by side and give different things.
    """

    leaves: dict[int, Any]
    floats: dict[int, Any] | None = None

    @property
    def meant(self) -> dict[int, Any]:
        """What the float block reads."""
        return self.leaves if self.floats is None else self.floats


class States:
    """The inputs of each block of a stack, in memory: those of a batch take the place of the same batch's of the block before.

    ``stack`` is the number of a stack, ``block`` of a block in it.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, int, Inputs]] = {}

    def put(self, stack: int, block: int, batch: int, inputs: Inputs) -> None:
        self._held[batch] = stack, block, inputs

    def get(self, stack: int, block: int, batch: int) -> Inputs:
        held = self._held[batch]
        assert held[:2] == (stack, block)
        return held[2]

    def latest(self, stack: int, block: int, batches: int) -> int:
        """The last block up to ``block`` whose inputs are all there; 0 where they are of none."""
        return 0

    def drop(self, stack: int, block: int) -> None:
        """These inputs are not needed any more."""
