"""Models that are looked at: without dropout and the like, and afterwards as they were."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

__all__ = ["evaluating"]


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within the block ``model`` is in evaluation mode; afterwards each module is in its own mode again."""
    modes = [(name, module.training) for name, module in model.named_modules()]
    model.eval()
    try:
        yield
    finally:
        for name, training in modes:
            model.get_submodule(name).training = training
