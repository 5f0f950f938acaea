"""QLinear: the linear layer that quantize_ puts in place of a float one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy

from .quantized_module import QuantizedModule, local_tensor
from .scales import rounded_tokens
from .scheme import Scheme
from .tensor import QTensor
from .tensor_products import Activation, product
from .tensor_shards import sharded_product

if TYPE_CHECKING:
    from .fused import FusedLinears

__all__ = ["QLinear"]

_OF_FUSED = frozenset({"weight", "bias", "activation", "input_scale", "transform"})


class QLinear(QuantizedModule, nn.Linear):  # type: ignore[misc]
    """``x @ weight.T + bias`` with a quantized weight [out_features, in_features].

    ``activation``: round ``x`` to this scheme first, with a scale a token, or with the fixed ``input_scale`` (a float32
    scalar) where calibration found one. ``transform``: a module that ``x`` goes through before anything else, which a rewrite
    put there. ``fused``: the layers that read the same tensor and are multiplied with this one, after :func:`lowbit.fuse_`.
    """

    if TYPE_CHECKING:  # alone: torch.jit.trace would read these, and knows no such types
        transform: nn.Module | None
        input_scale: Tensor | None
    fused: FusedLinears | None = None
    _place = 0
    _input_quant: Activation | None = None

    def __init__(
        self,
        weight: QTensor,
        bias: nn.Parameter | None = None,
        activation: Scheme | None = None,
        input_scale: Tensor | None = None,
        transform: nn.Module | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.activation = activation
        self._adopt(weight)
        self.out_features, self.in_features = weight.shape
        self.register_parameter("bias", bias)
        self.register_buffer("input_scale", input_scale)
        self.register_module("transform", transform)

    @property
    def _operator(self) -> str:
        return "linear" if self.activation is None else "quantized_linear"

    def forward(self, input: Tensor) -> Tensor:
        """``input`` [..., in_features] to [..., out_features], in the dtype of ``input``, or of torch.autocast.

        An ``input`` that is rounded to the layer's ``activation`` already is multiplied as it is.
        """
        x = input
        if (fused := self.fused) is not None and (y := fused.part(self, x)) is not None:
            return y
        if type(x) is not Tensor:
            if isinstance(x, QTensor):
                return self._of_codes(x)
            if isinstance(x, Proxy):
                return self._in_graph(x)
        if (transform := self._modules.get("transform")) is not None:
            x = transform(x)
        held: dict[str, Any] = self._parameters  # nn.Module looks a name up for longer than a small product takes
        try:
            weight, bias, input_scale = held["weight"], held["bias"], self._buffers["input_scale"]
        except KeyError:  # a parametrization took one of them
            weight, bias, input_scale = self.weight, self.bias, self.input_scale
        if not isinstance(weight, QTensor):  # shards, or floats of somebody who swaps parameters
            if isinstance(local_tensor(weight), QTensor):
                return sharded_product(x, weight, bias, self._input_quant, input_scale)
            return F.linear(x if self.activation is None else self._rounded(x), weight, bias)
        return product(x, weight, bias, self._input_quant, input_scale)

    def _rounded(self, x: Tensor) -> Tensor:
        """``x`` as products with a QTensor weight see it."""
        assert self.activation is not None
        return rounded_tokens(x.float(), self.activation, self.input_scale).to(x.dtype)

    def _of_codes(self, x: QTensor) -> Tensor:
        """The product of tokens that were rounded before."""
        if x.scheme_str != str(self.activation) or self.transform is not None or self.input_scale is not None:
            expected = f"activation {self.activation}" if x.scheme_str != str(self.activation) else "a fixed input_scale"
            expected = "a transform ahead of it" if self.transform is not None else expected
            raise ValueError(f"this layer has {expected}, and x is rounded to {x.scheme_str} already: give it x.dequantize()")
        if x.shape[-1:] != (self.in_features,) or x.transposed:
            raise ValueError(f"x must end in {self.in_features} features, got shape {tuple(x.shape)}")
        x, weight = x.canonical(), self.weight
        parts = (weight.packed, weight.scale, weight.zero_point, weight.outer)
        return torch.ops.lowbit.codes_linear(
            x.packed,
            x.scale,
            *parts,
            self.bias,
            weight.scheme_str,
            weight.byte_layout,
            str(self.activation),
            x.shape[-1],
            x.dtype,
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if self.fused is not None and name in _OF_FUSED:
            self.fused.leave(self)
        if name == "activation":
            self._input_quant = None if value is None else Activation(value, str(value))
        super().__setattr__(name, value)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moves with the model; a cast reaches the weight's dtype, never its stored scales nor ``input_scale``."""
        if self.fused is not None:
            self.fused.leave(self)
        fixed = self.input_scale
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if fixed is not None and self.input_scale is not None and self.input_scale.dtype != fixed.dtype:
            self.input_scale = fixed.to(self.input_scale.device)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "fused": None} if self.fused is not None else self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if "fused" in state:  # a copy is a layer by itself
            self.weight.pins_layout = False
            self._relayout()

    def extra_repr(self) -> str:
        activation = "" if self.activation is None else f", activation={self.activation}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"{self._quantization_repr()}{activation}"
        )
