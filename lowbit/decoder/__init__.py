"""Decoder layers of known structure, whose steps of few tokens are one call each on a CPU, after :func:`lowbit.fuse_`."""

from .step import fuse_decoders_

__all__ = ["fuse_decoders_"]
