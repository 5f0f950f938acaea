"""QLinear: the linear layer that quantize_ puts in place of a float one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from lowbit_kernels import inlined
from lowbit_kernels.ops import own
from lowbit_kernels.shortcut import signature

from .scheme import Scheme
from .tensor import QTensor
from .weight import QuantizedModule

if TYPE_CHECKING:
    from .fusion import Fused

__all__ = ["QLinear"]

_OF_FUSED = frozenset({"weight", "packed", "scale", "zero_point", "outer", "bias", "activation", "input_scale", "transform"})


class QLinear(QuantizedModule, nn.Linear):  # type: ignore[misc]
    """``x @ weight.T + bias`` with a quantized weight [out_features, in_features].

    ``activation``: round ``x`` to this scheme first, with a scale a token, or with the fixed ``input_scale`` (a float32
    scalar) where calibration found one. ``transform``: a module that ``x`` goes through before anything else, which a rewrite
    put there. ``fused``: the layers that read the same tensor and are multiplied with this one, after :func:`lowbit.fuse_`.
    """

    transform: nn.Module | None
    input_scale: Tensor | None
    fused: Fused | None = None
    _place = 0

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

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., in_features] to [..., out_features], in the dtype of ``x``, or of torch.autocast.

        An ``x`` that is rounded to the layer's ``activation`` already is multiplied as it is.
        """
        if (fused := self.fused) is not None:
            return fused.part(self._place, x)
        if type(x) is not Tensor and isinstance(x, QTensor):
            return self._of_codes(x)
        if (transform := self._modules.get("transform")) is not None:
            x = transform(x)
        if not is_compiling() and not inlined.active() and (y := self._without_dispatcher(x)) is not None:
            return y
        if x.dim() == 0 or x.shape[-1] != self._k:  # the operator knows K from x alone
            raise ValueError(f"x must end in {self._k} features, got shape {tuple(x.shape)}")
        weight, layout = (self.packed, self.scale, self.zero_point, self.outer), self._held_layout
        if inlined.active():
            if self.activation is None:
                return inlined.linear(x, *weight, self.bias, self.scheme, layout, self._k)
            if (one := self.input_scale) is not None:
                return inlined.quantized_linear(x, *weight, self.bias, self.scheme, layout, self._k, self.activation, one)
        if self.activation is None:
            return torch.ops.lowbit.linear(x, *weight, self.bias, self.spelling, layout)
        return torch.ops.lowbit.quantized_linear(
            x, *weight, self.bias, self.spelling, layout, str(self.activation), self.input_scale
        )

    def _of_codes(self, x: QTensor) -> Tensor:
        """The product of tokens that were rounded before."""
        if x.spelling != str(self.activation) or self.transform is not None or self.input_scale is not None:
            takes = f"activation {self.activation}" if x.spelling != str(self.activation) else "a fixed input_scale"
            takes = "a transform ahead of it" if self.transform is not None else takes
            raise ValueError(f"this layer has {takes}, and x is rounded to {x.spelling} already: give it x.dequantize()")
        if x.shape[-1:] != (self._k,) or x.transposed:
            raise ValueError(f"x must end in {self._k} features, got shape {tuple(x.shape)}")
        x, weight = x.canonical(), (self.packed, self.scale, self.zero_point, self.outer)
        return torch.ops.lowbit.codes_linear(
            x.packed, x.scale, *weight, self.bias, self.spelling, self._held_layout, str(self.activation), self._k, x.dtype
        )

    def _without_dispatcher(self, x: Tensor) -> Tensor | None:
        """The product by a kernel that was selected before; None where the operator has to be called."""
        held: dict[str, Any] = self._parameters
        try:
            packed, scale, zero_point, outer, bias = (
                held["packed"],
                held["scale"],
                held["zero_point"],
                held["outer"],
                held["bias"],
            )
            input_scale = self._buffers["input_scale"]
        except KeyError:  # a parametrization took one of them
            return None
        if (known := signature(x, scale, bias)) is None:
            return None
        run = self._shortcuts.get(known)
        if run is None or self._shortcuts.packed() is not packed:
            if not self._is_own(packed):
                return None
            what = (self._operator, self.byte_layout, self._k, self.scheme, self.activation)
            run = self._shortcuts.find(known, *what, x, (packed, scale, zero_point, outer), bias)
            if run is None:
                return None
        if self.activation is None:
            y = run(x, packed, scale, zero_point, outer, bias, self.scheme)
        else:
            y = run(x, packed, scale, zero_point, outer, bias, self.scheme, self.activation, input_scale)
        return own(y) if y._is_view() else y

    def __setattr__(self, name: str, value: Any) -> None:
        if self.fused is not None and name in _OF_FUSED:
            self.fused.take_apart()
        super().__setattr__(name, value)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        if self.fused is not None:
            self.fused.take_apart()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "fused"}

    def extra_repr(self) -> str:
        activation = "" if self.activation is None else f", activation={self.activation}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"{self._quantization_repr()}{activation}"
        )
