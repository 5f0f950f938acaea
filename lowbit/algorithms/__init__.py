"""Rounders: ``(weight, scheme, statistics) -> codes and scales``. They know a format through encode and decode only."""

from . import clip, gptq, hqq
from .rounder import Rounded, Rounder
from .rtn import rtn

__all__ = ["ROUNDERS", "Rounded", "Rounder"]

ROUNDERS: dict[str, Rounder] = {
    "rtn": Rounder(rtn, needs_statistics=False, uses_statistics=False),
    "clip": Rounder(clip.clip, needs_statistics=False, check=clip.check),
    "hqq": Rounder(hqq.hqq, needs_statistics=False, check=hqq.check, uses_statistics=False),
    "gptq": Rounder(gptq.gptq, needs_statistics=True, check=gptq.check, asks_drift=gptq.asks_drift),
}
"""Every rounder by name."""
