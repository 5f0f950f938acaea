"""The eager PyTorch meaning of every operator: the last row of the registry and the oracle of all others."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from lowbit.grid import Scales, to_codes, to_values
from lowbit.packing import pack_unchecked, packed_size, unpack
from lowbit.scales import choose, outer_scale, rounded_tokens, token_scales
from lowbit.scheme import Scheme

from .registry import Kernel, register

__all__ = [
    "codes_linear",
    "dequantize",
    "embedding",
    "experts_linear",
    "grouped_linear",
    "linear",
    "quantize",
    "quantized_linear",
    "rms_norm_quantize",
]


def _row_chunks(rows: int, k: int, device: torch.device) -> Iterator[slice]:
    """Slices of rows: temporaries stay in a CPU's cache, fill a GPU, and are far smaller than a large layer."""
    weights = 1 << 20 if device.type == "cpu" else 1 << 22
    step = max(1, weights // max(k, 1))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def quantize(w: Tensor, scheme: Scheme, method: str) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Packed codes, scales, zero points and outer scale of ``w`` [..., N, K], rounded to nearest."""
    *lead, n, k = w.shape
    flat = w.reshape(math.prod(lead), n, k)
    compute = torch.float64 if w.dtype == torch.float64 else torch.float32
    g = scheme.groups(k) if k else 0
    packed = torch.empty(flat.shape[0], n, packed_size(scheme.bits, k), dtype=torch.uint8, device=w.device)
    scale = torch.empty(flat.shape[0], n, g, dtype=scheme.scale_dtype, device=w.device)
    zero = None if scheme.zero_point_dtype is None else torch.empty_like(scale, dtype=scheme.zero_point_dtype)
    outer = torch.zeros(flat.shape[0], dtype=torch.float32, device=w.device) if scheme.outer else None
    for e, matrix in enumerate(flat):
        if outer is not None and matrix.numel():
            low, high = torch.aminmax(matrix)
            outer[e] = outer_scale(torch.maximum(-low, high).abs().to(compute), scheme)  # of zeros: 0 and not -0
        for rows in _row_chunks(n, k, w.device) if k else ():
            part = matrix[rows].to(compute)
            chosen = choose(part, scheme, method, None if outer is None else outer[e])
            packed[e, rows] = pack_unchecked(to_codes(part, scheme, chosen), scheme.bits)
            scale[e, rows] = chosen.scale
            if zero is not None and chosen.zero_point is not None:
                zero[e, rows] = chosen.zero_point
    return (
        packed.reshape(*lead, n, packed.shape[-1]),
        scale.reshape(*lead, n, g),
        None if zero is None else zero.reshape(*lead, n, g),
        None if outer is None else outer.reshape(lead),
    )


def dequantize(
    packed: Tensor, scale: Tensor, zero_point: Tensor | None, outer: Tensor | None, scheme: Scheme, k: int, dtype: torch.dtype
) -> Tensor:
    """The weight [..., N, K] as ``dtype``: each number computed in float32 and rounded once."""
    out = torch.empty(*packed.shape[:-1], k, dtype=dtype, device=packed.device)
    if packed.dim() > 2:
        for e in range(packed.shape[0]):
            out[e] = dequantize(
                packed[e],
                scale[e],
                None if zero_point is None else zero_point[e],
                None if outer is None else outer[e],
                scheme,
                k,
                dtype,
            )
        return out
    for rows in _row_chunks(packed.shape[-2], k, packed.device) if k else ():
        scales = Scales(scale[rows], None if zero_point is None else zero_point[rows], outer)
        out[rows] = to_values(unpack(packed[rows], scheme.bits, k), scheme, scales, dtype)
    return out


def linear(
    x: Tensor, packed: Tensor, scale: Tensor, zero_point: Tensor | None, outer: Tensor | None, bias: Tensor | None, scheme: Scheme
) -> Tensor:
    """``x @ W.T + bias`` with the weight dequantized to the dtype of ``x``."""
    weight = dequantize(packed, scale, zero_point, outer, scheme, x.shape[-1], x.dtype)
    return torch.nn.functional.linear(x, weight, bias)


def quantized_linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    outer: Tensor | None,
    bias: Tensor | None,
    scheme: Scheme,
    activation: Scheme,
    input_scale: Tensor | None,
) -> Tensor:
    """:func:`linear` with ``x`` rounded to ``activation``: a scale a token, or ``input_scale`` for all of them."""
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = rounded_tokens(x.to(compute), activation, input_scale)
    weight = dequantize(packed, scale, zero_point, outer, scheme, x.shape[-1], compute)
    return torch.nn.functional.linear(rows, weight, None if bias is None else bias.to(compute)).to(x.dtype)


