"""Decoder layers of known structure, whose steps of few tokens are one call each on a CPU, or one for all of them."""

from torch import nn

from lowbit_kernels import cpu_decoder

from .stack import fuse_stacks_
from .step import fuse_layers_

__all__ = ["fuse_decoders_"]


def fuse_decoders_(model: nn.Module) -> None:
    """Decoder layers of ``model`` on a CPU, and whole stacks of them, step as one call from now on where they are known."""
    if cpu_decoder.available() is None:
        fuse_layers_(model)
        fuse_stacks_(model)
