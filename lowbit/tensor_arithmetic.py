"""What every other operator means on a QTensor: it computes with the dequantized values, and what it writes is rounded again."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from .qtensor import QTensor, quantized
from .tensor_scaling import multiply
from .tensor_table import ATEN, FUNCTIONS, OTHERS, implements
from .tensor_writes import follow_gradients, set_data, write

__all__ = ["compute_dequantized"]

aten = torch.ops.aten


@implements(ATEN, OTHERS)
def compute_dequantized(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func`` on the values that its QTensors stand for. Those that it writes into are rounded again.

    Raises ``NotImplementedError`` for views that packed codes have none of, and for collectives.
    """
    if func.namespace not in ("aten", "prims") or func.is_view:
        raise NotImplementedError(f"{func} is not defined for a QTensor: call .dequantize() first")
    written: list[tuple[QTensor, Tensor]] = []
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    dense = {id(q): q.dequantize() for value in named.values() for q in quantized(value)}
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += [(q, dense[id(q)]) for q in quantized(named.get(argument.name))]
    given, options = tree_map_only(QTensor, lambda q: dense[id(q)], (args, kwargs))
    result = func(*given, **options)
    originals = {id(values): q for q, values in written}
    for q, values in written:
        write(q, values)
        follow_gradients(q, *tree_leaves((args, kwargs)))
    return tree_map_only(Tensor, lambda y: originals.get(id(y), y), result)


def _times(func: Any, inverse: bool, q: Any, other: Any) -> Any:
    """``q.mul_(other)`` or ``q.div_(other)``."""
    single = isinstance(other, Tensor) and type(other) is Tensor and other.dim() == 0 and other.device.type == "cpu"
    if isinstance(q, QTensor) and multiply(q, other.item() if single else other, inverse):
        return q
    return compute_dequantized(func, (q, other), {})


for _operator, _inverse in (
    (torch.ops.aten.mul_.Tensor, False), (torch.ops.aten.mul_.Scalar, False),
    (torch.ops.aten.div_.Tensor, True), (torch.ops.aten.div_.Scalar, True),
):  # fmt: skip
    ATEN[_operator] = partial(_times, _operator, _inverse)


def _set_data(q: Tensor, value: Tensor) -> Any:
    if not isinstance(q, QTensor):  # a float tensor's data becomes a quantized one's
        raise TypeError("the data of a float tensor cannot become a QTensor: assign the values, q.dequantize()")
    set_data(q, value)
    return None


def _requires_grad_(q: Tensor, requires_grad: bool = True) -> Any:
    if not isinstance(q, QTensor):
        return NotImplemented
    q._trains = requires_grad
    return NotImplemented


def _copied(function: Any) -> Any:
    """``function``, which takes the shape of a tensor and gives a view where there is one, on a copy of floats."""

    def on_copy(q: Any, *args: Any, **kwargs: Any) -> Any:
        same = isinstance(q, QTensor) and args in ((tuple(q.shape),), tuple(q.shape))
        return NotImplemented if same or not isinstance(q, QTensor) else function(q.dequantize(), *args, **kwargs)

    return on_copy


for _function in (torch.reshape, torch.Tensor.reshape, torch.flatten, torch.Tensor.flatten, torch.ravel, torch.Tensor.ravel):
    FUNCTIONS[_function] = _copied(_function)


def _numpy(q: Any, *args: Any, **kwargs: Any) -> Any:
    return q.dequantize().numpy(*args, **kwargs)


@implements(ATEN, aten.view.dtype)
def _reinterpreted(q: QTensor, dtype: torch.dtype) -> Tensor:
    return q.dequantize().view(dtype)


def _storage(q: Any) -> Any:
    """What code that writes plain tensors to a file asks for first (safetensors, transformers, diffusers, accelerate)."""
    raise RuntimeError(
        f"a QTensor {tuple(q.shape)} of {q.scheme_str} has no storage that a file of plain tensors could hold: save the model "
        f"with "
        "lowbit.save (lowbit.load and transformers' from_pretrained read it), or quantize the whole model, whose save_pretrained "
        "then writes it; torch.save takes its state_dict as it is"
    )


def _data_ptr(q: Any) -> int:
    """Where the codes lie: what tells ties apart from other weights."""
    return int(q.packed.data_ptr())


def _element_size(q: Any) -> float:
    """Bytes of a value: ``numel() * element_size()`` is what is stored."""
    return q.nbytes / q.numel() if q.numel() else 0.0


FUNCTIONS[torch.Tensor.numpy] = _numpy
FUNCTIONS[torch.Tensor.data_ptr] = _data_ptr
FUNCTIONS[torch.Tensor.storage] = FUNCTIONS[torch.Tensor._typed_storage] = _storage
FUNCTIONS[torch.Tensor.element_size] = _element_size
FUNCTIONS[torch.Tensor.data.__set__] = _set_data  # type: ignore[attr-defined]
FUNCTIONS[torch.Tensor.requires_grad_] = _requires_grad_
FUNCTIONS[torch.Tensor.requires_grad.__set__] = _requires_grad_  # type: ignore[attr-defined]
