"""Rounders: ``(weight, scheme, statistics) -> codes and scales``. They know a format through encode and decode only."""

from ..catalog import Catalog
from . import clip, gptq, hqq
from .rounder import Rounded, Rounder
from .rtn import rtn

__all__ = ["ROUNDERS", "Rounded", "Rounder"]

_OWN = {
    "rtn": Rounder(rtn, needs_statistics=False, uses_statistics=False),
    "clip": Rounder(clip.clip, needs_statistics=False, check=clip.check, rows_per_channel=0.5),
    "hqq": Rounder(hqq.hqq, needs_statistics=False, check=hqq.check, uses_statistics=False),
    "gptq": Rounder(gptq.gptq, needs_statistics=True, check=gptq.check, needs_drift=gptq.needs_drift),
}


def _check(name: str, rounder: Rounder) -> None:
    if not isinstance(rounder, Rounder):
        raise TypeError(f"ROUNDERS[{name!r}] must be a Rounder, got {type(rounder).__name__}")


ROUNDERS: Catalog[Rounder] = Catalog("ROUNDERS", _OWN, _check)
"""Every rounder by name."""
