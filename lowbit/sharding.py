"""``fully_shard`` (FSDP2) on a QTensor: each process keeps rows of codes, scales and zero points, and codes are gathered.

torch asks the local tensor for what to gather and for the weight that it makes. A scale as a whole (``outer``) is the same in
each process and is not gathered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .qtensor import QTensor

__all__ = ["post_all_gather", "pre_all_gather"]

_ROWS = ("packed", "scale", "zero_point")


def pre_all_gather(q: QTensor, mesh: Any, shape: torch.Size) -> tuple[tuple[Tensor, ...], Any]:
    """The parts of ``q``, rows of a weight of the shape ``shape``, to gather along the rows.

    Raises ``ValueError``, in every process alike, where the rows do not divide evenly: codes have no padding.
    """
    if shape[0] % mesh.size():
        raise ValueError(
            f"a quantized weight {tuple(shape)} has {shape[0]} rows, which {mesh.size()} processes cannot share evenly: leave "
            "its layer out of fully_shard (ignored_params), or use a number of processes that divides the rows"
        )
    parts = {name: part for name in _ROWS if (part := getattr(q, name)) is not None}
    sent = tuple(part.view(torch.uint8) for part in parts.values() if part.numel())  # torch cannot unflatten what is empty
    return sent, (tuple(shape), mesh.size(), parts)


def post_all_gather(q: QTensor, gathered: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, out: Tensor | None) -> Any:
    """The weight over the ``gathered`` bytes, in the layout of ``q``; with ``out``, which lies over them already, nothing."""
    if out is not None:
        return None
    shape, count, parts_by_name = metadata
    parts: dict[str, Any] = dict.fromkeys(_ROWS) | parts_by_name
    if count > 1:  # one process gathers nothing, and torch hands back the first part alone
        given = iter(gathered)
        for name, part in parts_by_name.items():
            parts[name] = next(given).view(part.dtype) if part.numel() else part.new_empty((count * len(part), *part.shape[1:]))
    weight = type(q)(parts["packed"], parts["scale"], parts["zero_point"], q.outer, q.scheme, shape, dtype, q.byte_layout)
    weight.pins_layout = True  # what is gathered for one layer's call is not worth arranging
    return weight, gathered
