# mypy: disallow-untyped-defs=False
# ruff: noqa: N803, N806 - compile-time constants of a kernel are written in capitals
"""The matrix product of x with a packed integer weight, dequantized on the way."""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import decode_integer, load_codes, widen


@triton.jit
def integer_gemm(
    x_ptr,
    packed_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    y_ptr,
    M,
    N,
    K,
    stride_xm,
    stride_xk,
    stride_packed,
    stride_scale,
    stride_zero,
    BITS: tl.constexpr,
    SIGNED: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile [BLOCK_N, BLOCK_M] of ``y.T = W @ x.T``.

    The exact integers ``q - z`` go into the product in the dtype of x (bf16 holds -256 .. 256, fp16 more), sums are
    fp32, and the scale of a group multiplies the group's sum in fp32. ``GROUP`` is a multiple of ``BLOCK_K``, or 0 where
    the whole row has one scale. The weight is the left operand, so that it may stay in registers.
    """
    tiles_m = tl.cdiv(M, BLOCK_M)
    m = tl.program_id(0) % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) // tiles_m * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    n_mask, m_mask = n < N, m < M
    row, wide_m = n.to(tl.int64), m.to(tl.int64)  # a vocabulary's weight, or a long batch, passes 2**31 elements
    rows = packed_ptr + row * stride_packed
    columns = x_ptr + wide_m * stride_xm
    # Only q - z of eight unsigned bits leaves the range of int8.
    WIDE: tl.constexpr = BITS == 8 and HAS_ZERO

    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k0 in range(0, K, BLOCK_K):
        q = decode_integer(load_codes(rows, n_mask, k0, K, BITS, BLOCK_K, EVEN_K), BITS, SIGNED, WIDE)
        group = k0 // GROUP if GROUP else 0
        if HAS_ZERO:
            zero = tl.load(zero_ptr + row * stride_zero + group, mask=n_mask, other=0)
            q = q - widen(zero, WIDE)[:, None]
        x_mask = m_mask[None, :]
        if not EVEN_K:
            x_mask = x_mask & (k0 + k < K)[:, None]
        x = tl.load(columns[None, :] + (k0 + k)[:, None].to(tl.int64) * stride_xk, mask=x_mask, other=0.0)
        if GROUP:
            scale = tl.load(scale_ptr + row * stride_scale + group, mask=n_mask, other=0.0).to(tl.float32)
            total += tl.dot(q.to(x.dtype), x, input_precision="ieee") * scale[:, None]
        else:
            total = tl.dot(q.to(x.dtype), x, total, input_precision="ieee")
    if not GROUP:
        total *= tl.load(scale_ptr + row * stride_scale, mask=n_mask, other=0.0).to(tl.float32)[:, None]
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=n_mask, other=0.0).to(tl.float32)[:, None]
    y = y_ptr + wide_m[None, :] * N + row[:, None]
    tl.store(y, total.to(y_ptr.dtype.element_ty), mask=n_mask[:, None] & m_mask[None, :])
