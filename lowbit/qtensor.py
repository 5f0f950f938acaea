"""QTensor: the one quantized tensor, for every format. ``lowbit.tensor`` brings what operators mean on it."""

from __future__ import annotations

import math
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

import lowbit_kernels.ops  # noqa: F401 - registers torch.ops.lowbit
from lowbit_kernels.fast_dispatch import FastDispatch
from lowbit_kernels.layouts import LAYOUTS, Parts
from lowbit_kernels.ops import call_for
from lowbit_kernels.registry import preferred_layout

from . import autocast, pickling, sharding  # noqa: F401 - autocast registers the operators' rules for it
from .grid import Scales
from .packing import pack_unchecked, unpack
from .scheme import Scheme
from .tensor_table import ATEN, FUNCTIONS, OTHERS

__all__ = ["QTensor", "RoundingError", "check_weight", "quantized"]

_aten = torch.ops.aten
_OF_ANY_SHAPE = frozenset({_aten.detach.default, _aten.alias.default, _aten.clone.default, _aten._to_copy.default})


class RoundingError(NamedTuple):
    """How far a quantized weight is from the float one: signal over noise in dB, and the largest difference."""

    sqnr_db: float
    max_error: float


class CopiedSlices(list[tuple[Callable[[], "QTensor | None"], Callable[[], "QTensor"]]]):
    """Slices of a tensor that hold copies of its bytes, since no view of them exists: each by a weak reference, with how it is
    taken again. A true view shares the list of its base."""

    def refresh(self) -> None:
        """Let every slice that is still in use hold what the base holds now."""
        self[:] = [(reference, recompute) for reference, recompute in self if reference() is not None]
        for reference, recompute in list(self):
            if (piece := reference()) is not None:
                piece._copy_from(recompute())


