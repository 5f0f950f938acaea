"""Operands of the kernels: a weight's parts as pointers, strides and compile-time constants, and what a device supports."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor

from lowbit.catalog import cached
from lowbit.decoding import TABLE
from lowbit.formats import get_format
from lowbit.scheme import PLAIN_SCALES, Scheme

from .assembly import assembly, bytes_as_floats
from .encodings import table_of


@cached(maxsize=256)
def scheme_constants(scheme: Scheme) -> dict[str, Any]:
    """The compile-time constants that every kernel takes from the scheme."""
    dec = scheme.fmt.decoding
    scale = None if scheme.scale in PLAIN_SCALES else get_format(scheme.scale).decoding
    return {
        "BITS": scheme.bits,
        "KIND": dec.kind,
        "FLIP": dec.flip,
        "MANTISSA": dec.mantissa,
        "SPECIAL": dec.special,
        "FACTOR": dec.factor,
        "SCALE_KIND": -1 if scale is None else scale.kind,
        "SCALE_MANTISSA": 0 if scale is None else scale.mantissa,
        "SCALE_SPECIAL": 0 if scale is None else scale.special,
        "SCALE_FACTOR": 1.0 if scale is None else scale.factor,
        "GROUP": 0 if scheme.group_size == -1 else scheme.group_size,
        "ZERO": {"none": 0, "int": 1, "float": 2}[scheme.zero_point],
        "HAS_OUTER": scheme.outer,
    }


def _aligned(packed: Tensor, scheme: Scheme, k: int) -> bool:
    """Whether words of eight codes start at multiples of their size."""
    size = 8 if scheme.bits == 8 else 4
    return k % 8 == 0 and packed.stride(0) % size == 0 and packed.data_ptr() % size == 0


class Parts:
    """A weight's parts as the kernels take them: pointers, strides and constants."""

    def __init__(self, packed: Tensor, scale: Tensor, zero: Tensor | None, outer: Tensor | None, scheme: Scheme, k: int) -> None:
        packed, scale = _rows_contiguous(packed), _rows_contiguous(scale)
        zero = None if zero is None else _rows_contiguous(zero)
        dec = scheme_constants(scheme)
        table = table_of(scheme.format, packed.device) if dec["KIND"] == TABLE else scale
        scales = table_of(scheme.scale, packed.device) if dec["SCALE_KIND"] == TABLE else scale
        self.scheme = scheme
        self.pointers = (packed, scale, scale if zero is None else zero, scale if outer is None else outer)
        self.tables = (table, scales)
        self.strides = (packed.stride(0), scale.stride(0), 0 if zero is None else zero.stride(0))
        self.constants = dec | {"ALIGNED": _aligned(packed, scheme, k)}
        if scheme.group(k) >= k:
            self.constants["GROUP"] = 0

    @property
    def groups_are_word_aligned(self) -> bool:
        """Whether rows of scales and of zero points start at multiples of four bytes."""
        parts = zip(self.pointers[1:3], self.strides[1:], strict=True)
        return all(part.data_ptr() % 4 == 0 and stride * part.element_size() % 4 == 0 for part, stride in parts)

    @property
    def rows_on_16_bytes(self) -> bool:
        """Whether rows of codes start at multiples of 16 bytes."""
        return self.strides[0] % 16 == 0 and self.pointers[0].data_ptr() % 16 == 0


def _rows_contiguous(tensor: Tensor) -> Tensor:
    """``tensor`` [N, C] with contiguous rows; slices of rows or columns are used as they are."""
    return tensor if tensor.stride(1) == 1 or tensor.shape[1] == 1 else tensor.contiguous()


@functools.lru_cache(maxsize=32)
def ramp(device: torch.device) -> Tensor:
    """0, 1, 2, ... on ``device``, for :func:`.codes.load_stored`."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.arange(32, dtype=torch.int32, device=device)


@functools.lru_cache(maxsize=32)
def supports_pdl(device: torch.device) -> bool:
    """Whether kernels may start before their predecessors have ended (PDL)."""
    return device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (9, 0)


def on_cuda(device: torch.device) -> bool:
    """Whether kernels may contain PTX."""
    return device.type == "cuda" and torch.version.cuda is not None


def assembly_for(scheme: Scheme, x: Tensor) -> str:
    """PTX that decodes words of codes to the dtype of ``x``, two at a time; empty where the compiler does it."""
    if not on_cuda(x.device):
        return ""
    return assembly(scheme.fmt.decoding, scheme.bits, scheme.zero_point != "none", x.dtype)


@cached(maxsize=256)
def assembly_for_bytes(scheme: Scheme, device: torch.device) -> str:
    """PTX that decodes words of four 8-bit codes to float32; empty where the compiler does it."""
    if not on_cuda(device):
        return ""
    major, minor = torch.cuda.get_device_capability(device)
    return bytes_as_floats(scheme.fmt.decoding, 10 * major + minor)


def launch_options(device: torch.device) -> dict[str, Any]:
    # FMAs round once less; Triton warns where nobody chooses.
    return {"enable_fp_fusion": True} | ({"launch_pdl": True} if supports_pdl(device) else {})


def register_limit(registers: int | None, device: torch.device) -> dict[str, Any]:
    """Limits registers a thread; other vendors' compilers have no such option."""
    return {"maxnreg": registers} if registers is not None and on_cuda(device) else {}


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index)