def rms_norm_quantize(x: Tensor, weight: Tensor | None, eps: float, activation: Scheme) -> tuple[Tensor, Tensor]:
    """RMSNorm of ``x`` [..., K], times ``weight`` [K], rounded to ``activation``: packed codes and scales [..., G]."""
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = x.to(compute)
    rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        rows = rows * weight.to(compute)
    scale = token_scales(rows[..., None, :], activation).scale[..., 0, :]
    codes = to_codes(torch.where(torch.isfinite(rows), rows, 0.0), activation, Scales(scale))
    return pack_unchecked(codes, activation.bits), scale


def codes_linear(
    codes: Tensor,
    x_scale: Tensor,
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    outer: Tensor | None,
    bias: Tensor | None,
    scheme: Scheme,
    activation: Scheme,
    k: int,
    dtype: torch.dtype,
) -> Tensor:
    """:func:`quantized_linear` of tokens that are rounded already."""
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    rows = to_values(unpack(codes, activation.bits, k), activation, Scales(x_scale), compute)
    weight = dequantize(packed, scale, zero_point, outer, scheme, k, compute)
    return torch.nn.functional.linear(rows, weight, None if bias is None else bias.to(compute)).to(dtype)


def grouped_linear(
    x: Tensor, packed: Tensor, scale: Tensor, zero_point: Tensor | None, outer: Tensor | None, bias: Tensor | None, scheme: Scheme
) -> Tensor:
    """:func:`linear` for each expert: ``x`` [E, M, K], ``packed`` [E, N, bytes], ``bias`` [E, N]; [E, M, N]."""
    out = x.new_empty(*x.shape[:-1], packed.shape[-2])
    for e in range(x.shape[0]):  # dequantizes one expert's weight at a time
        out[e] = linear(
            x[e],
            packed[e],
            scale[e],
            None if zero_point is None else zero_point[e],
            None if outer is None else outer[e],
            None if bias is None else bias[e],
            scheme,
        )
    return out


def experts_linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    outer: Tensor | None,
    bias: Tensor | None,
    scheme: Scheme,
    experts: Tensor,
) -> Tensor:
    """Row i of the result [S, N]: row ``i // (S / len(x))`` of ``x`` times the matrix of expert ``experts[i]`` of ``packed``
    [E, N, bytes], plus its ``bias`` [E, N]; 0 for an index that is none of 0 .. E - 1."""
    y = x.new_zeros(len(experts), packed.shape[-2])
    for e in range(packed.shape[0]):
        rows = (experts == e).nonzero()[:, 0]
        if len(rows):
            zero, tensor_scale, shift = (None if part is None else part[e] for part in (zero_point, outer, bias))
            y[rows] = linear(x[rows // (len(experts) // len(x))], packed[e], scale[e], zero, tensor_scale, shift, scheme)
    return y


def embedding(
    indices: Tensor,
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    outer: Tensor | None,
    scheme: Scheme,
    k: int,
    dtype: torch.dtype,
) -> Tensor:
    """Rows ``indices`` (any shape) of the weight [N, K]: only those rows are unpacked."""
    flat = indices.reshape(-1)
    if flat.numel() and flat.device.type == "cpu":  # on a GPU indexing itself asserts
        low, high = (int(v) for v in torch.aminmax(flat))
        if low < 0 or high >= packed.shape[0]:
            raise IndexError(f"embedding indices must be 0..{packed.shape[0] - 1}, got {low}..{high}")
    rows = dequantize(packed[flat], scale[flat], None if zero_point is None else zero_point[flat], outer, scheme, k, dtype)
    return rows.reshape(*indices.shape, k)


for _run, _contract in (
    (quantize, "round to nearest"),
    (dequantize, "weights rounded once"),
    (linear, "weights rounded once"),
    (quantized_linear, "exact"),
    (rms_norm_quantize, "round to nearest"),
    (codes_linear, "exact"),
    (grouped_linear, "weights rounded once"),
    (experts_linear, "weights rounded once"),
    (embedding, "weights rounded once"),
):
    register(Kernel(f"reference_{_run.__name__}", _run.__name__, _run, _contract, layout=None))
