"""What the quantized modules share: a weight held as plain tensors, seen from outside as one QTensor.

A weight is kept in the layout that the kernels of its device read (``registry.preferred_layout``), and changes layout when
it arrives there or leaves, never within a forward pass. One that several modules read stays canonical, and theirs together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack as _transform
from torch.compiler import is_compiling
from torch.utils.weak import WeakIdKeyDictionary

from lowbit_kernels.layouts import LAYOUTS
from lowbit_kernels.ops import call_for
from lowbit_kernels.registry import preferred_layout
from lowbit_kernels.shortcut import Shortcuts

from .scheme import Scheme
from .tensor import QTensor, _assemble

__all__ = ["QuantizedModule"]

_PARTS = ("packed", "scale", "zero_point", "outer")
_GIVEN = frozenset({*_PARTS, "bias", "activation"})  # what the selection of a kernel looks at
_readers = WeakIdKeyDictionary()  # from the parameter that holds the codes to the modules that were given it
_handed_out = WeakIdKeyDictionary()  # canonical codes that a state_dict made from another layout


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
    _settled: bool  # whether the layout was chosen here, and not asked for
    _shortcuts: Shortcuts

    def _adopt(self, weight: QTensor) -> None:
        if not isinstance(weight, QTensor):
            raise TypeError(f"the weight of a {type(self).__name__} is a QTensor, got {type(weight).__name__}")
        if weight.transposed or weight.dim() != 2:
            raise ValueError(f"a module's weight is a matrix [N, K] that is not transposed, got {weight!r}")
        self.scheme, self.byte_layout, self.weight_dtype = weight.scheme, weight.byte_layout, weight.dtype
        self.spelling = str(weight.scheme)
        self._k = weight.shape[-1]
        self._settled = False
        self._hold({name: getattr(weight, name) for name in _PARTS})
        if not isinstance(weight.packed, nn.Parameter) or len(self._sharing()) > 1:
            self._settle()  # other modules may be about to take somebody's parameters too

    def _hold(self, parts: dict[str, Tensor | None]) -> None:
        self._shortcuts = Shortcuts()
        for name, part in parts.items():
            if part is not None and not isinstance(part, nn.Parameter):
                part = nn.Parameter(part.detach(), requires_grad=False)
            setattr(self, name, part) if name in self._parameters else self.register_parameter(name, part)
        self._read()

    # ---- layouts -----------------------------------------------------------------------------------------------

    @property
    def _operator(self) -> str:
        """The operator that reads the weight."""
        return "linear"

    def _read(self) -> None:
        """Note that this module reads its codes, so that modules which share them are known to each other."""
        _readers.setdefault(self.packed, WeakSet()).add(self)

    def _is_own(self, packed: Tensor) -> bool:
        """Whether shortcuts are of these codes from now on: codes that were put in past this module take none."""
        if self not in _readers.get(packed, ()):
            return False
        if self._shortcuts.packed() is not packed:
            self._shortcuts.clear()
            self._shortcuts.packed = ref(packed)
        return True

    def _sharing(self) -> list[QuantizedModule]:
        """The modules that read these very codes, this one among them."""
        return [module for module in _readers.get(self.packed, ()) if module._parameters.get("packed") is self.packed]

    @property
    def _held_layout(self) -> str:
        """The layout of the codes that are held now; ``byte_layout`` is that of the module's own.

        ``torch.func.functional_call`` and tools that offload write tensors straight into ``_parameters``. Those that some
        module reads lie in its layout, those of a ``state_dict`` are canonical, and of others the sizes tell. Raises
        ``RuntimeError`` where they do not.
        """
        packed = self._parameters.get("packed")
        if packed is None or is_compiling() or type(packed) not in (Tensor, nn.Parameter):
            return self.byte_layout
        for module in _readers.get(packed, ()):
            if module._parameters.get("packed") is packed:
                return module.byte_layout
        if packed in _handed_out:
            return "canonical"
        held = packed.shape[-1], self.scale.shape[-1]
        names = dict.fromkeys(("canonical", self.byte_layout))
        fitting = [name for name in names if LAYOUTS[name].sizes(self.scheme, packed.shape[0], self._k) == held]
        if len(fitting) > 1 and _transform() is None:
            raise RuntimeError(
                f"the codes of this {type(self).__name__} were put in past it, and their size does not tell whether they are "
                f"canonical or in the layout {self.byte_layout}: give what its state_dict() or its parameters() hold, uncopied, "
                "or use load_state_dict"
            )
        return fitting[0] if len(fitting) == 1 else self.byte_layout

    def _preferred(self, device: torch.device, dtype: torch.dtype) -> str:
        if device.type == "meta" or len(self._sharing()) > 1:
            return "canonical"
        size, activation = (self.packed.shape[0], self._k), getattr(self, "activation", None)
        return preferred_layout(call_for(self._operator, self.scheme, "canonical", device, dtype, 1, *size, activation))

    def _settle(self) -> None:
        """Take the layout that kernels read here, unless another one was asked for."""
        layout = self._preferred(self.packed.device, self.weight_dtype)
        if self.byte_layout != layout and (self.byte_layout == "canonical" or any(m._settled for m in self._sharing())):
            self._arrange(layout)

    @torch.inference_mode(False)  # parameters made in that mode could never meet autograd again
    def _arrange(self, layout: str) -> None:
        """Hold the weight in ``layout``, in new parameters: tensors over the old ones keep their meaning."""
        sharing, arranged = self._sharing(), self.weight.to_layout(layout)
        parts: dict[str, Tensor | None] = dict.fromkeys(_PARTS)
        for name, part in arranged._parts().items():
            parts[name] = part if isinstance(part, nn.Parameter) else nn.Parameter(part, requires_grad=False)
        for module in sharing:
            module._hold(parts)
            module.byte_layout, module._settled = layout, layout != "canonical"

    @property
    def weight(self) -> QTensor:
        """The weight as one :class:`QTensor` over the module's own bytes."""
        shape = (self.packed.shape[0], self._k)
        parts = (self.packed, self.scale, self.zero_point, self.outer)
        return QTensor(*parts, self.scheme, shape, self.weight_dtype, self._held_layout)

    @weight.setter
    def weight(self, value: QTensor) -> None:
        if value.shape != self.weight.shape:
            raise ValueError(f"the weight of this {type(self).__name__} is {tuple(self.weight.shape)}, got {tuple(value.shape)}")
        self._adopt(value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":  # nn.Module would register a Parameter beside the property
            object.__setattr__(self, name, value)
            return
        super().__setattr__(name, value)
        if name in _GIVEN and "_shortcuts" in self.__dict__:  # a module that is being made has none yet
            self._shortcuts.clear()
            if name == "packed":
                self._read()
            elif name == "activation":
                self._settle()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves with the model; a change of dtype reaches the weight's dtype, never the stored scales."""
        moved = fn(torch.empty(0, dtype=self.weight_dtype, device=self.packed.device))
        if self._settled and self._preferred(moved.device, moved.dtype) != self.byte_layout:
            self._arrange("canonical")
        self.weight_dtype = moved.dtype
        stored = [getattr(self, name, None) for name in (*_PARTS, "input_scale")]

        def apply(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            keep = moved.dtype != tensor.dtype and any(tensor is part for part in stored)
            return tensor.to(moved.device) if keep else moved

        readers = list(_readers.pop(self.packed, ()))  # torch swaps no parameter that has weak references
        for module in {self, *readers}:
            module._shortcuts.clear()
        super()._apply(apply, recurse)
        self._shortcuts.clear()
        for module in {self, *readers}:
            module._read()
        self._settle()
        return self

    # ---- saving: always the canonical bytes, and never another scheme's ----------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_settled": False, "_alone": len(self._sharing()) == 1}
        del state["_shortcuts"]
        if self.byte_layout != "canonical":
            parts = self.weight.canonical()._parts()
            stored = {name: nn.Parameter(part, requires_grad=False) for name, part in parts.items()}
            state.update(byte_layout="canonical", _parameters={**self._parameters, **stored})
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        alone = state.pop("_alone")
        super().__setstate__(state)
        self._shortcuts = Shortcuts()
        self._read()
        if alone:  # the others that read these codes are not made yet
            self._settle()

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
            _handed_out[destination[prefix + "packed"]] = True

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *args: Any) -> None:
        extra = state_dict.get(prefix + "_extra_state")
        if extra is not None:
            self.set_extra_state(extra)  # before anything is copied: a refused state leaves the module as it was
        layout, names = self.byte_layout, [name for name, part in self.weight._parts().items()]
        if layout != "canonical" and metadata.get("assign_to_params_buffers", False):
            self._arrange("canonical")
        elif layout != "canonical" and all(prefix + name in state_dict for name in names):
            parts = {name: state_dict[prefix + name].to(self.packed.device) for name in names}
            shape = (parts["packed"].shape[0], self._k)
            arranged = _assemble(parts, self.scheme, shape, self.weight_dtype, "canonical", False).to_layout(layout)
            state_dict = {**state_dict, **{prefix + name: part for name, part in arranged._parts().items()}}
        super()._load_from_state_dict(state_dict, prefix, metadata, *args)
        self._settle()

    def _quantization_repr(self) -> str:
        return f"{self.spelling}, bits_per_weight={self.weight.bits_per_weight:.3f}"
