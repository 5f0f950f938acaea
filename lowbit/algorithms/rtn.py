"""Round to nearest: no data, no search; where every other method starts."""

from __future__ import annotations

from torch import Tensor

from ..grid import to_codes
from ..scales import choose
from ..scheme import Scheme
from ..statistics import Statistics
from .rounder import Rounded

__all__ = ["rtn"]


def rtn(weight: Tensor, scheme: Scheme, statistics: Statistics | None = None, *, scales: str = "range") -> Rounded:
    """Each number of ``weight`` [N, K] (float32 or float64, finite) rounded alone; ``statistics`` are not looked at.

    ``scales``: ``"range"`` or ``"mse"``, as ``method`` of :func:`lowbit.scales.choose`.
    """
    chosen = choose(weight, scheme, scales)
    return Rounded(to_codes(weight, scheme, chosen), chosen)
