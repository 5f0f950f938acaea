"""``fully_shard`` (FSDP2) on a QTensor: each process keeps rows of codes, scales and zero points, and codes are gathered.

torch asks the local tensor for what to gather and for the weight that it makes. A scale as a whole (``outer``) is the same in
each process and is not gathered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .tensor import QTensor

__all__ = ["post_all_gather", "pre_all_gather"]

_ROWS = ("packed", "scale", "zero_point")


def pre_all_gather(q: QTensor, mesh: Any, whole: torch.Size) -> tuple[tuple[Tensor, ...], Any]:
    """The parts of ``q``, rows of a weight of the shape ``whole``, to gather along the rows.

    Raises ``ValueError``, in every process alike, where the rows do not divide evenly: codes have no padding.
    """
    if whole[0] % mesh.size():
        raise ValueError(
            f"a quantized weight {tuple(whole)} has {whole[0]} rows, which {mesh.size()} processes cannot share evenly: leave "
            "its layer out of fully_shard (ignored_params), or use a number of processes that divides the rows"
        )
    parts = [part for name in _ROWS if (part := getattr(q, name)) is not None]
    return tuple(part.view(torch.uint8) for part in parts), (tuple(whole), [part.dtype for part in parts])


def post_all_gather(q: QTensor, gathered: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, out: Tensor | None) -> Any:
    """The weight over the ``gathered`` bytes, in the layout of ``q``; with ``out``, which lies over them already, nothing."""
    from .tensor import QTensor

    if out is not None:
        return None
    shape, dtypes = metadata
    parts = [part.view(kind) for part, kind in zip(gathered, dtypes, strict=True)]
    zero_point = parts[2] if len(parts) > 2 else None
    weight = QTensor(parts[0], parts[1], zero_point, q.outer, q.scheme, shape, dtype, q.byte_layout)
    weight.keeps_layout = True  # what is gathered for one layer's call is not worth arranging
    return weight, gathered
