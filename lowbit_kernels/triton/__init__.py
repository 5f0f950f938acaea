"""Triton kernels: any GPU that Triton targets, and its interpreter.

Importing this registers the rows and leaves Triton itself alone until one of them runs.
"""

from . import linear, rows

__all__ = ["linear", "rows"]
