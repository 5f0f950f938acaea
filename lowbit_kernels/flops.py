"""FLOPs of the operators for torch's FlopCounterMode: two for each weight and row, as of the float product."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch

__all__ = ["register"]


def _of_product(x: torch.Size, packed: torch.Size, *rest: Any, **named: Any) -> int:
    """``x`` [..., K] and a weight of N rows, or [E, M, K] and E weights of N rows."""
    return 2 * math.prod(x) * packed[-2]


def _of_experts(x: torch.Size, packed: torch.Size, *rest: Any, **named: Any) -> int:
    """Rows of ``x`` [..., K] times matrices of N rows, one for each of the experts, whose shape [S] is the ninth."""
    return 2 * math.prod(rest[6]) * x[-1] * packed[-2]


def _of_codes(codes: torch.Size, x_scale: torch.Size, packed: torch.Size, *rest: Any, **named: Any) -> int:
    """Quantized tokens [..., bytes]; K and the dtype of the result are the last arguments."""
    return 2 * math.prod(codes[:-1]) * int(rest[-2]) * packed[-2]


def register(counter: ModuleType) -> None:
    """Registers the operators, which ``torch.utils.flop_counter`` would count as zero."""
    for name, formula in (
        ("linear", _of_product),
        ("quantized_linear", _of_product),
        ("grouped_linear", _of_product),
        ("experts_linear", _of_experts),
        ("codes_linear", _of_codes),
    ):
        operator = getattr(torch.ops.lowbit, name)
        if operator not in counter.flop_registry:
            counter.register_flop_formula(operator)(formula)
