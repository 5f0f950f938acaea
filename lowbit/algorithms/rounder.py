"""What a rounder is, and what it gives back."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from ..grid import Scales
from ..torch_state import isolated

__all__ = ["Rounded", "Rounder"]


class Rounded(NamedTuple):
    """A weight on the grid.

    ``codes``: uint8 [N, K]. ``scales``: as they are stored. ``notes``: what a person should know of how it went (dead
    channels, more damping than asked for), in plain sentences; empty as a rule.
    """

    codes: Tensor
    scales: Scales
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rounder:
    """A way to choose codes.

    Attributes:
        round: ``round(weight, scheme, statistics, **options)`` for a ``weight`` [N, K] (float32 or float64, finite), a
            :class:`~lowbit.Scheme` and :class:`~lowbit.statistics.Statistics` or None; gives :class:`Rounded`. It runs
            :func:`~lowbit.torch_state.isolated`, whatever the caller has set for torch.
        needs_statistics: whether ``statistics`` may not be None.
        check: ``check(**options)`` raises ``ValueError`` for values that the options cannot take, before any work.
        needs_drift: ``needs_drift(**options)`` says whether it looks at ``statistics.drift``, which is then given where
            it can be.
        uses_statistics: whether ``statistics`` change the result, where there are any.
        rows_per_channel: how many rows of inputs a channel ``statistics`` have to be taken from before they are worth looking at:
            under that, rounding without them errs less on other inputs (``evals/few_rows.py`` measures it). Of an expert that
            fewer tokens reached they are not looked at.
    """

    round: Callable[..., Rounded]
    needs_statistics: bool
    check: Callable[..., None] = lambda **options: None
    needs_drift: Callable[..., bool] = lambda **options: False
    uses_statistics: bool = True
    rows_per_channel: float = 2.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "round", isolated()(self.round))

    @property
    def options(self) -> dict[str, Any]:
        """The options that :attr:`round` takes, by name, with their defaults."""
        parameters = inspect.signature(self.round).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
