"""Triton kernels: any GPU that Triton targets, and its interpreter.

Importing this registers the rows and leaves Triton itself alone until one of them runs.
"""

from . import activations, fused_norm_quant, linear, quantization, rows

__all__ = ["activations", "fused_norm_quant", "linear", "quantization", "rows"]
