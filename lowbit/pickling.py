"""How a QTensor comes back from a pickle; registered so that ``torch.load(weights_only=True)`` takes it.

A pickle holds canonical bytes. One that is made for another process of this machine (``multiprocessing``) shares the tensor's own
parts in the layout that they have: tensors made for the pickle alone would be gone before the other process opens them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .qtensor import QTensor
    from .scheme import Scheme

__all__ = ["set_tensor_class", "rebuild", "rebuild_shared", "share", "readers_as_strings"]

Readers = tuple[tuple[str, "str | None"], ...]


_tensor_class: Callable[[], type[QTensor]]


def set_tensor_class(tensor_class: Callable[[], type[QTensor]]) -> None:
    """Import the class by ``tensor_class()`` once a pickle is read: QTensor itself knows this module."""
    global _tensor_class
    _tensor_class = tensor_class


def readers_as_strings(readers: frozenset[tuple[str, Scheme | None]]) -> Readers:
    """The readers of a weight in plain strings."""
    return tuple(sorted(((op, None if scheme is None else str(scheme)) for op, scheme in readers), key=str))


def rebuild(
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    outer: Tensor | None,
    scheme: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    transposed: bool,
    is_parameter: bool,
    readers: Readers = (),
) -> QTensor | torch.nn.Parameter:
    """A QTensor from its canonical parts; a parameter that wants no gradient if it was one."""
    from .scheme import Scheme

    tensor = _tensor_class()(packed, scale, zero_point, outer, Scheme.parse(scheme), tuple(shape), dtype, transposed=transposed)
    for operator, activation in readers:
        tensor.read_by(operator, None if activation is None else Scheme.parse(activation))
    return torch.nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor


def share(tensor: QTensor) -> Any:
    """The reducer for other processes of this machine."""
    parts = (tensor.packed.detach(), tensor.scale.detach(), tensor.zero_point, tensor.outer)
    fields = (str(tensor.scheme), tensor._stored_shape, tensor.dtype, tensor.byte_layout, tensor.transposed)
    return rebuild_shared, (
        *parts,
        *fields,
        isinstance(tensor, torch.nn.Parameter),
        readers_as_strings(tensor.readers),
        tensor.pins_layout,
    )


def rebuild_shared(
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    outer: Tensor | None,
    scheme: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    layout: str,
    transposed: bool,
    is_parameter: bool,
    readers: Readers,
    pins_layout: bool,
) -> QTensor | torch.nn.Parameter:
    """A QTensor over parts that :func:`share` sent, in their layout."""
    from .scheme import Scheme

    tensor = _tensor_class()(packed, scale, zero_point, outer, Scheme.parse(scheme), tuple(shape), dtype, layout, transposed)
    tensor.readers = frozenset((op, None if act is None else Scheme.parse(act)) for op, act in readers)
    tensor.pins_layout = pins_layout
    return torch.nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor


torch.serialization.add_safe_globals([rebuild])
