"""Tokens that are rounded once and read by several layers: RMSNorm whose result is quantized."""

from __future__ import annotations

import torch
from torch import Tensor

from .scheme import Scheme
from .tensor import QTensor

__all__ = ["quantized_rms_norm"]


def quantized_rms_norm(x: Tensor, weight: Tensor | None, eps: float, activation: Scheme | str) -> QTensor:
    """``x / sqrt(mean(x**2) + eps) * weight`` along the last axis of ``x`` [..., K], rounded to ``activation``: a
    :class:`QTensor` of the dtype of ``x``, which a :class:`QLinear` of that ``activation`` multiplies as it is.

    Layers that read one norm (query, key and value; gate and up) round its result once between them, and the float result is
    never written. For activations without zero points.
    """
    scheme = Scheme.parse(activation) if isinstance(activation, str) else activation
    codes, scale = torch.ops.lowbit.rms_norm_quantize(x, weight, eps, str(scheme))
    return QTensor(codes, scale, None, None, scheme, tuple(x.shape), x.dtype)
