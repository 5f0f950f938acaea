"""Triton kernels: any GPU that Triton targets, and its interpreter.

Importing this registers the rows and leaves Triton itself alone until one of them runs.
"""

from . import activations, linear, quantization, rows, tokens

__all__ = ["activations", "linear", "quantization", "rows", "tokens"]
