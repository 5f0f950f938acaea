"""QLinear: the linear layer that quantize_ puts in place of a float one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .scheme import Scheme
from .tensor import QTensor
from .weight import QuantizedModule

__all__ = ["QLinear"]


class QLinear(QuantizedModule, nn.Linear):  # type: ignore[misc]
    """``x @ weight.T + bias`` with a quantized weight [out_features, in_features].

    ``activation``: round ``x`` to this scheme first, with a scale a token, or with the fixed ``input_scale`` (a float32
    scalar) where calibration found one.
    """

    def __init__(
        self,
        weight: QTensor,
        bias: nn.Parameter | None = None,
        activation: Scheme | None = None,
        input_scale: Tensor | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self._adopt(weight)
        self.out_features, self.in_features = weight.shape
        self.register_parameter("bias", bias)
        self.activation = activation
        self.register_buffer("input_scale", input_scale)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., in_features] to [..., out_features], in the dtype of ``x``, or of torch.autocast."""
        if x.dim() == 0 or x.shape[-1] != self._k:  # the operator knows K from x alone
            raise ValueError(f"x must end in {self._k} features, got shape {tuple(x.shape)}")
        weight = (self.packed, self.scale, self.zero_point, self.outer)
        if self.activation is None:
            return torch.ops.lowbit.linear(x, *weight, self.bias, self.spelling, self.byte_layout)
        return torch.ops.lowbit.quantized_linear(
            x, *weight, self.bias, self.spelling, self.byte_layout, str(self.activation), self.input_scale
        )

    def extra_repr(self) -> str:
        activation = "" if self.activation is None else f", activation={self.activation}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"{self._quantization_repr()}{activation}"
        )
