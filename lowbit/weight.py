"""What the quantized modules share: a weight held as plain tensors, seen from outside as one QTensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .scheme import Scheme
from .tensor import QTensor, _assemble

__all__ = ["QuantizedModule"]

_PARTS = ("packed", "scale", "zero_point", "outer")


class QuantizedModule(nn.Module):
    """Holds the parts of a weight as parameters without gradients, so that torch.compile, export and saving see plain
    tensors. ``state_dict`` also carries the scheme's spelling, and loading another scheme's bytes raises."""

    packed: Tensor
    scale: Tensor
    zero_point: Tensor | None
    outer: Tensor | None
    scheme: Scheme
    byte_layout: str
    weight_dtype: torch.dtype

    def _adopt(self, weight: QTensor) -> None:
        if not isinstance(weight, QTensor):
            raise TypeError(f"the weight of a {type(self).__name__} is a QTensor, got {type(weight).__name__}")
        if weight.transposed or weight.dim() != 2:
            raise ValueError(f"a module's weight is a matrix [N, K] that is not transposed, got {weight!r}")
        self.scheme, self.byte_layout, self.weight_dtype = weight.scheme, weight.byte_layout, weight.dtype
        self.spelling = str(weight.scheme)
        self._k = weight.shape[-1]
        for name in _PARTS:
            part = getattr(weight, name)
            if part is not None and not isinstance(part, nn.Parameter):
                part = nn.Parameter(part.detach(), requires_grad=False)
            setattr(self, name, part) if name in self._parameters else self.register_parameter(name, part)

    @property
    def weight(self) -> QTensor:
        """The weight as one :class:`QTensor` over the module's own bytes."""
        shape = (self.packed.shape[0], self._k)
        parts = (self.packed, self.scale, self.zero_point, self.outer)
        return QTensor(*parts, self.scheme, shape, self.weight_dtype, self.byte_layout)

    @weight.setter
    def weight(self, value: QTensor) -> None:
        if value.shape != self.weight.shape:
            raise ValueError(f"the weight of this {type(self).__name__} is {tuple(self.weight.shape)}, got {tuple(value.shape)}")
        self._adopt(value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":  # nn.Module would register a Parameter beside the property
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves with the model; a change of dtype reaches the weight's dtype, never the stored scales."""
        self.weight_dtype = fn(torch.empty(0, dtype=self.weight_dtype, device=self.packed.device)).dtype
        stored = [getattr(self, name, None) for name in (*_PARTS, "input_scale")]

        def apply(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            keep = moved.dtype != tensor.dtype and any(tensor is part for part in stored)
            return tensor.to(moved.device) if keep else moved

        return super()._apply(apply, recurse)

    # ---- saving: always the canonical bytes, and never another scheme's ----------------------------------------

    def _identity(self) -> str:
        return f"{self.spelling} K={self._k}"  # rows of another K may take as many bytes

    def get_extra_state(self) -> Tensor:
        return torch.tensor(list(self._identity().encode()), dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        found = bytes(state.tolist()).decode(errors="replace")
        if found != self._identity():
            raise ValueError(f"the state holds a weight quantized as {found}, and this module is {self._identity()}")

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.byte_layout != "canonical":
            parts = self.weight.canonical()._parts()
            destination.update({prefix + name: part if keep_vars else part.detach() for name, part in parts.items()})

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        extra = state_dict.get(prefix + "_extra_state")
        if extra is not None:
            self.set_extra_state(extra)  # before anything is copied: a refused state leaves the module as it was
        names = [name for name in _PARTS if prefix + name in state_dict]
        if self.byte_layout != "canonical" and "packed" in names:
            parts = {name: state_dict[prefix + name] for name in names}
            shape = (parts["packed"].shape[0], self._k)
            arranged = _assemble(parts, self.scheme, shape, self.weight_dtype, "canonical", False).to_layout(self.byte_layout)
            state_dict = {**state_dict, **{prefix + name: part for name, part in arranged._parts().items()}}
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _quantization_repr(self) -> str:
        return f"{self.spelling}, bits_per_weight={self.weight.bits_per_weight:.3f}"
