"""A pytest plug-in (``-p tests.support.additions``) that adds a format, a scheme, a rounder and a CPU kernel before tests are
collected, each in one place."""

from __future__ import annotations

import torch
from torch import Tensor

import lowbit
from lowbit.algorithms import Rounded, Rounder
from lowbit.formats import FormatSet
from lowbit.grid import to_codes
from lowbit.packing import unpack
from lowbit.scales import choose
from lowbit.scheme import Scheme
from lowbit.statistics import Statistics
from lowbit_kernels.registry import Kernel


def clamped(weight: Tensor, scheme: Scheme, statistics: Statistics | None, *, keep: float = 0.99) -> Rounded:
    """``weight`` [N, K] to the nearest, in a range of ``keep`` of the largest magnitude of each row."""
    limit = keep * torch.nn.functional.pad(weight.abs(), (0, 1)).amax(-1, keepdim=True)  # 0 for a row without weights
    chosen = choose(weight.clamp(-limit, limit), scheme)
    return Rounded(to_codes(weight, scheme, chosen), chosen)


def row_scaled_gemm(
    x: Tensor, packed: Tensor, scale: Tensor, zero_point: Tensor | None, outer: Tensor | None, bias: Tensor | None, scheme: Scheme
) -> Tensor:
    """``x`` [..., K] times ``packed`` [N, bytes] with ``scale`` [N, 1]: float32 sums, scaled once a row, rounded once."""
    numbers = scheme.fmt.decode(unpack(packed, scheme.bits, x.shape[-1]))  # [N, K]
    y = x.float() @ numbers.T * scale.float()[:, 0]
    return (y if bias is None else y + bias.float()).to(x.dtype)


lowbit.register_format(lowbit.Float("fp7_e3m3", exponent=3, mantissa=3))
lowbit.register_scheme("fp7", "fp7_e3m3:g128:bf16")
lowbit.register_rounder("clamped", Rounder(clamped, needs_statistics=False, uses_statistics=False))
lowbit.register_kernel(
    Kernel(
        "cpu_row_scaled_gemm",
        "linear",
        row_scaled_gemm,
        "exact",
        devices=frozenset({"cpu"}),
        formats=FormatSet(lambda fmt: fmt.bits == 7),
        zero_points=frozenset({"none"}),
        scales=frozenset({"bf16", "fp16", "fp32"}),
        groups=lambda size: None if size == -1 else "takes one scale for each row",
        dtypes=frozenset({torch.float32, torch.bfloat16}),
        m=(2, None),
        on_request=True,
    )
)
