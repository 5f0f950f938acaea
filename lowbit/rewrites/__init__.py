"""Rewrites: a float model becomes a float model with the same output that is easier to quantize."""

from .method import Method

__all__ = ["REWRITES", "Method"]

REWRITES: dict[str, Method] = {}
"""Every rewrite by name."""