class QTensor(torch.Tensor):
    """A weight [..., N, K] that means ``(decode(codes) - zero_point) * scale * outer``.

    Attributes:
        packed: uint8 [..., N, bytes], codes packed along K (see :mod:`lowbit.packing`).
        scale: [..., N, G], G groups along K: bf16, fp16, fp32, or uint8 codes of the scale's format.
        zero_point: [..., N, G] uint8 or the dtype of the scale, or None.
        outer: float32 [...], one for each matrix, or None.
        scheme: the :class:`~lowbit.scheme.Scheme`.
        byte_layout: name of the arrangement of the bytes; ``"canonical"`` in every file and pickle.
        transposed: whether this tensor is the transpose of what is stored (``w.t()``).
        flat: whether its shape is one dimension of all values (``w.view(-1)``).
        readers: the operators that modules read this weight with, each with the scheme that x is rounded to. Where there are
            any, :meth:`relayout_` keeps the bytes in the layout that those operators' kernels read on the weight's device,
        pins_layout: unless somebody asked for a layout by :meth:`to_layout`.

    Its dtype is that of the float weight: what :meth:`dequantize` returns. F.linear, matmul, bmm and F.embedding multiply by
    the codes. Moves, slices, ``cat`` and the like move the codes. Every other operator computes with the dequantized values and
    returns floats, and where it writes into a QTensor its result is rounded to nearest under the scheme
    (:mod:`lowbit.tensor_writes`), as a write into a bfloat16 tensor is.
    """

    packed: Tensor
    scale: Tensor
    zero_point: Tensor | None
    scheme: Scheme
    scheme_str: str
    byte_layout: str
    transposed: bool
    flat: bool
    _stored_shape: tuple[int, ...]
    readers: frozenset[tuple[str, Scheme | None]]
    pins_layout: bool
    _outer: Tensor | None
    _dispatch: FastDispatch
    _trains: bool  # whether a gradient was asked for, which there is none of
    _copies: CopiedSlices  # slices that are copies of bytes, and follow what is written here
    _shared: frozenset[str]  # parts that values outside this slice are scaled by too
    _is_fully_written: bool  # whether all of it is being written, slice by slice
    _write_back: Callable[[QTensor], None] | None  # how a slice that is a copy is written into its base
    _matrices: tuple[Tensor, list[QTensor]] | None  # what they are views of, and they
    _on_parts_changed: Callable[[], Callable[[], None] | None] | None  # a weak method, which is called once the parts are others

    @staticmethod
    def __new__(
        cls,
        packed: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        outer: Tensor | None,
        scheme: Scheme,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.bfloat16,
        layout: str = "canonical",
        transposed: bool = False,
        flat: bool = False,
    ) -> QTensor:
        outward = (*shape[:-2], shape[-1], shape[-2]) if transposed else tuple(shape)
        strides = _strides(shape, transposed)
        if flat:
            outward, strides = (math.prod(shape),), (1,)
        self = torch.Tensor._make_wrapper_subclass(
            cls, outward, strides=strides, dtype=dtype, device=packed.device, requires_grad=False
        )
        self.packed, self.scale, self.zero_point, self._outer = packed, scale, zero_point, outer
        self.scheme, self.byte_layout, self.transposed, self._stored_shape = scheme, layout, transposed, tuple(shape)
        self.flat = flat
        self.scheme_str = str(scheme)  # which a compiler can look at
        self._dispatch = FastDispatch()
        self.readers, self.pins_layout, self._trains = frozenset(), False, False
        self._copies, self._shared, self._write_back = CopiedSlices(), frozenset(), None
        self._on_parts_changed, self._matrices, self._is_fully_written = None, None, False
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @property
    def outer(self) -> Tensor | None:  # type: ignore[override]
        # Kept as _outer: torch.export follows only those attributes of a subclass whose names no tensor has.
        return self._outer

    # ---- making and reading ----------------------------------------------------------------------------------

    @classmethod
    def quantize(cls, w: Tensor, scheme: Scheme | str, *, method: str = "range", name: str = "weight") -> QTensor:
        """Round the float weight ``w`` [..., N, K] to nearest under ``scheme``.

        ``method``: how scales are chosen, ``"range"`` or ``"mse"`` (:func:`lowbit.scales.choose`). Raises ``ValueError``
        with ``name`` and the count where ``w`` holds NaN or infinity, ``TypeError`` where it is not floating point.
        """
        scheme = Scheme.parse(scheme) if isinstance(scheme, str) else scheme
        check_weight(w, name)
        w = w.detach()
        packed, scale, zero_point, outer = torch.ops.lowbit.quantize(w, str(scheme), method)
        zero = None if scheme.zero_point == "none" else zero_point
        return cls(packed, scale, zero, outer if scheme.outer else None, scheme, tuple(w.shape), w.dtype)

    @classmethod
    def from_codes(cls, codes: Tensor, scales: Scales, scheme: Scheme, dtype: torch.dtype = torch.bfloat16) -> QTensor:
        """A tensor from codes (uint8 [..., N, K]) and scales that a rounder chose."""
        packed = pack_unchecked(codes, scheme.bits)
        return cls(packed, scales.scale, scales.zero_point, scales.outer, scheme, tuple(codes.shape), dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The float weight that this stands for, [..., N, K] in ``dtype`` (its own by default)."""
        layout = self.byte_layout if len(self._stored_shape) > 1 else "canonical"
        parts = _with_rows(self._to_layout(layout))
        packed, scale = _flatten_lead(parts.packed, 2), _flatten_lead(parts.scale, 2)
        zero = None if parts.zero_point is None else _flatten_lead(parts.zero_point, 2)
        outer = None if self.outer is None else _flatten_lead(self.outer, 0)
        k = self._stored_shape[-1]
        dense = torch.ops.lowbit.dequantize(packed, scale, zero, outer, str(self.scheme), layout, k, dtype or self.dtype)
        dense = dense.reshape(self.shape if self.flat else self._stored_shape)
        return dense.transpose(-1, -2) if self.transposed else dense

    def codes(self) -> Tensor:
        """The codes, uint8, unpacked to a byte each, in the shape of this tensor."""
        codes = unpack(self.canonical().packed, self.scheme.bits, self._stored_shape[-1])
        return codes.transpose(-1, -2) if self.transposed else codes

    def requantize(self, scheme: Scheme | str, *, method: str = "range") -> QTensor:
        """This weight rounded again, under another scheme."""
        dense = self.dequantize(torch.float64 if self.dtype == torch.float64 else torch.float32)
        stored = dense.transpose(-1, -2) if self.transposed else dense
        result = cast(QTensor, QTensor.quantize(stored, scheme, method=method).to(self.dtype))
        return cast(QTensor, result.transpose(-1, -2)) if self.transposed else result

    def error(self, w: Tensor) -> RoundingError:
        """Distance from the float weight ``w`` of the same shape, in float64."""
        if w.shape != self.shape:
            raise ValueError(f"w must have shape {tuple(self.shape)}, got {tuple(w.shape)}")
        w = w.detach().double()
        difference = w - self.dequantize(torch.float64)
        noise, signal = float(difference.square().sum()), float(w.square().sum())
        db = math.inf if noise == 0 else (-math.inf if signal == 0 else 10 * math.log10(signal / noise))
        return RoundingError(db, float(difference.abs().max()) if w.numel() else 0.0)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits a weight: packed codes, scales, packed zero points and the outer scales."""
        rows = math.prod(self._stored_shape[:-1])
        outer = 0 if self.outer is None else 32 * self.outer.numel()
        return self.scheme.bits_per_weight(self._stored_shape[-1]) + outer / max(rows * self._stored_shape[-1], 1)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes in memory of everything that this tensor holds."""
        return sum(part.nbytes for part in self._parts().values())

    def to_layout(self, layout: str) -> QTensor:
        """This tensor with its bytes rearranged, without loss; a layer that reads it keeps it so. Raises ``ValueError`` for an
        unknown layout."""
        if layout not in LAYOUTS:
            raise ValueError(f"no layout named {layout!r}; there are {', '.join(LAYOUTS)}")
        if layout == self.byte_layout and self.pins_layout:
            return self
        found = self._apply_to_parts(lambda part: part) if layout == self.byte_layout else self._to_layout(layout)
        found.pins_layout = True
        return found

    def canonical(self) -> QTensor:
        """This tensor in the canonical layout."""
        return self._to_layout("canonical")

    def _to_layout(self, layout: str) -> QTensor:
        if layout == self.byte_layout:
            return self
        parts, k = Parts(self.packed, self.scale, self.zero_point), self._stored_shape[-1]
        parts = LAYOUTS[layout].arrange(LAYOUTS[self.byte_layout].restore(parts, self.scheme, k), self.scheme, k)
        return QTensor(*parts, self.outer, self.scheme, self._stored_shape, self.dtype, layout, self.transposed)

    def read_by(self, operator: str, activation: Scheme | None = None) -> None:
        """Note that a module reads this weight with ``operator``, and take the layout that suits all its readers."""
        self.readers |= {(operator, activation)}
        self.relayout_()

    def relayout_(self) -> None:
        """Rearrange the bytes, in place, as the readers' kernels read them on this device; canonical where readers differ.

        A weight without readers, and one that :attr:`pins_layout`, stays as it is.
        """
        if self.readers and not self.pins_layout:
            layout = self._preferred(self.device, self.dtype)
            if layout != self.byte_layout:
                with torch.inference_mode(False):  # parts made in that mode could never meet autograd again
                    self._become(self._to_layout(layout))

    def _preferred(self, device: torch.device, dtype: torch.dtype) -> str:
        if device.type == "meta" or len(self._stored_shape) not in (2, 3) or (self.transposed and len(self._stored_shape) == 2):
            return "canonical"
        n, k = self._stored_shape[-2:]
        found = {
            preferred_layout(call_for(operator, self.scheme, "canonical", device, dtype, 1, n, k, activation))
            for operator, activation in self.readers
        }
        return found.pop() if len(found) == 1 else "canonical"

    def _become(self, other: QTensor) -> None:
        """Become ``other``, whose parts this tensor holds from now on: what shared the old parts keeps them."""
        self.packed, self.scale, self.zero_point, self._outer = other.packed, other.scale, other.zero_point, other.outer
        self.scheme, self.scheme_str, self.byte_layout = other.scheme, other.scheme_str, other.byte_layout
        self.transposed, self.flat, self._stored_shape = other.transposed, other.flat, other._stored_shape
        self._dispatch, self._copies, self._shared, self._write_back = FastDispatch(), CopiedSlices(), other._shared, None
        self._notify_fused()

    def _notify_fused(self) -> None:
        """Layers that are multiplied by the old parts with others are by themselves from now on."""
        reference, self._on_parts_changed = self._on_parts_changed, None
        if reference is not None and (callback := reference()) is not None:
            callback()

    def _copy_from(self, other: QTensor) -> None:
        """Copy the parts of ``other``, which has this scheme and layout, into those of this tensor."""
        for name, part in self._parts().items():
            if part is not (new := other._parts()[name]):
                part.copy_(new)

    def _after_write(self) -> None:
        """What follows from a write into the parts: the tensor that this is a slice of has it too, and slices of it."""
        if self._write_back is not None:
            self._write_back(self)
        self._copies.refresh()

    def matrices(self) -> list[QTensor]:
        """The matrices [N, K] of this weight [E, N, K] or [E, K, N], as views in its layout, the same ones until its parts are
        others."""
        if self._matrices is None or self._matrices[0] is not self.packed:
            with torch.inference_mode(False), torch.no_grad():
                parts = {name: part.unbind() for name, part in self._parts().items()}
                n_k, settings = self._stored_shape[1:], (self.dtype, self.byte_layout, False)
                every = range(self._stored_shape[0])
                found = [_assemble({name: part[e] for name, part in parts.items()}, self.scheme, n_k, *settings) for e in every]
            self._matrices = self.packed, found
        return self._matrices[1]

    # ---- what torch asks of a wrapper subclass ---------------------------------------------------------------

    def _parts(self) -> dict[str, Tensor]:
        named = {"packed": self.packed, "scale": self.scale, "zero_point": self.zero_point, "outer": self.outer}
        return {name: part for name, part in named.items() if part is not None}

    def _apply_to_parts(self, fn: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> QTensor:
        parts = {name: fn(part) for name, part in self._parts().items()}
        settings = (dtype or self.dtype, self.byte_layout, self.transposed, self.flat)
        result = _assemble(parts, self.scheme, self._stored_shape, *settings)
        result.readers, result.pins_layout = self.readers, self.pins_layout
        return result

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        context = (str(self.scheme), self._stored_shape, self.dtype, self.byte_layout, self.transposed, self.flat)
        return list(self._parts()), context

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], context: Any, size: Any, stride: Any) -> QTensor:
        scheme, shape, *rest = context
        return _assemble(parts, Scheme.parse(scheme), shape, *rest)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.flat:
            raise TypeError("w.view(-1) of a QTensor w cannot be pickled: pickle w")
        plain = self.canonical()
        parts = (plain.packed, plain.scale, plain.zero_point, plain.outer)
        is_parameter, readers = isinstance(self, torch.nn.Parameter), pickling.readers_as_strings(self.readers)
        fields = (str(self.scheme), self._stored_shape, self.dtype, self.transposed, is_parameter, readers)
        return pickling.rebuild, (*parts, *fields)

    def __deepcopy__(self, memo: dict[int, Any]) -> QTensor:
        if id(self) in memo:
            return cast(QTensor, memo[id(self)])
        copied = self._apply_to_parts(lambda part: part.detach().clone())
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, requires_grad=self.requires_grad)  # type: ignore[assignment]
        memo[id(self)] = copied
        return copied

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        suffix = ", transposed" if self.transposed else ""
        return (
            f"QTensor({tuple(self.shape)}, {self.scheme}, {self.bits_per_weight:.3f} bits a weight, "
            f"dtype={self.dtype}, device={self.device}{suffix})"
        )

    # ---- torch.distributed ------------------------------------------------------------------------------------

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """What torch.distributed.fsdp.fully_shard gathers of each process's rows, and what it hands to the other side."""
        return sharding.pre_all_gather(self, mesh, outer_size)

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """The weight that the gathered parts are, and the tensors that it lies in."""
        return sharding.post_all_gather(self, all_gather_outputs, metadata, param_dtype, out)

    def __get_tensor_shard__(self, index: Any) -> QTensor:
        """What torch.distributed.checkpoint reads the pieces of a saved weight into: this tensor, whose slices take scales that
        they share with each other, since all of them are written."""
        detached = cast(QTensor, self.detach())
        detached._is_fully_written = True
        return detached

    def pin_memory(self, device: Any = None) -> QTensor:
        """A copy in page-locked memory."""
        return self._apply_to_parts(lambda part: part.pin_memory())

    def is_pinned(self, device: Any = None) -> bool:
        return all(part.is_pinned() for part in self._parts().values())

    def share_memory_(self) -> QTensor:
        """Move the parts to shared memory; the wrapper itself has no storage that torch could move."""
        for part in self._parts().values():
            part.share_memory_()
        return self

    def is_shared(self) -> bool:
        return all(part.is_shared() for part in self._parts().values())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in FUNCTIONS:
            result = FUNCTIONS[func](*args, **kwargs)
            if result is not NotImplemented:
                return result
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func not in ATEN or (func not in _OF_ANY_SHAPE and any(q.flat for q in quantized(args))):
            result = func.decompose(*args, **kwargs)  # inference mode leaves composite operators whole
            return ATEN[OTHERS](func, args, kwargs) if result is NotImplemented else result
        if torch.is_inference_mode_enabled() and func.is_view and not args[0].is_inference():
            # A view of an ordinary tensor has to be one too; made in this mode it would be an inference tensor.
            with torch.inference_mode(False), torch.no_grad():
                return ATEN[func](*args, **kwargs)
        return ATEN[func](*args, **kwargs)


ForkingPickler.register(QTensor, pickling.share)


def check_weight(w: Tensor, name: str) -> None:
    """Raise where ``w`` is no weight that can be quantized: not floating point, fewer than two dimensions, not finite."""
    if isinstance(w, QTensor):
        raise TypeError(f"{name} is quantized already ({w.scheme}): use requantize")
    if not w.dtype.is_floating_point or w.dtype.itemsize < 2:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {w.dtype}")
    if w.dim() < 2:
        raise ValueError(f"{name} must have at least two dimensions [..., N, K], got {tuple(w.shape)}")
    if w.numel() and w.device.type != "meta":
        # NaN and infinity both show in the extremes, which take no memory of the size of w.
        low, high = torch.aminmax(w.detach())
        if not bool(torch.isfinite(low) & torch.isfinite(high)):
            nan, infinite = int(torch.isnan(w).sum()), int(torch.isinf(w).sum())
            raise ValueError(f"{name} holds {nan} NaN and {infinite} infinite values: repair it before quantizing")


def quantized(value: Any) -> list[QTensor]:
    """The QTensors in an argument of an operator."""
    if isinstance(value, QTensor):
        return [value]
    return [q for item in value for q in quantized(item)] if isinstance(value, (list, tuple)) else []


def _strides(shape: tuple[int, ...], transposed: bool) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    strides.reverse()
    if transposed:
        strides[-1], strides[-2] = strides[-2], strides[-1]
    return tuple(strides)


def _with_rows(q: QTensor) -> Parts:
    """The parts of ``q`` with at least a dimension of rows: a single row is a matrix of one."""
    if len(q._stored_shape) > 1:
        return Parts(q.packed, q.scale, q.zero_point)
    return Parts(q.packed[None], q.scale[None], None if q.zero_point is None else q.zero_point[None])


def _flatten_lead(part: Tensor, trailing: int) -> Tensor:
    """``part`` with all dimensions before its last ``trailing`` made one, as the operators take them."""
    return part.flatten(0, -trailing - 1) if part.dim() > trailing + 1 else part


def _assemble(
    parts: dict[str, Tensor],
    scheme: Scheme,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    layout: str,
    transposed: bool,
    flat: bool = False,
) -> QTensor:
    zero_point, outer = parts.get("zero_point"), parts.get("outer")
    return QTensor(parts["packed"], parts["scale"], zero_point, outer, scheme, shape, dtype, layout, transposed, flat)
