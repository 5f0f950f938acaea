"""What a row of the registry takes, as its fields say it: the cases that tests of every row are made of."""

from __future__ import annotations

import itertools

from lowbit.formats import FORMATS
from lowbit.scheme import PLAIN_SCALES, Scheme
from lowbit_kernels.registry import Kernel

GROUPS = (-1, 16, 32, 48, 64, 128)


def weights(row: Kernel) -> tuple[tuple[str, str], ...]:
    """(format, zero point) of every weight that the row takes."""
    pairs = []
    for name in sorted(FORMATS if row.formats is None else row.formats):
        unsigned = FORMATS[name].min == 0 and FORMATS[name].step == 1
        for zero in ("int", "float") if unsigned else ("none",):
            if (unsigned or FORMATS[name].signed) and (row.zero_points is None or zero in row.zero_points):
                pairs.append((name, zero))
    return tuple(pairs)


def groups(row: Kernel) -> tuple[int, ...]:
    return tuple(size for size in GROUPS if row.groups is None or row.groups(size) is None)


def scales(row: Kernel) -> tuple[str, ...]:
    known = (*PLAIN_SCALES, "e8m0", "fp8_e4m3fn", "fp8_e4m3fn+outer")
    return tuple(name for name in known if row.scales is None or name in row.scales)


def scheme_of(weight: tuple[str, str], group: int, scale: str) -> Scheme:
    name, outer = scale.removesuffix("+outer"), scale.endswith("+outer")
    if weight[1] == "float" and name not in PLAIN_SCALES:  # stored as the scale is
        name, outer = "bf16", False
    return Scheme(weight[0], group, weight[1], name, outer)


def schemes_of(row: Kernel) -> list[Scheme]:
    """Schemes of weights that the row takes: one of each of its formats and zero points, group sizes and scales."""
    return [scheme_of(*parts) for parts in itertools.product(weights(row), groups(row), scales(row))]
