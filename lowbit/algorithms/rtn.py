"""Round to nearest: no data, no search; where every other method starts."""

from __future__ import annotations

from torch import Tensor

from ..grid import Scales, to_codes
from ..scales import choose
from ..scheme import Scheme

__all__ = ["rtn"]


def rtn(w: Tensor, scheme: Scheme, method: str = "range", outer: Tensor | None = None) -> tuple[Tensor, Scales]:
    """Codes (uint8, shape of ``w``) and scales of ``w`` [..., N, K] (float32 or float64), each weight rounded alone.

    ``method`` and ``outer`` as in :func:`lowbit.scales.choose`.
    """
    scales = choose(w, scheme, method, outer)
    return to_codes(w, scheme, scales), scales
