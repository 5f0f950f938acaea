"""lowbit: every low-bit number format as one tensor, one call to quantize a model, and a kernel trace of what ran.

Importing it loads neither Triton nor CUDA; each name below is imported when it is first used. It does two things to others:
torch knows the operators, so that a program which torch.export or AOTInductor wrote loads (``lowbit_kernels.schemas``), and
transformers' ``from_pretrained`` knows lowbit's models, and accelerate the sizes of their weights, as soon as both are imported,
in either order (``pretrained.import_hooks``).
"""

from __future__ import annotations

import importlib
from typing import Any

from . import (
    autocast,  # noqa: F401 - the operators and their rules for it
    pickling,
)
from .pretrained import import_hooks
from .version import __version__

_NAMES = {
    "lowbit.formats": ("FORMATS", "Float", "Format", "Int", "Table"),
    "lowbit.packing": ("pack", "packed_add", "packed_and", "packed_or", "packed_size", "packed_sub", "packed_xor", "unpack"),
    "lowbit.scheme": ("SCHEMES", "Scheme"),
    "lowbit.tensor": ("QTensor",),
    "lowbit.linear": ("QLinear",),
    "lowbit.fusion": ("fuse_",),
    "lowbit.fused_norm_quant": ("quantized_rms_norm",),
    "lowbit.embedding": ("QEmbedding",),
    "lowbit.layer_config": ("LayerConfig",),
    "lowbit.recipe": ("Recipe", "Rule"),
    "lowbit.planning": ("explain", "plan"),
    "lowbit.plans": ("Plan",),
    "lowbit.quantize": ("quantize_", "rewrite_"),
    "lowbit.calibration.data": ("Calibration",),
    "lowbit.diagnosis.doctor": ("doctor",),
    "lowbit.diagnosis.report": ("Diagnosis",),
    "lowbit.mixed_precision.trials": ("sensitivity",),
    "lowbit.mixed_precision.sensitivities": ("Sensitivity",),
    "lowbit.mixed_precision.allocation": ("allocate",),
    "lowbit.streaming.job": ("quantize_folder",),
    "lowbit.checkpoint": ("CheckpointError", "load", "save"),
    "lowbit.environment": ("env",),
    "lowbit.pretrained.config": ("Config",),
    "lowbit.registration": (
        "register_format",
        "register_kernel",
        "register_module",
        "register_rewrite",
        "register_rounder",
        "register_scheme",
    ),
    "lowbit.api": (
        "fp4_weight_only",
        "fp6_weight_only",
        "fp8_weight_only",
        "int2_weight_only",
        "int3_weight_only",
        "int4_weight_only",
        "int5_weight_only",
        "int6_weight_only",
        "int8_dynamic_activation_int4_weight",
        "int8_dynamic_activation_int8_weight",
        "int8_static_activation_int8_weight",
        "int8_weight_only",
        "mxfp4_weight_only",
        "mxfp6_weight_only",
        "mxfp8_weight_only",
        "mxint8_weight_only",
        "nf4_weight_only",
        "nvfp4_weight_only",
        "w4a16",
        "w8a16",
    ),
    "lowbit.methods": ("awq", "clip", "gptq", "hqq", "rotation", "smoothquant"),
    "lowbit_kernels.inlined": ("inline",),
    "lowbit_kernels.registry": ("NoKernelError", "strict"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = ["__version__", "trace_kernels", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name == "trace_kernels":
        value = importlib.import_module("lowbit_kernels.registry").trace
    elif name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module 'lowbit' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _tensor_class() -> Any:
    from .tensor import QTensor

    return QTensor


pickling.set_tensor_class(_tensor_class)
import_hooks.install()
