"""Whether a tensor's storage holds all of its elements, as ``csrc/storage_check.h`` checks for C++."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["check_storage"]


def check_storage(tensor: Tensor) -> None:
    """Raises where elements of ``tensor`` are outside its storage, which may have been freed without torch noticing."""
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
