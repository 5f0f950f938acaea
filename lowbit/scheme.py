"""A scheme: a number format and how its numbers are scaled."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

import torch

from .catalog import Catalog, cached
from .formats import FORMATS, Format, get_format
from .packing import packed_size

__all__ = ["SCHEMES", "Scheme", "UnknownSchemeError"]

PLAIN_SCALES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_ZERO_POINTS = ("none", "int", "float")


class UnknownSchemeError(ValueError):
    """A text that names no scheme; one that names a scheme wrongly (``int4_g0``) is a plain ``ValueError``."""


@dataclass(frozen=True)
class Scheme:
    """How a weight [..., K] is stored: ``(decode(codes) - zero_point) * scale * outer``.

    Attributes:
        format: name of the format of the codes (a key of ``FORMATS``; a :class:`Format` that stands there will do).
        group_size: how many values along K share a scale; the last group of a row may be short; -1: the whole row.
        zero_point: ``"none"``, ``"int"`` (a code of the same unsigned format, so that exact zeros stay zero) or
            ``"float"`` (stored as the scale is, after HQQ).
        scale: ``"bf16"``, ``"fp16"``, ``"fp32"``, or the name of a format: ``"e8m0"``, ``"fp8_e4m3fn"``.
        outer: one float32 scale for each matrix above the group scales (NVFP4).

    Raises ``ValueError`` for a combination that means nothing.
    """

    format: str
    group_size: int = -1
    zero_point: str = "none"
    scale: str = "bf16"
    outer: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.format, Format):
            if FORMATS.get(self.format.name) != self.format:
                raise ValueError(
                    f"format {self.format.name!r} is not in FORMATS: register it with FORMATS[{self.format.name!r}] = ..."
                )
            object.__setattr__(self, "format", self.format.name)
        fmt = get_format(self.format)
        if not isinstance(self.group_size, int) or isinstance(self.group_size, bool):
            raise ValueError(f"group_size must be an int, got {self.group_size!r}")
        if self.group_size != -1 and self.group_size < 1:
            raise ValueError(f"group_size must be -1 (the whole row) or at least 1, got {self.group_size}")
        if self.group_size >= 1 << 63:
            raise ValueError(f"group_size must be below 2**63, as sizes of tensors are, got {self.group_size}")
        if self.zero_point not in _ZERO_POINTS:
            raise ValueError(f"zero_point must be one of {', '.join(_ZERO_POINTS)}, got {self.zero_point!r}")
        if self.scale not in PLAIN_SCALES and self.scale not in FORMATS:
            raise ValueError(f"scale must be {', '.join(PLAIN_SCALES)} or the name of a format, got {self.scale!r}")
        if self.scale in FORMATS and FORMATS[self.scale].max <= 0:
            raise ValueError(f"a scale in {self.scale} could not be positive")
        if self.zero_point != "none" and not (fmt.min == 0 and fmt.step == 1):
            raise ValueError(f"a zero point goes with an unsigned integer format (uint1..uint8), got {self.format}")
        if self.zero_point == "none" and not fmt.signed:
            raise ValueError(f"{self.format} has no negative numbers: use zero_point='int', or a signed format")
        if self.zero_point == "none" and fmt.symmetric_max <= 0:
            raise ValueError(f"{self.format} has no positive numbers, so no scale covers both signs: use a format that has both")
        if self.zero_point == "float" and self.scale not in PLAIN_SCALES:
            raise ValueError(f"a float zero point is stored as the scale is: scale must be one of {', '.join(PLAIN_SCALES)}")
        if self.outer and (self.scale in PLAIN_SCALES or self.zero_point == "float"):
            raise ValueError("outer=True stands above scales in a narrow format such as fp8_e4m3fn")
        if self.outer and self.scale == "e8m0":
            raise ValueError("outer=True adds nothing to e8m0 scales, which reach as far as float32: use outer=False")

    # ---- what follows ----------------------------------------------------------------------------------------

    @property
    def fmt(self) -> Format:
        """The :class:`Format` of the codes."""
        return get_format(self.format)

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return self.fmt.bits

    @property
    def reach(self) -> float:
        """The number that the value of largest magnitude of a group becomes: the lowest integer, which has no opposite, where a
        scale takes the sign that this asks for; else the largest number that has one."""
        fmt = self.fmt
        of_scale = FORMATS.get(self.scale)
        allows_sign = self.scale in PLAIN_SCALES if of_scale is None else of_scale.symmetric_max >= of_scale.max
        lowest = fmt.step is not None and fmt.min == -fmt.max - fmt.step
        return fmt.min if self.zero_point == "none" and lowest and allows_sign else fmt.symmetric_max

    @property
    def scale_dtype(self) -> torch.dtype:
        """The dtype of the tensor that holds the scales; uint8 where they are codes of a format."""
        return PLAIN_SCALES.get(self.scale, torch.uint8)

    @property
    def scale_bits(self) -> int:
        """Bits of one stored scale."""
        return FORMATS[self.scale].bits if self.scale in FORMATS else self.scale_dtype.itemsize * 8

    @property
    def zero_point_dtype(self) -> torch.dtype | None:
        """The dtype that zero points have in memory."""
        return {"none": None, "int": torch.uint8, "float": self.scale_dtype}[self.zero_point]

    def groups(self, k: int) -> int:
        """Groups in a row of ``k`` values."""
        return -(-k // self.group(k))

    def group(self, k: int) -> int:
        """Values that share a scale in a row of ``k`` values (at least 1)."""
        return max(k if self.group_size == -1 else min(self.group_size, k), 1)

    def row_bytes(self, k: int) -> int:
        """Bytes of the packed codes of a row of ``k`` values."""
        return packed_size(self.bits, k)

    def row_bits(self, k: int) -> int:
        """Stored bits of a row of ``k`` values: packed codes, scales and packed zero points."""
        zero_bits = {"none": 0, "int": self.bits, "float": self.scale_bits}[self.zero_point]
        return 8 * self.row_bytes(k) + self.groups(k) * (self.scale_bits + zero_bits)

    def bits_per_weight(self, k: int) -> float:
        """:meth:`row_bits` a weight."""
        return self.row_bits(k) / max(k, 1)

    def replace(self, **changes: object) -> Scheme:
        """A scheme with some fields changed: ``SCHEMES["int4"].replace(group_size=64)``."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    # ---- canonical names --------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        """The canonical name, which operators and files take: ``uint4:g128:zint:bf16``."""
        group = "row" if self.group_size == -1 else f"g{self.group_size}"
        zero = "" if self.zero_point == "none" else f":z{self.zero_point}"
        return f"{self.format}:{group}{zero}:{self.scale}{':outer' if self.outer else ''}"

    @staticmethod
    def parse(text: str) -> Scheme:
        """The scheme that ``text`` names.

        Takes a canonical name (``uint4:g128:zint:bf16``), a name in ``SCHEMES``, and a name with a group size
        (``int4_g48``), ``_row`` or ``_sym`` behind it. Raises ``ValueError`` with the nearest names.
        """
        if ":" not in text:
            return _parse_name(text)
        return _parse_canonical(text)


@cached(maxsize=1024)
def _parse_canonical(text: str) -> Scheme:
    """Kept, because every call of an operator comes by here; names are not, because SCHEMES may change."""
    match = re.fullmatch(r"(\w+):(row|g\d+)(?::z(int|float))?:(\w+)(:outer)?", text)
    if not match:
        raise ValueError(f"a canonical name is format:g128:zint:bf16 (or row for g128, and :zint left out), got {text!r}")
    fmt, group, zero, scale, outer = match.groups()
    return Scheme(fmt, -1 if group == "row" else int(group[1:]), zero or "none", scale, outer is not None)


def _parse_name(text: str) -> Scheme:
    if SCHEMES.has(text):
        return SCHEMES[text]
    name, symmetric, size = text, False, None
    if match := re.fullmatch(r"(\w+?)_(?:g(\d+)|(row))", name):
        name, size = match[1], -1 if match[3] else int(match[2])
    if name.endswith("_sym"):
        name, symmetric = name.removesuffix("_sym"), True
    if name in SCHEMES:
        scheme = SCHEMES[name]
        if symmetric and scheme.zero_point != "none":
            scheme = scheme.replace(format=scheme.format.removeprefix("u"), zero_point="none")
        return scheme if size is None else scheme.replace(group_size=size)
    import difflib

    near = difflib.get_close_matches(text, SCHEMES, n=3, cutoff=0.3) or list(SCHEMES)
    raise UnknownSchemeError(f"no scheme named {text!r}; did you mean {', '.join(near)}?")


_INT = {bits: Scheme(f"uint{bits}", 128, zero_point="int") for bits in range(2, 8)}

_NAMED: dict[str, Scheme] = {
    "int8": Scheme("int8"),
    "int8_g128": Scheme("int8", 128),
    "int7": _INT[7],
    "int6": _INT[6],
    "int5": _INT[5],
    "int4": _INT[4],
    "int4_g64": _INT[4].replace(group_size=64),
    "int4_g32": _INT[4].replace(group_size=32),
    "int4_sym": Scheme("int4", 128),
    "int3": _INT[3],
    "int3_g64": _INT[3].replace(group_size=64),
    "int3_sym": Scheme("int3", 128),
    "int2": _INT[2].replace(group_size=64),
    "int2_g32": _INT[2].replace(group_size=32),
    "int1": Scheme("int1", 64),
    "ternary": Scheme("ternary", 64),
    "fp8": Scheme("fp8_e4m3fn"),
    "fp8_e5m2": Scheme("fp8_e5m2"),
    "fp6": Scheme("fp6_e2m3", 128),
    "fp6_e3m2": Scheme("fp6_e3m2", 128),
    "fp5": Scheme("fp5_e2m2", 128),
    "fp4": Scheme("fp4_e2m1", 64),
    "nf4": Scheme("nf4", 64),
    # OCP Microscaling v1.0, table 1: blocks of 32 under one e8m0 scale.
    "mxfp8": Scheme("fp8_e4m3fn", 32, scale="e8m0"),
    "mxfp8_e5m2": Scheme("fp8_e5m2", 32, scale="e8m0"),
    "mxfp6": Scheme("fp6_e2m3", 32, scale="e8m0"),
    "mxfp6_e3m2": Scheme("fp6_e3m2", 32, scale="e8m0"),
    "mxfp4": Scheme("fp4_e2m1", 32, scale="e8m0"),
    "mxint8": Scheme("mxint8", 32, scale="e8m0"),
    # NVFP4: blocks of 16 under an e4m3 scale, and one float32 for the matrix.
    "nvfp4": Scheme("fp4_e2m1", 16, scale="fp8_e4m3fn", outer=True),
}


def _check_named(name: str, scheme: Scheme) -> None:
    if not isinstance(scheme, Scheme):
        raise TypeError(f"SCHEMES[{name!r}] must be a Scheme, got {type(scheme).__name__}")
    if not re.fullmatch(r"[A-Za-z]\w*", name):
        raise ValueError(f"a scheme is named by letters, digits and _, got {name!r}")


SCHEMES: Catalog[Scheme] = Catalog("SCHEMES", _NAMED, _check_named)
"""The named schemes. :meth:`Scheme.parse` also takes them with a group size behind the name, as in ``int4_g48``."""
