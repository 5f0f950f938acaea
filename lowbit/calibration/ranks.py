"""Several processes that calibrate one model: each runs its share of the batches and rounds its share of the layers."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import distributed

from ..statistics import Tally

__all__ = ["Ranks"]

_T = TypeVar("_T")
_ROWS = 256  # of a Gram matrix that are sent at a time


class Ranks:
    """The processes of ``torch.distributed``'s group, where one was initialised, and else this one alone.

    Each holds the model (or reads it from one folder) and calls the same functions with the same arguments in the same
    order. Attributes: ``rank`` and ``count``.
    """

    def __init__(self) -> None:
        is_initialized = distributed.is_available() and distributed.is_initialized()
        self.rank: int = distributed.get_rank() if is_initialized else 0
        self.count: int = distributed.get_world_size() if is_initialized else 1

    def shard(self, total: int) -> range:
        """Which of ``total`` things in a row are those of this process: neighbours, so that sums keep their order."""
        return range(self.rank * total // self.count, (self.rank + 1) * total // self.count)

    def all_gather(self, value: _T) -> list[_T]:
        """What every process has, in the order of ranks."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        distributed.all_gather_object(found, value)
        return found

    def broadcast(self, value: _T) -> _T:
        """What the first process has."""
        return self.all_gather(value)[0]

    def barrier(self) -> None:
        """Until every process is here."""
        self.all_gather(None)

    def all_reduce(self, tally: Tally) -> Tally:
        """The sum of the tallies of all processes, in float64 and in the order of ranks, so that all have the same."""
        if self.count == 1:
            return tally
        device = tally.gram.device
        for matrix in tally.matrices:
            for start in range(0, len(matrix), _ROWS):
                rows = matrix[start : start + _ROWS].cpu()
                total = torch.zeros_like(rows)
                for rank in range(self.count):
                    part = rows.clone() if rank == self.rank else torch.empty_like(rows)
                    distributed.broadcast(part, rank)
                    total += part
                matrix[start : start + _ROWS] = total.to(device)
        others = self.all_gather((tally.absmax.cpu(), tally.count))
        tally.absmax = torch.stack([absmax for absmax, _ in others]).amax(0).to(device)
        tally.count = sum(count for _, count in others)
        return tally
