"""The named one-line recipes: what ``quantize_(model, int4_weight_only())`` takes."""

from __future__ import annotations

from .layer_config import LayerConfig
from .scheme import SCHEMES, Scheme

__all__ = [
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
]

_TOKEN_INT8 = Scheme("int8", scale="fp32")


def _integer(bits: int, group_size: int, symmetric: bool, scale: str) -> LayerConfig:
    if symmetric:
        return LayerConfig(Scheme(f"int{bits}", group_size, scale=scale))
    return LayerConfig(Scheme(f"uint{bits}", group_size, zero_point="int", scale=scale))


def int8_weight_only(group_size: int = -1, symmetric: bool = True, scale: str = "bf16") -> LayerConfig:
    """8-bit integers, a scale a row (``group_size=-1``) or a group: nearly lossless, half the bytes of bf16.

    Args:
        group_size: neighbours along K that share a scale, and a zero point where there is one; -1: the whole row.
        symmetric: signed integers without a zero point, under a scale with a sign.
        scale: how scales are stored: ``"bf16"``, ``"fp16"``, ``"fp32"``, ``"e8m0"`` or ``"fp8_e4m3fn"``.

    Raises ``ValueError`` for a value that a scheme cannot have.
    """
    return _integer(8, group_size, symmetric, scale)


def int6_weight_only(group_size: int = 128, symmetric: bool = False, scale: str = "bf16") -> LayerConfig:
    """6-bit integers in groups, with an integer zero point unless ``symmetric``.

    Args:
        group_size: neighbours along K that share a scale, and a zero point where there is one; -1: the whole row.
        symmetric: signed integers without a zero point, under a scale with a sign.
        scale: how scales are stored: ``"bf16"``, ``"fp16"``, ``"fp32"``, ``"e8m0"`` or ``"fp8_e4m3fn"``.

    Raises ``ValueError`` for a value that a scheme cannot have.
    """
    return _integer(6, group_size, symmetric, scale)


def int5_weight_only(group_size: int = 128, symmetric: bool = False, scale: str = "bf16") -> LayerConfig:
    """5-bit integers in groups, with an integer zero point unless ``symmetric``.

    Args:
        group_size: neighbours along K that share a scale, and a zero point where there is one; -1: the whole row.
        symmetric: signed integers without a zero point, under a scale with a sign.
        scale: how scales are stored: ``"bf16"``, ``"fp16"``, ``"fp32"``, ``"e8m0"`` or ``"fp8_e4m3fn"``.

    Raises ``ValueError`` for a value that a scheme cannot have.
    """
    return _integer(5, group_size, symmetric, scale)


def int4_weight_only(group_size: int = 128, symmetric: bool = False, scale: str = "bf16") -> LayerConfig:
    """4-bit integers in groups, with an integer zero point unless ``symmetric``: a quarter of the bytes of bf16.

    Args:
        group_size: neighbours along K that share a scale, and a zero point where there is one; -1: the whole row.
        symmetric: signed integers without a zero point, under a scale with a sign.
        scale: how scales are stored: ``"bf16"``, ``"fp16"``, ``"fp32"``, ``"e8m0"`` or ``"fp8_e4m3fn"``.

    Raises ``ValueError`` for a value that a scheme cannot have.
    """
    return _integer(4, group_size, symmetric, scale)


def int3_weight_only(group_size: int = 128, symmetric: bool = False, scale: str = "bf16") -> LayerConfig:
    """3-bit integers in groups, 3 bits in storage; wants a better rounder than round to nearest.

    Args:
        group_size: neighbours along K that share a scale, and a zero point where there is one; -1: the whole row.
        symmetric: signed integers without a zero point, under a scale with a sign.
        scale: how scales are stored: ``"bf16"``, ``"fp16"``, ``"fp32"``, ``"e8m0"`` or ``"fp8_e4m3fn"``.

    Raises ``ValueError`` for a value that a scheme cannot have.
    """
    return _integer(3, group_size, symmetric, scale)


def int2_weight_only(group_size: int = 64, symmetric: bool = False, scale: str = "bf16") -> LayerConfig:
    """2-bit integers in groups; of little use without a rounder that looks at data.

    Args:
        group_size: neighbours along K that share a scale, and a zero point where there is one; -1: the whole row.
        symmetric: signed integers without a zero point, under a scale with a sign.
        scale: how scales are stored: ``"bf16"``, ``"fp16"``, ``"fp32"``, ``"e8m0"`` or ``"fp8_e4m3fn"``.

    Raises ``ValueError`` for a value that a scheme cannot have.
    """
    return _integer(2, group_size, symmetric, scale)


