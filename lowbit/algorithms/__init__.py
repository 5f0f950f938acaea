"""Rounders: ``(weight, scheme) -> codes and scales``. They know a format through encode and decode only."""

from .rtn import rtn

__all__ = ["ROUNDERS"]

ROUNDERS = {"rtn": rtn}
