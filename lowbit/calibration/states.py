"""What flows between blocks, batch by batch, while they are calibrated."""

from __future__ import annotations

from typing import Any

__all__ = ["States"]


class States:
    """The inputs of each block of a stack, in memory: those of a batch take the place of the same batch's of the block before.

    ``stack`` is the number of a stack, ``block`` of a block in it; ``leaves`` what a block reads of the output of the one
    before, by its place there.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, int, dict[int, Any]]] = {}

    def put(self, stack: int, block: int, batch: int, leaves: dict[int, Any]) -> None:
        self._held[batch] = stack, block, leaves

    def get(self, stack: int, block: int, batch: int) -> dict[int, Any]:
        held = self._held[batch]
        assert held[:2] == (stack, block)
        return held[2]

    def latest(self, stack: int, block: int, batches: int) -> int:
        """The last block up to ``block`` whose inputs are all there; 0 where they are of none."""
        return 0

    def drop(self, stack: int, block: int) -> None:
        """These inputs are not needed any more."""