def fp8_weight_only(format: str = "fp8_e4m3fn", group_size: int = -1, scale: str = "bf16") -> LayerConfig:
    """8-bit floats, ``"fp8_e4m3fn"`` or ``"fp8_e5m2"``, a scale a row or a group.

    Args:
        format: ``"fp8_e4m3fn"`` or ``"fp8_e5m2"``.
        group_size: neighbours along K that share a scale, and a zero point where there is one; -1: the whole row.
        scale: how scales are stored: ``"bf16"``, ``"fp16"``, ``"fp32"``, ``"e8m0"`` or ``"fp8_e4m3fn"``.

    Raises ``ValueError`` for a value that a scheme cannot have.
    """
    return LayerConfig(Scheme(format, group_size, scale=scale))


def fp6_weight_only(format: str = "fp6_e2m3", group_size: int = 128, scale: str = "bf16") -> LayerConfig:
    """6-bit floats, ``"fp6_e2m3"`` or ``"fp6_e3m2"``, 6 bits in storage.

    Args:
        format: ``"fp6_e2m3"`` or ``"fp6_e3m2"``.
        group_size: neighbours along K that share a scale, and a zero point where there is one; -1: the whole row.
        scale: how scales are stored: ``"bf16"``, ``"fp16"``, ``"fp32"``, ``"e8m0"`` or ``"fp8_e4m3fn"``.

    Raises ``ValueError`` for a value that a scheme cannot have.
    """
    return LayerConfig(Scheme(format, group_size, scale=scale))


def fp4_weight_only(group_size: int = 64, scale: str = "bf16") -> LayerConfig:
    """4-bit floats (e2m1) in groups.

    Args:
        group_size: neighbours along K that share a scale, and a zero point where there is one; -1: the whole row.
        scale: how scales are stored: ``"bf16"``, ``"fp16"``, ``"fp32"``, ``"e8m0"`` or ``"fp8_e4m3fn"``.

    Raises ``ValueError`` for a value that a scheme cannot have.
    """
    return LayerConfig(Scheme("fp4_e2m1", group_size, scale=scale))


def nf4_weight_only(group_size: int = 64, scale: str = "bf16") -> LayerConfig:
    """NF4, the 4-bit quantiles of a normal distribution (QLoRA).

    Args:
        group_size: neighbours along K that share a scale, and a zero point where there is one; -1: the whole row.
        scale: how scales are stored: ``"bf16"``, ``"fp16"``, ``"fp32"``, ``"e8m0"`` or ``"fp8_e4m3fn"``.

    Raises ``ValueError`` for a value that a scheme cannot have.
    """
    return LayerConfig(Scheme("nf4", group_size, scale=scale))


def mxfp8_weight_only(format: str = "fp8_e4m3fn") -> LayerConfig:
    """OCP MXFP8: blocks of 32 under a power of two; ``"fp8_e4m3fn"`` or ``"fp8_e5m2"``.

    Args:
        format: ``"fp8_e4m3fn"`` or ``"fp8_e5m2"``.

    Raises ``ValueError`` for a value that a scheme cannot have.
    """
    return LayerConfig(Scheme(format, 32, scale="e8m0"))


def mxfp6_weight_only(format: str = "fp6_e2m3") -> LayerConfig:
    """OCP MXFP6: blocks of 32 under a power of two; ``"fp6_e2m3"`` or ``"fp6_e3m2"``.

    Args:
        format: ``"fp6_e2m3"`` or ``"fp6_e3m2"``.

    Raises ``ValueError`` for a value that a scheme cannot have.
    """
    return LayerConfig(Scheme(format, 32, scale="e8m0"))


def mxfp4_weight_only() -> LayerConfig:
    """OCP MXFP4: e2m1 in blocks of 32 under a power of two."""
    return LayerConfig(SCHEMES["mxfp4"])


def mxint8_weight_only() -> LayerConfig:
    """OCP MXINT8: 8-bit integers in blocks of 32 under a power of two."""
    return LayerConfig(SCHEMES["mxint8"])


def nvfp4_weight_only() -> LayerConfig:
    """NVFP4: e2m1 in blocks of 16 under an e4m3 scale, and one float32 for the matrix."""
    return LayerConfig(SCHEMES["nvfp4"])


def int8_dynamic_activation_int8_weight() -> LayerConfig:
    """W8A8: the input rounded to 8 bits with a scale a token as it comes, the weight to 8 bits with a scale a row."""
    return LayerConfig(SCHEMES["int8"], _TOKEN_INT8)


def int8_static_activation_int8_weight() -> LayerConfig:
    """W8A8: as above, with one scale for all inputs of a layer, which calibration data has to find: a little faster, and
    worse where some inputs are far larger than others."""
    return LayerConfig(SCHEMES["int8"], _TOKEN_INT8, activation_scale="static")


def int8_dynamic_activation_int4_weight(group_size: int = 32) -> LayerConfig:
    """W4A8: the input rounded to 8 bits with a scale a token as it comes, the weight to symmetric 4 bits in groups.

    Args:
        group_size: neighbours along K that share a scale, and a zero point where there is one; -1: the whole row.

    Raises ``ValueError`` for a value that a scheme cannot have.
    """
    return LayerConfig(Scheme("int4", group_size), _TOKEN_INT8)


w8a16 = int8_weight_only
w4a16 = int4_weight_only
