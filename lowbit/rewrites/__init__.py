"""Rewrites: a float model becomes a float model with the same output that is easier to quantize."""

from . import awq, smoothquant
from .method import Method
from .rotation import check_rotation, rotation

__all__ = ["REWRITES", "Method"]

REWRITES: dict[str, Method] = {
    "rotation": Method(rotation, "model", needs_data=False, check=check_rotation),
    "awq": Method(awq.awq, "block", check=awq.check),
    "smoothquant": Method(smoothquant.smoothquant, "block", check=smoothquant.check),
}
"""Every rewrite by name."""
