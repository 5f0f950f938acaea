"""Whether a tensor holds what its sizes say: what ``csrc/held.h`` asks where a call enters C++, for all that runs in Python."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["check_held"]


def check_held(tensor: Tensor) -> None:
    """Raise where elements of ``tensor`` lie outside of its storage: it may have been freed, which torch itself does not mind."""
    if tensor.layout is not torch.strided:
        raise TypeError(f"tensors must be dense, got one of the layout {tensor.layout}: take to_dense()")
    if not tensor.numel():
        return
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    held = tensor.untyped_storage().nbytes()
    if (tensor.storage_offset() + last + 1) * tensor.element_size() > held:
        raise ValueError(
            f"a tensor {tensor.dtype} {tuple(tensor.shape)} has a storage of {held} bytes, which does not hold it: it was freed "
            "or resized, give a tensor that has its memory"
        )
