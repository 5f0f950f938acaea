"""Rounders: ``(weight, scheme, statistics) -> codes and scales``. They know a format through encode and decode only."""

from .rounder import Rounded, Rounder
from .rtn import rtn

__all__ = ["ROUNDERS", "Rounded", "Rounder"]

ROUNDERS: dict[str, Rounder] = {
    "rtn": Rounder(rtn, needs_statistics=False),
}
"""Every rounder by name."""
