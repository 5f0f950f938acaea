"""Rewrites: a float model becomes a float model with the same output that is easier to quantize."""

from ..catalog import Catalog
from . import awq, smoothquant
from .method import Method
from .rotation import check_rotation, rotation

__all__ = ["REWRITES", "Method"]

_OWN = {
    "rotation": Method(rotation, "model", needs_data=False, check=check_rotation),
    "awq": Method(awq.awq, "block", check=awq.check),
    "smoothquant": Method(smoothquant.smoothquant, "block", check=smoothquant.check),
}


def _check(name: str, method: Method) -> None:
    if not isinstance(method, Method):
        raise TypeError(f"REWRITES[{name!r}] must be a Method, got {type(method).__name__}")


REWRITES: Catalog[Method] = Catalog("REWRITES", _OWN, _check)
"""Every rewrite by name."""
